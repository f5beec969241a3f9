"""Names and ids. Authors mint random ids, so a request can be repeated without taking effect twice."""

from __future__ import annotations

import random
import re
from typing import TypeAlias

from fray.errors import InvalidRequest

JobId: TypeAlias = str
"""``{name}-{token}``; survives retries."""
AttemptId: TypeAlias = str
"""``{job_id}:{generation}:{member}``: one incarnation of one member of a job."""
SessionId: TypeAlias = str
ActorId: TypeAlias = str
"""Id of an actor: its job's id if made by ``create_actor``, a separate token if registered with an ``ActorServer``."""
NodeName: TypeAlias = str
Namespace: TypeAlias = str
BlobId: TypeAlias = str
"""SHA-256 of the content, hexadecimal."""

_ALPHABET = "abcdefghijkmnpqrstuvwxyz23456789"
_CHARACTER_BITS = 5
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+=/-]*\Z")
_MADE_UP_LENGTH, _DIGIT = 6, "7"
_MADE_UP = re.compile(rf"-(?=[a-z]*[2-9])[{_ALPHABET}]{{{_MADE_UP_LENGTH}}}(?=-[0-9]+\Z|\Z)")
_NO_DIGITS = str.maketrans(dict.fromkeys("0123456789", ""))
NAME_LIMIT = 200
ANONYMOUS_PREFIX = "anon-"
"""Prefix of the namespaces of drivers that requested none."""

INTERNAL_PREFIX = "_fray."
"""Prefix of the names of Fray's internal actors, which are not listed."""


def mint(rng: random.Random, length: int = 12) -> str:
    """Return a random token (60 bits by default). ``rng`` is `random.SystemRandom` outside simulation."""
    # One draw: `choice` asks the system for randomness up to twice for each character.
    bits = rng.getrandbits(_CHARACTER_BITS * length)
    return "".join([_ALPHABET[bits >> at & 31] for at in range(0, _CHARACTER_BITS * length, _CHARACTER_BITS)])


def mint_name(label: str, rng: random.Random) -> str:
    """Return ``label-token``, for objects without a name of their own; `stem_of` removes the token again."""
    token = mint(rng, _MADE_UP_LENGTH)
    return f"{label}-{token if any(map(str.isdigit, token)) else token[:-1] + _DIGIT}"


def stem_of(name: str) -> str:
    """Return the common stem of names generated from one label: the name without its token and without all digits.

    A generated token always has a digit among its letters: few real words look like that, and a name that ends with
    such a word loses it here.
    """
    return _MADE_UP.sub("", name).translate(_NO_DIGITS)


def mint_job_id(name: str, rng: random.Random) -> JobId:
    return f"{name}-{mint(rng)}"


def attempt_id(job_id: JobId, generation: int, member: int) -> AttemptId:
    return f"{job_id}:{generation}:{member}"


def split_attempt(attempt: AttemptId) -> tuple[JobId, int, int]:
    """Inverse of `attempt_id`."""
    job_id, generation, member = attempt.rsplit(":", 2)
    return job_id, int(generation), int(member)


def check_name(name: str, what: str) -> str:
    """Return ``name`` if it may name a job or an actor.

    Raises:
        InvalidRequest: empty, longer than 200 characters, or with a character outside ``A-Z a-z 0-9 _ . @ + = / -``.
    """
    if not isinstance(name, str) or not _NAME.match(name) or len(name) > NAME_LIMIT:
        suggestion = re.sub(r"[^A-Za-z0-9_.@+=/-]+", "-", str(name)).strip("-")[:NAME_LIMIT]
        if not isinstance(name, str) or not _NAME.match(suggestion):
            suggestion = "my-job"
        raise InvalidRequest(
            f"{name!r} cannot be the name of {what}: use 1 to {NAME_LIMIT} letters, digits and _ . @ + = / - "
            f"without blanks, for example {suggestion!r}"
        )
    return name


# Light actors --------------------------------------------------------------------------------------------------------

_LIGHT = "~"


def light_actor_id(host: ActorId, number: int) -> ActorId:
    """Return the id of light actor ``number`` in the process of ``host``; the id itself contains the actor's host."""
    return f"{host}{_LIGHT}{number}"


def split_actor_id(actor_id: ActorId) -> tuple[ActorId, int]:
    """Return the actor whose process hosts this one, and its number there; a process actor hosts itself as number 0."""
    host, mark, number = actor_id.rpartition(_LIGHT)
    return (host, int(number)) if mark else (actor_id, 0)
