# SPDX-License-Identifier: Apache-2.0
"""Each kind of accident reported from the field that disks in files and in Ceph can
meet has a test that stands for it."""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).parents[1]
#: Image safety, sizes, the image cache, Ceph, images of Glance, inventory, other
#: users' secrets, crashes and concurrency.
KINDS = {
    *("A5", "A6", "A7", "A11", "A12"),
    *("B6", "B7", "B9", "B10"),
    *("C1", "C2", "C4", "C6", "C7", "C8", "C10", "C12"),
    *("D1", "D2", "D3", "D4", "D5", "D8", "D9", "D10", "D12", "D13", "D14", "D16"),
    *("E12", "F1", "F8", "F12"),
    *("H1", "H2", "H5"),
    *("I9", "I12"),
    *("J2", "J3", "J4", "J5", "J6"),
}


def marked() -> set[str]:
    found: set[str] = set()
    for path in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            if ast.unparse(node.func) == "pytest.mark.field":
                found |= {str(ast.literal_eval(each)) for each in node.args}
    return found


def test_every_kind_has_a_test() -> None:
    assert KINDS - marked() == set()
