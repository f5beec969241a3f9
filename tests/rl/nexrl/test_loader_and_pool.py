"""Data loaders and trajectory pools of the guide."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from fray import rl
from fray.errors import InvalidRequest
from fray.rl.nexrl.data_loader import MockDataLoader, TorchDataLoader
from fray.rl.nexrl.trajectory_pool import (
    GroupedTrajectoryStore,
    HierarchicalTrajectoryStore,
    SimpleTrajectoryStore,
    TrajectoryPoolInstance,
)

FIVE: dict[str, Any] = {"prompts": [f"p{number}" for number in range(5)], "batch_size": 2, "rollout_repeat_n": 2}


def taken(loader: rl.BaseDataLoader) -> list[str]:
    """Return the prompts that a loader gives until it has none."""
    found = []
    while loader.can_return_item():
        item = loader.get_next_item()
        assert item is not None
        found.append(item["prompt"])
    assert loader.get_next_item() is None
    return found


def test_nothing_beyond_the_loaded_batch_is_given_until_the_weights_are_in_place() -> None:
    loader = MockDataLoader(FIVE | {"keep_batch_order": True})
    assert len(loader) == 10
    assert loader.can_return_item()
    assert taken(loader) == ["p0", "p0", "p1", "p1"]
    assert (loader.is_finished(), loader.can_return_item()) == (False, False)
    loader.unlock_for_weight_sync()
    assert taken(loader) == ["p2", "p2", "p3", "p3"]
    loader.unlock_for_weight_sync()
    assert taken(loader) == ["p4", "p4"]
    assert loader.is_finished()
    loader.reset()
    assert taken(loader) == ["p0", "p0", "p1", "p1"]


def test_items_have_their_group_and_are_added_in_front_and_behind() -> None:
    loader = MockDataLoader(FIVE)
    assert [loader[index] for index in (0, 1, -1)] == [
        {"prompt": "p0", "group_id": "0-0", "run_id": 0},
        {"prompt": "p0", "group_id": "0-0", "run_id": 1},
        {"prompt": "p4", "group_id": "0-4", "run_id": 1},
    ]
    first = loader.get_next_item()
    loader.add_item_front({"prompt": "front"})
    loader.add_item({"prompt": "behind"})
    loader.add_item_back({"prompt": "last"})
    assert first is not None
    assert len(loader) == 12
    assert taken(loader) == ["front", "p0", "p1", "p1", "behind", "last", "p2", "p2", "p3", "p3", "p4", "p4"]


def test_validation_has_each_row_once_and_the_order_of_training_follows_the_seed() -> None:
    assert (
        taken(MockDataLoader(FIVE | {"shuffle": True, "keep_batch_order": True}, is_validate=True)) == FIVE["prompts"]
    )
    orders = [taken(MockDataLoader(FIVE | {"shuffle": True, "seed": seed})) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert taken(MockDataLoader(FIVE | {"skip_batches": 2})) == ["p4", "p4"]
    assert len(MockDataLoader({})) == 100


def test_the_torch_loader_reads_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": name}) + "\n")
    loader = TorchDataLoader({"data_files": [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]})
    assert taken(loader) == ["a", "b"]
    with pytest.raises(InvalidRequest, match=r"data\.data_files is missing"):
        TorchDataLoader({})


def trajectory(group: str, number: int = 0, **keys: Any) -> dict[str, Any]:
    return {"group_id": group, "number": number, "reward": 1.0, **keys}


def test_batches_are_made_of_whole_groups() -> None:
    pool = rl.TrajectoryPool({"key_list": ["group_id"], "group_size": 2, "batch_size": 4})
    assert pool.is_empty()
    for group, number in (("a", 0), ("b", 1), ("a", 2), ("c", 3), ("c", 4)):
        assert pool.get_batch() is None
        assert pool.put_trajectory(trajectory(group, number)) == "success"
    batch = pool.get_batch()
    assert batch is not None
    assert batch.values["group_id"] == ["a", "a", "c", "c"]
    assert batch.metadata == {"batch_size": 4, "model_tag": "default"}
    assert not pool.is_empty()
    with pytest.raises(ValueError, match="invalid batch_size 3: expected a multiple of the group_size 2"):
        pool.get_batch(3)
    assert pool.put_trajectory(trajectory("b")) == "success"
    smaller = pool.get_batch(2)
    assert smaller is not None
    assert len(smaller) == 2
    assert pool.is_empty()


def test_each_model_has_a_store_of_its_own() -> None:
    pool = rl.TrajectoryPool({"batch_size": 1})
    pool.put_trajectory(trajectory("a", model_tag="policy"))
    pool.put_trajectory(trajectory("b"))
    assert pool.get_model_tags() == ["policy", "default"]
    assert pool.get_batch(model_tag="other") is None
    assert pool.get_batch(model_tag="default") is not None
    assert pool.is_empty("default")
    assert not pool.is_empty("policy")
    batch = pool.get_batch_any()
    assert batch is not None
    assert batch.metadata["model_tag"] == "policy"


@pytest.mark.parametrize(
    ("keys", "kind", "groups"),
    [
        ([], SimpleTrajectoryStore, 4),
        (["user"], GroupedTrajectoryStore, 2),
        (["user", "session"], HierarchicalTrajectoryStore, 3),
    ],
)
def test_the_list_of_keys_decides_how_trajectories_are_grouped(keys: list[str], kind: type, groups: int) -> None:
    instance = TrajectoryPoolInstance({"key_list": keys, "group_size": 1 if not keys else 4, "batch_size": 4})
    assert type(instance.store) is kind
    for user, session in (("u", 1), ("u", 1), ("u", 2), ("v", 1)):
        instance.put_trajectory(trajectory("g", user=user, session=session))
    assert len({group.key for group in instance.store.complete} | set(instance.store._growing)) == groups


def test_trajectories_are_refused_while_weights_are_synchronised() -> None:
    pool = rl.TrajectoryPool({"batch_size": 1})
    pool.notify_weight_sync_starting("default")
    assert pool.put_trajectory(trajectory("a")) == "re-rollout"
    assert pool.is_empty()
    pool.unlock_for_weight_sync("default")
    assert pool.put_trajectory(trajectory("a")) == "success"


class SyncController:
    def __init__(self) -> None:
        self.ready: list[str] = []

    def trajectory_pool_notify_batch_ready(self, model_tag: str) -> None:
        self.ready.append(model_tag)


def test_a_loaded_batch_is_finished_when_the_loader_is_drained_and_no_worker_works() -> None:
    tracker, controller = rl.ActivityTracker(), SyncController()
    tracker.register_module("worker", object(), is_rollout_worker=True)
    loader = MockDataLoader(FIVE | {"rollout_repeat_n": 1, "keep_batch_order": True})
    pool = rl.TrajectoryPool({"batch_size": 8, "check_batch_ready_function": "loaded_batch_finished"})
    pool.set_module_references(loader, controller, rl.ActivityTrackerProxy(tracker))
    working = tracker.start("worker", "step")
    loader.get_next_item()
    pool.put_trajectory(trajectory("a"))
    loader.get_next_item()
    assert pool.get_batch() is None
    tracker.end(working)
    pool.put_trajectory(trajectory("b"))
    assert controller.ready == ["default"]
    batch = pool.get_batch()
    assert batch is not None
    assert batch.values["group_id"] == ["a", "b"]


def test_the_rest_is_a_batch_when_the_data_ends() -> None:
    loader = MockDataLoader({"prompts": ["p0"]})
    pool = rl.TrajectoryPool({"batch_size": 2, "check_batch_ready_function": "batch_size_reached"})
    pool.set_module_references(loader, None, rl.ActivityTrackerProxy(rl.ActivityTracker()))
    pool.put_trajectory(trajectory("a"))
    assert pool.get_batch() is None
    loader.get_next_item()
    assert pool.get_batch() is not None


async def test_a_task_waits_for_the_trajectory_that_makes_a_batch_ready_and_for_the_end_of_the_data() -> None:
    tracker, batches = rl.ActivityTracker(), list[Any]()
    tracker.register_module("worker", object(), is_rollout_worker=True)
    loader = MockDataLoader({"prompts": ["p0", "p1", "p2"]})
    pool = rl.TrajectoryPool({"key_list": ["group_id"], "group_size": 2, "batch_size": 2})
    pool.set_module_references(loader, None, rl.ActivityTrackerProxy(tracker))

    async def take() -> None:
        while (batch := await pool.next_batch()) is not None:
            batches.append(batch.values["number"])
        batches.append(None)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(take)
        for number, group in enumerate("abab"):
            await trio.testing.wait_all_tasks_blocked()
            # From a thread, as workers do.
            await trio.to_thread.run_sync(pool.put_trajectory, trajectory(group, number))
        await trio.testing.wait_all_tasks_blocked()
        assert batches == [[0, 2], [1, 3]]
        working = tracker.start("worker", "step")
        while loader.get_next_item() is not None:
            pass
        pool.put_trajectory(trajectory("c", 4))
        await trio.testing.wait_all_tasks_blocked()
        assert batches == [[0, 2], [1, 3]]
        await trio.to_thread.run_sync(tracker.end, working)
    assert batches == [[0, 2], [1, 3], None]


async def test_a_task_that_no_longer_waits_takes_no_batch() -> None:
    pool = rl.TrajectoryPool({"batch_size": 1})
    with trio.move_on_after(0):
        await pool.next_batch()
    pool.put_trajectory(trajectory("a"))
    instance = pool.instance()
    with trio.move_on_after(0):
        await instance.next_batch()
    assert not pool.is_empty()
    batch = await instance.next_batch()
    assert batch is not None
    assert pool.is_empty()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"check_batch_ready_function": "batch_sise"}, "check_batch_ready_function 'batch_sise'; expected one of.*did"),
        ({"key_list": ["g"], "group_size": 3, "batch_size": 4}, "trajectory_pool: invalid batch_size 4"),
        ({"group_size": 2, "batch_size": 4}, "group_size is 2, but key_list is empty"),
    ],
)
def test_an_invalid_pool_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        rl.TrajectoryPool(config)


def test_a_trajectory_without_a_key_of_its_group_is_an_error_that_names_it() -> None:
    pool = rl.TrajectoryPool({"key_list": ["uid"], "group_size": 2, "batch_size": 2})
    with pytest.raises(ValueError, match=r"lacks 'uid', a key of trajectory_pool\.key_list; it has group_id, number"):
        pool.put_trajectory(trajectory("a"))
