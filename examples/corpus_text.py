"""Computation of the corpus example, without processes: text to functions, sets to pairs, pairs to a result.

*Exact copies* have the same tokens; comments, blank lines and layout do not count. *Near copies* share at least 0.8
of their token 5-shingles (Jaccard), where every number and every string counts as the same token. The tokens of a
nested function belong to it alone. `python corpus_text.py < JOB` computes the whole result in one plain process, where
JOB is JSON: the directory and its files.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import sys
import token as kinds
import tokenize
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, TypeAlias

Place: TypeAlias = tuple[str, int, str]
"""File, line, name."""
Shingles: TypeAlias = "array[int]"
"""Hashes of a function's token 5-shingles, in order, each once."""
Packed: TypeAlias = tuple[list[int], list[int], Shingles]
"""Keys, sizes, and the members of all sets one after the other."""
Found: TypeAlias = tuple[bytes, int, Place, Shingles]
"""Function: digest of its tokens, their number, its place, its shingles."""

SAMPLE_ONE_IN = 256
"""One function in this many is compared with every other one."""
MIN_TOKENS = 40
"""Tokens of the shortest function that is compared; shorter ones are only counted."""
LITERALS = {kinds.NUMBER, kinds.STRING, getattr(kinds, "FSTRING_MIDDLE", kinds.STRING)}
LAYOUT = {kinds.NEWLINE: "\n", kinds.INDENT: "\t", kinds.DEDENT: "\b"}
SKIPPED = {kinds.ENCODING, kinds.NL, kinds.COMMENT, kinds.ENDMARKER}

# Text to functions (pure) --------------------------------------------------------------------------------------------


class Function:
    """Function definition: its tokens as written, and with every literal as ``''``."""

    def __init__(self, name: str, line: int, depth: int) -> None:
        self.name, self.line, self.depth = name, line, depth
        self.has_block = False
        self.raw: list[str] = ["def"]
        self.normal: list[str] = ["def"]

    def digest(self) -> bytes:
        return hashlib.blake2b("\0".join(self.raw).encode("utf-8", "surrogatepass"), digest_size=16).digest()

    def shingles(self) -> Shingles:
        """Return hashes that are equal in all processes: those of integers are, unlike those of strings."""
        words = [word_id(word) for word in self.normal]
        return array("q", sorted(set(map(hash, zip(words, words[1:], words[2:], words[3:], words[4:], strict=False)))))


@functools.cache
def word_id(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=7).digest())


def read_functions(source: bytes) -> tuple[list[Function], int, list[str]]:
    """Return the functions of a file, the number of its tokens, and all its names with their counts.

    Raises:
        SyntaxError, tokenize.TokenError: the file is not valid Python (the standard library has such files as tests).
    """
    found: list[Function] = []
    open_: list[Function] = []
    names: list[str] = []
    number = depth = 0
    line_ended = opening = False
    for kind, text, (line, _), _, _ in tokenize.tokenize(io.BytesIO(source).readline):
        number += 1
        if kind in SKIPPED:
            continue
        if line_ended:
            line_ended = False
            if open_ and not open_[-1].has_block:
                if kind == kinds.INDENT:
                    open_[-1].has_block = True
                else:  # `def f(): pass` ends with its line
                    open_.pop()
        if kind == kinds.NAME:
            names.append(text)
            if opening:
                opening = False
                if open_:
                    open_[-1].raw.append("def")
                    open_[-1].normal.append("def")
                open_.append(Function(text, line, depth))
                found.append(open_[-1])
            elif text == "def":
                opening = True
                continue
        elif kind in LAYOUT:
            text = LAYOUT[kind]
            line_ended = kind == kinds.NEWLINE
            depth += (kind == kinds.INDENT) - (kind == kinds.DEDENT)
            if kind == kinds.DEDENT and open_ and open_[-1].depth == depth:
                open_.pop()
        if open_:
            open_[-1].raw.append(text)
            open_[-1].normal.append("''" if kind in LITERALS else text)
    return found, number, names


# Sets to pairs (pure) ------------------------------------------------------------------------------------------------


