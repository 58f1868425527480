# SPDX-License-Identifier: Apache-2.0
"""The values that cross the borders of this library.

Frozen dataclasses that import nothing of ours but exceptions. Sizes are bytes
unless the name says otherwise; virtual and allocated size never share a field.
:func:`to_json` and :func:`from_json` turn any of them into plain JSON values and
back.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar, Union

from imagebackend import exceptions as exc

KiB = 1024
MiB = 1024**2
GiB = 1024**3

JSON = dict[str, Any]
#: A generation's, attachment's or snapshot's own facts; only its backend reads
#: them. JSON values, no secrets.
Handle = Mapping[str, Any]


class Role(enum.StrEnum):
    """What a disk is to its instance."""

    ROOT = "root"
    EPHEMERAL = "ephemeral"
    SWAP = "swap"
    CONFIG = "config"
    RESCUE = "rescue"


class Lifecycle(enum.StrEnum):
    """EPHEMERAL goes with its instance; PERSISTENT outlives it."""

    EPHEMERAL = "ephemeral"
    PERSISTENT = "persistent"


class DiskState(enum.StrEnum):
    """Where a disk stands. Settled states are never touched by recovery."""

    READY = "ready"
    RESIZED = "resized"
    RESCUED = "rescued"
    OFFLOADED = "offloaded"
    MOVED = "moved"
    FAILED = "failed"
    KEPT = "kept"

    CREATING = "creating"
    REPLACING = "replacing"
    REVERTING = "reverting"
    RESIZING = "resizing"
    CONNECTING = "connecting"
    SNAPSHOTTING = "snapshotting"
    MIGRATING = "migrating"
    DELETING = "deleting"

    @property
    def settled(self) -> bool:
        return self in _SETTLED


_SETTLED = frozenset(
    {
        DiskState.READY,
        DiskState.RESIZED,
        DiskState.RESCUED,
        DiskState.OFFLOADED,
        DiskState.MOVED,
        DiskState.FAILED,
        DiskState.KEPT,
    }
)


class GenerationState(enum.StrEnum):
    """What a storage object is to its disk."""

    NEW = "new"  # being made, not the disk yet
    CURRENT = "current"  # is the disk
    OLD = "old"  # was the disk, kept until confirm or revert
    DEBT = "debt"  # to be purged


class Path(enum.StrEnum):
    """How content comes into a new object, cheapest first."""

    BLANK = "blank"
    CLONE = "clone"  # no data moves
    COPY = "copy"  # bytes move, same format
    CONVERT = "convert"  # bytes move through qemu-img


# --- what the caller says --------------------------------------------------


@dataclass(frozen=True, slots=True)
class Flavor:
    """A flavor as Nova's: ``root_gb``, ``ephemeral_gb`` in GiB, ``swap_mb`` in MiB.

    ``root_gb = 0`` means the image's virtual size, as far as the host allows it.
    """

    name: str
    root_gb: int = 0
    ephemeral_gb: int = 0
    swap_mb: int = 0
    extra_specs: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Instance:
    """What the compute service says of an instance.

    :ivar id: uuid.
    :ivar image: id of the image that fills the root disk, None if there is none.
    :ivar flavor: None for callers without flavors: then ``disks`` says all sizes.
    """

    id: str
    project_id: str = ""
    image: str | None = None
    flavor: Flavor | None = None
    name: str = ""
    availability_zone: str | None = None


@dataclass(frozen=True, slots=True)
class DiskSpec:
    """A disk that is wanted beside, or instead of, what the flavor gives.

    It needs one of ``image``, ``base``, ``disk``, ``path`` or just a ``size``.

    :ivar name: unique in the instance; derived from the role when empty.
    :ivar size: bytes; 0: the size of what fills it.
    :ivar image: id of an image that fills it.
    :ivar base: id of a disk whose content is copied.
    :ivar disk: id of an existing disk that is attached (kept, or shareable).
    :ivar path: a file on this host, raw or ISO 9660, whose content is copied: for
        a config drive that the compute service made.
    :ivar fs: ``ext4``, ``xfs``, ``vfat`` or ``swap``: formatted when blank.
    :ivar cdrom: shown to the guest as a read-only CD.
    """

    name: str = ""
    role: Role = Role.EPHEMERAL
    size: int = 0
    image: str | None = None
    base: str | None = None
    disk: str | None = None
    path: str | None = None
    lifecycle: Lifecycle = Lifecycle.EPHEMERAL
    shareable: bool = False
    backend: str | None = None
    pool: str | None = None
    volume_type: str | None = None
    fs: str | None = None
    label: str | None = None
    bus: str | None = None
    cdrom: bool = False


# --- images ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ImageInfo:
    """What an image source says of an image.

    :ivar disk_format: as declared: ``raw``, ``qcow2``, ``vmdk``, ``vhd``, ``vhdx``,
        ``vdi`` or ``iso``. Content that is not so is rejected.
    :ivar size: bytes of the data as stored, None if not known.
    :ivar digest: ``algorithm:hex``, None if the source has none.
    :ivar version: changes when the content does; the digest where there is one.
    :ivar virtual_size: bytes that a disk from it needs at least, None: not known.
    :ivar locations: where a storage may clone it from; told only to backends that
        can.
    :ivar source: the image source that has it, where storages may know it too.
    """

    id: str
    disk_format: str
    version: str
    name: str = ""
    size: int | None = None
    virtual_size: int | None = None
    digest: str | None = None
    min_disk_gb: int = 0
    properties: Mapping[str, str] = field(default_factory=dict)
    locations: Sequence[str] = ()
    source: str = ""


@dataclass(frozen=True, slots=True)
class UploadTarget:
    """Where a snapshot goes.

    :ivar image: the id that the image gets, or has already where the caller made
        it.
    :ivar disk_format: ``qcow2`` or ``raw``.
    :ivar source: name of the image source that takes it, empty: the host's; for
        ``file``, ``image`` may be an absolute path of a file that does not exist yet.
    :ivar name: of an image that has none yet, empty: its id.
    :ivar owner: the project that gets an image that is not there yet, empty: the
        instance's.
    :ivar min_disk: bytes that a disk from it needs, 0: what the snapshot's disk has.
    """

    image: str
    disk_format: str = "qcow2"
    source: str = ""
    properties: Mapping[str, str] = field(default_factory=dict)
    name: str = ""
    owner: str = ""
    min_disk: int = 0


@dataclass(frozen=True, slots=True)
class CachedImage:
    """An image in this host's cache, checked and safe to be a backing file."""

    entry: str
    path: str
    format: str
    virtual_size: int


