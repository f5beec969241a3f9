"""Secrets that a process sends again to a restarted controller: those of the jobs that it has launched or adopted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import trio

from fray import JobInfo, JobState
from fray.model.messages.client import Jobs, Launch, ProvideSecrets
from fray.model.specs import EntryKind, JobSpec
from fray.runtime.controller_client.jobs import JobTracker


def actor(job_id: str, **more: Any) -> JobSpec:
    return JobSpec(job_id=job_id, name="store", namespace="", entry=EntryKind.ACTOR, secrets={"TOKEN": "T"}, **more)


class Controller:
    """Answers each launch of an actor with the one that it has, and keeps what is sent again."""

    def __init__(self) -> None:
        self.sent_again: list[dict[str, dict[str, str]]] = []

    async def send(
        self, message: object, payloads: Sequence[bytes] = (), *, on_answer: Callable[..., None] | None = None
    ) -> None:
        if isinstance(message, Launch) and on_answer is not None:
            on_answer(Jobs(jobs=(JobInfo(job_id="store-first", name="store", state=JobState.RUNNING),)), [])
        elif isinstance(message, ProvideSecrets):
            self.sent_again.append(message.secrets)


@pytest.mark.parametrize("owned_by_job", [True, False])
def test_those_of_an_adopted_actor_are_sent_for_it_if_its_job_owns_it(owned_by_job: bool) -> None:
    async def main() -> None:
        controller = Controller()
        jobs = JobTracker(controller.send)
        jobs.secret_of = {"T": "value"}.get
        records = await jobs.launch([actor("store-second", owned_by_job=owned_by_job)], [])
        await jobs.resubscribe()
        wanted = [{"store-first": {"T": "value"}}] if owned_by_job else []
        assert controller.sent_again == wanted
        jobs.on_job_changed(JobInfo(job_id="store-first", name="store", state=JobState.STOPPED), None)
        await jobs.resubscribe()
        assert controller.sent_again == wanted, "it has ended"
        del records

    trio.run(main)
