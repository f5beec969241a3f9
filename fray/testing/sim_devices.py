"""Accelerators that a simulated machine releases slowly: some in time, some only after the node has reported it."""

from __future__ import annotations

import random
from collections.abc import Callable

import trio

from fray.model.specs import AttemptSpec
from fray.node.resources.allocator import FREE_S
from fray.testing.ground_truth import GroundTruth

SLOW, STUCK = 0.2, 0.15
"""Probabilities that a device is held for a part of `FREE_S`, and beyond it."""
LONGEST_S = 30.0


class SimDevices:
    """Devices of one simulated machine, in place of `fray.node.resources.allocator.ResourceAllocator`."""

    def __init__(self, machine: str, truth: GroundTruth) -> None:
        self.busy: dict[str, str] = {}
        self.busy_since = 0.0
        """Time of the last change of `busy`."""
        self.on_busy: Callable[[], None] = lambda: None
        self._machine, self._truth = machine, truth

    def hold_devices(self, attempt: AttemptSpec) -> float:
        """Return how long another process keeps the devices of an attempt that has just ended; 0: not at all."""
        rng = random.Random(f"held {attempt.attempt_id}")
        draw = rng.random()
        if not attempt.devices or draw > SLOW + STUCK:
            return 0.0
        self._truth.held_devices.update((self._machine, device) for device in attempt.devices)
        return rng.uniform(0.1, FREE_S / 2) if draw > STUCK else FREE_S + rng.uniform(1.0, LONGEST_S)

    async def wait_reportable(self, attempt: AttemptSpec, held_s: float) -> float:
        """Wait until the end may be reported: its devices are free or busy. Return how long they are still held."""
        await trio.sleep(min(held_s, FREE_S))
        left_s = max(0.0, held_s - FREE_S)
        if left_s:
            why = f"held by a process left by {attempt.attempt_id}"
            self._change_busy({**self.busy, **dict.fromkeys(attempt.devices, why)})
        else:
            self._release(attempt)
        return left_s

    async def wait_free(self, attempt: AttemptSpec, left_s: float) -> None:
        await trio.sleep(left_s)
        self._release(attempt)
        self._change_busy({device: why for device, why in self.busy.items() if device not in attempt.devices})

    def _change_busy(self, busy: dict[str, str]) -> None:
        self.busy, self.busy_since = busy, trio.current_time()
        self.on_busy()

    def _release(self, attempt: AttemptSpec) -> None:
        self._truth.held_devices.difference_update((self._machine, device) for device in attempt.devices)

    def drop(self) -> None:
        """Lose the machine, and with it all holders of its devices."""
        self._truth.held_devices = {held for held in self._truth.held_devices if held[0] != self._machine}
