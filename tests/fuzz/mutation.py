"""Mutation of valid examples, of bytes and of the JSON in them. All randomness is the caller's."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

INTERESTING = (0, 1, 2, 3, 63, 64, 125, 126, 127, 128, 253, 254, 255)
STRANGE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 10**400, 1e308, -0.0, float("inf"), 0.1),
    *(
        "",
        " ",
        "\0",
        "a\0b",
        "\ud800",
        "j\udcf6rg",
        "\x1b[2J",
        "../../etc/passwd",
        "/",
        ".",
        "x" * 300,
        "\u202e",
        "é" * 64,
    ),
    *([], {}, [[]], {"": ""}, [None], ["a"] * 100),
)
"""Values in place of any value of a message."""
NESTED = 1500
"""Depth of lists in lists, beyond what a recursive reader survives."""
SIZE_LIMIT_BYTES = 64 * 1024


def mutate(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    """Return ``data`` changed in one to four places, sometimes spliced with another example."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        rng.choice(_CHANGES)(changed, others, rng)
    return bytes(changed[:SIZE_LIMIT_BYTES])


def _flip(data: bytearray, others: Sequence[bytes], rng: random.Random) -> None:
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _set(data: bytearray, others: Sequence[bytes], rng: random.Random) -> None:
    if data:
        data[rng.randrange(len(data))] = rng.choice(INTERESTING)


def _set_number(data: bytearray, others: Sequence[bytes], rng: random.Random) -> None:
    width = rng.choice((2, 4, 8))
    if len(data) >= width:
        at = rng.randrange(len(data) - width + 1)
        number = rng.choice((0, 1, 2 ** (8 * width) - 1, 2 ** (8 * width - 1), len(data), rng.randrange(2**width)))
        data[at : at + width] = (number % 2 ** (8 * width)).to_bytes(width, rng.choice(("big", "little")))


def _insert(data: bytearray, others: Sequence[bytes], rng: random.Random) -> None:
    at = rng.randrange(len(data) + 1)
    data[at:at] = rng.choice(
        (rng.randbytes(rng.randrange(1, 9)), bytes([rng.choice(INTERESTING)]) * rng.randrange(1, 99))
    )


def _remove(data: bytearray, others: Sequence[bytes], rng: random.Random) -> None:
    if data:
        at = rng.randrange(len(data))
        del data[at : at + rng.choice((1, 2, 8, len(data)))]


def _repeat(data: bytearray, others: Sequence[bytes], rng: random.Random) -> None:
    at = rng.randrange(len(data) + 1)
    data[at:at] = data[at : at + rng.randrange(1, 64)] * rng.choice((1, 2, 40))


def _splice(data: bytearray, others: Sequence[bytes], rng: random.Random) -> None:
    other = rng.choice(others) if others else b""
    at = rng.randrange(len(data) + 1)
    data[at:] = other[rng.randrange(len(other) + 1) :]


_CHANGES: tuple[Callable[[bytearray, Sequence[bytes], random.Random], None], ...] = (
    *(_flip, _set, _set_number, _insert, _remove, _repeat, _splice),
)


def mutate_json(text: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    """Return JSON with some values replaced, removed, or taken from another example; bytes of it, one time in four."""
    if rng.random() < 0.25:
        return mutate(text, others, rng)
    try:
        return _mutate_values(json.loads(text), json.loads(rng.choice(others) if others else b"{}"), rng)
    except (ValueError, RecursionError):
        return mutate(text, others, rng)


def _mutate_values(data: Any, other: Any, rng: random.Random) -> bytes:
    for _ in range(rng.choice((1, 1, 2, 3))):
        places = list(_places(data))
        if not places:
            break
        holder, key = rng.choice(places)
        action = rng.randrange(6)
        if action == 0:
            del holder[key]
        elif action == 1:
            donors = list(_places(other))
            if donors:
                taken_from, taken = rng.choice(donors)
                holder[key] = copy.deepcopy(taken_from[taken])
        elif action == 2 and isinstance(holder, dict):
            holder[rng.choice(("t", "b", "", "x", "job_id"))] = copy.deepcopy(rng.choice(STRANGE))
        elif action == 3 and rng.random() < 0.05:
            return json.dumps(data).encode().replace(b"null", b"[" * NESTED + b"]" * NESTED, 1)
        else:
            holder[key] = copy.deepcopy(rng.choice(STRANGE))
    return json.dumps(data).encode()


def _places(data: Any) -> Any:
    """Yield each container in ``data`` with each of its keys or indexes."""
    if isinstance(data, dict | list):
        for key in list(data) if isinstance(data, dict) else range(len(data)):
            yield data, key
            yield from _places(data[key])
