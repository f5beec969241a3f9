"""One-time tokens of machines that are yet to come: what stands in them. Pure.

A join token lets the hosts of one machine unit (a VM, or a TPU slice of several) introduce themselves to the cluster,
each once and until a given time; each then has a key of its own. The token is ``KEY-ID:SECRET``. Key ids are no
secrets: they say what the key is good for, and the controller derives the key from them, so it keeps neither.
"""

from __future__ import annotations

from fray.errors import InvalidRequest
from fray.model.frozen import frozen
from fray.model.ids import NodeName, check_name

JOIN_KEY = "join:"
"""How the key ids of join tokens begin."""
MACHINE_KEY = "machine:"
"""How the key ids of hosts begin that have shown one."""
MACHINE_ATTRIBUTE = "machine"
"""The node attribute that names the machine unit a node belongs to."""
WORKER_ATTRIBUTE = "tpu_worker"
"""The node attribute that says which host of its unit a node is, from 0."""

JOIN_LIFE_S = 3600.0
"""How long a join token lives unless more is asked for."""
JOIN_LIFE_LIMIT_S = 30 * 86_400.0
"""Requests for machines may be queued for weeks; a token does not live longer than this."""
HOSTS_LIMIT = 10_000
"""Hosts of one unit."""


@frozen
class JoinKey:
    """What a join token is good for."""

    unit: str
    hosts: int
    expires_s: int
    """In the time of the cluster whose token it is; nobody else compares it with anything."""

    @property
    def key_id(self) -> str:
        return f"{JOIN_KEY}{self.unit}:{self.hosts}:{self.expires_s}"


@frozen
class MachineKey:
    """Whose a host's own key is."""

    unit: str
    worker: int
    node: NodeName

    @property
    def key_id(self) -> str:
        return f"{MACHINE_KEY}{self.unit}:{self.worker}:{self.node}"


def read_join_key(key_id: str) -> JoinKey | None:
    """Inverse of `JoinKey.key_id`; None for any other key id."""
    words = key_id.removeprefix(JOIN_KEY).split(":")
    if not key_id.startswith(JOIN_KEY) or len(words) != 3 or not all(map(_is_number, words[1:])):
        return None
    found = JoinKey(words[0], int(words[1]), int(words[2]))
    return found if found.key_id == key_id else None


def read_machine_key(key_id: str) -> MachineKey | None:
    """Inverse of `MachineKey.key_id`; None for any other key id."""
    words = key_id.removeprefix(MACHINE_KEY).split(":")
    if not key_id.startswith(MACHINE_KEY) or len(words) != 3 or not _is_number(words[1]):
        return None
    found = MachineKey(words[0], int(words[1]), words[2])
    return found if found.key_id == key_id else None


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdecimal() and len(word) <= 12


def write_token(key_id: str, key: str) -> str:
    """The token as one word that travels in files and variables."""
    return f"{key_id}:{key}"


def read_token(token: str) -> tuple[JoinKey, str]:
    """What the token is good for, and its secret.

    Raises:
        InvalidRequest: it is no join token. What was given is not repeated: it may be another secret.
    """
    key_id, _, key = token.rpartition(":")
    found = read_join_key(key_id)
    if found is None or not key:
        raise InvalidRequest(
            "what was given as join token is none: it begins with join: and comes from `fray token --for-machine`, or "
            "from the controller that asked for this machine (the token of the cluster goes into --token-file)"
        )
    return found, key


def check_join(unit: str, hosts: int, life_s: float) -> None:
    """Raises InvalidRequest: a token that cannot be."""
    check_name(unit, "a machine")
    if not 1 <= hosts <= HOSTS_LIMIT:
        raise InvalidRequest(f"machine {unit!r}: {hosts} hosts must be 1 to {HOSTS_LIMIT}")
    if not 1 <= life_s <= JOIN_LIFE_LIMIT_S:
        raise InvalidRequest(
            f"machine {unit!r}: a join token lives 1 to {JOIN_LIFE_LIMIT_S:.0f} seconds, not {life_s:g}"
        )
