"""Allocator of CPUs, control groups and accelerators to attempts.

Invariants: an accelerator is free for the next attempt when no process has it open. After `FREE_S` it is *busy*: the
node reports so, with the holder's pid, before it reports that the attempt has ended, so that it is not allocated in
between; and checks until it is free.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

import trio
from attrs import Factory, frozen

from fray.model.specs import AttemptSpec
from fray.net.process_identity import start_ticks
from fray.node.linux.cgroups import Cgroup, CgroupManager
from fray.node.linux.process_tree import descendants
from fray.node.prepare import NotPrepared
from fray.node.resources import device_holders
from fray.node.resources.allocation import Allocation
from fray.node.resources.cpu_pinning import CpuTable

FREE_S = 10.0
"""Seconds that the end of an attempt waits for its devices to be released."""
GROUP_END_S = 0.2
"""Seconds to empty a control group, whose processes have ended already; one that is not empty is retried with the
next."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0

log = logging.getLogger("fray.node")


@frozen(kw_only=True)
class _AttemptResources:
    attempt_spec: AttemptSpec
    allocation: Allocation
    shim: Callable[[], int | None]
    holders_before: frozenset[tuple[int, int]] = Factory(frozenset)
    """Processes that held its devices when it began: (pid, start ticks)."""


class ResourceAllocator:
    """Resources of one node.

    Args:
        groups: manager of control groups; None: there are none.
        enforce: limit attempts to the memory they asked for.
    """

    def __init__(
        self,
        groups: CgroupManager | None,
        *,
        enforce: bool = True,
        cpus: Iterable[int] | None = None,
        root: Path = Path("/"),
    ) -> None:
        self.groups, self.enforce, self.root = groups, enforce, root
        self.cpus = CpuTable(os.sched_getaffinity(0) if cpus is None else cpus)
        self.busy: dict[str, str] = {}
        """Devices that cannot be allocated now, and why."""
        self.on_busy: Callable[[], None] = lambda: None
        """Callback for every change of `busy`."""
        self.files = device_holders.device_files(root)
        self._allocated: dict[str, _AttemptResources] = {}
        self._busy_holders: dict[str, frozenset[tuple[int, int]]] = {}
        """Processes that have to release each busy device."""
        self._stale: list[Cgroup] = []

    @property
    def memory_limiter(self) -> str:
        """Node attribute ``memory_limit``: the way memory is limited."""
        if not self.enforce:
            return "off"
        return self.groups.kind if self.groups is not None else "watch"

    def leftover_groups(self) -> Iterable[Cgroup]:
        """Return the groups of an earlier run of this node."""
        return self.groups.leftover() if self.groups is not None else ()

    # Allocation

    async def allocate(
        self, attempt_spec: AttemptSpec, shim: Callable[[], int | None], *, isolated: bool
    ) -> Allocation:
        """Allocate what the attempt needs.

        Args:
            shim: returns the pid of its shim once there is one.
            isolated: it needs no group to hold it together.

        Raises:
            NotPrepared: there is not enough of something; the message says of what.
        """
        attempt_id, spec = attempt_spec.attempt_id, attempt_spec.spec
        # Memory that a job requests is a limit; the default of the resources is only a reservation: something has to be
        # placed, but the author did not mean a limit by it, and jobs on TPU hosts use a hundred times as much.
        limit_bytes = spec.memory_limit_bytes if self.enforce else 0
        # A PID namespace holds the processes together by itself, so an isolated attempt needs a group for its limit
        # only.
        path, version = self._make_group(attempt_spec, limit_bytes) if limit_bytes or not isolated else ("", 0)
        allocation = Allocation(
            limit_bytes=limit_bytes, group=path, group_version=version, cpus=self._pin(attempt_spec)
        )
        # Daemons of the driver (nvidia-persistenced) hold their devices for ever, so the end is compared with the
        # beginning.
        holders_before = frozenset(_process_marks(await self._holders(attempt_spec.devices)))
        self._allocated[attempt_id] = _AttemptResources(
            attempt_spec=attempt_spec, allocation=allocation, shim=shim, holders_before=holders_before
        )
        return allocation

    def adopt(
        self,
        attempt_spec: AttemptSpec,
        allocation: Allocation,
        shim: Callable[[], int | None],
        holders_before: Iterable[tuple[int, int]],
    ) -> None:
        """Note what an attempt of the program that ran in this process before has."""
        self._allocated[attempt_spec.attempt_id] = _AttemptResources(
            attempt_spec=attempt_spec, allocation=allocation, shim=shim, holders_before=frozenset(holders_before)
        )
        if allocation.cpus:
            self.cpus.allocated[attempt_spec.attempt_id] = allocation.cpus

    def allocated(self, attempt_id: str) -> tuple[Allocation, tuple[tuple[int, int], ...]]:
        """Return the allocation of an attempt, and the processes that held its devices before. Raises KeyError."""
        held = self._allocated[attempt_id]
        return held.allocation, tuple(held.holders_before)

    def _make_group(self, attempt_spec: AttemptSpec, limit_bytes: int) -> tuple[str, int]:
        if self.groups is None:
            return "", 0
        try:
            return self.groups.make(Path(attempt_spec.directory).name, limit_bytes).path, self.groups.version
        except OSError as error:
            # The attempt runs without one: its memory is watched by sampling, and the shim finds its processes.
            log.warning("%s: cannot create a control group: %s", attempt_spec.attempt_id, error)
            return "", 0

    def _pin(self, attempt_spec: AttemptSpec) -> tuple[int, ...]:
        if not attempt_spec.spec.pin_cpus:
            return ()
        count = attempt_spec.spec.demand.cpu_milli // 1000
        found = self.cpus.grant(attempt_spec.attempt_id, count)
        if found is None:
            free, whole = len(self.cpus.free()), len(self.cpus.cpus)
            raise NotPrepared(
                f"pin_cpus: node {attempt_spec.node} has {free} of its {whole} CPUs free to pin, {count} requested: "
                "it offers more than it has. Leave pin_cpus out, or correct cpu in the node's configuration"
            )
        return found

    # Release

    async def release(self, attempt_spec: AttemptSpec) -> None:
        """Release the resources of an attempt whose processes have ended; return when its devices are free, or busy."""
        held = self._allocated.get(attempt_spec.attempt_id)
        if held is None:
            return
        try:
            if attempt_spec.devices:
                await self._wait_free(held)
        finally:
            self.release_now(attempt_spec)

    def release_now(self, attempt_spec: AttemptSpec) -> None:
        """Release everything that needs no waiting."""
        held = self._allocated.pop(attempt_spec.attempt_id, None)
        self.cpus.release(attempt_spec.attempt_id)
        if held is not None and held.allocation.group:
            self._stale.append(Cgroup(held.allocation.group, held.allocation.group_version))
        # A group with unkillable processes stays behind; each later release tries it again.
        self._stale = [group for group in self._stale if group.kill_and_remove(limit_s=GROUP_END_S)]

    async def _wait_free(self, held: _AttemptResources) -> None:
        pause_s, deadline = FIRST_PAUSE_S, trio.current_time() + FREE_S
        while found := await self._foreign_holders(held):
            if trio.current_time() >= deadline:
                self._mark_held(found)
                return
            await trio.sleep(pause_s)
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)
        # A killed process leaves libtpu's lock file behind, which the next one may take for a TPU in use.
        if any(device.startswith("tpu") for device in held.attempt_spec.devices):
            device_holders.remove_stale_lock(self.root)

    async def _holders(self, devices: Iterable[str]) -> dict[int, set[str]]:
        files = [self.files[device] for device in devices if device in self.files]
        if not files:
            return {}
        # In a thread: all descriptors of all processes of the machine are read.
        return await trio.to_thread.run_sync(partial(device_holders.holders, files, self.root))

    async def _foreign_holders(self, held: _AttemptResources) -> dict[int, set[str]]:
        """Return the processes that hold its devices and have no right to."""
        found = await self._holders(held.attempt_spec.devices)
        if found:
            others = [one.shim() for one in self._allocated.values() if one is not held]
            own_pids = {pid for shim in others if shim is not None for pid in descendants(shim)}
            found = {pid: files for pid, files in found.items() if pid not in own_pids}
        return {pid: files for pid, files in found.items() if not held.holders_before & set(_process_marks([pid]))}

    # Busy devices

    def mark_busy(self, reasons: Mapping[str, str], holders: Iterable[int] = ()) -> None:
        """Mark these devices as busy, each with its reason, until `mark_free`, or `wait_released` by ``holders``."""
        if reasons:
            # Replaced and never modified: the reports of the node compare it with the dict they sent last.
            self.busy = {**self.busy, **reasons}
            self._busy_holders.update(dict.fromkeys(reasons, frozenset(_process_marks(holders))))
            log.error("devices unavailable: %s", "; ".join(f"{device}: {why}" for device, why in reasons.items()))
            self.on_busy()

    def mark_survivors_busy(self, is_ours: Callable[[int], bool]) -> None:
        """Mark devices as busy that processes of an earlier run still hold, at the node's start."""
        found = device_holders.holders(list(self.files.values()), self.root)
        self._mark_held({pid: files for pid, files in found.items() if is_ours(pid)})

    def _mark_held(self, found: Mapping[int, set[str]]) -> None:
        texts = device_holders.device_holder_text(found, self.root)
        reasons = {device: f"held by {texts[path]}" for device, path in self.files.items() if path in texts}
        self.mark_busy(reasons, found)

    def mark_free(self, devices: Iterable[str]) -> None:
        """Mark these devices as free."""
        gone = set(devices) & set(self.busy)
        if gone:
            self.busy = {device: why for device, why in self.busy.items() if device not in gone}
            log.warning("devices available again: %s", ", ".join(sorted(gone)))
            self.on_busy()

    async def wait_released(self, devices: Iterable[str]) -> None:
        """Check until the holders of these busy devices have released each, and mark it as free."""
        devices, pause_s = list(devices), FIRST_PAUSE_S
        # Devices without known holders are freed by `mark_free` only: those of unkillable processes, when their shim
        # ends.
        while waiting := [device for device in devices if device in self.busy and self._busy_holders[device]]:
            await trio.sleep(pause_s)
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)
            found = await self._holders(waiting)
            self.mark_free([device for device in waiting if not self._is_still_held(device, found)])

    def _is_still_held(self, device: str, found: Mapping[int, set[str]]) -> bool:
        pids = [pid for pid, files in found.items() if self.files[device] in files]
        return bool(self._busy_holders[device] & set(_process_marks(pids)))


def _process_marks(pids: Iterable[int]) -> Iterable[tuple[int, int]]:
    for pid in pids:
        # With the start time, a reused pid does not pass for the process that held the device.
        if (ticks := start_ticks(pid)) is not None:
            yield pid, ticks
