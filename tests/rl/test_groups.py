"""Groups and models of the trajectories of an episode."""

from __future__ import annotations

from typing import Any

import pytest

from fray.rl.messages import TaskGrant
from fray.rl.rollout.groups import by_model, grouped
from fray.rl.train.trajectory_checks import InvalidTrajectory

GRANT = TaskGrant("0.1", "0-3-1", "0-3", 0, {"user": "u", "session": 1}, 1)


def made(**keys: Any) -> dict[str, Any]:
    return {"group_id": "0-3", "tokens": [1], **keys}


@pytest.mark.parametrize(
    ("keys", "trajectory", "key", "group"),
    [
        ([], made(), ("0-3",), "0-3"),
        (["user"], made(), ("u",), "u"),
        # What the worker has put counts before the row.
        (["user"], made(user=7), (7,), 7),
        (["user", "session"], made(session="s"), ("u", "s"), "user='u', session='s'"),
        (["group_id", "role"], made(role="judge"), ("0-3", "judge"), "group_id='0-3', role='judge'"),
        (["uid", "role"], made(role="judge"), ("0-3", "judge"), "uid='0-3', role='judge'"),
        (["uid"], made(uid="x"), ("x",), "x"),
    ],
)
def test_samples_are_grouped_and_compared_by_the_keys(
    keys: list[str], trajectory: dict[str, Any], key: tuple[Any, ...], group: Any
) -> None:
    assert grouped(GRANT, [trajectory], keys) == key
    assert trajectory["group_id"] == group


@pytest.mark.parametrize(
    ("trajectories", "message"),
    [
        ([made()], r"trajectory \(group_id '0-3'\): key 'role' is missing, .*; it has group_id, session, tokens, user"),
        ([made(role=[1])], r"role is \[1\]: expected a text or a number"),
        ([made(role="a"), made(role="b")], r"the trajectories of task 0-3-1 differ in role, .*: \('a',\) and \('b',\)"),
    ],
)
def test_a_sample_without_one_group_is_refused(trajectories: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(InvalidTrajectory, match=message):
        grouped(GRANT, trajectories, ["role"])


def test_trajectories_of_other_models_are_left_out() -> None:
    own, same, other = made(), made(model_tag="policy"), made(model_tag="judge")
    assert by_model([[own, other], [other, other], [same]], "policy") == ([[own], [], [same]], ["judge"] * 3)
