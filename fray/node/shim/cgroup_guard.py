"""Plug-in that moves the attempt's processes into its control group and reports the kernel's OOM kills."""

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

# Moving a process waits for the kernel, 10 to 20 ms where nothing was moved lately, and a warm start takes less. So
# attempts start outside and are moved a moment later, off the critical path; until then their memory is watched as in
# attempts without a group (`fray.node.shim.resource_usage`).
ENTER_AFTER_S = 0.05
CHECK_EVERY_S = 0.25
"""Seconds between reads of the kernel's count of kills, where there is a limit."""
_AMBIGUOUS_CAUSES = (EndReason.KILLED, EndReason.FAILURE, EndReason.OUT_OF_MEMORY)
"""Causes that a kill by the kernel may look like from outside. The kernel counts kills in groups among the machine's,
too."""


class CgroupGuard(ShimPlugin):
    """Holds one attempt in its control group.

    Args:
        limit_bytes: memory limit of the group; 0: it only holds the processes together.
        fail: called with the outcome when the kernel has killed a process: the others end too.
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
            # The kernel kills one process of the group (all of them only with memory.oom.group): end the rest.
            self._fail(self._oom_outcome(self.group.peak_bytes()))
            self._next_at = None
            return
        self._next_at = time.monotonic() + CHECK_EVERY_S if self.limit_bytes else None

    def _move_processes(self) -> None:
        """Move processes until none is found outside; those forked inside are inside."""
        self.processes_moved = True
        # The shim itself stays outside, so that the limit never kills the process that reports the outcome. Until none
        # is left: a process may fork between the look and its move.
        while outside := set(descendants(os.getpid())) - set(self.group.pids()):
            before = len(outside)
            for pid in outside:
                self.group.add_process(pid)
            if before == len(set(descendants(os.getpid())) - set(self.group.pids())):
                return  # zombies, or a system that accepts the move and does nothing

    def on_node_lost(self) -> None:
        self.group.remove()

    def amend_outcome(self, outcome: Outcome) -> Outcome:
        """Report an OOM kill as the cause of what looks like another failure."""
        # Of the group and of the samples: the group's peak leaves out what was used before the move, and old kernels
        # provide none.
        peak_bytes = max(self.group.peak_bytes() if self.processes_moved else 0, outcome.peak_memory_bytes)
        if self.limit_bytes and outcome.cause in _AMBIGUOUS_CAUSES and self.group.oom_kills():
            outcome_of_kill, message = self._oom_outcome(peak_bytes), ""
            if outcome.cause is not EndReason.OUT_OF_MEMORY:
                message = f". Its own outcome: {outcome.message}"
            return evolve(
                outcome_of_kill,
                message=outcome_of_kill.message + message,
                exit_code=outcome.exit_code,
                signal=outcome.signal,
                duration_s=outcome.duration_s,
                cpu_s=outcome.cpu_s,
                captured=outcome.captured,
            )
        return evolve(outcome, peak_memory_bytes=peak_bytes)

    def _oom_outcome(self, peak_bytes: int) -> Outcome:
        return out_of_memory_outcome(self.limit_bytes, peak_bytes, "was killed by the kernel")
