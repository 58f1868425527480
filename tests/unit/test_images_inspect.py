# SPDX-License-Identifier: Apache-2.0
"""The safety checks: what passes, and what never reaches qemu-img."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from imagebackend import exceptions as exc
from imagebackend.model import GiB, KiB, MiB
from tests import image_files as files
from tests.conftest import HostUnderTest
from tests.image_files import patched, verdict

SECRET = b"only this host may read it"


class Made(NamedTuple):
    data: bytes
    images: dict[str, bytes]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """One honest image of each kind, all with the same content."""
    folder = tmp_path_factory.mktemp("images")
    data = files.content()
    images = {
        recipe: files.make(folder, recipe, data).read_bytes()
        for recipe in files.RECIPES
    }
    images["vmdk-footer"] = files.with_footer(images["vmdk-stream"])
    images["raw"] = data
    images["iso"] = files.make_iso(folder).read_bytes()
    return Made(data, images)


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file of the host that no image may lead to."""
    path = tmp_path_factory.mktemp("host") / "secret"
    path.write_bytes(SECRET.ljust(MiB, b"!"))
    yield path


def refused(format_: str, data: bytes) -> str:
    with pytest.raises(exc.ImageRejected) as caught:
        verdict(format_, data)
    assert caught.value.code == "image-rejected"
    assert caught.value.message.startswith("image image is refused: ")
    return caught.value.message


# --- honest images ---------------------------------------------------------


@pytest.mark.field("A11", "B9")
@pytest.mark.parametrize("recipe", [*files.RECIPES, "vmdk-footer", "raw", "iso"])
def test_honest_image_passes_and_converts_to_the_same_bytes(
    host: HostUnderTest, made: Made, recipe: str
) -> None:
    format_ = recipe.partition("-")[0]
    base, path = files.fetched(host.conf, host.path, format_, made.images[recipe])
    wanted = made.images["iso"] if recipe == "iso" else made.data
    assert base.format == "raw" and base.file == "base.raw"
    got = path.read_bytes()
    assert got[: len(wanted)] == wanted
    # VHD counts in cylinders: what is more is nothing.
    assert not any(got[len(wanted) :]) and base.virtual_size == len(got)
    assert os.listdir(path.parent) == ["base.raw"]


@pytest.mark.parametrize("recipe", ["qcow2", "qcow2-v2", "qcow2-small-clusters"])
def test_qcow2_is_kept_as_it_came_where_the_operator_says_so(
    host: HostUnderTest, made: Made, recipe: str
) -> None:
    host.set("cache_format", "as-is", "imagebackend_images")
    base, path = files.fetched(host.conf, host.path, "qcow2", made.images[recipe])
    assert (base.format, base.virtual_size) == ("qcow2", len(made.data))
    assert path.read_bytes() == made.images[recipe]


def test_compressed_qcow2_converts_to_the_same_bytes(
    host: HostUnderTest, made: Made
) -> None:
    raw, path = host.path / "plain", host.path / "compressed"
    raw.write_bytes(made.data)
    files.run("qemu-img", "convert", "-c", "-f", "raw", "-O", "qcow2", raw, path)
    _, base = files.fetched(host.conf, host.path, "qcow2", path.read_bytes())
    assert base.read_bytes() == made.data