class ImageAccess(Protocol):
    """How a backend reaches an image; made by ``images``, handed over in a fill."""

    @property
    def info(self) -> ImageInfo: ...

    def cached(self) -> typing.ContextManager[CachedImage]:
        """The image in the cache, fetched if need be, held while in the block."""
        ...


# --- how QEMU reaches a disk -----------------------------------------------


@dataclass(frozen=True, slots=True)
class FileSource:
    """A file, reached by absolute path.

    :ivar backing: of an overlay, its whole chain, so that nobody has to open a
        file to find it.
    """

    kind: ClassVar[str] = "file"
    path: str
    format: str
    backing: FileSource | None = None

    def image_opts(self) -> JSON:
        opts: JSON = {
            "driver": self.format,
            "file": {"driver": "file", "filename": self.path},
        }
        if self.backing is not None:
            opts["backing"] = self.backing.image_opts()
        return opts


@dataclass(frozen=True, slots=True)
class BlockSource:
    """A block device of this host."""

    kind: ClassVar[str] = "block"
    path: str
    format: str = "raw"

    def image_opts(self) -> JSON:
        return {
            "driver": self.format,
            "file": {"driver": "host_device", "filename": self.path},
        }


@dataclass(frozen=True, slots=True)
class NetworkHost:
    """One address of a storage: a name, an IP address without brackets, or the
    absolute path of a socket."""

    name: str
    port: int | None = None

    @property
    def unix(self) -> bool:
        return self.port is None and self.name.startswith("/")


