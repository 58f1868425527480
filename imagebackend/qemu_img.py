# SPDX-License-Identifier: Apache-2.0
"""The only way to qemu-img: formats, limits, progress and errors in one place.

Every call names driver and format of every file, as image options, so that a path
is never read as a protocol and nothing is detected from bytes. ``qemu-img info`` is
used for one thing, the size of what LUKS has inside, whose header no guest reaches. A
run under limits that hits one names the option. Passphrases reach it by files without
a name, which are gone when it ends.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import resource
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from oslo_config import cfg

from imagebackend import exceptions as exc
from imagebackend import processes
from imagebackend.conf import qemu_img as options
from imagebackend.model import (
    Copyable,
    Encryption,
    MiB,
    Progress,
    ProgressCallback,
    Secret,
    Source,
    UnlockedSource,
)

_GROUP = options.GROUP.name
#: Exit codes of `qemu-img check`.
_CHECK_CORRUPT, _CHECK_LEAKS, _CHECK_UNKNOWN = 2, 3, 63
#: What QEMU, its libraries and the loader say when they get no memory. An image's
#: name, which has no blanks, cannot look like it.
_NO_MEMORY = re.compile(
    r"(?:cannot|unable to|failed to|could not) allocate|out of memory"
    r"|failed to map segment|thread_create: Resource temporarily",
    re.IGNORECASE,
)
_PERCENT = re.compile(r"\(([0-9.]+)/100%\)")


class QemuImg:
    """qemu-img under this host's limits. Keeps its argument, no effect."""

    def __init__(self, conf: cfg.ConfigOpts) -> None:
        self._conf = conf

    def create_overlay(
        self, path: str, size: int, backing: str, backing_format: str
    ) -> None:
        """A qcow2 file of virtual ``size`` on top of ``backing``; both absolute."""
        self._run(
            [
                "create",
                "-q",
                "-f",
                "qcow2",
                "-F",
                backing_format,
                "-b",
                _plain(backing),
                _plain(path),
                str(size),
            ]
        )

    def create(self, path: str, size: int, format_: str, **opts: str) -> None:
        """An empty file of virtual ``size``."""
        argv = ["create", "-q", "-f", format_]
        for key, value in opts.items():
            argv += ["-o", f"{key}={value}"]
        self._run([*argv, _plain(path), str(size)])

    def resize(self, source: Copyable, size: int) -> None:
        """Grow to ``size``.

        :raises Busy: a guest has it open.
        """
        with _objects(_secrets(source)) as objects:
            opts = ["--image-opts", image_opts(source)]
            self._run(["resize", "-q", *objects, *opts, str(size)])

    def check(self, source: Source) -> str:
        """What is wrong with the image's tables; empty if nothing, or if the format
        has no check. Unused clusters that are not free do no harm."""
        argv = ["check", "-q", "--image-opts", image_opts(source)]
        result = self._child(argv, copying=True)
        if result.returncode in (0, _CHECK_LEAKS, _CHECK_UNKNOWN):
            return ""
        if result.returncode == _CHECK_CORRUPT:
            return _last_line(result.stderr) or "qemu-img finds its tables corrupt"
        raise self._error(argv, result, self._conf[_GROUP].copy_cpu_seconds, "copy_")

    def size_inside(self, source: Source, encryption: Encryption) -> int:
        """Bytes that an encrypted disk has for a guest, which may run. Its passphrase
        is not needed."""
        opts = source.image_opts()
        if opts["driver"] == "raw":
            opts = {"driver": encryption.format, "file": opts["file"]}
        argv = ["info", "-U", "--output=json", "--image-opts", _joined(opts)]
        return int(json.loads(self._run(argv))["virtual-size"])

    def convert(
        self,
        source: Copyable,
        target: Copyable,
        *,
        target_is_blank: bool,
        progress: ProgressCallback | None = None,
        what: str = "copy",
    ) -> None:
        """Copy into ``target``, which exists and is at least as large.

        :param target_is_blank: it is known to read as zeros; else they are written.
        """
        argv = ["convert", "-n", "-W", "--image-opts", "--target-image-opts"]
        if target_is_blank:
            argv.append("--target-is-zero")
        else:
            argv += ["-S", "0"]
        argv += [image_opts(source), image_opts(target)]
        self._copy(argv, progress, what, _secrets(source, target))

    def zero(self, target: Source, offset: int, size: int) -> None:
        """Let ``size`` bytes from ``offset`` on read as zeros; what they took up is
        given back where the storage can do that."""
        nothing = {"driver": "null-co", "size": size, "read-zeroes": "on"}
        part = {
            "driver": "raw",
            "offset": offset,
            "size": size,
            "file": target.image_opts(),
        }
        argv = ["convert", "-n", "--image-opts", "--target-image-opts"]
        self._copy([*argv, _joined(nothing), _joined(part)], None, "zero", ())

    def convert_to_file(
        self,
        source: Copyable,
        path: str,
        format_: str,
        *,
        compress: bool = False,
        progress: ProgressCallback | None = None,
        what: str = "convert",
    ) -> None:
        """Copy into a new file, sparse where the source is."""
        argv = ["convert", "--image-opts", "-O", format_]
        if compress:
            argv.append("-c")
        argv += [image_opts(source), _plain(path)]
        self._copy(argv, progress, what, _secrets(source))

    def _copy(
        self,
        argv: Sequence[str],
        progress: ProgressCallback | None,
        what: str,
        secrets: Sequence[Secret],
    ) -> None:
        follow: Callable[[str], None] | None = None
        if progress is not None:
            argv = [argv[0], "-p", *argv[1:]]
            report = progress

            def follow(text: str) -> None:
                for percent in _PERCENT.findall(text):
                    report(Progress(what, int(float(percent) * 100), 10000))

        with _objects(secrets) as objects:
            self._run([argv[0], *objects, *argv[1:]], copying=True, on_output=follow)

    def _run(
        self,
        argv: Sequence[str],
        *,
        copying: bool = False,
        on_output: Callable[[str], None] | None = None,
    ) -> str:
        result = self._child(argv, copying=copying, on_output=on_output)
        if result.returncode:
            prefix = "copy_" if copying else ""
            cpu = self._conf[_GROUP][f"{prefix}cpu_seconds"]
            raise self._error(argv, result, cpu, prefix)
        return result.stdout

    def _child(
        self,
        argv: Sequence[str],
        *,
        copying: bool = False,
        on_output: Callable[[str], None] | None = None,
    ) -> processes.Result:
        limits = self._conf[_GROUP]
        prefix = "copy_" if copying else ""
        cpu = limits[f"{prefix}cpu_seconds"]
        timeout = limits[f"{prefix}timeout"]
        try:
            return processes.run(
                ["qemu-img", *argv],
                timeout=timeout,
                package="qemu-utils",
                limits={
                    resource.RLIMIT_AS: limits.memory_mb * MiB,
                    resource.RLIMIT_CPU: cpu,
                    # A core file would hold the disk's content.
                    resource.RLIMIT_CORE: 0,
                },
                on_output=on_output,
            )
        except TimeoutError:
            raise _limit(argv[0], f"{prefix}timeout", f"{timeout} s") from None

    def _error(
        self, argv: Sequence[str], result: processes.Result, cpu: int, prefix: str
    ) -> exc.ImageBackendError:
        reason = _last_line(result.stderr)
        code = result.returncode
        if code in (-signal.SIGXCPU, 128 + signal.SIGXCPU) or (
            code in (-signal.SIGKILL, 128 + signal.SIGKILL) and not reason
        ):
            return _limit(argv[0], f"{prefix}cpu_seconds", f"{cpu} s of CPU time")
        if _NO_MEMORY.search(reason):
            memory = self._conf[_GROUP].memory_mb
            return _limit(argv[0], "memory_mb", f"{memory} MiB ({reason})")
        if " lock" in reason and "Is another process using" in reason:
            return exc.Busy(
                f"qemu-img {argv[0]}: another process (a running guest?) has the "
                f"disk open: {reason}",
                reason=reason,
            )
        if "timed out" in reason:
            return exc.StorageUnavailable(
                f"qemu-img {argv[0]}: the storage does not answer: {reason}",
                reason=reason,
            )
        if "No space left" in reason or "Read-only file system" in reason:
            return exc.NoSpace(f"qemu-img {argv[0]}: {reason}", reason=reason)
        return exc.StorageError(
            f"qemu-img {argv[0]} failed ({code}): {reason or 'no reason given'}",
            reason=reason,
            returncode=code,
        )