def _raw_contents(folder: Path) -> dict[str, bytes]:
    """Raw images whose first bytes look like something."""
    found = {
        "text": "#!/bin/sh\n# größer als man denkt\n".encode() * 100_000,
        "text, then bytes": b"# comment\n" * 60 + b"\xff\xfe" * MiB,
        "zeros": bytes(MiB),
        "one byte": b"x",
        "random": os.urandom(2 * MiB + 17),
        "partitioned": files.partition_table(0x83, 1, 4095) + os.urandom(2 * MiB - 512),
        "GPT": files.partition_table(0xEE, 1, 4095) + b"EFI PART" + bytes(2 * MiB),
        "boot sector without partitions": bytes(510) + b"\x55\xaa" + bytes(MiB),
        "LUKS": b"LUKS\xba\xbe\x00\x01" + os.urandom(MiB),
        "LUKS2": b"LUKS\xba\xbe\x00\x02" + os.urandom(MiB),
        "hybrid CD": files.make_iso(folder, hybrid=True).read_bytes(),
        "CD": files.make_iso(folder).read_bytes(),
    }
    for name, tool in {
        "ext4": ("mkfs.ext4", "-q", "-F"),
        "FAT12": ("mkfs.vfat",),
        "FAT as of a floppy": ("mkfs.vfat", "-M", "0xf0"),
    }.items():
        path = folder / name
        path.write_bytes(b"")
        os.truncate(path, 4 * MiB)
        files.run(*tool, path)
        found[name] = path.read_bytes()
    return found


def test_raw_image_passes_whatever_its_content_looks_like(tmp_path: Path) -> None:
    for name, data in _raw_contents(tmp_path).items():
        assert verdict("raw", data).virtual_size == len(data), name
        assert verdict("raw", data).driver == "raw", name


def test_cd_passes_as_iso_with_and_without_partition_table(tmp_path: Path) -> None:
    for hybrid in (False, True):
        data = files.make_iso(tmp_path, hybrid=hybrid).read_bytes()
        assert verdict("iso", data).driver == "raw"
        assert verdict("iso", data).virtual_size == len(data)


def test_verdict_does_not_depend_on_how_the_stream_is_cut(made: Made) -> None:
    for recipe, data in made.images.items():
        format_ = recipe.partition("-")[0]
        whole = verdict(format_, data)
        for most in (4096, 999, 100_000):
            assert verdict(format_, data, most=most) == whole, (recipe, most)


def test_descriptor_that_comes_in_small_pieces_is_still_seen(secret: Path) -> None:
    descriptor = _descriptor(extents=f'RW 2048 FLAT "{secret}" 0')
    for most in (1, 3, 100):
        for format_ in ("raw", "vmdk"):
            with pytest.raises(exc.ImageRejected):
                verdict(format_, descriptor, most=most)


def test_image_of_no_bytes_is_refused() -> None:
    for format_ in files.FORMATS:
        assert "it is empty" in refused(format_, b"")


# --- another format than declared ------------------------------------------


@pytest.mark.field("A5", "A11")
@pytest.mark.parametrize("declared", files.FORMATS)
@pytest.mark.parametrize("real", files.FORMATS)
def test_format_that_differs_from_the_declared_one_is_refused(
    made: Made, declared: str, real: str
) -> None:
    if declared == real or (declared, real) == ("raw", "iso"):
        return
    message = refused(declared, made.images[real])
    assert f"declared as {declared}, its bytes say {real}" in message


@pytest.mark.field("A5")
def test_qcow2_within_a_raw_image_is_refused_and_within_a_qcow2_is_content(
    host: HostUnderTest, made: Made
) -> None:
    inner = made.images["qcow2"]
    inner += bytes(-len(inner) % 512)
    refused("raw", inner)
    outer = files.make(host.path, "qcow2", inner).read_bytes()
    _, base = files.fetched(host.conf, host.path, "qcow2", outer)
    assert base.read_bytes() == inner


def test_two_formats_in_one_file_are_refused(made: Made) -> None:
    """A CD's system area may hold anything: such as the header of a qcow2."""
    both = patched(made.images["iso"], 0, made.images["qcow2"][:512])
    for format_ in ("iso", "qcow2", "raw"):
        assert "iso and qcow2" in refused(format_, both)


def test_qed_is_refused_under_every_name(tmp_path: Path) -> None:
    path = tmp_path / "image"
    files.run("qemu-img", "create", "-q", "-f", "qed", path, "1M")
    for format_ in files.FORMATS:
        assert "say qed" in refused(format_, path.read_bytes())


# --- images that name other files ------------------------------------------


