"""Tables of the page about moving from NexRL: each name exists, and a test that checks something uses it.

What each key of the configuration changes is in `test_guide_key_effects`.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fray import rl
from fray.rl.recipe.guide_config import WITHOUT_EFFECT
from tests.rl.nexrl.test_guide_key_effects import KEYS, leaves_of_the_guide

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "from-nexrl.md"
OPERATORS = {"__len__": "len", "__getitem__": "[]"}
"""Names by which a test uses methods whose own names it does not have."""
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


def used_names(tree: ast.AST) -> Iterator[str]:
    """Return the names that a program uses, or defines for its caller; not those that it imports, or has in texts."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.FunctionDef(name=name) | ast.keyword(arg=str(name)):
                yield name
            case ast.Subscript():
                yield "[]"
            case ast.Constant(value=str(text)):  # a program of the guide that the test runs
                with contextlib.suppress(SyntaxError):
                    yield from used_names(ast.parse(text))


def names_in_checks(tree: ast.Module) -> set[str]:
    """Return the names that tests use which check something: by an assertion, or by an error that they expect."""
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            inner = list(ast.walk(node))
            if any(isinstance(one, ast.Assert) or getattr(one, "attr", "") == "raises" for one in inner):
                found.update(used_names(node))
    return found


def full_names(names: str) -> Iterator[str]:
    """Return the names of a row; one that begins with a dot is of the class before it."""
    owner = ""
    for name in re.findall(r"`([^`]+)`", names):
        full = f"{owner}{name}" if name.startswith(".") else name
        owner = full.rpartition(".")[0]
        yield full


@pytest.mark.parametrize(("names", "test"), ROWS, ids=[names.split("`")[1] for names, _ in ROWS])
def test_each_name_of_the_table_exists_and_a_test_that_checks_something_uses_it(names: str, test: str) -> None:
    (path,) = ROOT.glob(f"tests/rl/**/{test}")
    used = names_in_checks(ast.parse(path.read_text()))
    for full in full_names(names):
        assert found(full) is not None
        last = full.rpartition(".")[2]
        assert OPERATORS.get(last, last) in used, f"{full} is not used by a test of {test} that checks something"


def test_the_page_names_every_key_without_effect_and_no_other() -> None:
    section = PAGE.read_text().partition("### Keys without effect")[2].partition("\n## ")[0]
    rows = [row for row in section.splitlines() if row.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`([a-z_.]+)`", row.split("|")[1])]
    full: list[str] = []
    for name in named:
        full.append(f"{full[-1].rpartition('.')[0]}{name}" if name.startswith(".") else name)
    assert sorted(full) == sorted(WITHOUT_EFFECT)
    assert set(WITHOUT_EFFECT) | set(KEYS) <= set(leaves_of_the_guide())
