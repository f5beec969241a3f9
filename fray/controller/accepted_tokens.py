"""Tokens of the cluster that a running controller accepts: the present one, and the previous one while it is replaced.

Invariant: a token is never sent, not even to a peer that has proven the previous one, which may have been stolen: new
tokens reach nodes and drivers by their files.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path

import trio
from attrs import define, field

from fray.errors import FrayError, InvalidRequest
from fray.model.ids import mint
from fray.model.join_tokens import TOKENS_LIMIT, split_pins, with_pins
from fray.net.atomic_file import write_atomically
from fray.net.cluster_token import read_token_file

CHECK_S = 10.0
"""Seconds between looks at the file."""
LENGTH = 40
"""Characters of a token that is made here, of 5 random bits each."""

_log = logging.getLogger("fray.controller")


@define(eq=False)
class AcceptedTokens:
    """Tokens of a running controller, the present one first. `refresh` is called now and then, by `run`.

    Args:
        read: returns the tokens as they are on disk.
        on_change: called with the tokens that are accepted no longer, after a change.
    """

    read: Callable[[], tuple[str, ...]] = field(repr=False)
    on_change: Callable[[tuple[str, ...]], None] = lambda dropped: None
    accepted: tuple[str, ...] = field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        self.accepted = self.read()

    def refresh(self) -> None:
        """Take over tokens that were replaced; if they cannot be read, keep those that are known."""
        try:
            found = self.read()
        except (FrayError, OSError) as error:
            _log.error("%s; keeping the tokens that were in it", error)
            return
        if found == self.accepted:
            return
        before, self.accepted = self.accepted, found
        if found[0] != before[0]:
            _log.warning("the cluster's token was replaced", extra={"accepted": len(found)})
        dropped = tuple(token for token in before if token not in found)
        if dropped:
            _log.warning("a previous token of the cluster is accepted no longer")
        self.on_change(dropped)

    async def run(self) -> None:
        """Refresh until cancelled."""
        while True:
            await trio.sleep(CHECK_S)
            self.refresh()


# Replacing it --------------------------------------------------------------------------------------------------------


def rotate_token(file: Path, rng: random.Random) -> None:
    """Put a new token in front of the present one, which becomes the previous one.

    Raises:
        InvalidRequest: the file is missing or invalid, or a previous token is still accepted.
        OSError: it cannot be written.
    """
    lines = _read_lines(file)
    if len(lines) >= TOKENS_LIMIT:
        raise InvalidRequest(
            f"{file} has a previous token already: drop it with `fray key rotate-token --finish`, once `fray key list` "
            "names nothing that uses it"
        )
    present = lines[0]
    new = with_pins(mint(rng, LENGTH), split_pins(present)[1])
    write_atomically(file, f"{new}\n{present}\n".encode(), durable=True)


def drop_previous_token(file: Path) -> None:
    """Leave the present token alone in the file. Raises as `rotate_token`, but not if there is no previous one."""
    write_atomically(file, f"{_read_lines(file)[0]}\n".encode(), durable=True)


def _read_lines(file: Path) -> list[str]:
    if not file.exists():
        raise InvalidRequest(
            f"{file} does not exist: --token-file names the file from which fray-controller has its token; one that it "
            "got in FRAY_TOKEN is replaced by a restart with another one"
        )
    read_token_file(str(file))
    return [line.strip() for line in file.read_text().splitlines() if line.strip()]
