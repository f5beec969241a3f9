"""Table of the page about moving from NexRL: each name exists, and its test uses it."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from fray import rl
from fray.rl.recipe.guide_config import GuideConfig

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "from-nexrl.md"
OPERATORS = {"__len__": r"\blen\(", "__getitem__": r"\bloader\["}
"""Calls of methods whose names a test does not have."""
ROWS = re.findall(r"^\| (`.*) \| `(test_\w+\.py)` \|$", PAGE.read_text(), re.MULTILINE)


def found(path: str) -> Any:
    """Return what a dotted name below `fray.rl` is."""
    value: Any = rl
    module = "fray.rl"
    for name in path.split("."):
        module = f"{module}.{name}"
        try:
            value = getattr(value, name)
        except AttributeError:
            value = importlib.import_module(module)
    return value


@pytest.mark.parametrize(("names", "test"), ROWS, ids=[names.split("`")[1] for names, _ in ROWS])
def test_each_name_of_the_table_exists_and_its_test_uses_it(names: str, test: str) -> None:
    (path,) = ROOT.glob(f"tests/rl/**/{test}")
    content = path.read_text()
    owner = ""
    for name in re.findall(r"`([^`]+)`", names):
        full = f"{owner}{name}" if name.startswith(".") else name
        owner = full.rpartition(".")[0]
        assert has_key(full) or found(full) is not None
        last = full.rpartition(".")[2]
        assert re.search(OPERATORS.get(last, rf"\b{last}\b"), content), f"{full} does not occur in {test}"


def has_key(path: str) -> bool:
    """Return whether the configuration of the guide has a key."""
    section: Any = GuideConfig()
    for name in path.split("."):
        if not hasattr(type(section), "__attrs_attrs__"):
            return False
        names = {attribute.name for attribute in type(section).__attrs_attrs__}
        if name not in names:
            return False
        section = getattr(section, name)
    return True
