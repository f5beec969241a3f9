"""The history of a real cluster: a machine that left, after the controller was killed and started again."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from fray.cli.main import main
from tests.processes.lab import TOKEN, Lab

PRICES = "[prices]\ncpu = 3600.0\n"


@pytest.fixture
def lab(tmp_path: Path) -> Any:
    (tmp_path / "policy.toml").write_text(PRICES)
    lab = Lab(tmp_path)
    lab.start_controller("--policy", str(tmp_path / "policy.toml"))
    lab.start_node("alpha")
    lab.wait_serving()
    yield lab
    lab.close()


@pytest.mark.promise("P7")
def test_what_ran_on_a_machine_that_left_is_known_after_the_controller_was_killed(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FRAY_CLUSTER_SPEC", lab.spec)
    monkeypatch.setenv("FRAY_TOKEN", TOKEN)

    def shown(*words: str) -> str:
        assert main(list(words)) == 0
        return capfd.readouterr().out

    program = ("--cpu", "0.5", "--memory", "50MB", "--name", "work", "--", "sh", "-c", "sleep 1")
    assert main(["run", *program]) == 0
    capfd.readouterr()
    assert json.loads(shown("nodes", "--all", "--json"))["gone"] == []
    lab.kill("alpha", signal.SIGTERM)
    # Its goodbye is on the way when its process has ended.
    give_up_at = time.monotonic() + 60
    while json.loads(shown("nodes", "--json")):
        assert time.monotonic() < give_up_at
    lab.kill("controller")
    lab.start_controller("--policy", str(tmp_path / "policy.toml"))
    lab.wait_serving()

    (gone,) = json.loads(shown("nodes", "--all", "--json"))["gone"]
    assert gone["node"] == "alpha"
    assert gone["gone_at"] > gone["joined_at"] > 0
    assert gone["reason"] in shown("nodes", "--all")
    (attempt,) = json.loads(shown("node", "show", "alpha", "--json"))["attempts"]
    assert (attempt["name"], attempt["cause"]) == ("work", "succeeded")
    assert attempt["attempt_id"] in shown("node", "show", "alpha")
    held_s = attempt["ended_at"] - attempt["placed_at"]
    assert held_s >= 1.0
    (total,) = json.loads(shown("history", "--json"))
    assert total["held"]["cpu"] == pytest.approx(0.5 * held_s / 3600)
    (cost,) = json.loads(shown("cost", "--json"))
    assert cost["total"] == pytest.approx(0.5 * held_s)
    assert cost["unpriced"] == ["memory"]
    (row,) = json.loads(shown("sql", "select state, reason from nodes", "--json"))
    assert row == {"state": "gone", "reason": gone["reason"]}
