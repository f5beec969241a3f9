"""Driver that works while its cluster is upgraded: long jobs, an actor with state, calls to it one after the other.

``python driver_during_upgrade.py DIRECTORY JOBS RESTARTS``: it ends when the file ``finish`` appears there, and writes
``summary.json``. RESTARTS is ``max_restarts`` of the actor. Run by ``python`` and not imported, so that its functions
are pickled by value and every build can run them.
"""

import json
import sys
import time
from pathlib import Path

import trio

import fray
from fray import ActorConfig, Entrypoint, JobRequest, ResourceConfig

DIRECTORY, JOBS, RESTARTS = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
SMALL = ResourceConfig.with_cpu(cpu=0.2, memory="100MB")


def work(directory: str, name: str) -> str:
    """Run until the file ``finish`` appears; a line of ``starts`` for each start says which build runs it."""
    with Path(directory, "starts").open("a") as file:
        file.write(f"{name} {fray.__file__}\n")
    while not Path(directory, "finish").exists():
        time.sleep(0.05)
    return f"{name} has finished"


class Ledger:
    """Actor that keeps every call in its state, and writes it to a file, too."""

    def __init__(self, directory: str) -> None:
        self.file, self.calls = Path(directory, "effects"), []
        with Path(directory, "starts").open("a") as file:
            file.write(f"ledger {fray.__file__}\n")

    def add(self, number: int) -> int:
        with self.file.open("a") as file:
            file.write(f"{number}\n")
        self.calls.append(number)
        return len(self.calls)

    def all(self) -> list:
        return self.calls

    def __fray_checkpoint__(self) -> list:
        return self.calls

    def __fray_restore__(self, state: list) -> None:
        self.calls = state


async def main() -> None:
    async with fray.open_cluster() as cluster, cluster.open_scope("upgrade") as scope:
        await cluster.wait_for_nodes(1)
        jobs = [
            await scope.launch(
                JobRequest(
                    f"work-{number}", SMALL, Entrypoint.from_callable(work, args=(str(DIRECTORY), f"work-{number}"))
                )
            )
            for number in range(JOBS)
        ]
        config = ActorConfig(max_restarts=RESTARTS)
        ledger = await scope.create_actor(Ledger, str(DIRECTORY), name="ledger", resources=SMALL, actor_config=config)
        number = 0
        while not (DIRECTORY / "finish").exists():
            assert await ledger.add(number) == number + 1
            number += 1
            (DIRECTORY / "progress.new").write_text(str(number))
            (DIRECTORY / "progress.new").rename(DIRECTORY / "progress")
            await trio.sleep(0.02)
        results = [await job.wait() for job in jobs]
        summary = {"fray": fray.__file__, "calls": number, "state": await ledger.all(), "results": results}
        summary["states"] = [str(job.info.state) for job in jobs]
        # Arguments and results cross between the builds, too.
        summary["sum"] = await scope.run(sum, [1, 2, 3], resources=SMALL)
    (DIRECTORY / "summary.json").write_text(json.dumps(summary))


if __name__ == "__main__":
    trio.run(main)
