# SPDX-License-Identifier: Apache-2.0
"""Child processes: one way to start them.

Every child inherits the lock of the operation that it works for, so that an
orphaned one counts as alive (see ``store/operations.py``); it dies with a
cancelled caller; its output never reaches a message unmasked.
"""

from __future__ import annotations

import contextlib
import contextvars
import errno
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from imagebackend import exceptions as exc

_inherited: contextvars.ContextVar[tuple[int, ...]] = contextvars.ContextVar(
    "imagebackend_inherited_fds", default=()
)


@contextlib.contextmanager
def inheriting(fd: int) -> Iterator[None]:
    """Children started in this block (and context) inherit ``fd``."""
    token = _inherited.set((*_inherited.get(), fd))
    try:
        yield
    finally:
        _inherited.reset(token)


@dataclass(frozen=True, slots=True)
class Result:
    returncode: int
    stdout: str
    stderr: str


def run(
    argv: Sequence[str],
    *,
    timeout: float,
    package: str,
    limits: Mapping[int, int] | None = None,
    on_output: Callable[[str], None] | None = None,
) -> Result:
    """Run a program to its end; no shell, no standard input.

    :param limits: ``resource.RLIMIT_…`` to what the child may use.

    :param timeout: seconds; then it is killed.
    :param package: Debian package that has the program, for the message.
    :param on_output: gets each piece of standard output as it comes.
    :raises MissingDependency: the program is not installed.
    :raises TimeoutError: it took longer than ``timeout``.
    """
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=_inherited.get(),
            text=True,
            errors="replace",
        )
    except FileNotFoundError:
        raise missing(argv[0], package) from None
    except OSError as error:
        raise exc.HostError(
            f"cannot start {argv[0]}: {error.strerror or error}", program=argv[0]
        ) from error
    with process:
        try:
            _limit(process.pid, limits or {})
            if on_output is None:
                out, err = process.communicate(timeout=timeout)
            else:
                out, err = _follow(process, on_output, timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise TimeoutError(f"{argv[0]} took longer than {timeout:g} s") from None
        except BaseException:
            process.kill()
            raise
    return Result(process.returncode, out, err)


def _limit(pid: int, limits: Mapping[int, int]) -> None:
    """Limit a child that has just started.

    From here rather than by ``prlimit(1)``, which would add a quarter to a short
    run. The child may be a moment ahead, while it still links its libraries; a limit
    that it is beyond already stops it all the same.
    """
    for kind, most in limits.items():
        # It may have ended by now, which is no reason to fail.
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, kind, (most, most))


def _follow(
    process: subprocess.Popen[str], on_output: Callable[[str], None], timeout: float
) -> tuple[str, str]:
    import threading

    assert process.stdout is not None and process.stderr is not None
    errors: list[str] = []
    stderr = process.stderr
    reader = threading.Thread(target=lambda: errors.append(stderr.read()), daemon=True)
    timed_out = threading.Event()

    def give_up() -> None:
        timed_out.set()
        process.kill()

    timer = threading.Timer(timeout, give_up)
    timer.daemon = True
    reader.start()
    timer.start()
    try:
        # qemu-img ends its progress lines with a carriage return, which text mode
        # has already turned into a newline.
        for line in process.stdout:
            on_output(line)
        process.wait()
    finally:
        timer.cancel()
        if process.poll() is None:
            process.kill()
        reader.join()
    if timed_out.is_set():
        raise subprocess.TimeoutExpired(process.args, timeout)
    return "", "".join(errors)


def require(program: str, package: str) -> str:
    """The program's path. :raises MissingDependency:"""
    path = shutil.which(program)
    if path is None:
        raise missing(program, package)
    return path


def missing(program: str, package: str) -> exc.MissingDependency:
    return exc.MissingDependency(
        f"{program} is not installed on this host: install the package that has it "
        f"(Debian: {package})",
        program=program,
        package=package,
    )


def space_error(error: OSError, path: str) -> exc.HostError:
    """The exception for a write that failed: full, read-only, or not allowed."""
    reasons = {
        errno.ENOSPC: "the file system is full",
        errno.EDQUOT: "the disk quota is used up",
        errno.EROFS: "the file system is read-only",
        errno.EFBIG: "the file system cannot hold a file of that size",
        errno.EACCES: "this process may not write there",
        errno.EPERM: "this process may not do that",
    }
    reason = reasons.get(error.errno or 0, error.strerror or str(error))
    found = os.path.abspath(path)
    while not os.path.lexists(found):
        found = os.path.dirname(found)
    if error.errno in (errno.EEXIST, errno.ENOTDIR) and not os.path.isdir(found):
        reason = f"{found} is not a folder"
    kind = (
        exc.NoSpace
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
        else exc.HostError
    )
    return kind(f"cannot write {path}: {reason}", path=path, reason=reason)
