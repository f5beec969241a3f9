"""Actors of roles, in groups that share a process."""

from __future__ import annotations

import os
from typing import Any

import pytest

from fray import blocking, rl
from fray.errors import InvalidRequest
from fray.rl.nexrl.data_loader import MockDataLoader

POOL, LOADER, VALIDATION = (
    rl.NexRLRole.TRAJECTORY_POOL,
    rl.NexRLRole.DATA_LOADER,
    rl.NexRLRole.VALIDATE_DATALOADER,
)


class WithPid(rl.NexRLModule):
    def pid(self) -> int:
        return os.getpid()


def test_roles_of_a_group_share_a_host_and_their_methods_have_their_own_names() -> None:
    with blocking.open_cluster("local") as cluster, rl.ResourceManager(cluster) as manager:
        manager.register_role(LOADER, MockDataLoader, {"size": 2}, 1, "main")
        manager.register_role(POOL, rl.TrajectoryPool, {"batch_size": 1}, 1, "main")
        manager.register_role(VALIDATION, WithPid, None, 2)
        manager.create_all_actors()
        (loader,), (pool,) = manager.get_actor_wrapper(LOADER), manager.get_actor_wrapper(POOL)
        assert rl.execute(loader.get_next_item)["prompt"] == "prompt 0"
        assert rl.execute_async(pool.put_trajectory, {"reward": 1.0}).result(30) == "success"
        assert rl.execute(pool.get_batch).values == {"reward": [1.0]}
        assert loader.get_module_name() == "data_loader-0"
        assert (loader.is_colocated, loader.role) == (True, LOADER)
        assert isinstance(loader, rl.ActorWrapper)
        alone = manager.get_actor_wrapper(VALIDATION)
        assert [one.get_module_name() for one in alone] == ["validate_dataloader-0", "validate_dataloader-1"]
        assert not alone[0].is_colocated
        assert manager.get_actor_wrapper(rl.NexRLRole.TRAINER) == []
        with pytest.raises(AttributeError, match="MockDataLoader has no method 'get_next_itm'; did you mean get_next"):
            _ = loader.get_next_itm
        tracker = rl.ActivityTracker()
        tracker.register_module("loader", loader)
        assert tracker.check_module_liveness()
        with pytest.raises(InvalidRequest, match="register roles before create_all_actors"):
            manager.register_role(rl.NexRLRole.TRAINER, WithPid, None, 1)


def test_unequal_counts_in_a_group_are_refused_with_the_numbers() -> None:
    manager = rl.RayResourceManager()
    manager.register_role(LOADER, MockDataLoader, {}, 1, "main")
    manager.register_role(POOL, rl.TrajectoryPool, {}, 2, "main")
    text = "roles of colocation group 'main' have unequal counts: data_loader 1, trajectory_pool 2; expected one number"
    with pytest.raises(InvalidRequest, match=text):
        manager.create_all_actors()


@pytest.mark.parametrize(("count", "text"), [(0, "invalid count 0: expected 1 or more"), (1, "registered already")])
def test_a_role_is_registered_once_with_a_count(count: int, text: str) -> None:
    manager = rl.ResourceManager()
    if count:
        manager.register_role(LOADER, MockDataLoader, {}, 1)
    with pytest.raises(InvalidRequest, match=text):
        manager.register_role(LOADER, MockDataLoader, {}, count)
    wrapper: Any = rl.RayActorWrapper(None, MockDataLoader, LOADER)
    assert repr(wrapper) == "<ActorWrapper of data_loader: None>"
