# SPDX-License-Identifier: Apache-2.0
"""The application: global options, configuration, logging, errors, exit codes."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import functools
import glob
import importlib.metadata
import inspect
import itertools
import logging
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from cliff import app, commandmanager, help

from imagebackend.cli import output, progress

if TYPE_CHECKING:
    from oslo_config import cfg

    from imagebackend.manager import DiskManager
    from imagebackend.model import ProgressCallback

NAMESPACE = "imagebackend.commands"
_INTERRUPTED = 130
_BROKEN_PIPE = 141
_LEVELS = (logging.WARNING, logging.WARNING, logging.INFO, logging.DEBUG)


class Commands(commandmanager.CommandManager):
    """The commands by name, none of them imported before it is used."""

    def load_commands(self, namespace: str) -> None:
        self.group_list.append(namespace)
        for entry in importlib.metadata.entry_points(group=namespace):
            self.commands[entry.name.replace("_", " ")] = entry


class Help(help.HelpCommand):
    """Show the commands, or all about one."""

    def take_action(self, parsed_args: argparse.Namespace) -> int:
        if parsed_args.cmd:
            return super().take_action(parsed_args)
        assert isinstance(self.app, ImageBackendApp)
        self.app.print_help(self.app.stdout)
        return 0


class ImageBackendApp(app.App):
    """One run of the command."""

    NAME = "imagebackend"
    LOG = logging.getLogger("imagebackend.cli")

    def __init__(self) -> None:
        super().__init__(
            "Disks of instances, in the storages of this host.",
            _version(),
            Commands(NAMESPACE),
            deferred_help=True,
        )
        self.command_manager.add_command("help", Help)
        self._bar: progress.Bar | None = None
        self._handlers: list[logging.Handler] = []
        self._root_level = logging.WARNING

    # --- what commands use -----------------------------------------------------

    @functools.cached_property
    def conf(self) -> cfg.ConfigOpts:
        """The configuration that the options name, or oslo.config's usual files."""
        from oslo_config import cfg

        conf = cfg.ConfigOpts()
        args = [f"--config-file={path}" for path in self.options.config_file]
        args += [f"--config-dir={path}" for path in self.options.config_dir]
        try:
            conf(args, project=self.NAME, prog=self.NAME)
        except UnicodeDecodeError as error:
            where = _not_text(self.options.config_file, self.options.config_dir)
            raise cfg.Error(f"{where} is not a text in UTF-8: {error}") from None
        return conf

    @functools.cached_property
    def manager(self) -> DiskManager:
        from imagebackend.manager import DiskManager

        return DiskManager(self.conf)

    def close(self) -> None:
        manager: DiskManager | None = self.__dict__.pop("manager", None)
        if manager is not None:
            manager.close()
        root = logging.getLogger()
        while self._handlers:
            handler = self._handlers.pop()
            root.removeHandler(handler)
            handler.close()
            root.setLevel(self._root_level)

    def note(self, text: str) -> None:
        """A line for people, beside the output that programs read."""
        if self.options.verbose_level > 0:
            # In a pipe the two would come in any order.
            self.stdout.flush()
            print(output.escape(text), file=self.stderr)

    @contextlib.contextmanager
    def progress(self) -> Iterator[ProgressCallback | None]:
        """What to hand to a verb that copies; None where nobody would see it."""
        if not self.stderr.isatty() or self.options.verbose_level < 1:
            yield None
            return
        self._bar = progress.Bar(self.stderr)
        try:
            yield self._bar
        finally:
            self._bar.erase()

    def erase_progress(self) -> None:
        """Make room for a line of text."""
        if self._bar is not None:
            self._bar.erase()

    # --- cliff's hooks ---------------------------------------------------------

    def build_option_parser(
        self,
        description: str | None,
        version: str | None,
        argparse_kwargs: dict[str, Any] | None = None,
    ) -> argparse.ArgumentParser:
        # An abbreviation would take options away from the commands.
        kwargs: dict[str, Any] = {"allow_abbrev": False, "conflict_handler": "resolve"}
        kwargs |= {"prog": self.NAME} | (argparse_kwargs or {})
        parser = super().build_option_parser(description, version, kwargs)
        # cliff's own says the name of whatever program runs.
        parser.add_argument(
            "--version",
            action="version",
            version=f"%(prog)s {version}",
            help="Show the version and exit.",
        )
        for option, what in (("file", "file"), ("dir", "folder of *.conf files")):
            parser.add_argument(
                f"--config-{option}",
                metavar="PATH",
                action="append",
                default=[],
                help=f"Configuration {what}; repeatable, the last one wins. Unset: "
                "where oslo.config looks, as /etc/imagebackend/imagebackend.conf.",
            )
        return parser

    def configure_logging(self) -> None:
        level = _LEVELS[min(self.options.verbose_level, len(_LEVELS) - 1)]
        console = _Console(self)
        console.setLevel(level)
        self._handlers.append(console)
        if self.options.log_file:
            level = logging.DEBUG
            file = logging.FileHandler(self.options.log_file)
            file.setFormatter(logging.Formatter(self.LOG_FILE_MESSAGE_FORMAT))
            self._handlers.append(file)
        root = logging.getLogger()
        self._root_level = root.level
        root.setLevel(level)
        for handler in self._handlers:
            root.addHandler(handler)

    def initialize_app(self, argv: list[str]) -> None:
        if not argv and not self.options.deferred_help:
            self.parser.error(f"a command is missing: see {self.NAME} --help")

    def print_help_if_requested(self) -> None:
        if self.options.deferred_help:
            self.print_help(self.stdout)
            raise SystemExit(0)

    def run_subcommand(self, argv: list[str]) -> int:
        if argv[0] == "help":
            # "--help" may stand behind a command's arguments.
            argv = list(itertools.takewhile(lambda word: word[:1] != "-", argv))
        try:
            factory, name, rest = self.command_manager.find_command(argv)
        except ValueError:
            self.parser.error(self._unknown(argv))
        command = factory(self, self.options, cmd_name=name)
        parser = command.get_parser(f"{self.NAME} {name}")
        parsed_args = parser.parse_args(rest)
        try:
            return command.run(parsed_args)
        except ValueError:
            if factory is Help:
                self.parser.error(self._unknown(parsed_args.cmd))
            raise

    def print_help(self, out: TextIO) -> None:
        """The options and the commands; what they are for is in their docstrings."""
        self.parser.print_help(out)
        print("\ncommands:", file=out)
        for name, entry in sorted(self.command_manager):
            try:
                what = (inspect.getdoc(entry.load()) or "").partition("\n")[0]
            except ImportError as error:
                what = f"(cannot be loaded: {output.escape(str(error))})"
            print(f"  {name:<15} {what.rstrip('.')}", file=out)

    def _unknown(self, argv: Sequence[str]) -> str:
        if argv[0].startswith("-"):
            return f"{argv[0]!r} is not an option that stands before the command"
        # No command has more than two words.
        words = " ".join(itertools.takewhile(lambda word: word[:1] != "-", argv[:2]))
        names = sorted(self.command_manager.get_command_names())
        near = [name for name in names if name.startswith(f"{words} ")]
        near = near or difflib.get_close_matches(words, names)
        hint = f"did you mean {' or '.join(near)}?" if near else "see --help"
        return f"{words!r} is not a command: {hint}"


