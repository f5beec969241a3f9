"""Keys that count at the controller's listeners, a record of those that were refused, and who has which token."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from fray.controller.accepted_tokens import AcceptedTokens
from fray.controller.connections.validation import ATTEMPT_KEY
from fray.controller.context import ControllerContext
from fray.model.access.user_keys import INVITATION_KEY, USER_KEY
from fray.model.messages.people import AuditRecord
from fray.net.auth import KeyRegister
from fray.net.cluster_token import CLUSTER_KEY

ORIGINS_LIMIT = 50_000
"""Origins of connections whose token is remembered, before those that have ended are forgotten."""


class ConnectionKeys(KeyRegister):
    """Keys by their ids, and who has proven which token of the cluster.

    Args:
        origins: returns the origins of the present connections.
    """

    def __init__(
        self, context: ControllerContext, tokens: AcceptedTokens, origins: Callable[[], Collection[str]]
    ) -> None:
        self._context, self._tokens, self._origins = context, tokens, origins
        self._proven: dict[str, str] = {}

    def __call__(self, key_id: str) -> str | Sequence[str] | None:
        """Return the keys that count; None for attempts that have ended and for unknown ids."""
        if key_id == CLUSTER_KEY:
            return self._tokens.accepted
        if key_id.startswith((USER_KEY, INVITATION_KEY)):
            return self._context.people.key_of(key_id, self._context.inbox.current_time())
        attempt = key_id.removeprefix(ATTEMPT_KEY)
        # Neither the cluster's nor an attempt's: the key of a join token, or of a machine that has joined with one.
        if attempt == key_id:
            return self._context.join_tokens.key_of(key_id)
        # Keys of attempts end with them: a process that outlives its attempt gets no connection (P5).
        return self._context.attempt_key(attempt) if self._context.state.is_attempt_living(attempt) else None

    def on_outcome(self, key_id: str, remote: str, key: str | None) -> None:
        """Remember the token that a dialer has proven; record a dialer that was refused."""
        if key is None:
            self._record_refusal(key_id, remote)
        elif key_id == CLUSTER_KEY:
            if len(self._proven) >= ORIGINS_LIMIT:
                living = self._origins()
                self._proven = {origin: token for origin, token in self._proven.items() if origin in living}
            self._proven[remote] = key

    def on_account_refused(self, remote: str, uid: int) -> None:
        """Record a dialer that was refused for its account."""
        self._record_refusal("", remote, f"uid {uid} is another account of this machine")

    def has_previous_token(self, remote: str) -> bool:
        """Return whether the connection from ``remote`` was opened with a token that is not the present one."""
        return self._proven.get(remote, self._tokens.accepted[0]) != self._tokens.accepted[0]

    def has_token_of(self, remote: str, tokens: Collection[str]) -> bool:
        """Return whether the connection from ``remote`` was opened with one of these tokens."""
        return self._proven.get(remote) in tokens

    def _record_refusal(self, key_id: str, remote: str, why: str = "") -> None:
        now = self._context.inbox.current_time()
        is_known = self(key_id) is not None
        why = why or ("wrong proof" if is_known else self._unknown_text(key_id, now))
        owner = self._context.people.owner_of(key_id)
        record = AuditRecord(
            at=now,
            user="",
            role="",
            action="connect",
            outcome=f"refused: {why}",
            target=f"key of {owner}" if owner else "",
            remote=remote,
            key=key_id,
        )
        # Other names are free to choose, also those of machines, whose keys are derived: all of them share one line.
        is_on_record = owner or (is_known and key_id.startswith((CLUSTER_KEY, ATTEMPT_KEY)))
        self._context.audit.write_stranger(record, key_id if is_on_record else "")

    def _unknown_text(self, key_id: str, now: float) -> str:
        if not key_id:
            return "no key"
        if key_id.startswith(ATTEMPT_KEY):
            return "the attempt has ended, or is unknown"
        if self._context.people.owner_of(key_id):
            return "the key has expired"
        return "unknown or revoked key"
