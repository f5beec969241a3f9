"""Machines that join with tokens."""

from __future__ import annotations

from collections.abc import Mapping

import trio

from fray.errors import Unauthorized
from tests.simulation.operations.context import Act, OperationContext

JOINED_WITHIN_S = 400.0
"""Controllers are away for a while, and hosts retry."""


async def machine_let_in(b: OperationContext) -> str:
    """Two machines present one join token: one of them joins, and remains the owner, whatever dies meanwhile."""
    b.op("join token")
    token = await b.cluster.join_token(f"{b.token}.unit", life_s=10 * JOINED_WITHIN_S)
    let_in: list[str] = []
    refused: list[str] = []

    async def come(name: str, patience_s: float) -> None:
        try:
            with trio.move_on_after(patience_s):
                await b.join(token, name)
                let_in.append(name)
        except Unauthorized as error:
            b.check("P9", "was already used" in str(error), f"{name} was refused for something else: {error}")
            refused.append(name)

    names = [f"{b.token}.owner", f"{b.token}.thief"]
    async with trio.open_nursery() as nursery:
        for name in names:
            nursery.start_soon(come, name, JOINED_WITHIN_S)
    b.check("P9", len(let_in) <= 1, f"one join token has let in {' and '.join(let_in)}")
    b.check("P3", len(let_in) + len(refused) == 2, f"of {names} only {let_in or refused} heard of their token")
    await come(f"{b.token}.late", JOINED_WITHIN_S)
    b.check("P9", f"{b.token}.late" not in let_in, f"the spent join token of {let_in[0]} has let in a third machine")
    return f"{', '.join(let_in) or 'no machine'} joined, {', '.join(refused) or 'no machine'} refused"


ACTS: Mapping[str, Act] = {"machine let in": machine_let_in}