@pytest.mark.field("A5")
def test_qcow2_with_a_backing_file_is_refused(tmp_path: Path, secret: Path) -> None:
    for options in ("compat=1.1", "compat=0.10"):
        path = tmp_path / options
        files.run(
            *("qemu-img", "create", "-q", "-f", "qcow2", "-o", options),
            *("-F", "raw", "-b", secret, path),
        )
        assert "backing file" in refused("qcow2", path.read_bytes())


@pytest.mark.field("A5")
def test_qcow2_with_an_external_data_file_is_refused(tmp_path: Path) -> None:
    for raw in ("", ",data_file_raw=on"):
        path, data = tmp_path / "image", tmp_path / "data"
        path.unlink(missing_ok=True)
        data.unlink(missing_ok=True)
        files.run(
            *("qemu-img", "create", "-q", "-f", "qcow2"),
            *("-o", f"data_file={data}{raw}", path, "1M"),
        )
        assert "data_file" in refused("qcow2", path.read_bytes())


@pytest.mark.field("A5")
@pytest.mark.parametrize("feature", [3, 5, 17, 42, 63])
def test_qcow2_with_features_that_nobody_knows_is_refused(
    made: Made, feature: int
) -> None:
    refused("qcow2", _feature(made.images["qcow2"], 1 << feature | 1 << 5))


def _feature(data: bytes, bits: int) -> bytes:
    return patched(data, 72, bits.to_bytes(8, "big"))


def test_encrypted_qcow2_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "image"
    files.run(
        *("qemu-img", "create", "-q", "-f", "qcow2", "--object"),
        *("secret,id=s,data=password", "-o"),
        *("encrypt.format=aes,encrypt.key-secret=s", path, "1M"),
    )
    assert "encrypted" in refused("qcow2", path.read_bytes())
    luks = patched(path.read_bytes(), 32, (2).to_bytes(4, "big"))
    assert "encrypted" in refused("qcow2", luks)


def _descriptor(
    kind: str = "monolithicFlat", extents: str = "", more: str = ""
) -> bytes:
    return (
        "# Disk DescriptorFile\nversion=1\nCID=d48e0967\nparentCID=ffffffff\n"
        f'createType="{kind}"\n{more}\n# Extent description\n{extents}\n\n'
        '# The Disk Data Base\n#DDB\n\nddb.adapterType = "ide"\n'
    ).encode()


@pytest.mark.field("A5")
@pytest.mark.parametrize(
    "kind",
    [
        "monolithicFlat",
        "monolithicSparse",
        "streamOptimized",
        "twoGbMaxExtentSparse",
        "twoGbMaxExtentFlat",
        "vmfs",
        "vmfsSparse",
        "seSparse",
    ],
)
@pytest.mark.parametrize("name", ["/etc/passwd", "passwd", "json:{}", "nbd:host:1"])
def test_vmdk_that_is_only_a_descriptor_is_refused(kind: str, name: str) -> None:
    for access in ("RW 2048 FLAT", "RDONLY 2048 SPARSE"):
        refused("vmdk", _descriptor(kind, f'{access} "{name}" 0'))
        refused("raw", _descriptor(kind, f'{access} "{name}" 0'))


@pytest.mark.field("A5")
@pytest.mark.parametrize(
    "subformat", ["monolithicFlat", "twoGbMaxExtentSparse", "twoGbMaxExtentFlat"]
)
def test_vmdk_of_several_files_is_refused(tmp_path: Path, subformat: str) -> None:
    path = tmp_path / "disk.vmdk"
    files.run(
        *("qemu-img", "create", "-q", "-f", "vmdk"),
        *("-o", f"subformat={subformat}", path, "1M"),
    )
    refused("vmdk", path.read_bytes())


def _vmdk_with(data: bytes, old: bytes, new: bytes) -> bytes:
    """The image with another descriptor in the same place."""
    text = data[512:10752].rstrip(b"\0")
    assert old in text
    return patched(data, 512, text.replace(old, new).ljust(10240, b"\0"))


