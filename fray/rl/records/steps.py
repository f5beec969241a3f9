"""The groups of an update, from the journal of the run, and what failed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attrs import field, frozen

from fray.errors import InvalidRequest
from fray.rl.core.journal import BatchTaken, BatchTrained, Entry, SamplesAccepted, TaskDropped, TaskFailed
from fray.rl.core.trajectory_store import Sample
from fray.rl.journal_file import read_failures, read_journal
from fray.rl.records.run_files import JOURNAL_DIRECTORY
from fray.runtime.serialization.pickling import loads


@frozen
class RecordedGroup:
    """Samples of one task, that were compared with one another."""

    group_id: str
    samples: tuple[Sample, ...]

    @property
    def trajectories(self) -> list[dict[str, Any]]:
        """Return what its episodes brought, in the order of the tasks."""
        return [one for sample in self.samples for one in loads(sample.content)]

    @property
    def mean_reward(self) -> float:
        """Return the mean of the rewards of its trajectories."""
        rewards = [reward for sample in self.samples for reward in sample.rewards]
        return sum(rewards) / max(len(rewards), 1)


@frozen
class RecordedFailure:
    """An attempt of a task that failed."""

    task_id: str
    reason: str
    is_dropped: bool
    """True after its last attempt."""
    detail: str = ""
    """The end of its traceback."""


@frozen
class RecordedStep:
    """Groups of an update, and what failed meanwhile."""

    number: int
    groups: tuple[RecordedGroup, ...]
    failures: tuple[RecordedFailure, ...] = field(default=())

    @property
    def trajectories(self) -> list[dict[str, Any]]:
        """Return the trajectories as the trainer received them."""
        return [one for group in self.groups for one in group.trajectories]


def read_step(output: Path, number: int) -> RecordedStep:
    """Return what update ``number`` was made of.

    Raises:
        InvalidRequest: it was not done, or the journal of the run is missing.
    """
    journal = output / JOURNAL_DIRECTORY
    entries = read_journal(journal / f"step_{number}")
    wanted = _trained_samples(entries)
    if wanted is None:
        done = recorded_steps(output)
        listed = f"it has steps {done[0]} to {done[-1]}" if done else "none is"
        raise InvalidRequest(f"step {number} of {output} is not recorded: {listed}")
    found = _accepted(entries, wanted)
    # Those of asynchronous runs were rolled out during earlier updates.
    earlier = number - 1
    while len(found) < len(wanted) and earlier > 0:
        found |= _accepted(read_journal(journal / f"step_{earlier}"), wanted - found.keys())
        earlier -= 1
    return RecordedStep(number, _groups(list(found.values())), _failures(journal, number, entries))


def recorded_steps(output: Path) -> list[int]:
    """Return the numbers of the updates that are recorded."""
    directory = output / JOURNAL_DIRECTORY
    numbers = [int(path.name[5:]) for path in directory.glob("step_*") if path.name[5:].isdigit()]
    return [number for number in sorted(numbers) if _trained_samples(read_journal(directory / f"step_{number}"))]


def _trained_samples(entries: list[Entry]) -> set[str] | None:
    """Return the ids of the samples that were trained in the update that the entries end with."""
    taken: BatchTaken | None = None
    trained: set[str] | None = None
    for entry in entries:
        if isinstance(entry, BatchTaken):
            taken = entry
        elif isinstance(entry, BatchTrained) and taken is not None:
            trained = set(taken.sample_ids)
    return trained


def _accepted(entries: list[Entry], wanted: set[str]) -> dict[str, Sample]:
    # The last of a sample counts: it may have been rolled out again.
    return {
        sample.sample_id: sample
        for entry in entries
        if isinstance(entry, SamplesAccepted)
        for sample in entry.samples
        if sample.sample_id in wanted
    }


def _groups(samples: list[Sample]) -> tuple[RecordedGroup, ...]:
    """Return groups and samples in the order in which the trainer received them."""
    groups: dict[str, list[Sample]] = {}
    for sample in sorted(samples, key=lambda one: (one.task, one.run)):
        groups.setdefault(sample.task.group_id, []).append(sample)
    return tuple(RecordedGroup(name, tuple(found)) for name, found in groups.items())


def _failures(journal: Path, number: int, entries: list[Entry]) -> tuple[RecordedFailure, ...]:
    """Return the failures, those of tasks that were dropped first."""
    details = {(one["task"], one["reason"]): one["detail"] for one in read_failures(journal) if one["step"] == number}
    found = [
        RecordedFailure(
            entry.task.task_id,
            entry.reason,
            isinstance(entry, TaskDropped),
            details.get((entry.task.task_id, entry.reason), ""),
        )
        for entry in entries
        if isinstance(entry, TaskFailed | TaskDropped)
    ]
    return tuple(sorted(found, key=lambda one: not one.is_dropped))
