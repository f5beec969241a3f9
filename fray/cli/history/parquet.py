"""Answers of ``fray sql`` as files in Parquet, on this machine or in a storage that fsspec knows."""

from __future__ import annotations

from io import BytesIO
from typing import Any

from fray.cli.history.sql_tables import Rows
from fray.errors import InvalidRequest
from fray.net import storage


def check_output(target: str) -> None:
    """Raise InvalidRequest if a package that ``--output`` needs is not installed, there is no such storage, or the name
    is that of another format.
    """
    if target.endswith((".csv", ".json", ".jsonl", ".txt")):
        raise InvalidRequest(f"--output {target!r} would be a file in Parquet: name it so, or use --json > FILE")
    try:
        import pyarrow  # type: ignore[import-not-found, import-untyped, unused-ignore]  # noqa: F401
    except ImportError:
        raise InvalidRequest("--output needs pyarrow: pip install 'fray[parquet]'") from None
    storage.check(target)


async def write_parquet(target: str, columns: tuple[str, ...], rows: Rows) -> None:
    """Write a file, in place of one that is there; raises what the storage raises.

    Raises:
        InvalidRequest: two columns have one name, or the values of one are of several kinds.
    """
    if len(set(columns)) < len(columns):
        raise InvalidRequest(
            f"the columns {', '.join(columns)} need names of their own: write AS after each expression"
        )
    import pyarrow
    from pyarrow import parquet  # type: ignore[import-not-found, import-untyped, unused-ignore]

    arrays: dict[str, Any] = {}
    for number, column in enumerate(columns):
        values = [row[number] for row in rows]
        try:
            arrays[column] = pyarrow.array(_of_one_kind(values))
        except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError) as error:
            raise InvalidRequest(f"column {column!r} has values of several kinds ({error}): use CAST") from None
    buffer = BytesIO()
    parquet.write_table(pyarrow.table(arrays), buffer)
    await storage.write(target, buffer.getvalue())


def _of_one_kind(values: list[Any]) -> list[Any]:
    """Return whole numbers as fractions where a column has both, as sums of SQLite have."""
    kinds = {type(value) for value in values if value is not None}
    return [None if value is None else float(value) for value in values] if kinds == {int, float} else values
