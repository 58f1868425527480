# SPDX-License-Identifier: Apache-2.0
"""The facade: one :class:`DiskManager` a host process."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, TypeVar

from oslo_config import cfg

from imagebackend import conf as options
from imagebackend import exceptions as exc
from imagebackend.actions import cache as cache_action
from imagebackend.actions import check as check_action
from imagebackend.actions import connect as connect_action
from imagebackend.actions import create as create_action
from imagebackend.actions import destroy as destroy_action
from imagebackend.actions import flatten as flatten_action
from imagebackend.actions import inspect as inspect_action
from imagebackend.actions import replace as replace_action
from imagebackend.actions import resize as resize_action
from imagebackend.actions import snapshot as snapshot_action
from imagebackend.actions.context import Context
from imagebackend.images.cache import CacheEntry
from imagebackend.libvirt.guest import GuestDisks
from imagebackend.model import (
    JSON,
    BackendStatus,
    CachedImage,
    Change,
    Connection,
    Disk,
    DiskSpec,
    Finding,
    Flavor,
    ImageInfo,
    Instance,
    Inventory,
    Plan,
    ProgressCallback,
    UploadTarget,
)
from imagebackend.store.schema import REVISION
from imagebackend.validation import check_id, check_instance, check_target, spec_list

T = TypeVar("T")


class DiskManager:
    """The disks of this host's instances.

    Called from many threads; a context manager; no I/O before the first verb. The
    first verb settles what operations that died on this host left behind.

    Every mutating verb: before, the plan passed and no live operation holds the
    instance; on success rows are settled and equal the storage; on failure all is as
    before the call, or the row says ``failed`` and why; killed, recovery reaches one
    of the two. All disks of an instance, or none.

    Every verb raises subclasses of :class:`imagebackend.exceptions.ImageBackendError`
    and nothing else of the storage's or libvirt's; the classes say who can act.
    ``auth`` is the caller's keystoneauth plugin, for requests that must run as the
    caller; the embedded image source has no use for it.

    :param conf: the service's configuration; the library's options are registered
        on it.
    :raises ConfigError: a value in it cannot be used.
    """

    def __init__(self, conf: cfg.ConfigOpts) -> None:
        _refuse_green_threads()
        if not isinstance(conf, cfg.ConfigOpts):
            # Not shown: who knows what secrets it has.
            raise exc.InvalidValue(
                "configuration",
                type(conf).__name__,
                "an object of class oslo_config.cfg.ConfigOpts",
            )
        options.register(conf)
        options.check(conf)
        self._ctx = Context(conf)
        self._started = False
        self._lock = threading.Lock()

    def __enter__(self) -> DiskManager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the store, and connections to storages. The next verb opens them
        again."""
        self._ctx.backends.close()
        self._ctx.store.close()

    @property
    def host_id(self) -> str:
        """This host's uuid, from a file under the state path."""
        return self._ctx.host.id

    # --- what is made ----------------------------------------------------------

    def plan(
        self, instance: Instance, disks: Sequence[DiskSpec] = (), *, auth: Any = None
    ) -> Plan:
        """What :meth:`create` would do; no effect.

        :raises RequestError, HostError: as ``create`` would.
        """
        return create_action.plan(self._ctx, instance, spec_list(disks), auth)

    def create(
        self,
        instance: Instance,
        disks: Sequence[DiskSpec] = (),
        *,
        auth: Any = None,
        progress: ProgressCallback | None = None,
    ) -> Change:
        """Make the instance's disks: root, ephemeral and swap as flavor and image say,
        and ``disks``. A spec with the role of a disk that the flavor gives takes its
        place.

        Again with the same arguments: the same disks, in ``kept``.

        :raises Conflict: the instance exists and was asked for differently.
        :raises PlacementRefused, SizeRefused, ImageRejected, DiskInUse, NoSpace:
        """
        return self._verb(
            create_action.create,
            instance,
            spec_list(disks),
            auth=auth,
            progress=progress,
        )

    def update(
        self,
        instance: Instance,
        disks: Sequence[DiskSpec],
        *,
        auth: Any = None,
        progress: ProgressCallback | None = None,
    ) -> Change:
        """Make the instance's disks those that are wanted now, by name.

        A disk that is not wanted any more is deleted, or detached if it is persistent
        or shared; one that is wanted with other content or a smaller size is
        re-created; one that is only larger grows, keeping its data. After
        :meth:`taint` all ephemeral disks are re-created. The guest must be stopped.
        """
        check_instance(instance)
        return self._verb(
            replace_action.update,
            instance,
            spec_list(disks),
            auth=auth,
            progress=progress,
        )

    def taint(self, instance_id: str) -> None:
        """Let the next :meth:`update` re-create all ephemeral disks."""
        self._verb(replace_action.taint, check_id("instance id", instance_id))

    def rebuild(
        self,
        instance: Instance,
        *,
        auth: Any = None,
        progress: ProgressCallback | None = None,
    ) -> Change:
        """Pristine ephemeral disks, the root disk from ``instance.image``; persistent
        and shareable disks stay as they are. Disk ids and serials stay. The guest
        must be stopped; the disks have to be connected again."""
        check_instance(instance)
        return self._verb(
            replace_action.rebuild, instance, auth=auth, progress=progress
        )

    def destroy(self, instance_id: str) -> Change:
        """Delete the instance's ephemeral disks; persistent ones are kept, with an
        owner or without. An instance that is not recorded: an empty change.

        :raises Busy: a guest has a disk open. :raises HostConflict:
        """
        return self._verb(destroy_action.destroy, check_id("instance id", instance_id))

    def delete_disk(self, disk_id: str) -> Change:
        """Delete a disk that has no owner. :raises DiskInUse: it has."""
        return self._verb(destroy_action.delete_disk, check_id("disk id", disk_id))

    def resize(
        self,
        instance: Instance,
        guest: GuestDisks | None = None,
        *,
        auth: Any = None,
        progress: ProgressCallback | None = None,
    ) -> Change:
        """Grow the disks to the sizes of ``instance.flavor``.

        :param guest: the running guest; None: it is stopped.
        :raises SizeRefused: a disk would shrink. :raises Busy: the guest runs.
        """
        check_instance(instance)
        _check_guest(guest)
        return self._verb(
            resize_action.resize, instance, guest, auth=auth, progress=progress
        )

    def snapshot(
        self,
        instance_id: str,
        into: UploadTarget,
        guest: GuestDisks | None = None,
        *,
        progress: ProgressCallback | None = None,
    ) -> ImageInfo:
        """The root disk, as it is now, as an image.

        :param guest: the running guest; None: it is stopped.
        """
        check_id("instance id", instance_id)
        check_target(into)
        _check_guest(guest)
        return self._verb(
            snapshot_action.snapshot,
            instance_id,
            into,
            guest,
            progress=progress,
        )

    def flatten(
        self, disk_id: str, *, progress: ProgressCallback | None = None
    ) -> None:
        """Give a disk its own copy of what it shares with the image that it was cloned
        from, so that the image can go. Its guest may run.

        :raises NotSupported: its backend cannot.
        """
        self._verb(
            flatten_action.flatten, check_id("disk id", disk_id), progress=progress
        )

    # --- what a guest needs ----------------------------------------------------

    def connect(self, instance_id: str) -> Sequence[Connection]:
        """Make all disks reachable from this host; again gives fresh info.

        :raises HostConflict: another host has a disk that is not shareable.
        """
        return self._verb(connect_action.connect, check_id("instance id", instance_id))

    def disconnect(self, instance_id: str) -> None:
        """Let go of all disks on this host. :raises Busy: the guest runs."""
        self._verb(connect_action.disconnect, check_id("instance id", instance_id))

    def libvirt_xml(self, instance_id: str) -> Sequence[str]:
        """libvirt's ``<disk>`` elements of the connected disks, rendered fresh."""
        return self._verb(
            connect_action.libvirt_xml, check_id("instance id", instance_id)
        )

    # --- what there is ---------------------------------------------------------

    def list(self, instance_id: str | None = None) -> Iterator[Disk]:
        """The disks of an instance in the guest's order, or all of the store; a
        shared disk once for each owner."""
        if instance_id is not None:
            check_id("instance id", instance_id)
        return inspect_action.list_disks(self._ctx, instance_id)

    def disk(self, disk_id: str) -> Disk:
        """One disk, by its id. :raises DiskNotFound:"""
        return inspect_action.one_disk(self._ctx, check_id("disk id", disk_id))

    def instance(self, instance_id: str) -> Instance:
        """The instance as it was last asked for, with its flavor of now.

        :raises InstanceNotFound:
        """
        return inspect_action.recorded_instance(
            self._ctx, check_id("instance id", instance_id)
        )

    def capacity(self) -> Sequence[Inventory]:
        """Room by backend, and what the image cache takes. A storage that does not
        answer is left out, with a warning in the log."""
        return inspect_action.capacity(self._ctx)

    def audit(self) -> Iterator[Finding]:
        """Compare rows, storages and cache, both ways; changes nothing."""
        return inspect_action.audit(self._ctx)

    def recover(self, *, dry_run: bool = True) -> Iterator[Finding]:
        """Settle this host's dead operations and purge its debts.

        What cannot be proved to be ours, and operations of other hosts, are only
        reported. The findings come as it goes: iterate to the end.

        :param dry_run: only say what would be done.
        """
        return inspect_action.recover(self._ctx, dry_run=dry_run)

    def export_rows(self, instance_id: str) -> JSON:
        """The rows of an instance, for a compute service to keep elsewhere."""
        return inspect_action.export_rows(
            self._ctx, check_id("instance id", instance_id)
        )

    # --- this host -------------------------------------------------------------

    def backends(self) -> Sequence[BackendStatus]:
        """This host's backends, and the drivers that are installed beside them."""
        return check_action.backends(self._ctx)

    def check(
        self, flavors: Sequence[Flavor] = (), *, project_id: str = ""
    ) -> Iterator[Finding]:
        """Can this host work as it is configured? Changes nothing.

        :param flavors: say of each where its disks would go.
        :param project_id: whose instances they would be, and whose volume types are
            told.
        """
        return check_action.check(self._ctx, flavors, project_id)

    def upgrade_store(self) -> tuple[str | None, str]:
        """Bring the store's schema up to date; its revision before and after."""
        before = self._ctx.store.database.upgrade()
        return before, REVISION

    # --- the image cache -------------------------------------------------------

    def cache_entries(self) -> Sequence[CacheEntry]:
        """What the image cache has."""
        return cache_action.entries(self._ctx)

    def prefetch(
        self,
        image_id: str,
        *,
        auth: Any = None,
        progress: ProgressCallback | None = None,
    ) -> CachedImage:
        """Bring an image into the cache before it is needed."""
        return self._verb(cache_action.prefetch, image_id, auth=auth, progress=progress)

    def prune(self, *, dry_run: bool = False) -> Iterator[Finding]:
        """Remove from the cache what is damaged, old or over budget, and not needed.
        The findings come as it goes: iterate to the end."""
        return cache_action.prune(self._ctx, dry_run=dry_run)

    def forget_host(self, host_id: str) -> None:
        """Another host that shared the cache is gone for good: drop its leases."""
        cache_action.forget_host(self._ctx, check_id("host id", host_id))

    def _verb(self, action: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        if not self._started:
            with self._lock:
                if not self._started:
                    inspect_action.recover_at_start(self._ctx)
                    self._started = True
        return action(self._ctx, *args, **kwargs)


def _check_guest(guest: object) -> None:
    """:raises InvalidValue: it cannot do what a running guest has to."""
    if guest is not None and not isinstance(guest, GuestDisks):
        raise exc.InvalidValue(
            "guest", guest, "a running guest, as imagebackend.libvirt.guest.Guest"
        )


def _refuse_green_threads() -> None:
    """:raises ConfigError: calls into storage libraries would stop the process."""
    patcher = sys.modules.get("eventlet.patcher")
    if patcher is not None and patcher.is_monkey_patched("thread"):
        raise exc.ConfigError(
            "eventlet has patched this process's threads: imagebackend blocks in "
            "libraries that eventlet cannot switch away from; use native threads"
        )