@pytest.mark.field("A5")
@pytest.mark.parametrize("spelling", ["parentFileNameHint", "PARENTFILENAMEHINT"])
@pytest.mark.parametrize("recipe", ["vmdk", "vmdk-stream"])
def test_vmdk_that_names_a_parent_is_refused(
    made: Made, recipe: str, spelling: str
) -> None:
    """QEMU opens it, by any protocol, and reads through it where the child is a
    hole; format_inspector lets it pass."""
    bad = _vmdk_with(
        made.images[recipe],
        b"createType=",
        f'{spelling}="json:{{}}"\ncreateType='.encode(),
    )
    assert "names its parent" in refused("vmdk", bad)


@pytest.mark.field("A5")
def test_vmdk_that_names_a_parent_behind_its_descriptor_is_refused(made: Made) -> None:
    """QEMU looks for it in twenty sectors, however few the header says."""
    text = made.images["vmdk"][512:10752].rstrip(b"\0")
    text = text.ljust(600, b"#") + b'\nparentFileNameHint="/etc/passwd"\n'
    data = patched(made.images["vmdk"], 512, text.ljust(10240, b"\0"))
    assert "names its parent" in refused("vmdk", patched(data, 36, b"\1"))


@pytest.mark.field("A5")
def test_vmdk_of_a_parent_leaks_nothing_where_qemu_alone_would(
    host: HostUnderTest, tmp_path: Path, secret: Path
) -> None:
    parent, child = tmp_path / "parent", tmp_path / "child"
    parent.write_bytes(_descriptor(extents=f'RW 2048 FLAT "{secret}" 0'))
    files.run("qemu-img", "create", "-q", "-f", "vmdk", child, "1M")
    bad = _vmdk_with(
        child.read_bytes(),
        b"parentCID=ffffffff",
        f'parentCID=d48e0967\nparentFileNameHint="{parent}"'.encode(),
    )
    child.write_bytes(bad)
    out = tmp_path / "out"
    files.run("qemu-img", "convert", "-f", "vmdk", "-O", "raw", child, out)
    assert out.read_bytes().startswith(SECRET), "the attack that this is about"
    with pytest.raises(exc.ImageRejected):
        files.fetched(host.conf, host.path, "vmdk", bad)


@pytest.mark.field("A5")
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"parentCID=ffffffff", b"parentCID=d48e0967"),
        (b"# The Disk Data Base", b'RW 2048 FLAT "secret" 0\n#'),
        (b"createType=", b'createtype="monolithicSparse"\ncreateType='),
        (b'"monolithicSparse"', b'"monolithicFlat"'),
        (b'SPARSE "', b'SPARSE "/etc/'),
        (b"# The Disk Data Base", b"unheard of"),
        (b"RW ", b"# "),
        (b"version=1", b"\xff"),
    ],
)
def test_vmdk_whose_descriptor_says_more_than_one_file_is_refused(
    made: Made, old: bytes, new: bytes
) -> None:
    refused("vmdk", _vmdk_with(made.images["vmdk"], old, new))


@pytest.mark.field("A5")
def test_vmdk_whose_header_says_no_capacity_is_refused(made: Made) -> None:
    """QEMU would read its descriptor as one of other files."""
    refused("vmdk", patched(made.images["vmdk"], 12, bytes(8)))


@pytest.mark.field("A7")
def test_vmdk_whose_footer_says_another_size_is_refused(made: Made) -> None:
    data = files.with_footer(made.images["vmdk-stream"])
    assert verdict("vmdk", data).virtual_size == len(made.data)
    for place, value in ((12, 1 << 50), (20, 8)):
        bad = patched(data, len(data) - 1024 + place, value.to_bytes(8, "little"))
        assert "differ" in refused("vmdk", bad)


def test_vhd_that_is_a_difference_or_fixed_is_refused(made: Made) -> None:
    def typed(kind: int) -> bytes:
        data = patched(made.images["vhd"], 60, kind.to_bytes(4, "big"))
        return patched(data, len(data) - 512 + 60, kind.to_bytes(4, "big"))

    assert "names its parent" in refused("vhd", typed(4))
    for kind in (0, 2, 5):
        assert "it must be dynamic" in refused("vhd", typed(kind))