@dataclass(frozen=True, slots=True)
class NetworkSource:
    """A disk that QEMU reaches itself, by a protocol (``rbd``, ``iscsi``, ``nbd``).

    :ivar name: as the protocol wants it; RBD: ``pool/image``.
    :ivar user: who QEMU is to the storage; its key is a libvirt secret.
    :ivar secret_uuid: that secret; the key itself is nowhere here.
    :ivar secret_type: ``ceph``, ``iscsi``; what libvirt calls the secret's usage.
    :ivar conf: for QEMU's own command line, a configuration file of the storage.
    """

    kind: ClassVar[str] = "network"
    protocol: str
    name: str
    format: str = "raw"
    hosts: Sequence[NetworkHost] = ()
    user: str | None = None
    secret_uuid: str | None = None
    secret_type: str | None = None
    conf: str | None = None

    def image_opts(self) -> JSON:
        opts: JSON = {"driver": self.protocol}
        if self.protocol == "rbd":
            pool, _, image = self.name.partition("/")
            opts |= {"pool": pool, "image": image}
            if self.user:
                opts["user"] = self.user
            if self.conf:
                opts["conf"] = self.conf
        elif self.protocol == "nbd" and self.hosts:
            host = self.hosts[0]
            opts["export"] = self.name
            opts["server"] = (
                {"type": "unix", "path": host.name}
                if host.unix
                else {
                    "type": "inet",
                    "host": host.name,
                    "port": str(host.port or 10809),
                }
            )
        else:
            raise exc.NotSupported(
                f"qemu-img cannot be pointed at a disk of protocol {self.protocol!r} "
                f"with {len(self.hosts)} addresses",
                protocol=self.protocol,
            )
        return {"driver": self.format, "file": opts}


Source = FileSource | BlockSource | NetworkSource


@dataclass(frozen=True, slots=True)
class Secret:
    """What QEMU has to know and nobody stores: libvirt gets it, for QEMU alone.

    :ivar usage: libvirt's usage type: ``ceph``, ``volume``, ``iscsi``.
    :ivar name: what it is for; unique on the host.
    :ivar value: base64.
    """

    uuid: str
    usage: str
    name: str
    value: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Encryption:
    """How QEMU decrypts what a source has.

    :ivar format: ``luks``, which is all that QEMU knows.
    :ivar secret_uuid: libvirt's secret with the passphrase, which is nowhere here.
    """

    format: str
    secret_uuid: str


@dataclass(frozen=True, slots=True)
class UnlockedSource:
    """An encrypted disk with its passphrase, for copies that this host makes itself.

    Guests never get it: they have :class:`Encryption`, and libvirt's secret.
    """

    source: Source
    encryption: Encryption
    secret: Secret

    @property
    def format(self) -> str:
        return self.source.format

    def image_opts(self) -> JSON:
        """With the secret by its id, which is its uuid with a letter before."""
        opts = self.source.image_opts()
        format_, key = self.encryption.format, f"s{self.secret.uuid}"
        if opts["driver"] == "raw":
            return {"driver": format_, "key-secret": key, "file": opts["file"]}
        # Formats of QEMU's own encrypt their clusters, and keep the header.
        return {**opts, "encrypt": {"format": format_, "key-secret": key}}


#: What this host can copy from and to.
Copyable = Source | UnlockedSource


# --- the contract's values (terms: see backends/base.py) --------------------


