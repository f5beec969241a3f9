"""Computation of the corpus example, without processes: text to functions, sets to pairs, pairs to a result.

*Exact copies* have the same tokens; comments, blank lines and layout do not count. *Near copies* share at least 0.8
of their token 5-shingles (Jaccard), where every number and every string counts as the same token. The tokens of a
nested function belong to it alone.
"""

from __future__ import annotations

import hashlib
import io
import token as kinds
import tokenize
from array import array
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

Place: TypeAlias = tuple[str, int, str]
"""File, line, name."""

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

    def shingles(self) -> set[tuple[str, ...]]:
        words = self.normal
        return set(zip(words, words[1:], words[2:], words[3:], words[4:], strict=False))


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


def alike(a: Collection[Any], b: Collection[Any], shared: int) -> bool:
    """Return whether the Jaccard index is at least 0.8, in whole numbers: shared / (a + b - shared) >= 4/5."""
    return 9 * shared >= 4 * (len(a) + len(b))


def near_pairs(sets: Mapping[int, frozenset[Any]], least: int = 0) -> list[tuple[int, int]]:
    """Return all pairs (i < j) with Jaccard >= 0.8 of which the larger set has at least ``least`` members; exact.

    Order all members by rarity. Two sets that share so much share one of their rarest members: of the larger set's
    first ``n - 4n/5 + 1``, of the smaller set's first ``n - 8n/9 + 1``. Only these are indexed and looked up.
    """
    rarity = Counter(member for members in sets.values() for member in members)
    index: dict[Any, list[int]] = defaultdict(list)
    pairs = []
    for key in sorted(sets, key=lambda key: (len(sets[key]), key)):
        mine = sets[key]
        size = len(mine)
        ordered = sorted(mine, key=lambda member: (rarity[member], member))
        if size >= least:
            prefix = ordered[: size - -(-4 * size // 5) + 1]
            candidates = {other for member in prefix for other in index.get(member, ())}
            for other in candidates:
                theirs = sets[other]
                if 5 * len(theirs) >= 4 * size and alike(mine, theirs, len(mine & theirs)):
                    pairs.append((min(key, other), max(key, other)))
        for member in ordered[: size - -(-8 * size // 9) + 1]:
            index[member].append(key)
    return sorted(pairs)


def sampled_pairs(sets: Mapping[int, frozenset[Any]], least: int, sample: Collection[int]) -> set[tuple[int, int]]:
    """Return the near pairs of the sets in ``sample`` by brute force: each with all sets of a suitable size."""
    pairs = set()
    for key in sample:
        mine = sets[key]
        for other, theirs in sets.items():
            low, high = sorted((len(mine), len(theirs)))
            if other != key and high >= least and 5 * low >= 4 * high and alike(mine, theirs, len(mine & theirs)):
                pairs.add((min(key, other), max(key, other)))
    return pairs


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

    def read(self, root: str, file: str) -> list[tuple[Place, Function]]:
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
        return [((file, one.line, one.name), one) for one in found if len(one.raw) >= MIN_TOKENS]

    def add(self, other: Tally) -> None:
        self.counts.update(other.counts)
        self.names.update(other.names)
        self.unreadable.extend(other.unreadable)


class Group:
    """All copies of a function: their places, and (once) its tokens and shingles."""

    def __init__(self, tokens: int, content: Any) -> None:
        self.tokens, self.content = tokens, content
        self.places: list[Place] = []


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


def packed(shingles: Iterable[tuple[str, ...]], ids: dict[str, int]) -> bytes:
    """Return eight bytes per shingle. Hashes of tuples of integers are equal in all processes, unlike those of
    strings."""
    for word in {word for shingle in shingles for word in shingle} - ids.keys():
        ids[word] = int.from_bytes(hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=7).digest())
    return array("q", sorted({hash(tuple([ids[word] for word in shingle])) for shingle in shingles})).tobytes()


def unpacked(shingles: bytes) -> frozenset[int]:
    return frozenset(array("q", shingles))


# Files to a result, simply --------------------------------------------------------------------------------------------


def plain_result(root: str, files: Iterable[str]) -> dict[str, Any]:
    """Return the result computed without pool, actor, bands and hashes: sets of five words, all compared at once."""
    tally = Tally()
    groups: dict[str, Group] = {}
    known: dict[tuple[str, ...], tuple[str, ...]] = {}
    for file in files:
        for place, one in tally.read(root, file):
            text = "\0".join(one.raw)
            if text not in groups:
                groups[text] = Group(len(one.raw), frozenset(known.setdefault(s, s) for s in one.shingles()))
            groups[text].places.append(place)
    ordered = in_order(groups.values())
    pairs = near_pairs({key: group.content for key, group in enumerate(ordered)})
    return summary(tally, ordered, pairs)
