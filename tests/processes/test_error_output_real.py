"""Output on a terminal when a job on real processes fails while ten siblings run: the failure alone, in 35 lines."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

TRANSCRIPT = Path(__file__).parents[1] / "transcripts" / "terminal" / "failure_among_siblings.txt"
PROGRAM = """
import fray, trio
from fray import JobRequest, ResourceConfig

SMALL = ResourceConfig(cpu=0.01, memory="64MB")

def load(path):
    return open(path).read()

async def nested(depth):
    async with fray.current_cluster().open_scope(f"at {depth}") as scope:
        fn, args = (nested, (depth - 1,)) if depth else (load, ("missing.txt",))
        return await scope.run(fn, *args, resources=SMALL)

class Barrier:
    def __init__(self):
        self.missing, self.full = 10, trio.Event()

    async def arrive(self):
        self.missing -= 1
        if not self.missing:
            self.full.set()

    async def wait(self):
        await self.full.wait()

async def forever(barrier):
    await barrier.arrive()
    await trio.sleep_forever()

async def main():
    async with fray.open_cluster("machine?cpu=4&memory=4GB") as cluster:
        barrier = await cluster.create_actor(Barrier, resources=SMALL)
        async with cluster.open_scope("run") as scope:
            for number in range(10):
                sibling = fray.Entrypoint.from_callable(forever, args=(barrier,))
                await scope.launch(JobRequest(f"s{number}", SMALL, entrypoint=sibling))
            await barrier.wait()
            await scope.run(nested, 2, resources=SMALL)

trio.run(main)
"""


def test_siblings_that_are_cancelled_by_a_failure_add_no_line(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, timeout=120, check=False, env={**os.environ}
    )
    assert done.returncode == 1
    shown = re.sub(r"(?m)^[ |]*[~^]+\n", "", done.stdout + done.stderr).replace(str(program), "program.py")
    shown = re.sub(r'"[^"]*/trio/_core/_run.py", line \d+', '"trio/_core/_run.py", line N', shown)
    shown = re.sub(r"\b(load|nested)-[a-z0-9]{6}(-[a-z0-9]{12})?\b", r"\1-N", shown)
    shown = re.sub(r"(?m)[ ]+$", "", shown)
    if os.environ.get("FRAY_WRITE_TRANSCRIPTS"):
        TRANSCRIPT.write_text(shown)
    assert shown == TRANSCRIPT.read_text()
    assert shown.count("\n") <= 35
    assert shown.count("No such file or directory: 'missing.txt'") == 1
    assert shown.count("return open(path).read()") == 2, "once at the top, once as the last frame"
