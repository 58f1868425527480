# SPDX-License-Identifier: Apache-2.0
"""libvirt itself: its library, a connection, and what its errors are here."""

from __future__ import annotations

from typing import Any

from oslo_config import cfg

from imagebackend import exceptions as exc


def connect(conf: cfg.ConfigOpts) -> Any:
    libvirt = library()
    uri = conf.imagebackend_libvirt.uri
    try:
        return libvirt.open(uri)
    except libvirt.libvirtError as error:
        raise exc.HypervisorError(
            f"libvirt does not answer at {uri}: {error}: is libvirtd running, and "
            f"[imagebackend_libvirt] uri right?",
            uri=uri,
        ) from error


def library() -> Any:
    """libvirt's Python library, needed for running guests, and for the secrets of
    storages that QEMU logs in to.

    :raises MissingDependency:
    """
    try:
        import libvirt
    except ImportError as error:
        raise exc.MissingDependency(
            "a running guest, or a disk that QEMU needs a secret for, needs the Python "
            "library libvirt: install imagebackend[libvirt]",
            library="libvirt",
        ) from error
    # It would print every error to standard error by itself.
    libvirt.registerErrorHandler(lambda _context, _error: None, None)
    return libvirt


def translated(what: str, error: Any) -> exc.ImageBackendError:
    libvirt = library()
    reason = error.get_error_message() or str(error)
    code = error.get_error_code()
    if code in (
        libvirt.VIR_ERR_OPERATION_TIMEOUT,
        libvirt.VIR_ERR_RESOURCE_BUSY,
        libvirt.VIR_ERR_BLOCK_COPY_ACTIVE,
    ) or (code == libvirt.VIR_ERR_OPERATION_INVALID and "job" in reason):
        return exc.Busy(f"cannot {what}: {reason}", reason=reason)
    return exc.HypervisorError(f"cannot {what}: {reason}", reason=reason)
