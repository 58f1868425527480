# SPDX-License-Identifier: Apache-2.0
"""Disks as volumes of Cinder, of any volume type.

A volume carries its generation's marker in its metadata. It is reserved for its
instance as soon as it is there and for as long as it lives, so that it is never free
for others; each host that uses it has an attachment beside that reservation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

from oslo_config import cfg
from oslo_log import log

from imagebackend import exceptions as exc
from imagebackend.backends import attaching, generic, luks
from imagebackend.backends.base import (
    Backend,
    Blank,
    Fill,
    FromGeneration,
    FromImage,
    FromSnapshot,
    Record,
)
from imagebackend.backends.cinder import (
    ATTACH_MODE,
    REIMAGE,
    Cinder,
    VolumeType,
    project_of,
)
from imagebackend.conf import backends as options
from imagebackend.conf.keystone import keystone_options, plugin_options
from imagebackend.host import Host
from imagebackend.model import (
    JSON,
    Capabilities,
    Connection,
    Connector,
    Copyable,
    Creation,
    Encryption,
    FileSource,
    Finding,
    Found,
    Generation,
    GiB,
    Handle,
    ImageInfo,
    InPlace,
    Inventory,
    Marker,
    Path,
    Placement,
    Role,
    Secret,
    Severity,
    Snapshot,
    Source,
    Stat,
    UnlockedSource,
    Want,
    Way,
)
from imagebackend.qemu_img import QemuImg

LOG = log.getLogger(__name__)

#: Keys of a volume's metadata.
_GENERATION = "imagebackend_generation"
_DEPLOYMENT = "imagebackend_deployment"
_INSTANCE = "imagebackend_instance"
_HOST = "imagebackend_host"
#: Its bytes came from us, and are all there.
_FILLED = "imagebackend_filled"
_SNAPSHOT = "imagebackend-"
_SCHEME = "cinder"
#: Name of the image source whose images Cinder knows too.
_GLANCE = "glance"
#: While it is in one of these, Cinder is at it. Of attaching and detaching a client is
#: the one to end them.
_PASSING = frozenset(
    (
        *("creating", "downloading", "extending", "deleting", "uploading", "retyping"),
        *("reverting", "maintenance", "backing-up", "restoring-backup"),
        "awaiting-transfer",
    )
)
_USABLE = ("available", "reserved", "attaching", "detaching", "in-use")
#: Of users whose tokens count as a service's.
_SERVICE_ROLE = "service"
_A_DISK = Want(GiB, Role.ROOT, None, "")
#: Seconds between two tries at something that Cinder cannot do at the moment.
_PAUSE = 0.5
#: Seconds for which what a thread has just read of a volume is still so.
_FRESH = 1.0
#: Seconds for which a request that got no answer may still be carried out.
_LATE = 120.0
#: How often a volume is asked for whose request got no answer.
_TRIES = 4
_LOST_PAUSE = 1.0


class CinderBackend(Backend):
    """Volumes of one Cinder."""

    VOLUME_TYPES = True
    TWINS = True
    OPTIONS: ClassVar[Sequence[cfg.Opt]] = [*options.CINDER, *keystone_options()]

    def __init__(self, name: str, conf: cfg.ConfigOpts, deployment_id: str) -> None:
        super().__init__(name, conf, deployment_id)
        self._lock = threading.Lock()
        self._made: Cinder | None = None
        self._seen = threading.local()

    @classmethod
    def chosen_options(cls, conf: cfg.ConfigOpts, group: str) -> Sequence[cfg.Opt]:
        return plugin_options(conf, group)

    @property
    def _cinder(self) -> Cinder:
        with self._lock:
            if self._made is None:
                self._made = Cinder(self.name, self.conf, self._of_this_host)
            return self._made

    def _of_this_host(self) -> list[JSON]:
        """The volumes that this host has made."""
        everywhere = None if self.options.owner == "service" else ""
        marks = {_DEPLOYMENT: self.deployment_id, _HOST: Host(self.conf).id}
        return self._cinder.volumes(everywhere, **marks)

    def close(self) -> None:
        with self._lock:
            made, self._made = self._made, None
        if made is not None:
            made.close()

    # --- places --------------------------------------------------------------------

    def check(self) -> Sequence[Finding]:
        try:
            version = ".".join(map(str, self._cinder.version))
            what = f"Cinder {version} at {self._cinder.endpoint}"
            names = ", ".join(sorted(each["name"] for each in self._cinder.types()))
            default = self._type(_A_DISK).name
        except exc.ImageBackendError as error:
            return [Finding(Severity.ERROR, self.name, error.message)]
        answer = f"{what} has volume types {names}, {default} by default"
        return [Finding(Severity.OK, self.name, answer), *self._check_rights()]

    def _check_rights(self) -> Iterator[Finding]:
        """Cinder goes by the roles of who asks."""
        roles = self._cinder.roles
        if _SERVICE_ROLE in roles:
            yield Finding(Severity.OK, self.name, "the service token is accepted")
        else:
            yield Finding(
                Severity.ERROR,
                self.name,
                f"the user of [{self.name}] has the roles {', '.join(sorted(roles))}",
                f"give it the role {_SERVICE_ROLE}: without a service token Cinder "
                f"refuses to let go of volumes (OSSA-2023-003)",
            )
        if not self._cinder.pools():
            yield Finding(
                Severity.WARNING,
                self.name,
                f"the user of [{self.name}] may not ask for pools",
                "give it the role admin, or allow scheduler_extension:scheduler_stats"
                ":get_pools; until then no disk grows while its guest runs, unless "
                "grow_attached says that its type can",
            )
        if self.options.owner != "service":
            yield Finding(
                Severity.WARNING,
                self.name,
                f"[{self.name}] owner is tenant: users see the volumes of their "
                f"instances, and can detach and delete them unless a Nova vouches for "
                f"the instance",
            )

    def capabilities(self, at: Placement | Generation) -> Capabilities:
        facts = at.handle
        files = attaching.is_file(facts.get("protocol", ""))
        known = bool(facts.get("protocol"))
        grows = facts.get("grows", True) and known and not files
        chosen = self.options.grow_attached.get(facts.get("type_name", ""))
        if chosen is not None:
            grows = chosen.strip().lower() in ("true", "1", "yes", "on")
        return Capabilities(
            live_resize=Way.STORAGE if grows else Way.NONE,
            live_snapshot=Way.HYPERVISOR if files else Way.STORAGE,
            shareable=bool(facts.get("multiattach")),
            # What Cinder puts below such a file only its own host finds.
            snapshot=not (files and _encrypted(facts)),
            reimage=True,
            granularity=GiB,
            in_place=InPlace(self.options.rebuild),
        )

    def plan(self, want: Want) -> Placement:
        able = ("Blank", "FromImage", "FromGeneration", "FromSnapshot")
        generic.refuse_fills(self.name, want, able)
        if want.pool:
            raise exc.PlacementRefused(
                f"backend {self.name!r} has no pools to choose from: instead of pool "
                f"{want.pool!r}, name a volume type that leads there",
                pool=want.pool,
            )
        kind = self._type(want)
        if want.shareable and not kind.multiattach:
            raise exc.NotSupported(
                f"volume type {kind.name!r} cannot be shareable: it needs a type with "
                f"the extra spec multiattach = <is> True",
                volume_type=kind.name,
            )
        if kind.encryption:
            luks.refuse(self.name, kind)
        size_gb = self._size_gb(want.size, kind)
        handle: dict[str, Any] = {
            "type": kind.id,
            "type_name": kind.name,
            "protocol": kind.protocol,
        }
        if not kind.grows_attached:
            handle["grows"] = False
        if kind.multiattach:
            handle["multiattach"] = True
        if kind.encryption:
            handle["encryption"] = luks.FORMAT
        zone = self.options.availability_zone
        if zone == "instance":
            zone = want.availability_zone
        if zone:
            handle["zone"] = zone
        return Placement(
            self.name,
            self._scope(self._owner(want.project_id)),
            size_gb * GiB,
            "raw",
            self._way(want.fill, want.image, handle),
            handle,
        )

    def _way(self, fill: str, image: ImageInfo | None, handle: Handle) -> Path:
        """By which way the bytes come through this host; none, where Cinder fills."""
        if fill == "Blank":
            return Path.BLANK
        if fill == "FromSnapshot" or (image is not None and _known(image, handle)):
            return Path.CLONE
        raw = image is not None and image.disk_format in ("raw", "iso")
        return Path.COPY if raw else Path.CONVERT

    def _owner(self, project_id: str) -> str:
        if self.options.owner == "service":
            return self._cinder.project_id
        if not project_id:
            raise exc.PlacementRefused(
                f"backend {self.name!r}: [{self.name}] owner is tenant, and the "
                f"instance has no project",
                backend=self.name,
            )
        return project_id

    def _scope(self, project_id: str) -> str:
        return f"{_SCHEME}:{self._cinder.endpoint}/{project_id}"

    def scope_of_copies(self, gen: Generation) -> str:
        # Made without the caller, and none of the tenant's business.
        return self._scope(self._cinder.project_id)

    def _own(self, gen: Generation) -> str:
        """The project that the generation's volume is in.

        :raises ConfigError: it was recorded in another Cinder, or of another service
            user.
        """
        project_id = gen.scope.rpartition("/")[2]
        mine = project_id in (self._cinder.project_id, gen.project_id)
        if not mine or gen.scope != self._scope(project_id):
            raise exc.ConfigError(
                f"backend {self.name!r}: generation {gen.id} is recorded in "
                f"{gen.scope}, but [{self.name}] leads to "
                f"{self._scope(self._cinder.project_id)}",
                backend=self.name,
                generation=gen.id,
            )
        return project_id

    # --- types ---------------------------------------------------------------------

    def _type(self, want: Want) -> VolumeType:
        """:raises PlacementRefused: unknown, or not for the instance's project."""
        cinder = self._cinder
        listed = cinder.types()
        asked = want.volume_type or self.options.default_type
        wanted = asked or cinder.default_type()
        found = [each for each in listed if wanted in (each["id"], each["name"])]
        # Who set up the host may use what the instance's project may not.
        trusted = not want.volume_type and self.options.owner == "service"
        if found and (trusted or self._may_use(found[0], want.project_id)):
            return cinder.described(found[0])
        allowed = sorted(self._usable(listed, want.project_id))
        raise exc.PlacementRefused(
            f"backend {self.name!r}: there is no volume type {wanted!r} that project "
            f"{want.project_id!r} may use: it may use {', '.join(allowed)}",
            volume_type=wanted,
            accepted=allowed,
        )

    def volume_types(self, project_id: str) -> Sequence[str]:
        return self._usable(self._cinder.types(), project_id)

    def _usable(self, listed: Sequence[JSON], project_id: str) -> list[str]:
        return [each["name"] for each in listed if self._may_use(each, project_id)]

    def _may_use(self, raw: JSON, project_id: str) -> bool:
        if raw.get("os-volume-type-access:is_public", raw.get("is_public")):
            return True
        return bool(project_id) and self._cinder.may_use(raw["id"], project_id)

    def _size_gb(self, size: int, kind: VolumeType) -> int:
        # With what a guest does not get of it.
        lost = luks.overhead(kind.protocol) if kind.encryption else 0
        wanted = -(-(size + lost) // GiB)
        for key, sign in (
            ("provisioning:min_vol_size", 1),
            ("provisioning:max_vol_size", -1),
        ):
            limit = kind.extra_specs.get(key, "")
            # An encrypted file is made smaller, and then grown.
            asked = wanted - lost // GiB if sign > 0 else wanted
            # To Cinder an empty one is none.
            if limit.isdigit() and sign * (int(limit) - asked) > 0:
                word = "least" if sign > 0 else "most"
                raise exc.SizeRefused(
                    f"a disk of {size} bytes takes a volume of {wanted} GiB, and those "
                    f"of type {kind.name!r} have at {word} {limit} ({key})",
                    size=size,
                    volume_type=kind.name,
                )
        return wanted

    # --- create --------------------------------------------------------------------

    def create(
        self, gen: Generation, fill: Fill, record: Record, *, auth: Any = None
    ) -> Creation:
        project_id = self._own(gen)
        caller = auth if project_id != self._cinder.project_id else None
        if project_id != self._cinder.project_id and caller is None:
            raise exc.PlacementRefused(
                f"backend {self.name!r}: [{self.name}] owner is tenant: volumes are "
                f"made with the caller's credentials, and there are none",
                backend=self.name,
            )
        handle: dict[str, Any] = {**_facts(fill), **gen.handle, "asked": True}
        tries = 1 + self.options.create_retries
        for number in range(1, tries + 1):
            try:
                return self._create_once(gen, handle, fill, record, caller)
            except _FailedError as error:
                if number == tries:
                    raise error.error from error
                LOG.warning("%s: trying again", error)
        raise AssertionError("not reached")

    def _create_once(
        self,
        gen: Generation,
        handle: dict[str, Any],
        fill: Fill,
        record: Record,
        auth: Any,
    ) -> Creation:
        def lost(when: float) -> None:
            # What is tried next has it too: a volume may still come of this one.
            handle["lost"] = when
            record(handle)

        request = _Request(self, gen, fill, auth)
        present = self._find(gen) if "asked" in gen.handle else None
        with contextlib.ExitStack() as undo:
            if present is not None and not self._whole(present, fill, handle):
                self._remove(gen)
                present = None
            if present is None:
                record(handle)
                undo.callback(self._remove_made, gen, request)
                present = request.send(lost)
            volume_id = present["id"]
            whole = {**handle, "volume": volume_id}
            record(whole)
            present = self._available(present, request.timeout)
            if int(present["size"]) * GiB < gen.size:
                self._extend(volume_id, gen.size // GiB)
                present = self._available(present, self.options.operation_timeout)
            self._reserve(present, gen)
            self._write(gen, whole, present, fill)
            if "lost" in whole:
                self._drop_twins(gen, volume_id)
            undo.pop_all()
        way = self._way(type(fill).__name__, _image_of(fill), whole)
        return Creation(int(present["size"]) * GiB, "raw", way, whole)

    def _available(self, volume: JSON, timeout: float) -> JSON:
        """Once it can be used. :raises _FailedError: it ended in an error."""

        def done(seen: JSON | None) -> bool:
            if seen is None:
                raise _FailedError(
                    f"backend {self.name!r}: volume {volume['id']} has gone while it "
                    f"was being made",
                    volume["id"],
                )
            if seen["status"].startswith("error"):
                raise _FailedError(
                    f"backend {self.name!r}: volume {volume['id']} could not be made: "
                    f"{self._cinder.reason(volume['id'])}",
                    volume["id"],
                )
            return seen["status"] in ("available", "reserved", "in-use")

        what = f"volume {volume['id']} is available"
        seen = self._cinder.wait(volume["id"], done, timeout, what)
        assert seen is not None
        return seen

    def _reserve(self, volume: JSON, gen: Generation) -> None:
        """Hold it for the instance, and look that it is held: Cinder forgets a
        reservation that came while it still copied."""
        volume_id = volume["id"]
        for _ in range(_TRIES):
            if volume["status"] != "available":
                return
            self._attach(volume, gen, None)
            seen = self._cinder.volume(volume_id)
            if seen is None:
                raise self._missing(gen)
            volume = seen
        raise exc.StorageError(
            f"backend {self.name!r}: volume {volume_id} does not stay reserved",
            volume=volume_id,
        )

    def _attach(
        self, volume: JSON, gen: Generation, connector: JSON | None, mode: str = "rw"
    ) -> JSON:
        """A new attachment. One whose answer was lost is dropped, and made again."""
        what = f"attach volume {volume['id']}"
        instance_id = gen.instance_id or gen.id
        reserves, lost = connector is None, False
        mode = mode if self._cinder.version >= (3, ATTACH_MODE) else "null"
        for last in reversed(range(_TRIES)):
            try:
                made: JSON = self._cinder.ask(
                    what,
                    lambda spoken: spoken.attachments.create(
                        volume["id"], connector, instance_id, mode
                    ),
                    again=False,
                )
            except exc.StorageError as error:
                # It refuses a second one while the first is being made.
                if not (lost or isinstance(error, exc.StorageUnavailable)) or not last:
                    raise
                lost = True
                time.sleep(_PAUSE)
                self._drop_lost(volume, gen, reservations=reserves)
                continue
            if lost:
                # The first one may have been made only now.
                self._drop_lost(volume, gen, reservations=reserves, keep=made["id"])
            return made
        raise AssertionError("not reached")

    def _drop_lost(
        self,
        volume: JSON,
        gen: Generation,
        *,
        reservations: bool = False,
        keep: str = "",
    ) -> None:
        """Attachments that nobody can know of: requested here, their answer lost."""
        for each in self._cinder.attachments(volume):
            if each["id"] == keep:
                continue
            if each["status"] == "reserved" and reservations:
                self._cinder.delete_attachment(each["id"])
            # On another host one of a shareable volume may be in the making.
            if each["status"] == "attaching" and not gen.shareable:
                self._cinder.delete_attachment(each["id"])

    # --- content -------------------------------------------------------------------

    def _by_cinder(self, fill: Fill, handle: Handle) -> bool:
        """Whether Cinder fills it, so that no byte comes through this host."""
        match fill:
            case Blank(fs=None) | FromSnapshot():
                return True
            case FromImage(image):
                return _known(image.info, handle)
            case _:
                return False

    def _whole(self, volume: JSON, fill: Fill, handle: Handle) -> bool:
        return self._by_cinder(fill, handle) or _FILLED in volume["metadata"]

    def _write(self, gen: Generation, handle: Handle, volume: JSON, fill: Fill) -> None:
        """What Cinder does not fill by itself."""
        if self._whole(volume, fill, handle):
            return
        gen = dataclasses.replace(gen, handle=handle)
        with self._borrowed(gen) as target:
            self._fill(gen, fill, target)
        self._cinder.ask(
            f"mark volume {volume['id']} as filled",
            lambda spoken: spoken.volumes.set_metadata(volume["id"], {_FILLED: "yes"}),
        )

    @contextlib.contextmanager
    def _borrowed(self, gen: Generation) -> Iterator[Copyable]:
        """Attached to this host for the block. A delete tells what a process that died
        in it left (:meth:`_abandoned`)."""
        connection = self.connect(gen, Host(self.conf).connector, lambda _: None)
        try:
            if connection.encryption is None:
                yield connection.source
            else:
                yield connection.copyable(self.secrets(gen, connection))
        finally:
            self.disconnect(gen, connection)

    def _fill(self, gen: Generation, fill: Fill, target: Copyable) -> None:
        match fill:
            case Blank(fs=str() as fs, label=label):
                with self._scratch(self._room(gen, target)) as path:
                    generic.make_filesystem(path, fs, label)
                    self._copy(FileSource(path, "raw"), target)
            case FromImage(image):
                with image.cached() as cached:
                    self._copy(FileSource(cached.path, cached.format), target)
            case FromGeneration(source=source):
                self._copy(source, target)
            case _:
                raise exc.NotSupported(
                    f"backend {self.name!r} cannot fill by {type(fill).__name__}"
                )

    def _room(self, gen: Generation, target: Copyable) -> int:
        """Bytes that fit into it."""
        if isinstance(target, UnlockedSource):
            return QemuImg(self.conf).size_inside(target.source, target.encryption)
        return gen.size

    def _copy(self, source: Copyable, target: Copyable) -> None:
        # A new volume reads as zeros where the storage is thin; a block device may
        # have another's bytes, and what LUKS has not written is noise, but in qcow2.
        noise = isinstance(target, UnlockedSource) and target.format == "raw"
        blank = not (noise or isinstance(target, attaching.BLOCK))
        QemuImg(self.conf).convert(source, target, target_is_blank=blank)

    @contextlib.contextmanager
    def _scratch(self, size: int) -> Iterator[str]:
        """A file of ``size`` zeros without a name, so that nothing is left of it."""
        folder = self.conf.imagebackend.state_path
        os.makedirs(folder, mode=0o711, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            os.truncate(file.fileno(), size)
            yield f"/proc/{os.getpid()}/fd/{file.fileno()}"

    # --- which volumes are whose -----------------------------------------------------

    def _marked(self, gen: Generation) -> list[JSON]:
        """Volumes with the generation's marker in the project that it is recorded in,
        the recorded one or else the oldest first."""
        recorded = gen.handle.get("volume")
        found = self._cinder.volumes(self._own(gen), **{_GENERATION: gen.id})
        return sorted(
            (each for each in found if self._is(each, gen)),
            key=lambda each: (each["id"] != recorded, each["created_at"], each["id"]),
        )

    def _is(self, volume: JSON, gen: Generation) -> bool:
        return _marker_of(volume) == Marker(gen.id, gen.deployment_id) and project_of(
            volume
        ) in ("", self._own(gen))

    def _find(self, gen: Generation) -> JSON | None:
        """The generation's volume, None if Cinder answered that there is none.

        :raises IntegrityError: the recorded one says that it is something else.
        """
        self._own(gen)
        recorded = gen.handle.get("volume")
        if not recorded:
            found = self._marked(gen)
            return found[0] if found else None
        volume = self._cinder.volume(str(recorded))
        if volume is not None and not self._is(volume, gen):
            raise exc.IntegrityError(
                f"backend {self.name!r}: volume {recorded} is recorded as generation "
                f"{gen.id}, but its project or its metadata ({_GENERATION}, "
                f"{_DEPLOYMENT}) say otherwise: it is not touched",
                backend=self.name,
                generation=gen.id,
                volume=recorded,
            )
        return volume

    def _missing(self, gen: Generation) -> exc.ObjectMissing:
        return exc.ObjectMissing(
            f"backend {self.name!r}: the disk's volume "
            f"{gen.handle.get('volume', '')} is gone",
            backend=self.name,
            generation=gen.id,
        )

    def _volume(self, gen: Generation) -> JSON:
        volume = self._find(gen)
        if volume is None:
            raise self._missing(gen)
        return volume

    # --- delete --------------------------------------------------------------------

    def delete(self, gen: Generation) -> None:
        self._own(gen)
        self._remove(gen)
        if time.time() < gen.handle.get("lost", 0.0) + _LATE:
            raise exc.Debt(
                f"backend {self.name!r}: a request for a volume of generation {gen.id} "
                f"got no answer, and may still be carried out: it is looked for again",
                backend=self.name,
                generation=gen.id,
            )

    def _remove_made(self, gen: Generation, request: _Request) -> None:
        """What a create that failed has made."""
        if request.volume_id:
            handle = {**gen.handle, "volume": request.volume_id}
            gen = dataclasses.replace(gen, handle=handle)
        self._remove(gen)

    def _remove(self, gen: Generation) -> None:
        found = [] if "volume" not in gen.handle else [self._find(gen)]
        # A tenant may write our metadata onto volumes of its own.
        if not found or self._own(gen) == self._cinder.project_id:
            found += self._marked(gen)
        for each in {volume["id"]: volume for volume in found if volume}.values():
            self._remove_volume(gen, each)

    def drop_twins(self, gen: Generation, recorded: Sequence[Handle]) -> int:
        # A tenant may write our metadata onto volumes of its own, and our names.
        if self._own(gen) != self._cinder.project_id or "volume" not in gen.handle:
            return 0
        count = self._drop_twins(gen, gen.handle["volume"])
        volume = self._find(gen)
        if volume is None:
            return count
        known = {value for handle in recorded for value in handle.values()}
        attachments, snapshots = (
            self._cinder.attachments(volume),
            self._snapshots(volume),
        )
        loose = [
            part
            for part in _parts(attachments, snapshots).get(volume["id"], ())
            if known.isdisjoint(part.values())
        ]
        for each in loose:
            LOG.warning("volume %s has %s, which is in no row", volume["id"], each)
            if "attachment" in each:
                self._cinder.delete_attachment(each["attachment"])
        dropped = [each["snapshot"] for each in loose if "snapshot" in each]
        if dropped:
            with self._free(gen, self._volume(gen)):
                for each in snapshots:
                    if each["id"] in dropped:
                        self._drop_snapshot(each)
        return count + len(loose)

    def _drop_twins(self, gen: Generation, keep: str) -> int:
        twins = [each for each in self._marked(gen) if each["id"] != keep]
        for each in twins:
            LOG.warning("volume %s is a twin of %s: deleted", each["id"], keep)
            self._remove_volume(gen, each)
        return len(twins)

    def _remove_volume(self, gen: Generation, volume: JSON) -> None:
        volume_id = volume["id"]
        deadline = time.monotonic() + self.options.operation_timeout
        what = f"volume {volume_id} is at rest"
        if volume["status"] in _PASSING - {"deleting"}:
            seen = self._cinder.wait(
                volume_id, _at_rest, self.options.operation_timeout, what
            )
            if seen is None:
                return
            volume = seen
        if volume["status"] != "deleting":
            self._let_go(gen, volume)
            self._drop_snapshots(volume)
        while volume["status"] != "deleting":
            try:
                self._cinder.ask(
                    f"delete volume {volume_id}",
                    lambda spoken: spoken.volumes.delete(volume_id),
                )
                break
            except exc.ObjectMissing:
                return
            except (exc.StorageUnavailable, exc.StorageFull):
                raise
            except exc.StorageError as error:
                # It says no while something that was begun before still ends.
                seen = self._cinder.volume(volume_id)
                if seen is None:
                    return
                if time.monotonic() > deadline:
                    raise exc.Busy(error.message, **error.values) from error
                time.sleep(_PAUSE)
                volume = seen

        def gone(seen: JSON | None) -> bool:
            if seen is not None and seen["status"] == "error_deleting":
                raise exc.StorageError(
                    f"backend {self.name!r}: volume {volume_id} could not be deleted: "
                    f"{self._cinder.reason(volume_id)}",
                    volume=volume_id,
                )
            if seen is not None and seen["status"] != "deleting":
                raise exc.Busy(
                    f"backend {self.name!r}: volume {volume_id} was not deleted, and "
                    f"is {seen['status']}: {self._cinder.reason(volume_id)}",
                    volume=volume_id,
                )
            return seen is None

        self._cinder.wait(
            volume_id,
            gone,
            self.options.operation_timeout,
            f"volume {volume_id} is gone",
        )

    def _let_go(self, gen: Generation, volume: JSON) -> None:
        """Drop the attachments that are no host's.

        :raises Busy: a host has it.
        """
        mine = self._abandoned(volume)
        hosts = [
            each["host_name"] or "(unknown)"
            for each in volume["attachments"]
            if each["attachment_id"] not in mine
        ]
        if hosts:
            raise exc.Busy(
                f"backend {self.name!r}: volume {volume['id']} is attached to host "
                f"{', '.join(hosts)}",
                hosts=hosts,
                volume=volume["id"],
            )
        for each in self._cinder.attachments(volume):
            self._detach(each)

    def _abandoned(self, volume: JSON) -> set[str]:
        """Attachments of this host that nothing uses: what a process that died while it
        filled the volume left."""
        found = set()
        for info in self._here(volume):
            if not attaching.users(self.conf, self.options, info["connection_info"]):
                found.add(info["id"])
        return found

    def _here(self, volume: JSON) -> Iterator[JSON]:
        """The attachments of this host."""
        hostname = Host(self.conf).hostname
        for each in volume["attachments"]:
            if each["host_name"] == hostname:
                found = self._cinder.attachment(each["attachment_id"])
                if found is not None:
                    yield found

    # --- connect -------------------------------------------------------------------

    def connect(
        self,
        gen: Generation,
        to: Connector,
        record: Record,
        *,
        readonly: bool = False,
    ) -> Connection:
        self._own(gen)
        volume = self._just_seen(gen) or self._volume(gen)
        if volume["status"] == "attaching" and not gen.shareable:
            # Nobody else may do that now: by a request that got no answer, and was
            # carried out when its verb had ended.
            self._drop_lost(volume, gen)
            volume = self._volume(gen)
        self._must_be_usable(volume, gen)
        mine = [
            each["attachment_id"]
            for each in volume["attachments"]
            if each["host_name"] == to.hostname
        ]
        with contextlib.ExitStack() as undo:
            made = self._cinder.attachment(mine[0]) if mine else None
            again = made is not None
            if made is None:
                # Nobody but us takes it away, but an administrator can.
                self._reserve(volume, gen)
                connector = attaching.connector(
                    self.conf, self.options, to, attaching.needs_host(gen.handle)
                )
                mode = "ro" if readonly else "rw"
                made = self._attach(volume, gen, connector, mode)
                undo.callback(self._detach, made)
            handle = {
                "attachment": made["id"],
                "host": to.host_id,
                "hostname": to.hostname,
                "volume": volume["id"],
            }
            info = made["connection_info"]
            encryption = None
            if info.get("encrypted"):
                encryption = self._layer(volume["id"], info)
                handle["secret"] = encryption.secret_uuid
            record(handle)
            source = attaching.attach(self.conf, self.options, info)
            if (
                isinstance(source, FileSource)
                and encryption
                and not (again or readonly)
            ):
                self._grow_inside(volume, source, encryption)
            if not again:
                attachment_id = made["id"]
                self._cinder.ask(
                    f"complete attachment {attachment_id}",
                    lambda spoken: spoken.attachments.complete(attachment_id),
                )
            undo.pop_all()
        limits = attaching.limits(info)
        return Connection(source, to.host_id, handle, readonly, encryption, limits)

    def _must_be_usable(self, volume: JSON, gen: Generation) -> None:
        status = volume["status"]
        if status in _USABLE:
            return
        values = {"backend": self.name, "generation": gen.id, "volume": volume["id"]}
        text = f"backend {self.name!r}: the disk's volume {volume['id']} is {status}"
        if status.startswith("error"):
            raise exc.IntegrityError(
                f"{text}: {self._cinder.reason(volume['id'])}: when it is in order "
                f"again, reset its status",
                **values,
            )
        raise exc.Busy(f"{text}: Cinder, or an administrator, is at it", **values)

    def disconnect(self, gen: Generation, conn: Connection) -> None:
        self._own(gen)
        host = conn.handle.get("host", conn.host_id)
        if host != conn.host_id:
            raise exc.HostConflict(
                f"the attachment is of host {host}, not of {conn.host_id}", host=host
            )
        attachment_id = conn.handle.get("attachment")
        if attachment_id is not None:
            found = self._cinder.attachment(attachment_id)
            if found is not None:
                self._detach(found)
            return
        # It was not recorded, so its answer may have been lost.
        volume = self._find(gen)
        if volume is not None:
            for each in self._here(volume):
                self._detach(each)
            self._drop_lost(volume, gen)

    def _detach(self, attachment: JSON) -> None:
        """The host first, then the attachment, which may be a mere reservation."""
        attaching.detach(self.conf, self.options, attachment.get("connection_info"))
        self._cinder.delete_attachment(attachment["id"])

    def secrets(self, gen: Generation, conn: Connection) -> Sequence[Secret]:
        found = list(attaching.secrets(self.conf, self.options, conn.source))
        if conn.encryption is not None:
            found.append(self._secret(conn.handle["volume"]))
        return found

    def own_secrets(self, gen: Generation, conn: Connection) -> Sequence[str]:
        return [conn.handle["secret"]] if "secret" in conn.handle else []

    # --- encryption ----------------------------------------------------------------

    def _layer(self, volume_id: str, info: JSON) -> Encryption:
        provider = str(self._cinder.encryption(volume_id).get("provider") or "")
        return luks.layer(volume_id, provider, attaching.protocol_of(info))

    def _secret(self, volume_id: str) -> Secret:
        key_id = self._cinder.encryption(volume_id)["encryption_key_id"]
        return luks.secret(self.conf, self._cinder.auth, volume_id, str(key_id))

    def _grow_inside(self, volume: JSON, source: Source, layer: Encryption) -> None:
        """Cinder makes an encrypted file only longer; what is in it is for us to grow,
        as long as no guest has it."""
        wanted = int(volume["size"]) * GiB - luks.overhead("nfs")
        tool = QemuImg(self.conf)
        if tool.size_inside(source, layer) < wanted:
            secret = self._secret(volume["id"])
            tool.resize(UnlockedSource(source, layer, secret), wanted)

    def guest_size(self, gen: Generation, size: int) -> int:
        if not _encrypted(gen.handle):
            return size
        volume, hostname = self._volume(gen), Host(self.conf).hostname
        for each in volume["attachments"]:
            mine = each["host_name"] == hostname
            found = self._cinder.attachment(each["attachment_id"]) if mine else None
            if found is not None:
                info = found["connection_info"]
                source = attaching.attach(self.conf, self.options, info)
                layer = self._layer(volume["id"], info)
                return QemuImg(self.conf).size_inside(source, layer)
        raise exc.ObjectMissing(
            f"backend {self.name!r}: volume {volume['id']} is not attached to this "
            f"host ({hostname}), which has a guest of it",
            volume=volume["id"],
        )

    # --- what there is -------------------------------------------------------------

    def stat(self, gen: Generation) -> Stat | None:
        volume = self._find(gen)
        if volume is None:
            return None
        self._seen.what = (gen.id, time.monotonic(), volume)
        status = volume["status"]
        size = int(volume["size"]) * GiB
        if size < gen.size or status in ("error", "error_restoring"):
            hosts = [f"host {each['host_name']}" for each in volume["attachments"]]
            raise exc.IntegrityError(
                f"backend {self.name!r}: the disk's volume {volume['id']} is {status} "
                f"and has {size} bytes, recorded are {gen.size}",
                backend=self.name,
                generation=gen.id,
                used_by=hosts,
            )
        # An attachment is not a guest that has it open.
        users = [
            user
            for each in self._here(volume)
            for user in attaching.users(
                self.conf, self.options, each["connection_info"]
            )
        ]
        return Stat(size, used_by=tuple(users))

    def _just_seen(self, gen: Generation) -> JSON | None:
        """What this thread's last ``stat`` read, once: a caller looks before it
        connects."""
        what = getattr(self._seen, "what", None)
        self._seen.what = None
        if what is None or what[0] != gen.id or time.monotonic() - what[1] > _FRESH:
            return None
        found: JSON = what[2]
        return found

    def scan(self) -> Iterator[Found]:
        found = self._cinder.volumes()
        # In other projects, what hangs on them may be somebody else's.
        parts = _parts(self._cinder.all_attachments(), self._cinder.all_snapshots())
        if self.options.owner != "service":
            theirs = self._cinder.volumes("", **{_DEPLOYMENT: self.deployment_id})
            found = list({each["id"]: each for each in [*found, *theirs]}.values())
        for volume in found:
            handle = {"asked": True, "volume": volume["id"]}
            hanging = tuple(parts.get(volume["id"], ()))
            yield Found(volume["id"], _marker_of(volume), handle, parts=hanging)

    def capacity(self) -> Sequence[Inventory]:
        found = []
        for pool in self._cinder.pools():
            total = pool["capabilities"].get("total_capacity_gb")
            free = pool["capabilities"].get("free_capacity_gb")
            # Some say infinite, or unknown.
            if isinstance(total, int | float) and isinstance(free, int | float):
                found.append(
                    Inventory(
                        self.name,
                        f"{_SCHEME}:{self._cinder.endpoint}#{pool['name']}",
                        int(total * GiB),
                        max(0, int(min(free, total) * GiB)),
                        None,
                        what=f"volumes in {pool['name']}",
                    )
                )
        return found

    # --- optional ------------------------------------------------------------------

    def resize(self, gen: Generation, size: int) -> int:
        volume = self._volume(gen)
        lost = 0
        if _encrypted(gen.handle):
            lost = luks.overhead(gen.handle["protocol"])
        wanted = -(-(size + lost) // GiB)
        if int(volume["size"]) >= wanted:
            return int(volume["size"]) * GiB
        attached = bool(volume["attachments"])
        if attached and self.capabilities(gen).live_resize is Way.NONE:
            raise exc.Busy(
                f"backend {self.name!r}: volume {volume['id']} is attached, and "
                f"volumes of type {gen.handle.get('type_name')!r} grow only while "
                f"they are not",
                volume=volume["id"],
            )
        with self._free(gen, volume):
            size = self._extend(volume["id"], wanted)
        return size * GiB

    def _extend(self, volume_id: str, wanted: int) -> int:
        what = f"grow volume {volume_id} to {wanted} GiB"
        try:
            self._cinder.ask(
                what, lambda spoken: spoken.volumes.extend(volume_id, wanted)
            )
        except exc.StorageUnavailable:
            raise
        except exc.StorageError:
            # Asked twice, it may have grown by the first request.
            seen = self._cinder.volume(volume_id)
            if seen is None or (
                int(seen["size"]) < wanted and seen["status"] != "extending"
            ):
                raise

        def done(seen: JSON | None) -> bool:
            if seen is None:
                raise exc.ObjectMissing(f"volume {volume_id} is gone")
            if seen["status"] == "error_extending":
                self._after_failed_growth(seen, wanted)
            if seen["status"] == "extending":
                return False
            if int(seen["size"]) < wanted:
                raise exc.StorageError(
                    f"backend {self.name!r}: cannot {what}: it has {seen['size']}: "
                    f"{self._cinder.reason(volume_id)}",
                    volume=volume_id,
                )
            return True

        seen = self._cinder.wait(
            volume_id, done, self.options.operation_timeout, f"{what} has ended"
        )
        assert seen is not None
        return int(seen["size"])

    def _after_failed_growth(self, volume: JSON, wanted: int) -> None:
        """Cinder leaves it in a state in which nothing can be done to it; what it has
        is what it had, so it is put back.

        :raises StorageError:
        """
        reason = self._cinder.reason(volume["id"])
        back = "in-use" if volume["attachments"] else "available"
        self._cinder.ask(
            f"reset the status of volume {volume['id']}",
            lambda spoken: spoken.volumes.reset_state(volume["id"], back),
        )
        raise exc.StorageError(
            f"backend {self.name!r}: volume {volume['id']} could not grow to {wanted} "
            f"GiB, and has {volume['size']} as before: {reason}",
            volume=volume["id"],
        )

    def reimage(self, gen: Generation, fill: FromImage) -> None:
        volume = self._volume(gen)
        if volume["attachments"]:
            raise exc.Busy(
                f"backend {self.name!r}: volume {volume['id']} is attached: it can be "
                f"filled anew only when it is not",
                volume=volume["id"],
            )
        needs = fill.image.info.virtual_size
        able = self._cinder.version >= (3, REIMAGE) and needs is not None
        if able and self._by_cinder(fill, gen.handle) and not _encrypted(gen.handle):
            with self._free(gen, volume):
                self._reimage_by_cinder(volume, fill.image.info)
            self._zero(gen, needs or 0)
        else:
            self._overwrite(gen, fill)

    def _reimage_by_cinder(self, volume: JSON, image: ImageInfo) -> None:
        volume_id = volume["id"]
        what = f"fill volume {volume_id} from image {image.id}"
        try:
            self._cinder.ask(
                what, lambda spoken: spoken.volumes.reimage(volume_id, image.id)
            )
        except exc.StorageUnavailable:
            raise
        except exc.StorageError:
            # Asked twice, it may be at it by the first request.
            seen = self._cinder.volume(volume_id)
            if seen is None or seen["status"] != "downloading":
                raise

        def done(seen: JSON | None) -> bool:
            if seen is None:
                raise exc.ObjectMissing(f"volume {volume_id} is gone")
            if seen["status"].startswith("error"):
                raise exc.StorageError(
                    f"backend {self.name!r}: cannot {what}: "
                    f"{self._cinder.reason(volume_id)}",
                    volume=volume_id,
                )
            return bool(seen["status"] == "available")

        options = self.options
        timeout = (
            options.create_timeout + options.create_timeout_per_gb * volume["size"]
        )
        self._cinder.wait(volume_id, done, timeout, f"{what} has ended")

    def _zero(self, gen: Generation, offset: int) -> None:
        """What is behind the image, and would still be the old disk's: Cinder writes no
        further than the image goes."""
        if offset < gen.size:
            with self._borrowed(gen) as target:
                # Not an encrypted one.
                assert not isinstance(target, UnlockedSource)
                QemuImg(self.conf).zero(target, offset, gen.size - offset)

    def _overwrite(self, gen: Generation, fill: FromImage) -> None:
        """By this host; zeros too, to the disk's end."""
        folder = self.conf.imagebackend.state_path
        tool = QemuImg(self.conf)
        with (
            fill.image.cached() as cached,
            tempfile.TemporaryDirectory(dir=folder) as scratch,
            self._borrowed(gen) as target,
        ):
            path = os.path.join(scratch, "whole.qcow2")
            size = self._room(gen, target)
            tool.create_overlay(path, size, cached.path, cached.format)
            base = FileSource(cached.path, cached.format)
            whole = FileSource(path, "qcow2", base)
            tool.convert(whole, target, target_is_blank=False)

    @contextlib.contextmanager
    def _free(self, gen: Generation, volume: JSON) -> Iterator[None]:
        """Without its reservation, with which Cinder does nothing to it; attached ones
        need not be free."""
        if volume["attachments"] or volume["status"] != "reserved":
            self._must_be_usable(volume, gen)
            yield
            return
        for each in self._cinder.attachments(volume):
            self._cinder.delete_attachment(each["id"])
        try:
            yield
        finally:
            seen = self._cinder.volume(volume["id"])
            if seen is not None:
                self._reserve(seen, gen)

    # --- snapshots -----------------------------------------------------------------

    def snapshot(self, gen: Generation, snap_id: str, record: Record) -> Snapshot:
        if not self.capabilities(gen).snapshot:
            raise self._cannot("take a snapshot of", gen.id)
        volume = self._volume(gen)
        present = self._snapshots(volume, _SNAPSHOT + snap_id)
        if not present:
            if volume["attachments"] and attaching.is_file(
                gen.handle.get("protocol", "")
            ):
                raise exc.Busy(
                    f"backend {self.name!r}: volume {volume['id']} is attached: Cinder "
                    f"takes snapshots of volumes in files only while they are not",
                    volume=volume["id"],
                )
            with self._free(gen, volume):
                present = [self._take(volume, _SNAPSHOT + snap_id, record)]
        taken = present[0]
        record({"snapshot": taken["id"]})
        self._snapshot_ready(taken["id"])
        return Snapshot(
            snap_id, gen.id, int(taken["size"]) * GiB, {"snapshot": taken["id"]}
        )

    def _take(self, volume: JSON, name: str, record: Record) -> JSON:
        record({"name": name})
        for last in reversed(range(_TRIES)):
            try:
                made: JSON = self._cinder.ask(
                    f"take a snapshot of volume {volume['id']}",
                    lambda spoken: spoken.volume_snapshots.create(
                        volume["id"], name=name, **_force(self._cinder.version)
                    ).to_dict(),
                    again=False,
                )
                self._snapshot_ready(made["id"])
                return made
            except exc.StorageUnavailable:
                if not last:
                    raise
                time.sleep(_LOST_PAUSE)
                present = self._snapshots(volume, name)
                if present:
                    return present[0]
        raise AssertionError("not reached")

    def _snapshots(self, volume: JSON, name: str = "") -> list[JSON]:
        search: dict[str, Any] = {"volume_id": volume["id"]}
        if name:
            search["name"] = name
        if project_of(volume) != self._cinder.project_id:
            search["all_tenants"] = 1
        return self._cinder.ask(
            f"list the snapshots of volume {volume['id']}",
            lambda spoken: [
                each.to_dict()
                for each in spoken.volume_snapshots.list(search_opts=search)
            ],
        )

    def _snapshot(self, snapshot_id: str) -> JSON | None:
        try:
            found: JSON = self._cinder.ask(
                f"read snapshot {snapshot_id}",
                lambda spoken: spoken.volume_snapshots.get(snapshot_id).to_dict(),
            )
            return found
        except exc.ObjectMissing:
            return None

    def _snapshot_ready(self, snapshot_id: str) -> None:
        def ready() -> bool:
            seen = self._snapshot(snapshot_id)
            if seen is None or seen["status"] == "error":
                raise exc.StorageError(
                    f"backend {self.name!r}: snapshot {snapshot_id} could not be "
                    f"taken: {self._cinder.reason(snapshot_id)}",
                    snapshot=snapshot_id,
                )
            return bool(seen["status"] == "available")

        self._until(ready, f"snapshot {snapshot_id} is not available")

    def delete_snapshot(self, gen: Generation, snap: Snapshot) -> None:
        volume = self._find(gen)
        if volume is None:
            return
        found = self._snapshots(volume, _SNAPSHOT + snap.id)
        if found:
            with self._free(gen, volume):
                for each in found:
                    self._drop_snapshot(each)

    def _drop_snapshots(self, volume: JSON) -> None:
        """:raises Busy: there are snapshots of somebody else's."""
        for each in self._snapshots(volume):
            if not (each["name"] or "").startswith(_SNAPSHOT):
                raise exc.Busy(
                    f"backend {self.name!r}: volume {volume['id']} has snapshot "
                    f"{each['id']} ({each['name']}), which is not ours: delete it "
                    f"first",
                    volume=volume["id"],
                    snapshot=each["id"],
                )
            self._drop_snapshot(each)

    def _drop_snapshot(self, snapshot: JSON) -> None:
        snapshot_id = snapshot["id"]
        if snapshot["status"] != "deleting":
            try:
                self._cinder.ask(
                    f"delete snapshot {snapshot_id}",
                    lambda spoken: spoken.volume_snapshots.delete(snapshot_id),
                )
            except exc.ObjectMissing:
                return

        def gone() -> bool:
            seen = self._snapshot(snapshot_id)
            if seen is not None and seen["status"] != "deleting":
                raise exc.Busy(
                    f"backend {self.name!r}: snapshot {snapshot_id} was not deleted, "
                    f"and is {seen['status']}: {self._cinder.reason(snapshot_id)}",
                    snapshot=snapshot_id,
                )
            return seen is None

        self._until(gone, f"snapshot {snapshot_id} is still there")

    def _until(self, done: Callable[[], bool], late: str) -> None:
        deadline = time.monotonic() + self.options.operation_timeout
        pause = self.options.poll_first
        while not done():
            if time.monotonic() > deadline:
                raise exc.StorageUnavailable(
                    f"backend {self.name!r}: {late} after "
                    f"{self.options.operation_timeout} s",
                    backend=self.name,
                )
            time.sleep(pause)
            pause = min(1.5 * pause, self.options.poll_longest)


class _FailedError(Exception):
    """Within this module alone: a volume ended in an error, and another one may not.

    :ivar error: what the caller is told, if none does.
    """

    def __init__(self, text: str, volume: str) -> None:
        super().__init__(text)
        self.error = exc.StorageError(text, volume=volume)


class _Request:
    """A request for a new volume, and what became of it."""

    def __init__(
        self, backend: CinderBackend, gen: Generation, fill: Fill, auth: Any
    ) -> None:
        self._backend = backend
        self._gen = gen
        self._auth = auth
        self._arguments = self._of(fill)
        self.volume_id = ""

    @property
    def timeout(self) -> float:
        options = self._backend.options
        timeout = float(options.create_timeout)
        if "imageRef" in self._arguments:
            timeout += options.create_timeout_per_gb * self._arguments["size"]
        return timeout

    def send(self, lost: Callable[[float], None]) -> JSON:
        """Ask for it once; after a lost answer, look before asking again.

        :param lost: is told when an answer was lost: since then there may be a volume
            that nobody knows of, or come to be.
        """
        for last in reversed(range(_TRIES)):
            try:
                made: JSON = self._backend._cinder.ask(
                    f"create a volume for generation {self._gen.id}",
                    lambda spoken: spoken.volumes.create(**self._arguments).to_dict(),
                    again=False,
                    auth=self._auth,
                )
            except exc.StorageUnavailable:
                lost(time.time())
                if not last:
                    raise
                time.sleep(_LOST_PAUSE)
                found = self._backend._marked(self._gen)
                if not found:
                    continue
                made = found[0]
            self.volume_id = made["id"]
            return made
        raise AssertionError("not reached")

    def _of(self, fill: Fill) -> dict[str, Any]:
        gen, backend = self._gen, self._backend
        marker = Marker(gen.id, gen.deployment_id)
        size = gen.size // GiB
        if _encrypted(gen.handle) and attaching.is_file(gen.handle["protocol"]):
            # Grown afterwards, when what is in it no longer grows with it.
            size -= luks.overhead(gen.handle["protocol"]) // GiB
        arguments: dict[str, Any] = {
            "size": size,
            "name": generic.object_name(gen.disk_name, marker),
            "description": f"disk {gen.disk_name} of instance {gen.instance_id}",
            "metadata": {
                _GENERATION: gen.id,
                _DEPLOYMENT: gen.deployment_id,
                _INSTANCE: gen.instance_id or "",
                _HOST: Host(backend.conf).id,
            },
        }
        if "type" in gen.handle:
            arguments["volume_type"] = gen.handle["type"]
        if "zone" in gen.handle:
            arguments["availability_zone"] = gen.handle["zone"]
        hints = {
            key: value.replace("{instance}", gen.instance_id or "").replace(
                "{project}", gen.project_id
            )
            for key, value in backend.options.scheduler_hints.items()
        }
        if hints:
            arguments["scheduler_hints"] = hints
        match fill:
            case FromImage(image) if _known(image.info, gen.handle):
                arguments["imageRef"] = image.info.id
            case FromSnapshot(_, snapshot):
                arguments["snapshot_id"] = snapshot.handle["snapshot"]
        return arguments


def _facts(fill: Fill) -> Handle:
    """A volume from a snapshot is of the type of what the snapshot is of."""
    if not isinstance(fill, FromSnapshot):
        return {}
    keys = ("type", "type_name", "protocol", "grows", "multiattach", "zone")
    return {key: value for key, value in fill.generation.handle.items() if key in keys}


def _at_rest(volume: JSON | None) -> bool:
    return volume is None or volume["status"] not in _PASSING - {"deleting"}


def _marker_of(volume: JSON) -> Marker | None:
    metadata = volume.get("metadata") or {}
    if _GENERATION in metadata and _DEPLOYMENT in metadata:
        return Marker(metadata[_GENERATION], metadata[_DEPLOYMENT])
    return None


def _encrypted(handle: Handle) -> bool:
    return "encryption" in handle


def _known(image: ImageInfo, handle: Handle) -> bool:
    """Whether Cinder fills a volume with the image itself."""
    if image.source != _GLANCE or not _encrypted(handle):
        return image.source == _GLANCE
    # An encrypted file it would fill by the kernel's dm-crypt, which is not what it
    # made; in Ceph it cuts off what does not fit beside the header.
    sized = image.virtual_size is not None or image.disk_format in ("raw", "iso")
    return sized and not attaching.is_file(handle["protocol"])


def _parts(
    attachments: Sequence[JSON], snapshots: Sequence[JSON]
) -> dict[str, list[Handle]]:
    """By volume: what must be in a row, or is left of a lost answer. One reservation
    need not, and what is attached and is not ours, is somebody's."""
    found: dict[str, list[Handle]] = {}
    reserved = set()
    for each in sorted(attachments, key=lambda each: str(each["id"])):
        volume_id = each["volume_id"]
        if each["status"] == "reserved" and volume_id not in reserved:
            reserved.add(volume_id)
        elif each["status"] in ("reserved", "attaching"):
            found.setdefault(volume_id, []).append({"attachment": each["id"]})
    for each in snapshots:
        if (each["name"] or "").startswith(_SNAPSHOT):
            found.setdefault(each["volume_id"], []).append({"snapshot": each["id"]})
    return found


def _image_of(fill: Fill) -> ImageInfo | None:
    return fill.image.info if isinstance(fill, FromImage) else None


def _force(version: tuple[int, int]) -> dict[str, bool]:
    # An attached one needs it; since 3.66 none does, and it is not taken.
    return {"force": True} if version < (3, 66) else {}