@dataclass(frozen=True, slots=True)
class Want:
    """What a new generation is to be, as asked from a backend's ``plan``.

    :ivar size: bytes that the guest shall see.
    :ivar fill: which of the fills will come: ``Blank``, ``FromImage``, …
    """

    size: int
    role: Role
    instance_id: str | None
    project_id: str
    fill: str = "Blank"
    image: ImageInfo | None = None
    pool: str | None = None
    volume_type: str | None = None
    shareable: bool = False
    read_only: bool = False
    availability_zone: str | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """A backend's answer: where and how a generation would be made. No effect.

    :ivar scope: what the object is local to: ``host:<id>``, ``folder:<id>``,
        ``ceph:<fsid>/<pool>``, ``cinder:<endpoint>/<project>``.
    :ivar size: bytes that will be allocated for the guest, at least what was asked.
    :ivar handle: what the generation's handle starts with.
    :ivar uses_cache: the object goes on needing the image's cache entry.
    :ivar new: why the storage looks as if it never had a disk, as ``/srv/disks has no
        .folder-id``: then it gets its identity, and ``scope`` its name, with the first
        one. Refused where disks are recorded already. Empty: it has an identity.
    """

    backend: str
    scope: str
    size: int
    format: str
    path: Path
    handle: Handle = field(default_factory=dict)
    uses_cache: bool = False
    new: str = ""


@dataclass(frozen=True, slots=True)
class Generation:
    """One storage object that is, was or becomes a disk."""

    id: str
    disk_id: str
    disk_name: str
    instance_id: str | None
    deployment_id: str
    project_id: str
    backend: str
    scope: str
    size: int
    format: str
    shareable: bool = False
    handle: Handle = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Creation:
    """What ``create`` and ``adopt`` made: size as the storage has it.

    :ivar scope: set where ``plan`` could not know it yet (a new folder).
    """

    size: int
    format: str
    path: Path
    handle: Handle
    scope: str | None = None


@dataclass(frozen=True, slots=True)
class Connector:
    """Who connects: this host's uuid and what storages want to know of it."""

    host_id: str
    hostname: str = ""
    ip: str = ""
    properties: Handle = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Connection:
    """A disk that a host can reach now.

    :ivar encryption: of what ``source`` has, None: there is none, or QEMU does not see
        it.
    :ivar limits: that the storage wants the host to keep, by libvirt's names, as
        ``read_bytes_sec``; they win over a flavor's.
    """

    source: Source
    host_id: str
    handle: Handle = field(default_factory=dict)
    readonly: bool = False
    encryption: Encryption | None = None
    limits: Mapping[str, int] = field(default_factory=dict)

    def copyable(self, secrets: Sequence[Secret]) -> Copyable:
        """For copies. :param secrets: that the backend has for this connection."""
        if self.encryption is None:
            return self.source
        wanted = self.encryption.secret_uuid
        (secret,) = (each for each in secrets if each.uuid == wanted)
        return UnlockedSource(self.source, self.encryption, secret)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A point in time of a generation, of ``size`` bytes."""

    id: str
    generation_id: str
    size: int
    handle: Handle = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stat:
    """What the storage says of an object.

    :ivar size: virtual, bytes. :ivar allocated: bytes that it takes up, None: the
        storage does not say. :ivar used_by: who has it open, as far as known.
    """

    size: int
    allocated: int | None = None
    used_by: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Marker:
    """What makes an object ours."""

    generation_id: str
    deployment_id: str


@dataclass(frozen=True, slots=True)
class Found:
    """An object met by ``scan``; a foreign one has no marker.

    :ivar handle: enough for the backend to ``delete`` it, if it is ours.
    :ivar parts: its connections and snapshots, as far as their rows' handles must have
        them: which that is, is for the backend to say.
    """

    name: str
    marker: Marker | None
    handle: Handle = field(default_factory=dict)
    allocated: int | None = None
    parts: Sequence[Handle] = ()


class Fenced(enum.StrEnum):
    """CUT: no write of that host can land any more."""

    CUT = "cut"
    NOT_POSSIBLE = "not-possible"


class Way(enum.StrEnum):
    """Who does a thing to a running guest's disk."""

    STORAGE = "storage"
    HYPERVISOR = "hypervisor"
    NONE = "none"


