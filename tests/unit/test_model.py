# SPDX-License-Identifier: Apache-2.0
"""Values that cross borders, errors, and which module may know which."""

from __future__ import annotations

import ast
import dataclasses
import enum
import json
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import imagebackend
from imagebackend import exceptions as exc
from imagebackend import model

ROOT = Path(imagebackend.__file__).parent
DATACLASSES = [
    value
    for value in vars(model).values()
    if dataclasses.is_dataclass(value) and isinstance(value, type)
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.text(max_size=4), inner, max_size=2)
    ),
    max_leaves=4,
)


def values(cls: type) -> st.SearchStrategy[Any]:
    names = {field.name for field in dataclasses.fields(cls)}
    hints = {
        name: of(hint) for name, hint in model._hints(cls).items() if name in names
    }
    return st.builds(cls, **hints)


def of(hint: Any) -> st.SearchStrategy[Any]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*(of(each) for each in args))
    if origin in (Sequence, typing.get_origin(Sequence[int])):
        return st.lists(of(args[0]), max_size=2).map(tuple)
    if origin in (Mapping, typing.get_origin(Mapping[str, Any])):
        inner = JSON if args[1] is Any else of(args[1])
        return st.dictionaries(st.text(max_size=4), inner, max_size=2)
    if hint is type(None):
        return st.none()
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return st.sampled_from(list(hint))
    if dataclasses.is_dataclass(hint):
        return st.deferred(lambda: values(hint))  # type: ignore[arg-type]
    kinds: dict[Any, st.SearchStrategy[Any]] = {
        str: st.text(max_size=6),
        int: st.integers(),
        bool: st.booleans(),
        float: st.floats(allow_nan=False),
    }
    return kinds[hint]


@pytest.mark.parametrize("cls", DATACLASSES, ids=lambda cls: cls.__name__)
def test_every_value_survives_json(cls: type) -> None:
    @settings(max_examples=30, deadline=None)
    @given(values(cls))
    def check(value: Any) -> None:
        text = json.dumps(model.to_json(value))
        assert model.from_json(cls, json.loads(text)) == value
        assert model.dumps(value) == model.dumps(model.from_json(cls, json.loads(text)))

    check()


def test_a_newer_writers_fields_are_ignored_and_missing_ones_are_named() -> None:
    data = model.to_json(model.Flavor("small", root_gb=1)) | {"colour": "blue"}
    assert model.from_json(model.Flavor, data) == model.Flavor("small", root_gb=1)
    del data["name"]
    with pytest.raises(exc.InvalidValue, match="name"):
        model.from_json(model.Flavor, data)
    with pytest.raises(exc.InvalidValue, match="JSON object"):
        model.from_json(model.Flavor, "small")
    with pytest.raises(exc.InvalidValue, match="root, ephemeral"):
        model.from_json(model.DiskSpec, {"role": "boot"})


def test_sources_know_which_kind_they_are() -> None:
    source = model.NetworkSource(
        "rbd", "pool/image", hosts=(model.NetworkHost("::1", 3),)
    )
    connection = model.Connection(source, "host")
    again = model.from_json(model.Connection, model.to_json(connection))
    assert again == connection and isinstance(again.source, model.NetworkSource)


@pytest.mark.parametrize("source", [{"kind": "cloud"}, {"path": "/x"}, [], "file", 7])
def test_a_source_of_no_known_kind_is_refused(source: object) -> None:
    data = {"source": source, "host_id": "host"}
    with pytest.raises(exc.InvalidValue, match="source of Connection") as caught:
        model.from_json(model.Connection, data)
    if source != "file":
        assert "file, block, network" in caught.value.message


@pytest.mark.parametrize(
    ("cls", "field", "value", "wanted"),
    [
        (model.Flavor, "root_gb", "1", "a whole number"),
        (model.Flavor, "root_gb", True, "a whole number"),
        (model.Flavor, "root_gb", 1.5, "a whole number"),
        (model.Flavor, "root_gb", None, "a whole number"),
        (model.Flavor, "name", 1, "text"),
        (model.Flavor, "extra_specs", [], "a JSON object"),
        (model.Flavor, "extra_specs", {"a": 1}, "text"),
        (model.Instance, "flavor", "small", "a JSON object"),
        (model.Instance, "flavor", {}, "name is missing"),
        (model.DiskSpec, "cdrom", "yes", "true or false"),
        (model.DiskSpec, "cdrom", 1, "true or false"),
        (model.DiskSpec, "role", ["root"], "one of root"),
        (model.DiskSpec, "lifecycle", None, "one of ephemeral"),
        (model.Stat, "used_by", "qemu", "a JSON array"),
        (model.Stat, "used_by", [1], "text"),
        (model.Change, "created", {}, "a JSON array"),
    ],
)
def test_a_value_that_is_not_of_its_type_is_named(
    cls: type, field: str, value: object, wanted: str
) -> None:
    values = {"name": "x", "id": "x", "size": 1, "instance_id": None} | {field: value}
    with pytest.raises(exc.InvalidValue, match=f"{field} of {cls.__name__}") as caught:
        model.from_json(cls, values)
    assert wanted in caught.value.message


