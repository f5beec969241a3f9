"""The living members of one job group, counted: by where they are, and by the stage they wait for.

An index; `Tables` keeps it true, and the law asks it instead of walking over the members.
"""

from __future__ import annotations

from attrs import Factory, define

from fray.model.ids import JobId
from fray.model.specs import JobSpec
from fray.scheduler.lifecycle import JobPhase

PLACED = (JobPhase.STARTING, JobPhase.RUNNING, JobPhase.CLOSING)
"""It has machines, or processes that are still being ended have."""


def stage_of(spec: JobSpec) -> int:
    return spec.role.stage if spec.role else 0


@define
class GroupMembers:
    """Members of one job group."""

    jobs: dict[JobId, None] = Factory(dict)
    """All on record, in order of acceptance."""
    phases: dict[JobPhase, dict[JobId, None]] = Factory(dict)
    """Living ones."""
    unready_by_stage: dict[int, int] = Factory(dict)
    """By stage: how many living ones do not run."""
    gathered: dict[JobId, None] = Factory(dict)
    """Those that wait for nothing but to be placed together."""
    started_stage: int | None = None
    """The front for which all that may begin has been told to."""

    def on_phase_changed(self, job_id: JobId, stage: int, before: JobPhase | None, after: JobPhase) -> None:
        """A member's phase has changed; None: it is new here."""
        if before is not None:
            self._leave(job_id, stage, before)
        if after is not JobPhase.ENDED:
            self.phases.setdefault(after, {})[job_id] = None
            if after is not JobPhase.RUNNING:
                self.unready_by_stage[stage] = self.unready_by_stage.get(stage, 0) + 1

    def _leave(self, job_id: JobId, stage: int, before: JobPhase) -> None:
        jobs = self.phases[before]
        del jobs[job_id]
        if not jobs:
            del self.phases[before]
        if before is not JobPhase.RUNNING:
            self.unready_by_stage[stage] -= 1
            if not self.unready_by_stage[stage]:
                del self.unready_by_stage[stage]

    @property
    def blocking_stage(self) -> int | None:
        """The stage that must run before a later one begins; None: all run."""
        return min(self.unready_by_stage, default=None)

    @property
    def living_count(self) -> int:
        return sum(map(len, self.phases.values()))

    @property
    def is_placed(self) -> bool:
        """Some member has machines."""
        return any(phase in self.phases for phase in PLACED)

    @property
    def is_complete(self) -> bool:
        """All that live have gathered: they can be placed together."""
        return bool(self.gathered) and len(self.gathered) == self.living_count
