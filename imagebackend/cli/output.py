# SPDX-License-Identifier: Apache-2.0
"""Values as a person reads them; other formatters get the plain value."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from cliff.columns import FormattableColumn

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_WIDEST_SIZE = len("1023.9 MiB")


def escape(text: str) -> str:
    """The text with all that could steer a terminal, or mislead the eye, escaped."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode()
        for char in text
    )


def size(number: int) -> str:
    """Bytes in the largest unit that leaves a whole part (``10.0 GiB``)."""
    value = float(number)
    for unit in _UNITS:
        # As shown: 1023.96 would be rounded to 1024.0.
        if round(abs(value), 1) < 1024 or unit == _UNITS[-1]:
            return f"{number} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("not reached")


def when(epoch: float) -> str:
    """A point in time, to the second, in ISO 8601 and UTC."""
    moment = datetime.datetime.fromtimestamp(epoch, datetime.UTC)
    return moment.isoformat(timespec="seconds")


class Size(FormattableColumn[int | None]):
    """Bytes; None: not known, or nothing left."""

    def human_readable(self) -> str:
        return "-" if self._value is None else size(self._value)


class ListedSize(Size):
    """Bytes in a column of a list: the units stand below each other."""

    def human_readable(self) -> str:
        return super().human_readable().rjust(_WIDEST_SIZE)


class Names(FormattableColumn[Sequence[str]]):
    """Several names."""

    def human_readable(self) -> str:
        return ", ".join(escape(name) for name in self._value)


class Facts(FormattableColumn[Mapping[str, Any]]):
    """A JSON object, a fact a line."""

    def human_readable(self) -> str:
        return "\n".join(
            f"{escape(str(key))}={escape(str(value))}"
            for key, value in self._value.items()
        )