# --- errors -------------------------------------------------------------------------


def errors(cls: type = exc.ImageBackendError) -> Iterator[type[exc.ImageBackendError]]:
    for each in cls.__subclasses__():
        yield each
        yield from errors(each)


def test_every_error_has_a_code_of_its_own_and_says_who_can_act() -> None:
    found = list(errors())
    codes = [each.code for each in found]
    assert len(set(codes)) == len(codes) > 20
    branches = (exc.RequestError, exc.HostError, exc.StorageError, exc.InternalError)
    assert all(issubclass(each, branches) for each in found)
    assert all(each.__doc__ for each in found)


@given(st.text())
def test_no_value_steers_a_terminal(value: str) -> None:
    error = exc.InvalidValue("name", value, "better")
    assert error.message.isprintable() and len(error.message) < 600
    assert error.values["value"] == value


# --- who may know whom --------------------------------------------------------------

#: A part of the package, and the parts that it may import.
ARROWS = {
    "exceptions": set(),
    "model": {"exceptions"},
    "conf": {"exceptions"},
    "processes": {"exceptions"},
    "local_files": {"exceptions", "model"},
    "host": {"exceptions", "model", "processes", "local_files"},
    "keystone": {"exceptions", "conf"},
    "validation": {"exceptions", "model"},
    "qemu_img": {"exceptions", "model", "processes", "conf"},
    "images": {
        *("exceptions", "model", "processes", "local_files", "host", "qemu_img"),
        *("conf", "keystone"),
    },
    "backends": {
        *("exceptions", "model", "processes", "local_files", "qemu_img", "conf"),
        *("host", "keystone"),
    },
    "libvirt": {"exceptions", "model"},
    "store": {"exceptions", "model", "processes", "host", "local_files"},
    "specs": {"exceptions", "model", "validation"},
    "selection": {"exceptions", "model", "backends", "validation", "specs"},
    "actions": {
        *("exceptions", "model", "processes", "host", "qemu_img", "images", "backends"),
        *("conf", "local_files"),
        *("libvirt", "store", "selection", "validation"),
    },
    "manager": {
        *("exceptions", "model", "conf", "actions", "images", "libvirt", "store"),
        "validation",
    },
    "testing": {"exceptions", "model", "processes", "qemu_img", "backends"},
    "cli": {
        *("exceptions", "model", "conf", "manager", "libvirt", "testing", "selection"),
        *("backends", "validation"),
    },
}


def imports(path: Path) -> Iterator[str]:
    """Parts of the package that the file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{each.name}" for each in node.names]
        elif isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        for name in names:
            if name.startswith("imagebackend."):
                part = name.split(".")[1]
                if (ROOT / part).exists() or (ROOT / f"{part}.py").exists():
                    yield part
                elif part in ("DiskManager",):
                    yield "manager"


@pytest.mark.parametrize("part", ARROWS)
def test_arrows_go_down_only(part: str) -> None:
    folder = ROOT / part
    files = sorted(folder.rglob("*.py")) if folder.is_dir() else [ROOT / f"{part}.py"]
    assert files
    for path in files:
        found = set(imports(path)) - {part}
        assert found <= ARROWS[part], f"{path.name} imports {found - ARROWS[part]}"


def test_every_part_is_in_the_picture() -> None:
    parts = {
        path.stem
        for path in ROOT.iterdir()
        if (path.suffix == ".py" or (path / "__init__.py").exists())
        and not path.name.startswith("__")
    }
    assert parts == set(ARROWS)


def test_the_public_names_can_be_had_and_nothing_else() -> None:
    for name in imagebackend.__all__:
        assert getattr(imagebackend, name).__name__ == name
    with pytest.raises(AttributeError, match="nothing_such"):
        imagebackend.nothing_such  # noqa: B018
    assert set(dir(imagebackend)) == set(imagebackend.__all__)
