"""Random faults under load, in small; ``python -m tests.network.campaign`` runs many."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.network.actors import ANSWERS, EFFECTS, HISTORY, OVERLAPS
from tests.network.campaign import Result, check_history, run_campaign, was_nothing_lost
from tests.network.laboratory import Laboratory


@pytest.mark.in_test_all
@pytest.mark.within(300)
def test_calls_streams_and_arrays_take_effect_once_under_random_faults(
    lab: Laboratory, pytestconfig: pytest.Config
) -> None:
    seed = int(pytestconfig.getoption("hypothesis_seed") or 1)
    result = run_campaign(lab, seed, cuts=5)
    assert not result.breaches, f"seed {seed}: {result.faults}"
    assert result.calls > 1000, "there was load"
    assert result.items > 100
    assert result.operations["increment, value"] > 0
    assert result.operations["launch, value"] > 0


def test_a_campaign_finds_effects_that_were_repeated_lost_or_made_by_two_incarnations_at_once(tmp_path: Path) -> None:
    lab = Laboratory(tmp_path)
    recorded = {
        "on-n1 n1 5 1.0": "1.5 a\n2.5 b\n4.0 c-again\n",
        "on-n1 n1 6 3.0": "3.5 b\n4.5 c-again\n",
        "overlapping n2 7 1.0": "1.5 d\n9.5 f 1\n",
        "overlapping n1 8 2.0": "2.5 f 0\n",
    }
    answers = {
        "on-n1 laptop": "1.0 2.0 value 0 a\n2.0 3.0 value 0 b\n2.0 5.0 value 0 c-again\n2.0 5.0 value 0 lost\n",
        "overlapping home": "1.0 2.0 value 0 d\n1.0 3.0 unknown 2 f\n",
    }
    for folder, files in ((EFFECTS, recorded), (ANSWERS, answers), (HISTORY, {})):
        (lab.shared / folder).mkdir(parents=True)
        for name, text in files.items():
            (lab.shared / folder / name).write_text(text)
    (lab.shared / OVERLAPS).write_text("on-n1: process 6 on n1\noverlapping: process 8 on n1\n")
    result = Result()
    check_history(lab, result, [])
    assert result.incarnations == 4
    assert result.operations["call, value"] == 4
    assert result.breaches == [
        "a call took effect 2 times: on-n1:n1 5 1.0:0: effect b from 2.500 to 2.500 = None; "
        "on-n1:n1 6 3.0:0: effect b from 3.500 to 3.500 = None",
        "a call was answered without an effect: on-n1 laptop: call lost from 2.000 to 5.000 = None",
        "two generations of on-n1 ran at once: on-n1:n1 5 1.0:0: run on-n1 from 1.500 to 4.000 = unknown; "
        "on-n1:n1 6 3.0:0: run on-n1 from 3.500 to 4.500 = unknown",
        "on-n1: process 6 on n1",
    ]


def test_a_call_may_be_lost_only_with_its_actor_or_machine() -> None:
    lost = [(10.0, "n2")]
    assert not was_nothing_lost("anywhere", 12.0, lost)
    assert not was_nothing_lost("on-n2", 12.0, lost)
    assert was_nothing_lost("on-n1", 12.0, lost)
    assert was_nothing_lost("anywhere", 9.0, lost)
    assert was_nothing_lost("anywhere", 90.0, lost)
