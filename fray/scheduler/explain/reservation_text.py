"""Why a job waits in its reservation, in words."""

from __future__ import annotations

from fray.scheduler.state.rows import JobRow
from fray.scheduler.state.tables import Tables


def waits_inside(state: Tables, job: JobRow, needs: str) -> str:
    """Empty for a job that is in none.

    Args:
        needs: what one member asks for, in words.
    """
    row = state.reservations.get(job.spec.reservation_id)
    if row is None:
        return ""
    held = f"{len(row.staying_units)} of {row.spec.max_units} units"
    if not row.staying_units:
        return f"waits for reservation {row.id}, which is {row.phase.value} and holds {held}"
    others = len(state.jobs_inside.get(row.id, ())) - 1
    told = f"{others} other job{'s' * (others != 1)}" if others else "no other job"
    gang = f"{job.spec.members} times " if job.spec.members > 1 else ""
    leaving = ", some of which are being given back" if len(row.staying_units) < len(row.units) else ""
    return f"waits for room in reservation {row.id}: needs {gang}{needs}; it holds {held}{leaving}, and {told}"
