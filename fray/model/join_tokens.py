"""One-time tokens with which new machines join a cluster: their format and checks. Pure.

A join token lets the hosts of one machine unit (a VM, or a TPU slice of several) introduce themselves to the cluster,
each once and until a given time; each then has a key of its own. The token is ``KEY-ID:SECRET``, to which
`with_pins` may add fingerprints. Key ids are not secret: they say what the key is valid for, and the
controller derives the key from them, so it stores neither.
"""

from __future__ import annotations

from collections.abc import Sequence

from fray.errors import InvalidRequest
from fray.model.frozen import frozen
from fray.model.ids import NodeName, check_name

JOIN_KEY = "join:"
"""Prefix of the key ids of join tokens."""
MACHINE_KEY = "machine:"
"""Prefix of the key ids of hosts that have joined."""
MACHINE_ATTRIBUTE = "machine"
"""The node attribute that names the machine unit a node belongs to."""
WORKER_ATTRIBUTE = "tpu_worker"
"""The node attribute that says which host of its unit a node is, from 0."""

JOIN_LIFE_S = 3600.0
"""Default lifetime of a join token."""
JOIN_LIFE_LIMIT_S = 30 * 86_400.0
"""Requests for machines may be queued for weeks; a token does not live longer than this."""
HOSTS_LIMIT = 10_000
"""Hosts of one unit."""


@frozen
class JoinKey:
    """Validity of a join token."""

    unit: str
    hosts: int
    expires_s: int
    """Expiry on the clock of the cluster that issued the token; never compared with another clock."""

    @property
    def key_id(self) -> str:
        return f"{JOIN_KEY}{self.unit}:{self.hosts}:{self.expires_s}"


@frozen
class MachineKey:
    """Identity of a host's own key."""

    unit: str
    worker: int
    node: NodeName

    @property
    def key_id(self) -> str:
        return f"{MACHINE_KEY}{self.unit}:{self.worker}:{self.node}"


def read_join_key(key_id: str) -> JoinKey | None:
    """Inverse of `JoinKey.key_id`; None for any other key id."""
    parts = key_id.removeprefix(JOIN_KEY).split(":")
    if not key_id.startswith(JOIN_KEY) or len(parts) != 3 or not all(map(_is_number, parts[1:])):
        return None
    key = JoinKey(parts[0], int(parts[1]), int(parts[2]))
    return key if key.key_id == key_id else None


def read_machine_key(key_id: str) -> MachineKey | None:
    """Inverse of `MachineKey.key_id`; None for any other key id."""
    parts = key_id.removeprefix(MACHINE_KEY).split(":")
    if not key_id.startswith(MACHINE_KEY) or len(parts) != 3 or not _is_number(parts[1]):
        return None
    key = MachineKey(parts[0], int(parts[1]), parts[2])
    return key if key.key_id == key_id else None


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 12


def write_token(key_id: str, key: str) -> str:
    """Return the token as text, for files and variables."""
    return f"{key_id}:{key}"


def read_token(token: str) -> tuple[JoinKey, str]:
    """Return the validity of a token and its secret.

    Raises:
        InvalidRequest: not a join token. The message does not repeat the value: it may be another secret.
    """
    token, _ = split_pins(token)
    key_id, _, key = token.rpartition(":")
    validity = read_join_key(key_id)
    if validity is None or not key:
        raise InvalidRequest(
            "not a join token: it must start with join: and comes from `fray token --for-machine`, or from the "
            "controller that requested this machine (the token of the cluster goes into --token-file)"
        )
    return validity, key


def check_join(unit: str, hosts: int, life_s: float) -> None:
    """Raise InvalidRequest unless a join token of these values can be issued."""
    check_name(unit, "a machine")
    if not 1 <= hosts <= HOSTS_LIMIT:
        raise InvalidRequest(f"machine {unit!r}: {hosts} hosts must be 1 to {HOSTS_LIMIT}")
    if not 1 <= life_s <= JOIN_LIFE_LIMIT_S:
        raise InvalidRequest(
            f"machine {unit!r}: a join token is valid for 1 to {JOIN_LIFE_LIMIT_S:.0f} seconds, not {life_s:g}"
        )


# Fingerprints of the certificate authority, in tokens of any kind -----------------------------------------------------

MARK = "#"
"""Separates the secret from the fingerprints: ``SECRET#FINGERPRINT[,FINGERPRINT]``. What authenticates a node or driver
is then also what it needs to recognize the controller."""


def with_pins(token: str, pins: Sequence[str]) -> str:
    """Return the token with these fingerprints, in place of those it may have."""
    secret, _ = split_pins(token)
    return f"{secret}{MARK}{','.join(pins)}" if pins else secret


TOKENS_LIMIT = 2
"""Tokens of a cluster that count at a time: while one is replaced, the previous one does, too."""


def split_tokens(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the secrets in the text of a cluster's token, and the fingerprints of the first.

    Each line is a token: the present one, and while it is being replaced the previous one.

    Raises:
        InvalidRequest: there are more lines.
    """
    lines = [split_pins(line) for line in text.splitlines() if line.strip()]
    if len(lines) > TOKENS_LIMIT:
        raise InvalidRequest(
            f"a token has at most {TOKENS_LIMIT} lines, the present one and the previous one, not {len(lines)}"
        )
    return tuple(secret for secret, _ in lines), lines[0][1] if lines else ()


def with_pins_of_all(text: str, pins: Sequence[str]) -> str:
    """Return the text of a cluster's token with these fingerprints in each line."""
    return "".join(f"{with_pins(line, pins)}\n" for line in text.splitlines() if line.strip())


def split_pins(text: str) -> tuple[str, tuple[str, ...]]:
    """Return the secret of a token and the fingerprints in its text, which are not checked."""
    secret, mark, pins = text.strip().rpartition(MARK)
    # A secret may contain the mark; fingerprints are hexadecimal.
    if not mark or not all(len(pin) == 64 and pin.isalnum() for pin in pins.split(",")):
        return text.strip(), ()
    return secret, tuple(pins.split(","))
