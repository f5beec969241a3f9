"""Lines that a terminal shows while a driver waits for a pending job, with each interface."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TRANSCRIPT = Path(__file__).parents[1] / "transcripts" / "terminal" / "waits.txt"
HOLD = """
import os, sys, time

def hold(path):
    while not os.path.exists(path):
        time.sleep(0.02)
    return 7
"""
PROGRAMS = {
    "fray": HOLD
    + """
import fray, trio
ALL = fray.ResourceConfig.with_cpu(cpu=4, memory="1GB")

async def main():
    async with fray.open_cluster() as cluster, cluster.open_scope("run") as scope:
        await scope.launch(fray.JobRequest("holder", ALL, fray.Entrypoint.from_callable(hold, args=(sys.argv[1],))))
        job = await scope.launch(fray.JobRequest("train", ALL, fray.Entrypoint.from_callable(pow, args=(2, 10))))
        print(await job.wait())

trio.run(main)
""",
    "fray.blocking": HOLD
    + """
import fray.blocking as fray
ALL = fray.ResourceConfig.with_cpu(cpu=4, memory="1GB")
with fray.open_cluster() as cluster, cluster.open_scope("run") as scope:
    scope.launch(fray.JobRequest("holder", ALL, fray.Entrypoint.from_callable(hold, args=(sys.argv[1],))))
    print(scope.launch(fray.JobRequest("train", ALL, fray.Entrypoint.from_callable(pow, args=(2, 10)))).wait())
""",
    "fray.v2": HOLD
    + """
from fray.v2 import Entrypoint, JobRequest, ResourceConfig, current_client
ALL = ResourceConfig.with_cpu(cpu=4, ram="1g")
client = current_client()
held = client.submit(JobRequest("holder", Entrypoint.from_callable(hold, args=(sys.argv[1],)), ALL))
print(client.submit(JobRequest("train", Entrypoint.from_callable(pow, args=(2, 10)), ALL)).wait().value)
client.shutdown()
""",
}


def start(face: str, path: Path, **environ: str) -> subprocess.Popen[str]:
    spec = "machine?nodes=1&cpu=4&memory=4GB"
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAMS[face], str(path)],
        env={**os.environ, "FRAY_CLUSTER_SPEC": spec, "FRAY_CLIENT_SPEC": spec, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def settled(text: str) -> str:
    return re.sub(r"(holder|train)-[a-z0-9]{12}", r"\1-0", text)


@pytest.mark.promise("P10")
def test_every_face_says_for_what_a_pending_job_waits_and_one_setting_turns_it_off(tmp_path: Path) -> None:
    free = tmp_path / "free"
    waiting = {face: start(face, free) for face in PROGRAMS}
    silent = start("fray.blocking", free, FRAY_REPORT_WAITS="0")
    first = {face: process.stderr.readline() for face, process in waiting.items() if process.stderr is not None}
    free.touch()
    shown = ""
    for face, process in waiting.items():
        out, err = process.communicate(timeout=60)
        shown += f"$ python driver.py                                    # {face}\n{settled(first[face] + err)}{out}"
    if os.environ.get("FRAY_WRITE_TRANSCRIPTS"):
        TRANSCRIPT.write_text(shown)
    assert shown == TRANSCRIPT.read_text()
    assert silent.communicate(timeout=60) == ("1024\n", "")
