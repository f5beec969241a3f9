"""The shim's hold on its attempt's control group: everything below is put into it, and the kernel's kills are
outcome_of_kill.

A process that is moved waits for the kernel, 10 to 20 ms where nothing was moved lately. So the attempt starts outside
and is put in by its shim a moment later (`ENTER_AFTER_S`), on nobody's way; what it took until then is watched as in
any other attempt (`fray.node.shim.resource_usage`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from attrs import evolve

from fray.model.specs import EndReason, Outcome
from fray.node.linux.cgroups import Cgroup
from fray.node.linux.process_tree import descendants
from fray.node.shim.plugin import ShimPlugin
from fray.node.shim.resource_usage import out_of_memory_outcome

ENTER_AFTER_S = 0.05
CHECK_EVERY_S = 0.25
"""How often the kernel's count of kills is read, where there is a limit."""
_AMBIGUOUS_CAUSES = (EndReason.KILLED, EndReason.FAILURE, EndReason.OUT_OF_MEMORY)
"""What a kill by the kernel looks like from outside. The kernel counts those of groups among the machine's, too."""


class CgroupGuard(ShimPlugin):
    """Of one attempt.

    Args:
        limit_bytes: what the group is limited to; 0: it only holds its processes together.
        fail: called with the outcome when the kernel has killed one of them: the others end too.
    """

    def __init__(self, group: Cgroup, limit_bytes: int, fail: Callable[[Outcome], None]) -> None:
        self.group, self.limit_bytes, self._fail = group, limit_bytes, fail
        self.processes_moved = False
        self._next_at: float | None = time.monotonic() + ENTER_AFTER_S

    def next_due_at(self) -> float | None:
        return self._next_at

    def on_timer(self, now: float) -> None:
        if self._next_at is None or now < self._next_at:
            return
        if not self.processes_moved:
            self._move_processes()
        elif self.group.oom_kills():
            self._fail(self._killed())
            self._next_at = None
            return
        self._next_at = time.monotonic() + CHECK_EVERY_S if self.limit_bytes else None

    def _move_processes(self) -> None:
        """Until a look finds nobody outside: whoever is forked by one that is inside is inside."""
        self.processes_moved = True
        while outside := set(descendants(os.getpid())) - set(self.group.pids()):
            before = len(outside)
            for pid in outside:
                self.group.add_process(pid)
            if before == len(set(descendants(os.getpid())) - set(self.group.pids())):
                return  # zombies, or a system that says yes and does nothing

    def on_node_lost(self) -> None:
        self.group.remove()

    def amend_outcome(self, outcome: Outcome) -> Outcome:
        """A death by the kernel's hand is the first cause of what looks like a failure afterwards."""
        peak_bytes = max(self.group.peak_bytes() if self.processes_moved else 0, outcome.peak_memory_bytes)
        if self.limit_bytes and outcome.cause in _AMBIGUOUS_CAUSES and self.group.oom_kills():
            outcome_of_kill, message = self._killed(), ""
            if outcome.cause is not EndReason.OUT_OF_MEMORY:
                message = f". What was seen of it: {outcome.message}"
            return evolve(
                outcome_of_kill,
                message=outcome_of_kill.message + message,
                exit_code=outcome.exit_code,
                signal=outcome.signal,
            )
        return evolve(outcome, peak_memory_bytes=peak_bytes)

    def _killed(self) -> Outcome:
        return out_of_memory_outcome(self.limit_bytes, self.group.peak_bytes(), "was killed by the kernel")
