"""The example of a recipe runs by its command, and the commands that look at a run show what it did."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch: make test-rl"),
    pytest.mark.usefixtures("warm_cluster"),
]
RECIPE = Path(__file__).parents[2] / "examples" / "rl_recipe" / "digits.yaml"


def test_a_recipe_trains_and_its_steps_are_shown_and_replayed(tmp_path: Path) -> None:
    output = tmp_path / "digits"
    # OMP_NUM_THREADS: the replay is to take one core of those that other tests use.
    variables = {"XDG_STATE_HOME": str(tmp_path / "state"), "DIGITS_OUTPUT": str(output), "OMP_NUM_THREADS": "1"}

    def fray(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "fray.cli", "rl", *words],
            env=os.environ | variables,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout

    plan = json.loads(fray("run", str(RECIPE), "inference_servers=2", "--dry", "--json"))
    assert plan["recipe"]["output"] == str(output)
    assert [(one["part"], one["count"]) for one in plan["processes"]] == [
        ("coordinator", 1),
        ("trainer", 1),
        ("server", 2),
        ("rollout", 1),
    ]
    assert not output.exists()

    # The file beside the recipe sets the limit of tokens; the worker reads it in its process.
    result = json.loads(fray("run", str(RECIPE), "trainer.lr=2e-3", "save_every=2", "keep_checkpoints=true", "--json"))
    assert [step["step"] for step in result["steps"]] == [1, 2, 3]
    assert {step["lr"] for step in result["steps"]} == {2e-3}

    status = json.loads(fray("top", "digits", "--once", "--json"))
    assert (status["state"], status["step"], status["waits_for"]) == ("done", 3, "the run is done")
    assert (
        status["issued"] == status["trained"] + status["validated"] + sum(status["dropped"].values()) + status["open"]
    )
    assert "digits  done" in fray("ls")

    shown = json.loads(fray("show", "digits", "--step", "3", "--worst", "2", "--json"))
    assert [len(group["samples"]) for group in shown["groups"]] == [8, 8]
    assert shown["groups"][0]["mean_reward"] <= shown["groups"][1]["mean_reward"] <= result["steps"][2]["reward_mean"]
    sample = shown["groups"][0]["samples"][0]
    assert sample["prompt"].endswith(">")
    assert 1 <= len(sample["response"]) <= 4
    assert sample["versions"][0].startswith("0.2 x")

    replayed = json.loads(fray("replay", "digits", "--step", "3", "--json"))
    for name in ("loss", "grad_norm", "reward_mean", "entropy"):
        assert replayed["metrics"][name] == pytest.approx(replayed["recorded"][name], rel=1e-6), name
