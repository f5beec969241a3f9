"""Persisted examples of a fuzzer: one literal of Python's bytes per line, in ``tests/fuzz/corpus/``."""

from __future__ import annotations

import ast
from pathlib import Path

FOLDER = Path(__file__).parent / "corpus"


def read_examples(target: str, folder: Path = FOLDER) -> list[bytes]:
    """Return the examples of a target: valid ones, and those that once broke something."""
    path = folder / f"{target}.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    return [ast.literal_eval(line) for line in lines if line.startswith("b")]


def add_example(target: str, data: bytes, why: str, folder: Path = FOLDER) -> Path:
    """Append an example under a comment, and return the file."""
    path = folder / f"{target}.txt"
    with path.open("a") as file:
        file.write(f"# {why.splitlines()[0]}\n{data!r}\n")
    return path