def test_vdi_or_vhdx_that_names_a_parent_is_refused(
    host: HostUnderTest, made: Made
) -> None:
    vdi = patched(made.images["vdi"], 0x1A8, os.urandom(16))
    params = bytes.fromhex("3767a1ca36fa434db3b633f0aa44e76b")
    vhdx = made.images["vhdx"]
    item = vhdx.index(params)
    (offset,) = struct.unpack_from("<I", vhdx, item + 16)
    parent = patched(vhdx, item - item % MiB + offset + 4, b"\2")
    for format_, data in (("vdi", vdi), ("vhdx", parent)):
        with pytest.raises(exc.ImageRejected):
            files.fetched(host.conf, host.path, format_, data)


# --- headers that cannot be ------------------------------------------------

_QCOW2_FIELDS = {
    "cluster_bits of 0": (20, "I", 0),
    "cluster_bits of 8": (20, "I", 8),
    "cluster_bits of 22": (20, "I", 22),
    "cluster_bits of 63": (20, "I", 63),
    "virtual size of nothing": (24, "Q", 0),
    "virtual size of 2^60": (24, "Q", 1 << 60),
    "virtual size of 2^64 - 1": (24, "Q", (1 << 64) - 1),
    "encryption that nobody knows": (32, "I", 77),
    "L1 of 2^32 - 1 entries": (36, "I", (1 << 32) - 1),
    "L1 of 4 Mi + 1 entries": (36, "I", (1 << 22) + 1),
    "L1 of no entries": (36, "I", 0),
    "L1 behind the end": (40, "Q", 1 << 40),
    "L1 that wraps round": (40, "Q", (1 << 64) - 8),
    "refcount table behind the end": (48, "Q", 1 << 40),
    "refcount table of 2^32 - 1 clusters": (56, "I", (1 << 32) - 1),
    "refcount table of 64 clusters": (56, "I", 64),
    "2^32 - 1 snapshots": (60, "I", (1 << 32) - 1),
    "version 1": (4, "I", 1),
    "version 4": (4, "I", 4),
}


@pytest.mark.field("A7")
@pytest.mark.parametrize("what", _QCOW2_FIELDS)
def test_qcow2_with_an_absurd_header_is_refused(made: Made, what: str) -> None:
    place, kind, value = _QCOW2_FIELDS[what]
    refused(
        "qcow2", patched(made.images["qcow2"], place, struct.pack(f">{kind}", value))
    )


@pytest.mark.field("A7")
def test_qcow2_with_snapshots_behind_its_end_is_refused(made: Made) -> None:
    bad = patched(made.images["qcow2"], 60, struct.pack(">IQ", 1000, 1 << 40))
    assert "behind its end" in refused("qcow2", bad)


@pytest.mark.field("A7", "B10")
@pytest.mark.parametrize(
    ("recipe", "place", "order", "bytes_"),
    [
        ("vhd", 40, "big", 8),
        ("vhd", 48, "big", 8),
        ("vmdk", 12, "little", 8),
        ("vdi", 0x170, "little", 8),
    ],
)
def test_size_of_2_to_the_60_is_refused_whichever_field_says_it(
    host: HostUnderTest, made: Made, recipe: str, place: int, order: str, bytes_: int
) -> None:
    """Of a VHD's two sizes QEMU believes the one that is usually not looked at."""
    value = (1 << 60).to_bytes(bytes_, order)  # type: ignore[arg-type]
    bad = patched(made.images[recipe], place, value)
    if recipe == "vhd":
        bad = patched(bad, len(bad) - 512 + place, value)
    with pytest.raises((exc.SizeRefused, exc.ImageRejected)):
        files.fetched(host.conf, host.path, recipe, bad)


