"""Token of the cluster, as a dialer has it: given once, or in a file that is read again for each dial."""

from __future__ import annotations

import logging
from pathlib import Path

import trio
from attrs import define, field

from fray.errors import InvalidRequest
from fray.model.join_tokens import split_tokens
from fray.net.transport import Credential

CLUSTER_KEY = "cluster"
"""Key id of the cluster's token, of the present one and of the previous one: a session continues with either."""
TOKEN_FILE_VARIABLE = "FRAY_TOKEN_FILE"
WARN_EVERY_S = 60.0
PREVIOUS_S = 30.0
"""Seconds after a refusal for which the previous token of a file is used."""

_log = logging.getLogger("fray.net")


@define(eq=False)
class ClusterToken:
    """Source of a dialer's credential; see `CredentialSource`.

    A file of two lines has the present token and the previous one (``fray key rotate-token``). The next one is tried
    when one is refused, so that files may be replaced before or after the controller has taken over the new token.

    Args:
        tokens: those that were found first, at least one.
        file: read again for each dial. Empty: the tokens were given in another way, and stay.
    """

    _tokens: tuple[str, ...] = field(repr=False)
    _file: str = ""
    _position: int = field(default=0, init=False)
    _refused_at: float = field(default=float("-inf"), init=False)
    _warned_at: float = field(default=float("-inf"), init=False)

    def current(self) -> Credential:
        """Return the credential for the next dial."""
        if self._file:
            self._read()
        # The controller may have read its file later than this side; it takes the present token by now.
        if self._position and trio.current_time() >= self._refused_at + PREVIOUS_S:
            self._position = 0
        return Credential(CLUSTER_KEY, self._tokens[self._position % len(self._tokens)])

    def on_refused(self, *, was_accepted: bool) -> bool:
        """Take the refusal of the current token; return whether there is another to try now."""
        self._position, self._refused_at = self._position + 1, trio.current_time()
        has_other = self._position % len(self._tokens) != 0
        # One that was never accepted may be wrong, and the error of the dial says so.
        if was_accepted and not has_other and trio.current_time() >= self._warned_at + WARN_EVERY_S:
            self._warned_at = trio.current_time()
            advice = (
                f"write the present one into {self._file}, which is read again for each attempt"
                if self._file
                else "start this process with the present one, or with a token file, which is read again"
            )
            _log.warning("the controller does not accept this token any more: it was replaced; %s", advice)
        return has_other

    def _read(self) -> None:
        try:
            tokens = read_token_file(self._file)[0]
        except InvalidRequest as error:
            # It is being replaced, or the disk is not mounted: what was read before may still count.
            _log.warning("%s; keeping what was in it", error)
            return
        if tokens != self._tokens:
            self._tokens, self._position = tokens, 0
            _log.info("the token in %s has changed", self._file)


def read_token_file(file: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the tokens in a file, and the fingerprints of the certificate authority that it has.

    Raises:
        InvalidRequest: it cannot be read, is empty, or has more than two lines.
    """
    try:
        tokens, pins = split_tokens(Path(file).expanduser().read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the token file {file} cannot be read: {error}") from None
    except InvalidRequest as error:
        raise InvalidRequest(f"the token file {file}: {error}") from None
    if not tokens:
        raise InvalidRequest(f"the token file {file} is empty")
    return tokens, pins
