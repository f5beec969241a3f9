"""Modules of the guide that need no run: activity, errors, execution and the base class."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from fray import rl
from fray.rl.nexrl.error_reporter import ErrorInfo, ErrorReporter, ErrorSeverity


class Loader(rl.NexRLModule):
    is_healthy = True

    def health_check(self) -> bool:
        return self.is_healthy


class FrozenActor:
    """Stands for the wrapper of an actor whose process is frozen."""

    class health_check:
        @staticmethod
        def remote() -> Any:
            class Future:
                def result(self, timeout: float) -> bool:
                    assert timeout <= 5.0
                    raise TimeoutError("no answer")

            return Future()


def test_a_module_has_a_name_and_a_tracker() -> None:
    module = Loader()
    assert rl.NexRLModule.health_check(module)
    assert module.get_module_name() == "invalid"
    module.set_module_name("loader")
    tracker = rl.ActivityTracker({"project_name": "p", "experiment_name": "e"})
    module.set_activity_tracker(rl.ActivityTrackerProxy(tracker))
    with module._activity_tracker.track(module.get_module_name(), "loads rows"):
        assert not tracker.is_quiescent()
        assert tracker.get_running_status_summary().startswith("p/e, step 0: loader: loads rows (")
    assert tracker.is_quiescent()
    assert tracker.get_running_status_summary() == "p/e, step 0: no work in progress"


def test_values_are_dumped_below_the_name_of_the_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = Loader()
    module.set_module_name("loader")
    monkeypatch.setenv("FRAY_RL_DUMP", str(tmp_path))
    module.easy_dump([1, 2], ["epoch", "rows"])
    module.easy_dump([3], ["epoch", "rows"], value_formatter=len)
    lines = (tmp_path / "loader" / "epoch" / "rows.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [[1, 2], 1]


def test_a_value_is_a_debug_line_without_a_directory(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FRAY_RL_DUMP", raising=False)
    with caplog.at_level(logging.DEBUG, "fray.rl"):
        Loader().easy_dump({"a": 1}, ["x"])
    assert caplog.messages == ['invalid x: {"a": 1}']


def test_an_error_of_tracked_work_is_reported_and_leaves_the_block() -> None:
    tracker = rl.ActivityTracker()
    proxy = rl.ActivityTrackerProxy(tracker)
    with pytest.raises(KeyError), proxy.track("worker", "step"):
        raise KeyError("answer")
    assert proxy.is_quiescent()
    health = proxy.get_error_health_status()
    assert (health["status"], health["error_level_count"]) == ("error", 1)
    assert "worker, step: 'answer'" in health["message"]
    with pytest.raises(KeyError), proxy.track("worker", "step", auto_report_errors=False):
        raise KeyError("answer")
    assert proxy.get_error_health_status()["error_level_count"] == 1


def test_quiescence_is_waited_for_and_the_work_of_rollout_workers_is_separate() -> None:
    tracker = rl.ActivityTracker()
    tracker.register_module("worker-0", Loader(), is_rollout_worker=True)
    trainer, worker = tracker.start("trainer", "trains"), tracker.start("worker-0", "rolls out")
    assert not tracker.is_rollout_worker_quiescent()
    assert not tracker.wait_quiescent(timeout=0)
    tracker.end(worker)
    assert tracker.is_rollout_worker_quiescent()
    waiting = threading.Thread(target=tracker.end, args=(trainer,))
    waiting.start()
    assert tracker.wait_quiescent()
    waiting.join()


def test_a_module_that_is_not_healthy_or_does_not_answer_is_reported() -> None:
    tracker, module = rl.ActivityTracker(), Loader()
    tracker.register_module("loader", module)
    assert tracker.check_module_liveness()
    module.is_healthy = False
    assert not tracker.check_module_liveness()
    assert "loader, health check: health_check returned False" in tracker.get_error_health_status()["message"]
    module.is_healthy = True
    tracker.register_module("trainer", FrozenActor())
    assert not tracker.check_module_liveness(timeout=0.0)
    assert "trainer, health check: no answer" in tracker.get_error_health_status()["message"]


def test_steps_and_metrics_reach_their_destination(caplog: pytest.LogCaptureFixture) -> None:
    tracker, got = rl.ActivityTracker(), []
    tracker.experiment_logger.sinks["wandb"] = lambda **values: got.append(values)
    proxy = rl.ActivityTrackerProxy(tracker)
    proxy.set_training_step(7)
    proxy.experiment_logger_post(backend="wandb", data={"reward": 1.0}, step=proxy.get_training_step())
    assert got == [{"data": {"reward": 1.0}, "step": 7}]
    with caplog.at_level(logging.INFO, "fray.rl"):
        proxy.experiment_logger_post(backend="feishu", content="text", title="title")
    assert caplog.messages == ["feishu (not configured): {'content': 'text', 'title': 'title'}"]


def test_the_health_of_the_last_five_minutes_has_errors_before_warnings() -> None:
    now = [0.0]
    reporter = ErrorReporter(max_errors=3, clock=lambda: now[0])
    assert reporter.get_health_status()["status"] == "healthy"
    reporter.report_error("m", "w", "a note", ErrorSeverity.INFO)
    assert reporter.get_health_status()["status"] == "healthy"
    first = reporter.report_error("m", "w", "slow", ErrorSeverity.WARNING, {"seconds": 3})
    assert reporter.get_health_status()["status"] == "warning"
    second = reporter.report_exception("m", "w", ValueError("bad"))
    assert first != second
    reporter.report_error("m", "w", "later", ErrorSeverity.WARNING)
    status = reporter.get_health_status()
    assert (status["status"], status["recent_error_count"], status["warning_level_count"]) == ("error", 3, 2)
    assert status["message"].endswith("last error: m, w: bad")
    error: ErrorInfo = reporter.recent_errors[1]
    assert (error.exception_type, error.message) == ("ValueError", "bad")
    assert error.exception_traceback is not None
    now[0] = 301.0
    assert reporter.get_health_status()["status"] == "healthy"
    reporter.report_error("m", "w", "lost data", ErrorSeverity.CRITICAL)
    assert reporter.get_health_status()["critical_level_count"] == 1


def test_a_function_is_executed_here() -> None:
    assert rl.execute(max, 1, 2) == rl.execute_async(max, 1, 2) == 2


def test_log_lines_have_one_format(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        rl.set_logging_basic_config(logging.INFO)
        logging.getLogger("x").info("text")
        assert capsys.readouterr().err.endswith("INFO x: text\n")
    finally:
        root.handlers[:] = before
        root.setLevel(level)
