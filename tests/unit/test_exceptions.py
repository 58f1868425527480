# SPDX-License-Identifier: Apache-2.0
"""Errors: who can act, a stable code, and a message that does no harm."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagebackend import exceptions as exc

#: Programs depend on them: a code may come, none may change or go.
CODES = {
    *("request", "invalid-value", "placement-refused", "size-refused"),
    *("image-rejected", "image-not-found", "disk-not-found", "instance-not-found"),
    *("conflict", "disk-in-use", "not-supported"),
    *("host", "config", "missing-dependency", "no-space", "limit-exceeded"),
    *("hypervisor", "store", "store-not-shared", "host-conflict"),
    *("storage", "storage-unavailable", "busy", "object-exists", "object-missing"),
    *("integrity", "superseded", "internal"),
}
BRANCHES = (exc.RequestError, exc.HostError, exc.StorageError, exc.InternalError)


def classes(
    root: type[exc.ImageBackendError] = exc.ImageBackendError,
) -> Iterator[type[exc.ImageBackendError]]:
    for each in root.__subclasses__():
        if each.__module__ == exc.__name__:
            yield each
            yield from classes(each)


def make(cls: type[exc.ImageBackendError], text: str) -> exc.ImageBackendError:
    if cls is exc.InvalidValue:
        return exc.InvalidValue("name", text, "better")
    return cls(text, thing=text)


@pytest.mark.field("J5")
def test_every_error_has_a_code_that_stays() -> None:
    found = [each.code for each in classes()]
    assert len(found) == len(set(found)), "each class has its own"
    assert set(found) >= CODES
    assert exc.ImageBackendError.code not in found


@pytest.mark.field("J5")
@pytest.mark.parametrize("cls", list(classes()), ids=lambda cls: cls.__name__)
def test_every_error_says_who_can_act(cls: type[exc.ImageBackendError]) -> None:
    assert sum(issubclass(cls, branch) for branch in BRANCHES) == 1
    assert cls.__doc__ and cls.__doc__.endswith(".")


@pytest.mark.parametrize("cls", list(classes()), ids=lambda cls: cls.__name__)
def test_the_text_of_an_error_is_its_message_with_the_values_for_programs(
    cls: type[exc.ImageBackendError],
) -> None:
    error = make(cls, "disk-1")
    assert str(error) == error.message
    assert "disk-1" in error.message and "disk-1" in error.values.values()


@given(st.sampled_from(list(classes())), st.text())
def test_no_message_steers_a_terminal_or_has_a_second_line(
    cls: type[exc.ImageBackendError], text: str
) -> None:
    error = make(cls, f"image {text} of disk x")
    assert error.message.isprintable()
    assert error.message.encode() and error.message == str(error)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("qemu-img: a\r\n  qemu-img: b\n", "qemu-img: a qemu-img: b"),
        ("clear \x1b[2J", "clear \\x1b[2J"),
        ("eight-bit \x9b2J", "eight-bit \\x9b2J"),
        ("turned \u202e", "turned \\u202e"),
        ("half \ud800", "half \\ud800"),
        ("zero \0", "zero \\x00"),
        ("plain Ü", "plain Ü"),
    ],
)
def test_what_a_storage_says_is_shown_harmlessly(text: str, shown: str) -> None:
    assert exc.StorageError(text).message == shown


@pytest.mark.field("B10")
def test_a_value_of_any_length_leaves_a_message_that_can_be_read() -> None:
    for value in ("x" * 10**6, 10**5000, [10**5000], {"a": "b" * 10**6}, b"\0" * 999):
        error = exc.InvalidValue("size of disk 'a'", value, "a whole number")
        assert len(error.message) < 200
        assert error.message.startswith("size of disk 'a' is ")
        assert error.message.endswith(": it must be a whole number")
        assert error.values["value"] is value


def test_an_error_survives_being_raised_from_a_worker_process() -> None:
    import pickle

    error = exc.SizeRefused("too small", size=1, limit=2)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.message, again.values) == (
        exc.SizeRefused,
        "too small",
        {"size": 1, "limit": 2},
    )
    invalid = pickle.loads(pickle.dumps(exc.InvalidValue("size", -1, "more")))
    assert invalid.message == "size is -1: it must be more"
    assert invalid.values == {"what": "size", "value": -1, "wanted": "more"}
