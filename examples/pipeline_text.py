"""Computation of the pipeline example, without workers: sources to documents, documents to near copies.

A *document* is a docstring of a Python file, or a paragraph of another text. Two are *near copies* when they share at
least 0.8 of their shingles, runs of four words (Jaccard). The search is exact: put all shingles in one order, that of
their hashes, and such sets share one of their first ``n - ⌈4n/5⌉ + 1``. So each document goes to the groups of
its first few shingles, and each group compares its own.
"""

from __future__ import annotations

import ast
import re
import warnings
from array import array
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import combinations
from pathlib import PurePosixPath
from threading import Lock
from typing import Any, TypeAlias

Row: TypeAlias = dict[str, Any]

SHINGLE_WORDS = 4
LEAST_WORDS = 12
"""Words of the shortest document that is compared."""

DOCS = (("id", "string"), ("package", "string"), ("name", "string"), ("words", "int64"), ("shingles", "binary"))
SKETCH = (("key", "int64"), ("id", "string"), ("shingles", "binary"))
PAIRS = (("one", "string"), ("other", "string"), ("shared", "int64"))
COPIES = (("package", "string"), ("id", "string"), ("group", "string"))
COUNTS = (("package", "string"), ("docs", "int64"), ("words", "int64"), ("copies", "int64"))

PARSING = Lock()
"""Python 3.11's parser counts its depth for all threads together (SystemError: recursion depth mismatch), and filters
of warnings apply to all threads: where workers are threads, they parse one at a time."""

# From sources to documents -------------------------------------------------------------------------------------------


def documents(source: Row) -> Iterator[Row]:
    """Yield the documents of a file of ``path`` and ``text``; none for an invalid Python file, as in the library's
    tests."""
    if not source["path"].endswith(".py"):
        yield from _paragraphs(source)
        return
    with PARSING, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # for strings with "\d" in them
        try:
            tree = ast.parse(source["text"])
        except (SyntaxError, ValueError):
            return
    yield from _described(tree, source["path"], ())


def _paragraphs(source: Row) -> Iterator[Row]:
    line = 1
    for number, text in enumerate(re.split(r"(\n\s*\n)", source["text"])):
        if number % 2 == 0:
            yield {"id": f"{source['path']}:{line}", "path": source["path"], "name": "", "text": text}
        line += text.count("\n")


def _described(node: ast.AST, path: str, names: tuple[str, ...]) -> Iterator[Row]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inside = (*names, child.name)
            if text := ast.get_docstring(child):
                yield {"id": f"{path}:{child.lineno}", "path": path, "name": ".".join(inside), "text": text}
            yield from _described(child, path, inside)
        else:
            yield from _described(child, path, names)


def normalised(document: Row) -> Row:
    """Return the document with its lower-case words as shingles, and the first part of its path as package."""
    words = words_of(document["text"])
    return {
        "id": document["id"],
        "package": PurePosixPath(document["path"]).parts[0].removesuffix(".py"),
        "name": document["name"],
        "words": len(words),
        "shingles": packed(shingle_hash(shingle) for shingle in shingles_of(words)),
    }


def long_enough(document: Row) -> bool:
    return bool(document["words"] >= LEAST_WORDS)


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def shingles_of(words: Sequence[str]) -> set[tuple[str, ...]]:
    return set(zip(*(words[at:] for at in range(SHINGLE_WORDS)), strict=False))


def shingle_hash(shingle: Iterable[str]) -> int:
    """Return a hash that is equal in every process; collisions have a chance of some in 10**8."""
    digest = blake2b(" ".join(shingle).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def packed(hashes: Iterable[int]) -> bytes:
    return array("q", sorted(set(hashes))).tobytes()


def unpacked(shingles: bytes) -> array[int]:
    return array("q", shingles)


# From documents to near copies ---------------------------------------------------------------------------------------


def alike(one: Collection[Any], other: Collection[Any], shared: int) -> bool:
    """Return whether the Jaccard index is at least 0.8, in whole numbers: shared / (one + other - shared) >= 4/5."""
    return 9 * shared >= 4 * (len(one) + len(other))


def first_shingles(document: Row) -> Iterator[Row]:
    """Yield a row for each group in which a document may have near copies."""
    hashes = unpacked(document["shingles"])
    for key in hashes[: len(hashes) - -(-4 * len(hashes) // 5) + 1]:
        yield {"key": key, "id": document["id"], "shingles": document["shingles"]}


def near_pairs(key: int, rows: Sequence[Row]) -> Iterator[Row]:
    """Yield the near copies in a group. A pair in several groups counts where its first common shingle is the key."""
    sets = [(row["id"], frozenset(unpacked(row["shingles"]))) for row in rows]
    for (one, mine), (other, theirs) in combinations(sorted(sets, key=lambda member: str(member[0])), 2):
        common = mine & theirs
        if alike(mine, theirs, len(common)) and min(common) == key:
            yield {"one": one, "other": other, "shared": len(common)}


def copies(pairs: Iterable[Row]) -> Iterator[Row]:
    """Yield each document that has a near copy, with its group: the documents that pairs connect, by the first."""
    leader: dict[str, str] = {}

    def find(key: str) -> str:
        while leader.setdefault(key, key) != key:
            leader[key] = key = leader[leader[key]]
        return key

    for pair in pairs:
        low, high = sorted((find(pair["one"]), find(pair["other"])))
        leader[high] = low
    for key in sorted(leader):
        package = PurePosixPath(key.rpartition(":")[0]).parts[0].removesuffix(".py")
        yield {"package": package, "id": key, "group": find(key)}


# The table -----------------------------------------------------------------------------------------------------------


def counted(document: Row) -> Row:
    return {"package": document["package"], "docs": 1, "words": document["words"], "copies": 0}


def counted_copy(copy: Row) -> Row:
    return {"package": copy["package"], "docs": 0, "words": 0, "copies": 1}


def summed(package: str, rows: Sequence[Row]) -> Iterator[Row]:
    """Yield one row for a package. It may be applied to its own results."""
    yield {"package": package, **{name: sum(row[name] for row in rows) for name in ("docs", "words", "copies")}}


# Reference -----------------------------------------------------------------------------------------------------------


def plain_result(sources: Iterable[Row]) -> dict[str, Any]:
    """Return the result computed in plain loops, which compare every set of shingles with every other."""
    found = [document for source in sources for document in documents(source)]
    kept = [(one, words) for one in found if len(words := words_of(one["text"])) >= LEAST_WORDS]
    sets = sorted(((one["id"], shingles_of(words)) for one, words in kept), key=lambda member: len(member[1]))
    pairs = []
    for place, (one, mine) in enumerate(sets):
        for other, theirs in sets[place + 1 :]:
            if 5 * len(mine) < 4 * len(theirs):
                break
            if alike(mine, theirs, len(mine & theirs)):
                pairs.append({"one": one, "other": other})
    table: dict[str, Counter[str]] = defaultdict(Counter)
    package_of = {one["id"]: PurePosixPath(one["path"]).parts[0].removesuffix(".py") for one, _ in kept}
    for one, words in kept:
        table[package_of[one["id"]]].update(docs=1, words=len(words), copies=0)
    groups: dict[str, list[str]] = defaultdict(list)
    for copy in copies(pairs):
        table[package_of[copy["id"]]]["copies"] += 1
        groups[copy["group"]].append(copy["id"])
    return {
        "pairs": sorted(sorted(pair.values()) for pair in pairs),
        "groups": sorted(groups.values()),
        "table": [{"package": package, **table[package]} for package in sorted(table)],
    }
