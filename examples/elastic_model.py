"""Model of `elastic_slices.py`: it decides whether a line of the standard library is code, or prose of a docstring.

It is a logistic regression over pairs of neighbouring characters, in numpy. The rows of a step depend on its number
only, and each member of a multi-slice takes its part of them: so the gradients of all parts have the same sum for any
number of members.
"""

from __future__ import annotations

import ast
import functools
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, Any]

MODULES = ("argparse", "doctest", "inspect", "turtle")
PAIRS = 512
"""Number of features besides the constant one."""
BATCH_ROWS = 256
RATE = 0.5
UNSEEN = 5
"""One line in this many is used for `accuracy` only."""


class Data(NamedTuple):
    """Lines as rows of features, and their labels (prose or code): for training, and unseen."""

    rows: Array
    prose: Array
    unseen_rows: Array
    unseen_prose: Array


@functools.cache
def load() -> Data:
    """Return the data from the standard library of this Python."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    lines = [line for name in MODULES for line in lines_of((stdlib / f"{name}.py").read_text())]
    rows, prose = np.stack([features(text) for text, _ in lines]), np.array([float(is_prose) for _, is_prose in lines])
    unseen = np.arange(len(lines)) % UNSEEN == 0
    return Data(rows[~unseen], prose[~unseen], rows[unseen], prose[unseen])


def lines_of(source: str) -> Iterator[tuple[str, bool]]:
    """Yield each line that is not blank, stripped, and whether it belongs to a docstring."""
    prose: set[int] = set()
    has_docstring = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, has_docstring) and ast.get_docstring(node):
            prose.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    for number, line in enumerate(source.splitlines(), 1):
        if text := line.strip():
            yield text, number in prose


def features(text: str) -> Array:
    """Return the pairs of characters in a text as a unit vector, whose last element is the constant feature."""
    codes = np.frombuffer(text.encode(), np.uint8).astype(np.int64)
    found = np.zeros(PAIRS + 1, np.float32)
    found[(codes[:-1] * 31 + codes[1:]) % PAIRS] = 1
    found[-1] = 1
    return found / np.sqrt(found.sum())


def fresh() -> Array:
    return np.zeros(PAIRS + 1)


def gradient(weights: Array, data: Data, step: int, rank: int, size: int) -> Array:
    """Return the gradient of a member's part of the rows of a step."""
    rows = np.random.default_rng(step).choice(len(data.rows), BATCH_ROWS)[rank::size]
    seen = data.rows[rows].astype(np.float64)
    guessed = 1 / (1 + np.exp(-seen @ weights))
    return (guessed - data.prose[rows]) @ seen


def stepped(weights: Array, gradients: list[Array]) -> Array:
    """Return the weights after a step with these gradients of all parts."""
    return weights - RATE * np.sum(gradients, axis=0) / np.sqrt(BATCH_ROWS)


def plain(data: Data, steps: int) -> Array:
    """Return the weights after so many steps in a single loop."""
    weights = fresh()
    for step in range(steps):
        weights = stepped(weights, [gradient(weights, data, step, 0, 1)])
    return weights


def accuracy(weights: Array, data: Data) -> float:
    """Return the share of the unseen lines with the right answer."""
    return float(np.mean((data.unseen_rows @ weights > 0) == (data.unseen_prose > 0)))