def image_opts(source: Copyable) -> str:
    """The source for ``--image-opts``, with the one special character escaped."""
    return _joined(source.image_opts())


def _joined(opts: Mapping[str, Any]) -> str:
    return ",".join(
        f"{key}={value.replace(',', ',,')}" for key, value in _flat("", opts)
    )


def _secrets(*sources: Copyable) -> list[Secret]:
    return [each.secret for each in sources if isinstance(each, UnlockedSource)]


@contextlib.contextmanager
def _objects(secrets: Sequence[Secret]) -> Iterator[list[str]]:
    """Options that give a QEMU program started in the block the secrets. Their files
    are in memory and have no name, so that they end with the processes."""
    argv: list[str] = []
    with contextlib.ExitStack() as files:
        for each in {secret.uuid: secret for secret in secrets}.values():
            fd = os.memfd_create("secret", os.MFD_CLOEXEC)
            files.callback(os.close, fd)
            os.write(fd, base64.b64decode(each.value))
            files.enter_context(processes.inheriting(fd))
            file = f"/proc/self/fd/{fd}"
            argv += ["--object", f"secret,id=s{each.uuid},format=raw,file={file}"]
        yield argv


def _flat(prefix: str, opts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in opts.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}{key}.", value)
        else:
            yield prefix + key, str(value)


def _plain(path: str) -> str:
    """A path that qemu-img cannot read as a protocol."""
    if not path.startswith("/"):
        raise exc.InternalError(f"not an absolute path: {path!r}", path=path)
    return path


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " / ".join(lines[-3:]).removeprefix("qemu-img: ")


def _limit(verb: str, option: str, value: str) -> exc.LimitExceeded:
    return exc.LimitExceeded(
        f"qemu-img {verb} was stopped at its limit of {value}: raise "
        f"[{_GROUP}] {option} if the image is honest",
        option=option,
    )