class InPlace(enum.StrEnum):
    """When a rebuild fills the present object anew, instead of making another one."""

    NEVER = "never"
    WHEN_FULL = "when-full"  # there is no room, or no quota, for a second object
    ALWAYS = "always"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What can be done with a disk, or at a place.

    :ivar granularity: sizes are multiples of it, bytes.
    :ivar formats: formats that an object here may have.
    :ivar in_place: how the operator wants rebuilds; needs ``reimage``.
    """

    live_resize: Way = Way.NONE
    live_snapshot: Way = Way.NONE
    shareable: bool = False
    snapshot: bool = False
    revert: bool = False
    reimage: bool = False
    fence: bool = False
    flatten: bool = False
    granularity: int = 512
    formats: Sequence[str] = ("raw",)
    in_place: InPlace = InPlace.NEVER


@dataclass(frozen=True, slots=True)
class Inventory:
    """Room in a storage.

    :ivar provider: stable id of what has the room: two hosts on one pool say the
        same, so a caller counts it once.
    :ivar used_by_us: bytes, None where the storage can tell it only by opening every
        object.
    """

    backend: str
    provider: str
    total: int
    free: int
    used_by_us: int | None = 0
    what: str = "disks"


class Severity(enum.StrEnum):
    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a check, audit or recovery saw, and what to do about it."""

    severity: Severity
    subject: str
    what: str
    advice: str = ""
    action: str = ""


@dataclass(frozen=True, slots=True)
class BackendStatus:
    """A backend of this host, or a driver that is installed and not used."""

    name: str
    driver: str
    enabled: bool
    findings: Sequence[Finding] = ()


# --- what the manager answers ----------------------------------------------


@dataclass(frozen=True, slots=True)
class Disk:
    """A disk as its row has it. Its id and serial never change.

    :ivar owners: instances that use it; more than one only if shareable.
    :ivar device: name of the device on its bus, as libvirt's ``<target dev>``.
    :ivar reason: why it is ``failed``.
    """

    id: str
    name: str
    instance_id: str | None
    project_id: str
    role: Role
    lifecycle: Lifecycle
    state: DiskState
    size: int
    backend: str
    format: str
    shareable: bool
    bus: str
    device: str
    cdrom: bool = False
    tainted: bool = False
    connected: bool = False
    owners: Sequence[str] = ()
    generation_id: str | None = None
    handle: Handle = field(default_factory=dict)
    image: str | None = None
    reason: str = ""
    operation: str = ""

    @property
    def serial(self) -> str:
        """What the guest sees; the first 20 characters are unique (virtio's limit)."""
        return self.id


@dataclass(frozen=True, slots=True)
class PlannedDisk:
    """One line of a plan: what would be made, where and how."""

    name: str
    role: Role
    lifecycle: Lifecycle
    size: int
    placement: Placement
    bus: str
    device: str
    image: str | None = None
    shareable: bool = False
    cdrom: bool = False
    why: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """What ``create`` would do. Making it has no effect."""

    instance_id: str
    disks: Sequence[PlannedDisk]
    attached: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class DiskChange:
    """One disk in a change, with the handles before and after.

    :ivar size: bytes after; 0 when it is gone.
    :ivar path: how its content came, None where none came.
    """

    disk_id: str
    name: str
    size: int = 0
    old: Handle | None = None
    new: Handle | None = None
    path: Path | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """What a verb did; each disk of the instance is in exactly one of the lists.

    :ivar kept: as they were, or grown in place.
    :ivar detached: persistent or shared disks that left the instance.
    """

    instance_id: str | None
    created: Sequence[DiskChange] = ()
    recreated: Sequence[DiskChange] = ()
    kept: Sequence[DiskChange] = ()
    detached: Sequence[DiskChange] = ()
    deleted: Sequence[DiskChange] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    """How far something is, as a ratio without a unit. ``total`` 0: not known."""

    what: str
    done: int
    total: int


