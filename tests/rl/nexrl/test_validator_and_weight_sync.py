"""Validator and weight sync controller of the guide, with its loader, pool and tracker."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from fray import rl
from fray.errors import InvalidRequest
from fray.rl.core.versions import VersionName
from fray.rl.nexrl.data_loader import MockDataLoader


class Worker(rl.NexRLModule):
    """Rollout worker that works until it is released."""

    def __init__(self, tracker: rl.ActivityTrackerProxy) -> None:
        super().__init__()
        self.started, self.released = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, args=(tracker,))
        self._thread.start()
        self.started.wait(10)

    def _work(self, tracker: rl.ActivityTrackerProxy) -> None:
        with tracker.track("worker", "validates"):
            self.started.set()
            self.released.wait(10)

    def release(self) -> None:
        self.released.set()
        self._thread.join()


def test_a_validation_is_complete_when_its_data_is_drained_and_no_worker_works() -> None:
    tracker = rl.ActivityTracker()
    proxy = rl.ActivityTrackerProxy(tracker)
    worker = Worker(proxy)
    tracker.register_module("worker", worker, is_rollout_worker=True)
    loader = MockDataLoader({"size": 2, "batch_size": 2}, is_validate=True)
    validator = rl.Validator({})
    validator.set_activity_tracker(proxy)
    validator.set_module_references(loader)
    assert not validator.is_complete()
    while loader.get_next_item() is not None:
        assert not validator.is_complete()
    assert not validator.is_complete()
    worker.release()
    assert validator.is_complete()


def test_scores_are_averaged_by_name_over_those_that_have_it() -> None:
    tracker = rl.ActivityTracker()
    posts: list[tuple[str, dict[str, Any]]] = []
    tracker.experiment_logger.post = lambda backend, **kwargs: posts.append((backend, kwargs))  # type: ignore[method-assign]
    tracker.set_training_step(7)
    validator = rl.Validator({"backend": "console"})
    validator.set_activity_tracker(rl.ActivityTrackerProxy(tracker))
    for trajectory in ({"score": {"exact": 1, "length": 4}}, {"score": {"exact": 0}}, {"reward": 0.5}, {"score": 2}):
        assert validator.put_trajectory(trajectory) == "success"
    expected = {"val/exact": 0.5, "val/length": 4.0, "val/reward": 0.5, "val/score": 2.0}
    assert validator.compute_and_log_metrics() == expected
    assert posts == [("console", {"data": expected, "step": 7})]
    validator.clear()
    assert validator.compute_and_log_metrics() == {}


def test_a_training_rollout_does_not_land_in_the_validator() -> None:
    validator = rl.Validator({})
    assert validator.put_trajectory({"is_val": False, "score": {"exact": 1}}) == "fail"
    assert validator.compute_and_log_metrics() == {}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"sync_mode": "sync"}, "1/1 2/2 3/3 4/4 5/5 6/6"),
        ({"sync_mode": "batch-async", "staleness_threshold": 1}, "1/0 2/2 3/2 4/4 5/4 6/6"),
        ({"sync_mode": "fully-async"}, "1/1 2/2 3/3 4/4 5/5 6/6"),
    ],
)
def test_golden_versions_of_trainer_and_servers(config: dict[str, Any], expected: str) -> None:
    controller = rl.WeightSyncController(config)
    sent: list[str] = []
    controller.set_transfer(lambda tag, version: sent.append(f"{tag} {version}"))
    found = []
    for number in range(1, 7):
        controller.trajectory_pool_notify_batch_ready("m")
        controller.train_worker_notify_weight_update("trainer", "m")
        found.append(f"{number}/{controller.get_rollout_model_version('m')}")
    assert " ".join(found) == expected
    assert sent == [f"m 0.{number}" for number in sorted({int(one.split("/")[1]) for one in found} - {0})]


def test_the_pool_is_closed_from_the_batch_to_the_weights() -> None:
    pool = rl.TrajectoryPool({"batch_size": 2, "group_size": 1, "key_list": []})
    loader = MockDataLoader({"size": 2, "batch_size": 2})
    controller = rl.WeightSyncController({"sync_mode": "sync"})
    pool.set_module_references(loader, controller, rl.ActivityTrackerProxy(rl.ActivityTracker()))
    controller.set_module_references(loader, pool)
    assert controller.check_rollout_service_status("default") == "continue"
    assert [pool.put_trajectory({"reward": 1.0}) for _ in range(3)] == ["success", "success", "re-rollout"]
    assert controller.check_rollout_service_status("default") == "block"
    assert pool.get_batch() is not None
    controller.train_worker_notify_weight_update("trainer", "default")
    assert controller.check_rollout_service_status("default") == "continue"
    assert pool.put_trajectory({"reward": 1.0}) == "success"


def test_servers_keep_the_version_that_is_validated() -> None:
    controller = rl.WeightSyncController({"sync_mode": "fully-async", "validate_freq": 2})
    sent: list[VersionName] = []
    controller.set_transfer(lambda tag, version: sent.append(version))
    states = []
    for _ in range(4):
        controller.train_worker_notify_weight_update("trainer", "m")
        states.append(controller.is_waiting_for_validation())
    assert states == [False, True, True, True]
    assert controller.get_rollout_model_version("m") == 2
    controller.end_validate("m")
    # Version 4 is a multiple, too.
    assert controller.is_waiting_for_validation()
    controller.end_validate("m")
    assert not controller.is_waiting_for_validation()
    assert [version.number for version in sent] == [1, 2, 4]


def test_weights_whose_transfer_failed_are_sent_when_asked() -> None:
    controller = rl.WeightSyncController({"sync_mode": "sync"})
    sent: list[VersionName] = []

    def fail(tag: str, version: VersionName) -> None:
        raise ConnectionError(tag)

    controller.set_transfer(fail)
    with pytest.raises(ConnectionError, match="m"):
        controller.train_worker_notify_weight_update("trainer", "m")
    assert (controller.get_rollout_model_version("m"), controller.check_rollout_service_status("m")) == (0, "block")
    controller.set_transfer(lambda tag, version: sent.append(version))
    for _ in range(2):  # the second time the servers have them
        controller.sync_weight_to_rollout_service("m")
    assert (controller.get_rollout_model_version("m"), controller.check_rollout_service_status("m")) == (1, "continue")
    assert sent == [VersionName(0, 1)]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"sync_mode": "async"}, "invalid sync_mode 'async'; expected one of 'sync', 'batch-async', 'fully-async'"),
        ({"staleness_threshold": -1}, "invalid staleness_threshold -1: expected a whole number of 0 or more"),
        ({"validate_freq": 1.5}, "invalid validate_freq 1.5: expected a whole number of 1 or more"),
    ],
)
def test_an_invalid_setting_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        rl.WeightSyncController(config)