@pytest.mark.field("A7")
@pytest.mark.parametrize(
    ("recipe", "place", "value"),
    [
        ("vhd", 512 + 28, b"\x0f\xff\xff\xff"),  # entries of the block table
        ("vhd", 512 + 16, b"\0\0\0\1\0\0\0\0"),  # its place
        ("vhd", 512, b"cxspoilt"),
        ("vhd", 16, b"\xff" * 8),  # place of the dynamic header
        ("vhdx", 192 * KiB + 16 + 24, b"\0\0\0\xf0"),  # length of a region
        ("vhdx", 256 * KiB + 16 + 16, b"\xff" * 8),  # its place, second copy
        ("vhdx", 192 * KiB, b"none"),
        ("vhdx", 192 * KiB + 8, b"\xff\xff\0\0"),  # count of regions
        ("vdi", 0x180, b"\xff\xff\xff\x3f"),  # blocks
        ("vdi", 0x184, b"\xff\xff\xff\x3f"),  # blocks in use
        ("vdi", 0x154, b"\0\0\0\xf0"),  # place of the map
        ("vmdk", 56, b"\0\0\0\0\1\0\0\0"),  # place of the grain directory
        ("vmdk", 44, b"\0\0\0\0"),  # entries a grain table
        ("vmdk", 20, bytes(8)),  # sectors a grain
        ("vmdk", 28, b"\2"),  # place of the descriptor
        ("vmdk", 4, b"\7"),  # version
    ],
)
def test_tables_that_cannot_be_are_refused_before_qemu_sees_them(
    made: Made, recipe: str, place: int, value: bytes
) -> None:
    refused(recipe, patched(made.images[recipe], place, value))


def test_vhdx_whose_size_is_no_number_is_refused(made: Made) -> None:
    guid = bytes.fromhex("2442a52f1bcd7648b2115dbed83bf4b8")
    vhdx = made.images["vhdx"]
    item = vhdx.index(guid)
    for length in (0, 4, 4096):
        refused("vhdx", patched(vhdx, item + 20, struct.pack("<I", length)))
    refused("vhdx", patched(vhdx, item, bytes(16)))


# --- torn and garbled files --------------------------------------------------


@pytest.mark.field("A12")
@pytest.mark.parametrize("recipe", [*files.RECIPES, "vmdk-footer"])
def test_file_that_is_cut_is_refused_even_without_a_digest(
    host: HostUnderTest, made: Made, recipe: str
) -> None:
    """Read by QEMU alone, what is missing would be zeros."""
    data = made.images[recipe]
    format_ = recipe.partition("-")[0]
    refusals = 0
    for part in (0.1, 0.5, 0.75, 0.85, 0.99):
        torn = data[: int(len(data) * part)]
        info = files.info_of(format_, digest=None)
        try:
            _, path = files.fetched(host.conf, host.path, format_, torn, info=info)
        except exc.ImageRejected:
            refusals += 1
        else:
            # Only padding was cut off; or less than a cluster of a qcow2, since QEMU
            # itself may end a file within its last one.
            whole = path.read_bytes()[: len(made.data)] == made.data
            assert whole or (format_ == "qcow2" and len(data) - len(torn) < 64 * KiB)
    assert refusals >= 3


@pytest.mark.field("A12")
def test_qcow2_whose_tables_point_behind_its_end_is_refused(
    host: HostUnderTest, made: Made
) -> None:
    data = made.images["qcow2"]
    (l1,) = struct.unpack_from(">Q", data, 40)
    (l2,) = struct.unpack_from(">Q", data, l1)
    l2 &= (1 << 56) - 512
    beyond = struct.pack(">Q", 1 << 63 | 1 << 40)
    for place in (l1, l2, l2 + 8):
        with pytest.raises(exc.ImageRejected, match="damaged"):
            files.fetched(host.conf, host.path, "qcow2", patched(data, place, beyond))


