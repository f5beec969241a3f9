"""Start of the reports that a job waits for what it has launched."""

from __future__ import annotations

from fray.model.service_key import ServiceKey
from fray.runtime.runtime import Runtime, current_or_none
from fray.runtime.waits import WaitCounter, set_finder

WAITS: ServiceKey[WaitCounter] = ServiceKey("waits")


def report_waits(runtime: Runtime) -> None:
    """Report the waits of a job from now on, as it launches something; in the loop. A driver holds no CPUs."""
    # Not before: a job that has launched nothing has nothing below it that could use its CPUs.
    if runtime.services.get(WAITS) is None:
        runtime.services[WAITS] = reporter = WaitCounter(runtime.token, runtime.client.request)
        set_finder(_reporter_here)
        runtime.nursery.start_soon(reporter.run)


def _reporter_here() -> WaitCounter | None:
    runtime = current_or_none()
    return None if runtime is None else runtime.services.get(WAITS)