class _Console(logging.StreamHandler[TextIO]):
    """One line a record, below a progress bar that may be there."""

    def __init__(self, application: ImageBackendApp) -> None:
        super().__init__(application.stderr)
        self._app = application

    def format(self, record: logging.LogRecord) -> str:
        kind = f"{record.levelname.lower()}: "
        if record.levelno >= logging.ERROR:
            kind = ""
        text = output.escape(" ".join(record.getMessage().split("\n")))
        if self._app.options.debug and record.exc_info:
            text += "\n" + "".join(traceback.format_exception(*record.exc_info))
        return f"{ImageBackendApp.NAME}: {kind}{text}"

    def emit(self, record: logging.LogRecord) -> None:
        self._app.erase_progress()
        super().emit(record)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 1 for an error, 2 for misuse."""
    application = ImageBackendApp()
    try:
        code = _run(application, sys.argv[1:] if argv is None else argv)
    finally:
        application.close()
    return code


def _run(application: ImageBackendApp, argv: Sequence[str]) -> int:
    try:
        try:
            code = application.run(list(argv))
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        application.stdout.flush()
    except BrokenPipeError:
        code = _BROKEN_PIPE
    except KeyboardInterrupt:
        code = _INTERRUPTED
    except Exception as error:
        application.LOG.error("%s", _message(error), exc_info=error)
        code = 1
    if code == _INTERRUPTED:
        application.LOG.error("interrupted")
    if code in (_BROKEN_PIPE, 1):
        _discard(application.stdout)
    return code


def _message(error: Exception) -> str:
    from oslo_config import cfg

    from imagebackend.exceptions import ImageBackendError

    if isinstance(error, ImageBackendError):
        return error.message
    if isinstance(error, cfg.Error):
        return f"configuration: {error}"
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}"
    return (
        f"internal error: {type(error).__name__}: {error}; please report it, with what "
        f"--debug prints"
    )


def _not_text(files: Sequence[str], folders: Sequence[str]) -> str:
    """The configuration file that cannot be decoded: oslo.config does not say which."""
    from oslo_config import cfg

    name = ImageBackendApp.NAME
    files = files or cfg.find_config_files(name, name)
    for folder in folders or cfg.find_config_dirs(name, name):
        files = [*files, *sorted(glob.glob(os.path.join(folder, "*.conf")))]
    for path in files:
        try:
            with open(path, encoding="utf-8") as file:
                file.read()
        except UnicodeDecodeError:
            return str(path)
        except OSError:
            pass
    return "a configuration file"


def _discard(stream: TextIO) -> None:
    """Let Python's own flush at the end of the process not fail again."""
    try:
        stream.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def _version() -> str:
    try:
        return importlib.metadata.version("imagebackend")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