ProgressCallback = Callable[[Progress], None]


# --- JSON both ways ---------------------------------------------------------

T = TypeVar("T")


def to_json(value: Any) -> Any:
    """The value as plain JSON values; unions of dataclasses carry ``kind``."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        out: JSON = {}
        if "kind" in type(value).__dict__:
            out["kind"] = value.kind  # type: ignore[attr-defined]
        for item in dataclasses.fields(value):
            out[item.name] = to_json(getattr(value, item.name))
        return out
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_json(v) for v in value]
    return value


def from_json(cls: type[T], data: Any) -> T:
    """The dataclass ``cls`` from :func:`to_json`'s result.

    Fields that this version does not know are ignored, so that a newer writer may
    add one; a missing field without a default, or a value that is not of the field's
    type, is an :class:`~.InvalidValue`.
    """
    result: T = _decode(cls, data)
    return result


@functools.cache
def _hints(cls: type) -> Mapping[str, Any]:
    return typing.get_type_hints(cls)


def _decode(hint: Any, data: Any) -> Any:
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        return _decode_union(typing.get_args(hint), data)
    if dataclasses.is_dataclass(hint):
        return _decode_dataclass(typing.cast(type, hint), data)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        try:
            return hint(data)
        except ValueError:
            choices = ", ".join(str(member.value) for member in hint)
            raise exc.InvalidValue(hint.__name__, data, f"one of {choices}") from None
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(data, Mapping):
            raise exc.InvalidValue("a mapping", data, "a JSON object")
        (_, item) = typing.get_args(hint)
        return {str(key): _decode(item, value) for key, value in data.items()}
    if origin is not None:
        if not isinstance(data, list | tuple):
            raise exc.InvalidValue("a sequence", data, "a JSON array")
        (item, *_) = typing.get_args(hint)
        return tuple(_decode(item, value) for value in data)
    if hint in _PLAIN and type(data) is not hint:
        # A whole number is a fraction too; but true is no number to anybody.
        if hint is float and type(data) is int:
            return float(data)
        raise exc.InvalidValue("a value", data, _PLAIN[hint])
    return data


_PLAIN: Mapping[Any, str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
}


def _decode_union(members: tuple[Any, ...], data: Any) -> Any:
    if data is None:
        return None
    candidates = [member for member in members if member is not type(None)]
    kinds = {each.kind: each for each in candidates if hasattr(each, "kind")}
    if not kinds:
        return _decode(candidates[0], data)
    kind = data.get("kind") if isinstance(data, Mapping) else data
    if not isinstance(kind, str) or kind not in kinds:
        raise exc.InvalidValue("kind", kind, "one of " + ", ".join(kinds))
    return _decode(kinds[kind], data)


def _decode_dataclass(cls: type, data: Any) -> Any:
    if not isinstance(data, Mapping):
        raise exc.InvalidValue(cls.__name__, data, "a JSON object")
    hints = _hints(cls)
    values = {}
    for item in dataclasses.fields(cls):
        if item.name in data:
            try:
                values[item.name] = _decode(hints[item.name], data[item.name])
            except exc.InvalidValue as error:
                raise exc.InvalidValue(
                    f"{item.name} of {cls.__name__}",
                    error.values["value"],
                    str(error.values["wanted"]),
                ) from None
        elif (
            item.default is dataclasses.MISSING
            and item.default_factory is dataclasses.MISSING
        ):
            raise exc.InvalidValue(
                cls.__name__,
                sorted(map(str, data)),
                f"complete: {item.name} is missing",
            )
    return cls(**values)


def dumps(value: Any) -> str:
    """Compact JSON text with sorted keys: equal values give equal text."""
    return json.dumps(to_json(value), sort_keys=True, separators=(",", ":"))
