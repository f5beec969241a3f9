"""Rows of data from which tasks are made: a file, or any iterable of dicts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeAlias

from fray.errors import InvalidRequest
from fray.model.text import near_text

Data: TypeAlias = str | os.PathLike[str] | Iterable[Mapping[str, Any]]
"""A file (``.jsonl`` or ``.parquet``), or an iterable of rows."""


def load_rows(data: Data, name: str = "data") -> list[dict[str, Any]]:
    """Return the rows of the data, each a dict.

    Parquet files need pyarrow.

    Args:
        data: the file or iterable.
        name: of the setting, for the messages of the errors.

    Raises:
        InvalidRequest: there is no such file, it is of another kind, has no rows, or has a row that is not a dict; the
            message names file and line.
    """
    if isinstance(data, str | os.PathLike):
        path = Path(data)
        if not path.is_file():
            raise InvalidRequest(f"invalid {name} {str(path)!r}: there is no such file in {Path.cwd()}")
        rows = _READERS.get(path.suffix, _refuse)(path)
        source = str(path)
    elif not isinstance(data, Iterable):
        raise InvalidRequest(f"invalid {name} {data!r}: expected a .jsonl or .parquet file, or an iterable of dicts")
    else:
        rows, source = [_checked(row, f"row {number}") for number, row in enumerate(data)], "the iterable"
    if not rows:
        raise InvalidRequest(f"invalid {name}: {source} has no rows")
    return rows


def fingerprint_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a name of the data by its content."""
    digest = sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=repr).encode() + b"\n")
    return digest.hexdigest()[:16]


def lack_text(row: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return that a row lacks a key, of ``names`` one, and which keys it has, with ``names`` that are similar."""
    keys = sorted(map(str, row))
    near = {key: near_text(key, names).removeprefix("; ") for key in keys}
    has = ", ".join(f"{key} ({near[key]})" if near[key] else key for key in keys)
    return f"lacks {' or '.join(map(repr, names))}; it has {has or 'no keys'}"


def _read_jsonl(path: Path) -> list[dict[str, Any]]:
    rows = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise InvalidRequest(f"invalid data: line {number} of {path} is not JSON: {error}") from None
            rows.append(_checked(row, f"line {number} of {path}"))
    return rows


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise InvalidRequest(f"data {path} is a Parquet file, which needs pyarrow: pip install pyarrow") from None
    return list(parquet.read_table(path).to_pylist())


def _refuse(path: Path) -> list[dict[str, Any]]:
    raise InvalidRequest(f"invalid data {str(path)!r}: expected a file whose name ends in {' or '.join(_READERS)}")


_READERS = {".jsonl": _read_jsonl, ".parquet": _read_parquet}


def _checked(row: object, where: str) -> dict[str, Any]:
    if not isinstance(row, Mapping):
        raise InvalidRequest(f"invalid data: {where} is of type {type(row).__name__}; expected a dict")
    return dict(row)