def alike(size: int, other: int, shared: int) -> bool:
    """Return whether the Jaccard index is at least 0.8, in whole numbers: shared / (size + other - shared) >= 4/5."""
    return 9 * shared >= 4 * (size + other)


def pack(sets: Mapping[int, Shingles]) -> Packed:
    """Return ``sets`` as their keys, their sizes and one array, which travels faster than ten thousand small ones."""
    return list(sets), [len(members) for members in sets.values()], array("q", b"".join(map(bytes, sets.values())))


def unpack(packed: Packed) -> dict[int, Shingles]:
    """Inverse of `pack`."""
    keys, sizes, members = packed
    ends = accumulate(sizes)
    return {key: members[end - size : end] for key, size, end in zip(keys, sizes, ends, strict=True)}


def near_pairs(sets: Mapping[int, Sequence[int]], least: int = 0) -> list[tuple[int, int]]:
    """Return all pairs (i < j) with Jaccard >= 0.8 of which the larger set has at least ``least`` members; exact.

    Order all members by rarity. Two sets that share so much share one of their rarest members: of the larger set's
    first ``n - 4n/5 + 1``, of the smaller set's first ``n - 8n/9 + 1``. Only these are indexed and looked up.

    Args:
        sets: the members of each set, in order, each once.
    """
    rarity = Counter(chain.from_iterable(sets.values()))
    index: dict[int, list[int]] = defaultdict(list)
    members = functools.cache(lambda key: frozenset(sets[key]))  # only the few candidates are compared
    pairs = []
    for key in sorted(sets, key=lambda key: (len(sets[key]), key)):
        size = len(sets[key])
        rarest = sorted(sets[key], key=rarity.__getitem__)[: size - -(-4 * size // 5) + 1]  # stable: one order for all
        if size >= least:
            for other in {other for member in rarest for other in index.get(member, ())}:
                theirs = len(sets[other])
                if 5 * theirs >= 4 * size and alike(size, theirs, len(members(key) & members(other))):
                    pairs.append((min(key, other), max(key, other)))
        for member in rarest[: size - -(-8 * size // 9) + 1]:
            if rarity[member] > 1:
                index[member].append(key)
    return sorted(pairs)


def sampled_pairs(sets: Mapping[int, Sequence[int]], least: int, sample: Collection[int]) -> set[tuple[int, int]]:
    """Return the near pairs of the sets in ``sample`` by brute force: each with all sets of a suitable size."""
    by_size = sorted(sets, key=lambda key: len(sets[key]))
    sizes = [len(sets[key]) for key in by_size]
    members = functools.cache(lambda key: frozenset(sets[key]))
    pairs = set()
    for key in sample:
        size, mine = len(sets[key]), members(key)
        suitable = slice(bisect_left(sizes, -(-4 * size // 5)), bisect_right(sizes, 5 * size // 4))
        for other, theirs in zip(by_size[suitable], sizes[suitable], strict=True):
            if max(size, theirs) >= least and alike(size, theirs, len(mine & members(other))) and other != key:
                pairs.add((min(key, other), max(key, other)))
    return pairs


def search(sets: Mapping[int, Sequence[int]], least: int = 0) -> tuple[list[tuple[int, int]], dict[str, int]]:
    """Return the near pairs, and what a comparison of every `SAMPLE_ONE_IN`-th set with all others says of them."""
    pairs = near_pairs(sets, least)
    sample = {key for key in sets if key % SAMPLE_ONE_IN == 0}
    found = {pair for pair in pairs if sample.intersection(pair)}
    truth = sampled_pairs(sets, least, sample)
    return pairs, {"pairs": len(truth), "missed": len(truth - found), "wrong": len(found - truth)}


def clusters_of(pairs: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Return the groups that ``pairs`` connect, each in order."""
    leader: dict[int, int] = {}

    def find(key: int) -> int:
        while leader.setdefault(key, key) != key:
            leader[key] = key = leader[leader[key]]
        return key

    for one, other in pairs:
        low, high = sorted((find(one), find(other)))
        leader[high] = low
    members: dict[int, list[int]] = defaultdict(list)
    for key in sorted(leader):
        members[find(key)].append(key)
    return list(members.values())


class Tally:
    """Counts of files read one after the other; tallies add up in any order."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.names: Counter[str] = Counter()
        self.unreadable: list[tuple[str, str]] = []

    def read(self, root: str, file: str) -> list[Found]:
        """Count a file; return its functions that are long enough to compare."""
        source = (Path(root) / file).read_bytes()
        self.counts.update(files=1, bytes=len(source), lines=source.count(b"\n"))
        try:
            found, tokens, names = read_functions(source)
        except (SyntaxError, tokenize.TokenError) as error:
            self.unreadable.append((file, str(error)))
            return []
        self.counts.update(tokens=tokens, functions=len(found))
        self.names.update(names)
        return [
            (one.digest(), len(one.raw), (file, one.line, one.name), one.shingles())
            for one in found
            if len(one.raw) >= MIN_TOKENS
        ]

    def add(self, other: Tally) -> None:
        self.counts.update(other.counts)
        self.names.update(other.names)
        self.unreadable.extend(other.unreadable)


def read_files(root: str, files: Iterable[str]) -> tuple[Tally, list[Found]]:
    """Return the counts and functions of these files."""
    tally = Tally()
    return tally, [found for file in files for found in tally.read(root, file)]


class Group:
    """All copies of a function: their places, and (once) its tokens and shingles."""

    def __init__(self, tokens: int, shingles: Shingles) -> None:
        self.tokens, self.shingles = tokens, shingles
        self.places: list[Place] = []


def add_to_groups(groups: dict[bytes, Group], functions: Iterable[Found]) -> None:
    for digest, tokens, place, shingles in functions:
        groups.setdefault(digest, Group(tokens, shingles)).places.append(place)


def in_order(groups: Iterable[Group]) -> list[Group]:
    """Return the groups sorted by their first place, independent of the order of work."""
    return sorted(groups, key=lambda group: min(group.places))


def summary(tally: Tally, groups: Sequence[Group], pairs: Iterable[tuple[int, int]]) -> dict[str, Any]:
    """Return the result, in an order that does not depend on the order of work."""

    def described(members: Iterable[Group]) -> dict[str, Any]:
        members = list(members)
        places = sorted(place for group in members for place in group.places)
        return {
            "tokens": max(group.tokens for group in members),
            "functions": [f"{path}:{line} {name}" for path, line, name in places],
        }

    pairs = sorted(pairs)
    exact = [described([group]) for group in groups if len(group.places) > 1]
    near = [described(groups[key] for key in cluster) for cluster in clusters_of(pairs)]
    return {
        "counts": dict(sorted(tally.counts.items())),
        "compared": sum(len(group.places) for group in groups),
        "unreadable": sorted(list(item) for item in tally.unreadable),
        "names": sorted(tally.names.items(), key=lambda item: (-item[1], item[0]))[:20],
        "exact": sorted(exact, key=lambda one: -len(one["functions"]) * one["tokens"]),
        "near": sorted(near, key=lambda one: -len(one["functions"])),
        "near_pairs": len(pairs),
        "near_pairs_digest": hashlib.sha256(repr(pairs).encode()).hexdigest(),
    }


def sample_of(groups: Sequence[Group], counts: Mapping[str, int]) -> dict[str, int]:
    """Return what `search` counted, in all bands together, with the number of functions in the sample."""
    return {"functions": len(range(0, len(groups), SAMPLE_ONE_IN)), **counts}


# Files to a result, simply --------------------------------------------------------------------------------------------


def plain_result(root: str, files: Iterable[str]) -> tuple[dict[str, Any], dict[str, int]]:
    """Return result and sample as one plain process computes them, by the same functions as the workers: no pool,
    actor, shards and bands; nothing travels.
    """
    groups: dict[bytes, Group] = {}
    tally, functions = read_files(root, files)
    add_to_groups(groups, functions)
    ordered = in_order(groups.values())
    pairs, sample = search({key: group.shingles for key, group in enumerate(ordered)})
    return summary(tally, ordered, pairs), sample_of(ordered, sample)


if __name__ == "__main__":
    json.dump(plain_result(*json.load(sys.stdin)), sys.stdout)
