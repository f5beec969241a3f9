"""A server that answers its node and not its run is taken for dead, ended and replaced."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import trio

from fray.rl.inference.model_engine import ModelEngine
from fray.rl.processes import run_servers
from fray.rl.records.run_files import read_status
from fray.rl.records.run_requests import RunRequest, ask_run
from fray.rl.records.steps import read_step
from tests.rl.test_run_with_torch import NAMES, processes, run
from tests.support.cut_server import MARK, CutEngine

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch: make test-rl"),
    pytest.mark.usefixtures("warm_cluster"),
]
LIVENESS_S = 4.0


def test_a_server_that_only_its_run_cannot_reach_is_ended_and_replaced_and_its_late_answers_count_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        run_servers, "ModelEngine", lambda *args, **kwargs: CutEngine(ModelEngine(*args, **kwargs), tmp_path)
    )
    options: dict[str, Any] = {"weight_sync": "none", "sync": "fully-async", "stale": "keep", "save_every": 100_000}
    running = run(100_000, inference_servers=2, liveness_s=LIVENESS_S, output=tmp_path, **options)
    servers: list[int] = []

    def said(text: str) -> bool:
        return text in (tmp_path / "progress.log").read_text()

    async def until(what: Any) -> None:
        while not what():  # noqa: ASYNC110 - another process changes it
            await trio.sleep(0.02)

    async def main() -> None:
        with trio.fail_after(90):
            async with trio.open_nursery() as nursery:
                updated = trio.Event()
                running.on_step = lambda metrics: updated.set()
                nursery.start_soon(running.main)
                await updated.wait()
                await until(lambda: [one["state"] for one in read_status(tmp_path)["servers"]] == ["healthy"] * 2)
                servers.extend(processes(NAMES["server"]))
                cut = tmp_path / f"cut-{servers[0]}"
                cut.touch()
                await until(lambda: said("is taken for dead"))
                cut.unlink()
                await until(lambda: said("is replaced"))
                await until(lambda: [one["state"] for one in read_status(tmp_path)["servers"]] == ["healthy"] * 2)
                before = read_status(tmp_path)["step"]
                await until(lambda: read_status(tmp_path)["step"] >= before + 2)
                after = processes(NAMES["server"])
                assert servers[0] not in after
                assert servers[1] in after
                assert len(after) == 2
                await ask_run(tmp_path, RunRequest(None))

    trio.run(main)
    text = (tmp_path / "progress.log").read_text()
    (name,) = set(re.findall(r"(server-\d) is taken for dead", text))
    steps = (
        f"{name} does not answer: its requests go to other servers",
        f"{name} is taken for dead",
        f"{name} is replaced after 1 starts: {name} missed every deadline for {LIVENESS_S:g} s or more",
    )
    places = [text.index(step) for step in steps]
    assert places == sorted(places)
    # It spoke again, after it was taken for dead, and nothing of that was believed.
    assert (tmp_path / f"late-{servers[0]}").exists()
    assert f"{name} answers again" not in text[places[1] :]
    status = trio.run(running.status)
    assert status is not None
    assert status.version.number == read_status(tmp_path)["step"]
    rows = [one for number in range(1, status.version.number + 1) for one in read_step(tmp_path, number).trajectories]
    assert not [row for row in rows if MARK in row["logprobs"]]
    # Its requests went to the other server: no episode was lost or repeated.
    assert len(rows) == status.trained == 32 * status.version.number
    assert not status.dropped
    assert not status.repeated
    assert status.issued == status.trained + status.open
