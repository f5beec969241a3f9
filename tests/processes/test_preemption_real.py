"""A production gang takes the places of batch jobs, which are notified in time, come back and finish."""

from __future__ import annotations

import time
from pathlib import Path

import trio

import fray
from fray import EndReason, Entrypoint, JobRequest, ResourceConfig
from fray.model.specs import TerminationPolicy

ONE = ResourceConfig(cpu=1, memory="64MB")
PROGRAM = """
trap 'echo saved > "$0"; exit 0' TERM
[ -e "$0" ] && exit 0
echo ready > "$0.ready"
while :; do sleep 0.02; done
"""


def careful(directory: str) -> str:
    """Save at the preemption notice; continue from there after the restart."""
    saved = Path(directory, "saved")
    if saved.exists():
        return f"continued from {saved.read_text()}"
    Path(directory, "ready").touch()
    for step in range(10_000):
        if fray.current_job().preempted:
            saved.write_text("a step" if step else "nothing")
            raise SystemExit("its place is taken")
        time.sleep(0.01)
    return "was never notified"


async def together() -> str:
    return f"rank {fray.current_job().rank}"


async def until(path: Path) -> None:
    with trio.fail_after(20):
        while not await trio.Path(path).exists():  # noqa: ASYNC110 - another process makes it
            await trio.sleep(0.01)


def test_batch_makes_room_for_a_production_gang_and_continues_afterwards(tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text("[preemption]\nshield_s = 0\n")
    mark = tmp_path / "program"

    async def main() -> None:
        async with fray.open_cluster(f"machine?nodes=1&cpu=2&policy={policy}", logs=False) as cluster:
            patient = JobRequest(
                "patient",
                ONE,
                Entrypoint.from_callable(careful, (str(tmp_path),)),
                priority="batch",
                preemption_notice_s=30,
            )
            program = JobRequest(
                "program",
                ONE,
                Entrypoint.from_binary("sh", ["-c", PROGRAM, str(mark)]),
                priority="batch",
                termination=TerminationPolicy(term_s=20),
            )
            jobs = [await cluster.launch(patient), await cluster.launch(program)]
            await until(tmp_path / "ready")
            await until(Path(f"{mark}.ready"))
            gang = await cluster.launch(
                JobRequest("gang", ONE, Entrypoint.from_callable(together), replicas=2, priority="production")
            )
            with trio.fail_after(20):  # far less than notice and termination: both have ended
                assert await gang.wait() == "rank 0"
                assert await jobs[0].wait() == "continued from a step"
            info = await jobs[1].wait_ended()
            assert (info.cause, mark.read_text()) == (EndReason.SUCCEEDED, "saved\n")
            for job in jobs:
                assert job.info.retries == {"preempted": 1}
                assert job.info.attempts[0].cause is EndReason.PREEMPTED
                events = await cluster.events(job)
                text = next(event.text for event in events if event.what == "preempted")
                assert text.startswith(f"for {gang.id} (production); lost: ")

    trio.run(main)
