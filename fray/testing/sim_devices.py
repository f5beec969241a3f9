"""Accelerators that a simulated machine is slow to let go of: some in time, some only after the node has said so."""

from __future__ import annotations

import random
from collections.abc import Callable

import trio

from fray.model.specs import AttemptSpec
from fray.node.resources.allocator import FREE_S
from fray.testing.ground_truth import GroundTruth

SLOW, STUCK = 0.2, 0.15
"""Chances that a device is held for a part of `FREE_S`, and beyond it."""
LONGEST_S = 30.0


class SimDevices:
    """Of one machine, as `fray.node.resources.allocator.ResourceAllocator` is of a real one."""

    def __init__(self, machine: str, truth: GroundTruth) -> None:
        self.busy: dict[str, str] = {}
        self.on_busy: Callable[[], None] = lambda: None
        self._machine, self._truth = machine, truth

    def take_hold(self, ticket: AttemptSpec) -> float:
        """How long somebody will go on holding the devices of an attempt that has just ended; 0: nobody does."""
        rng = random.Random(f"grip {ticket.attempt_id}")
        draw = rng.random()
        if not ticket.devices or draw > SLOW + STUCK:
            return 0.0
        self._truth.gripped.update((self._machine, device) for device in ticket.devices)
        return rng.uniform(0.1, FREE_S / 2) if draw > STUCK else FREE_S + rng.uniform(1.0, LONGEST_S)

    async def wait_told(self, ticket: AttemptSpec, held_s: float) -> float:
        """Return when the end may be told: its devices are free, or busy. How long they are held still."""
        await trio.sleep(min(held_s, FREE_S))
        left_s = max(0.0, held_s - FREE_S)
        if left_s:
            self.busy = {**self.busy, **dict.fromkeys(ticket.devices, f"held by who came for {ticket.attempt_id}")}
            self.on_busy()
        else:
            self._let_go(ticket)
        return left_s

    async def wait_free(self, ticket: AttemptSpec, left_s: float) -> None:
        await trio.sleep(left_s)
        self._let_go(ticket)
        self.busy = {device: why for device, why in self.busy.items() if device not in ticket.devices}
        self.on_busy()

    def _let_go(self, ticket: AttemptSpec) -> None:
        self._truth.gripped.difference_update((self._machine, device) for device in ticket.devices)

    def drop(self) -> None:
        """The machine is gone, and with it whoever held something there."""
        self._truth.gripped = {grip for grip in self._truth.gripped if grip[0] != self._machine}
