"""Samples that were accepted, in groups, until a batch of whole groups is taken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from enum import Enum
from typing import Any

from attrs import define, field, frozen

from fray.rl.core.tasks import RolloutTask
from fray.rl.core.versions import Segment


class ReadyRule(Enum):
    """Condition under which a batch may be taken (``check_batch_ready_function``)."""

    BATCH_SIZE = "batch_size"
    LOADED_BATCH_FINISHED = "loaded_batch_finished"
    BOTH = "batch_size_reached_and_loaded_batch_finished"

    @classmethod
    def _missing_(cls, value: object) -> ReadyRule | None:
        return cls.BATCH_SIZE if value == "batch_size_reached" else None


@frozen
class Sample:
    """Result of one episode: one or more trajectories, of which only the numbers are known here."""

    task: RolloutTask
    run: int
    """Index among the samples of the task; 0 if it has one."""
    segments: tuple[Segment, ...]
    """Versions of the weights that made the tokens, in order; empty for samples without tokens."""
    rewards: tuple[float, ...]
    """One for each trajectory."""
    content: Any = field(default=None, eq=False, repr=False)
    score: tuple[tuple[str, float], ...] = ()
    """Names and values, for validation; a name is repeated for each trajectory that has it."""

    @property
    def sample_id(self) -> str:
        return f"{self.task.task_id}/{self.run}"

    def __deepcopy__(self, memo: object) -> Sample:
        # Nothing of it changes, and its content may be large.
        return self


@define
class SampleGroup:
    """Samples that are compared with one another, and therefore trained together."""

    key: tuple[Hashable, ...]
    samples: list[Sample] = field(factory=list)
    missing: Counter[str] = field(factory=Counter)
    """Number of its samples that will never come, by the group of their tasks."""

    @property
    def slots(self) -> int:
        """Number of samples that it counts for in a batch: its own, and those that are missing."""
        return len(self.samples) + self.missing.total()

    @property
    def sample_ids(self) -> tuple[str, ...]:
        return tuple(sample.sample_id for sample in self.samples)

    @property
    def tasks(self) -> list[RolloutTask]:
        return sorted({sample.task for sample in self.samples})

    @property
    def first_task(self) -> RolloutTask:
        return min(sample.task for sample in self.samples)

    @property
    def segments(self) -> list[Segment]:
        return [segment for sample in self.samples for segment in sample.segments]

    @property
    def has_equal_rewards(self) -> bool:
        """True if all trajectories have the same reward, so that all advantages are 0."""
        return len({reward for sample in self.samples for reward in sample.rewards}) <= 1


@define
class TrajectoryStore:
    """Groups of samples. A group is complete when it has its size, less the samples of it that will never come.

    Those missing samples count towards the size of a batch (as slots), so that a batch whose episodes failed is smaller
    instead of never ready.

    Args:
        group_size: samples of a group; 1 where samples are not compared.
        batch_size: samples of a batch.
        rule: when a batch is ready.

    Raises:
        ValueError: no whole number of groups fills a batch.
    """

    group_size: int
    batch_size: int
    rule: ReadyRule = ReadyRule.BATCH_SIZE
    _growing: dict[tuple[Hashable, ...], SampleGroup] = field(init=False, factory=dict)
    _complete: list[SampleGroup] = field(init=False, factory=list)
    """Complete groups in the order in which they became so."""
    _missing: Counter[str] = field(init=False, factory=Counter)
    """Number of samples that will never come, of groups of tasks of which none has come yet."""
    lost_slots: int = field(init=False, default=0)
    """Samples of groups that are missing as a whole."""
    _complete_slots: int = field(init=False, default=0)
    """Slots of the complete groups: counted along, since it is asked for with each sample."""

    def __attrs_post_init__(self) -> None:
        self.check_sizes()

    def check_sizes(self) -> None:
        """Raise ValueError if no whole number of groups fills a batch."""
        if self.group_size < 1 or self.batch_size < 1 or self.batch_size % self.group_size:
            raise ValueError(
                f"invalid batch_size {self.batch_size}: expected a multiple of the group_size {self.group_size},"
                " since groups are never split"
            )

    @property
    def samples(self) -> list[Sample]:
        """All samples, in the order of their tasks."""
        groups = (*self._growing.values(), *self._complete)
        return sorted((sample for group in groups for sample in group.samples), key=lambda one: (one.task, one.run))

    @property
    def complete(self) -> Sequence[SampleGroup]:
        """The complete groups, those first that were complete first."""
        return tuple(self._complete)

    @property
    def complete_slots(self) -> int:
        """Samples of complete groups, and those that are missing for good."""
        return self._complete_slots + self.lost_slots

    @property
    def sample_count(self) -> int:
        """Number of all samples."""
        return sum(len(group.samples) for groups in (self._growing.values(), self._complete) for group in groups)

    @property
    def growing_samples(self) -> int:
        """Number of samples of groups that are not complete."""
        return sum(len(group.samples) for group in self._growing.values())

    def put(self, sample: Sample, key: tuple[Hashable, ...]) -> SampleGroup | None:
        """Add a sample to the group of this key. Return the group if it is complete now."""
        group = self._growing.setdefault(key, SampleGroup(key))
        group.samples.append(sample)
        if missing := self._missing.pop(sample.task.group_id, 0):
            self._note_missing(group, sample.task.group_id, missing)
        return self._complete_if_full(group)

    def miss(self, group_id: str, samples: int) -> None:
        """Note that samples of the tasks of a group will never come."""
        for group in self._growing.values():
            if any(sample.task.group_id == group_id for sample in group.samples):
                self._note_missing(group, group_id, samples)
                self._complete_if_full(group)
                return
        self._missing[group_id] += samples
        if self._missing[group_id] >= self.group_size:
            self.lost_slots += self._missing.pop(group_id)

    def _note_missing(self, group: SampleGroup, group_id: str, samples: int) -> None:
        # A group by keys may have samples of several rows, all of which may lack some.
        group.missing[group_id] += min(samples, self.group_size - group.slots)

    def _complete_if_full(self, group: SampleGroup) -> SampleGroup | None:
        if group.slots < self.group_size:
            return None
        del self._growing[group.key]
        self._complete.append(group)
        self._complete_slots += group.slots
        return group

    def is_ready(self, *, batch_finished: bool, is_last: bool) -> bool:
        """Return whether a batch may be taken.

        Args:
            batch_finished: nothing of the loaded batch is waiting or rolled out.
            is_last: no further sample will come, whatever is taken.
        """
        if is_last:
            return self.complete_slots > 0
        enough = self.complete_slots >= self.batch_size
        match self.rule:
            case ReadyRule.BATCH_SIZE:
                return enough
            case ReadyRule.LOADED_BATCH_FINISHED:
                return batch_finished and self.complete_slots > 0
            case ReadyRule.BOTH:
                return enough and batch_finished

    def choose(self) -> tuple[list[SampleGroup], int]:
        """Return the groups of a batch, in the order of their tasks, and how many lost slots it uses up."""
        if self.rule is ReadyRule.LOADED_BATCH_FINISHED:
            chosen, lost = list(self._complete), self.lost_slots
        else:
            chosen, lost = [], min(self.lost_slots, self.batch_size)
            slots = lost
            for group in self._complete:
                if slots + group.slots > self.batch_size:
                    break
                chosen.append(group)
                slots += group.slots
        return sorted(chosen, key=lambda group: group.first_task), lost

    def take(self, sample_ids: Iterable[str], lost: int) -> list[SampleGroup]:
        """Remove the complete groups that have these samples, and lost slots; return them in the order of their tasks.

        Raises:
            KeyError: no complete group has one of the samples.
        """
        wanted, taken = set(sample_ids), []
        left = []
        for group in self._complete:
            if members := wanted.intersection(group.sample_ids):
                wanted -= members
                taken.append(group)
            else:
                left.append(group)
        if wanted:
            raise KeyError(min(wanted))
        self._complete = left
        self._complete_slots -= sum(group.slots for group in taken)
        self.lost_slots -= lost
        return sorted(taken, key=lambda group: group.first_task)

    def take_incomplete(self) -> list[Sample]:
        """Remove the samples of groups that are not complete."""
        left = [sample for group in self._growing.values() for sample in group.samples]
        self._growing.clear()
        self._missing.clear()
        return left
