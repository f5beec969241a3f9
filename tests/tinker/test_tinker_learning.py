"""Training through the Tinker SDK beside a plain loop with peft: `bench.tinker`, shortly."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest

pytest.importorskip("torch")
pytest.importorskip("peft")
pytestmark = pytest.mark.torch

from bench.tinker import ROOT, plain_loop, through_service  # noqa: E402


def sdk() -> Path:
    python = ROOT / ".venv-tinker-0.38/bin/python"
    if not python.is_file():
        pytest.skip("no environment with the SDK: tools/venv tinker-0.38 makes it")
    return python


@pytest.mark.within(120)
async def test_losses_are_those_of_the_plain_loop(tmp_path: Path) -> None:
    served = await through_service("sft", 20, tmp_path / "run", sdk())
    plain = await plain_loop("sft", 20, tmp_path / "base")
    assert served == pytest.approx(plain, abs=1e-3)
    assert served[-1] < 0.7 * served[0]


@pytest.mark.within(120)
async def test_rewards_rise(tmp_path: Path) -> None:
    rewards = await through_service("rl", 12, tmp_path, sdk())
    assert mean(rewards[:3]) < 0.08, "an answer at random has one right position of fifteen"
    assert mean(rewards[-3:]) > 1.25 * mean(rewards[:3])
