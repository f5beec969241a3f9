"""Job states, as a generated module has them."""

from __future__ import annotations

from enum import IntEnum


class _State(IntEnum):
    JOB_STATE_PENDING = 1
    JOB_STATE_BUILDING = 2
    JOB_STATE_RUNNING = 3
    JOB_STATE_SUCCEEDED = 4
    JOB_STATE_FAILED = 5
    JOB_STATE_KILLED = 6
    JOB_STATE_WORKER_FAILED = 7
    JOB_STATE_UNSCHEDULABLE = 8


class JobState:
    @staticmethod
    def Name(number: int) -> str:
        return _State(number).name


globals().update({state.name: int(state) for state in _State})