@pytest.mark.field("A12")
def test_vhd_whose_blocks_lie_behind_its_end_is_refused(
    host: HostUnderTest, made: Made
) -> None:
    data = made.images["vhd"]
    (table,) = struct.unpack_from(">Q", data, 512 + 16)
    bad = patched(data, table, struct.pack(">I", 1 << 20))
    with pytest.raises(exc.ImageRejected, match="blocks lie behind"):
        files.fetched(host.conf, host.path, "vhd", bad)


def _fates(host: HostUnderTest, format_: str, data: bytes) -> None:
    """One of the few ends that an image may have."""
    info = files.info_of(format_, digest=None)
    try:
        base, path = files.fetched(host.conf, host.path, format_, data, info=info)
    except (exc.ImageRejected, exc.IntegrityError, exc.SizeRefused):
        return
    assert base.format == "raw" and path.stat().st_size == base.virtual_size <= GiB
    path.unlink()


mutations = st.lists(
    st.tuples(
        st.floats(0, 1, exclude_max=True),
        st.one_of(
            st.binary(min_size=1, max_size=8),
            st.sampled_from([b"\0" * 8, b"\xff" * 8, b"\x7f" + b"\xff" * 7]),
        ),
    ),
    min_size=1,
    max_size=6,
)
#: Where each format has its headers and tables.
_TABLES = {
    "qcow2": [(0, 120), (0, 512), (65536, 200), (131072, 200), (196608, 200)],
    "vmdk": [(0, 80), (512, 400), (10752, 4096)],
    "vmdk-stream": [(0, 80), (512, 400), (-1536, 1536)],
    "vhd": [(0, 80), (512, 64), (1536, 32), (-512, 80)],
    "vhdx": [(65536, 80), (192 * KiB, 96), (256 * KiB, 96), (2 * MiB, 200)],
    "vdi": [(0, 512), (512, 64)],
}


@pytest.mark.field("A7", "A12")
@pytest.mark.parametrize("recipe", _TABLES)
def test_garbled_header_is_refused_or_harmless_whatever_it_says(
    made: Made, recipe: str
) -> None:
    """The checks alone: they are what must never fail in another way."""

    @settings(
        max_examples=60 if "vhdx" in recipe else 150, deadline=None, derandomize=True
    )
    @given(where=st.sampled_from(_TABLES[recipe]), changes=mutations)
    def check(where: tuple[int, int], changes: list[tuple[float, bytes]]) -> None:
        data = garbled(made.images[recipe], where, changes)
        try:
            found = verdict(recipe.partition("-")[0], data)
        except exc.ImageRejected:
            return
        assert found.virtual_size > 0

    check()


def garbled(
    data: bytes, where: tuple[int, int], changes: list[tuple[float, bytes]]
) -> bytes:
    start, length = where
    for part, value in changes:
        place = (start + len(data)) % len(data) + int(part * length)
        data = patched(data, place, value)[: len(data)]
    return data


@pytest.mark.field("A7", "A12")
@pytest.mark.parametrize("recipe", _TABLES)
def test_garbled_image_never_ends_in_another_error_than_of_images(
    host: HostUnderTest, made: Made, recipe: str
) -> None:
    """The whole way, qemu-img included; many more of them in the functional tests."""

    @settings(
        max_examples=12,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(where=st.sampled_from(_TABLES[recipe]), changes=mutations)
    def check(where: tuple[int, int], changes: list[tuple[float, bytes]]) -> None:
        data = garbled(made.images[recipe], where, changes)
        _fates(host, recipe.partition("-")[0], data)

    check()


@settings(max_examples=200, deadline=None)
@given(
    data=st.binary(max_size=2048),
    magic=st.sampled_from(
        [b"", b"QFI\xfb", b"KDMV", b"conectix", b"vhdxfile", b"QED\0", b"LUKS\xba\xbe"]
    ),
    format_=st.sampled_from(files.FORMATS),
)
def test_any_bytes_get_a_verdict(data: bytes, magic: bytes, format_: str) -> None:
    try:
        found = verdict(format_, magic + data)
    except exc.ImageRejected as error:
        assert not re.search(r"[\x00-\x1f]", error.message)
    else:
        assert found.virtual_size > 0
