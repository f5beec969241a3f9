"""A run writes what it does, and is found by its name."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import evolve

from fray import rl
from fray.cli.rl.look import status_lines
from fray.errors import InvalidRequest
from fray.rl.core.server_states import ServerEvent, ServerRecord
from fray.rl.core.versions import VersionName
from fray.rl.journal_file import RunJournal, read_failures
from fray.rl.messages import RunStatus
from fray.rl.records import run_files
from fray.rl.records.replay import replay
from fray.rl.records.run_files import (
    RunRecorder,
    find_output,
    named_outputs,
    read_settings_of,
    read_status,
    write_work,
)
from fray.rl.run import Run

STATUS = RunStatus(
    waits_for="the trainer waits: 12 of 32 groups; slowest: task 0-81-0, 41 s, of w",
    version=VersionName(0, 7),
    rollout_version=VersionName(0, 6),
    issued=20,
    trained=10,
    validated=0,
    open=8,
    dropped={"timeout": 2},
    repeated={},
    last_failure="Traceback\nKeyError: 'answer'",
)


async def solve(task: dict[str, object], llm: rl.LLM) -> rl.Score:
    raise NotImplementedError


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    data, trainer = [{"prompt": "1"}], rl.GRPO(groups=1, group_size=2, steps=40)
    return Run(model=rl.TinyLlama(), data=data, rollout=solve, trainer=trainer, output=tmp_path / "digits")


def test_a_run_is_found_by_its_name(run: Run, tmp_path: Path) -> None:
    with RunRecorder(run.parts) as recorder:
        server = ServerRecord("server-0")
        server.observe(ServerEvent.READY, 0)
        recorder.write(STATUS, [server])
        assert find_output("digits") == find_output(str(tmp_path / "digits")) == tmp_path / "digits"
        status = read_status(tmp_path / "digits")
        assert (status["state"], status["step"], status["steps"], status["version"]) == ("running", 7, 40, "0.7")
        with pytest.raises(InvalidRequest, match=r"there is no run 'digit', .*; did you mean digits"):
            find_output("digit")
    assert read_status(tmp_path / "digits")["state"] == "done"
    assert read_settings_of(tmp_path / "digits").trainer == run.trainer
    (tmp_path / "digits" / "status.json").unlink()
    assert named_outputs() == []


def test_a_run_that_fails_says_with_what(run: Run, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), RunRecorder(run.parts):
        raise RuntimeError("no memory")
    status = read_status(tmp_path / "digits")
    assert (status["state"], status["error"]) == ("failed", "RuntimeError: no memory")


class Cancellation(BaseException):
    """Ends a run as a cancel scope or Ctrl-C does."""


def test_a_run_that_was_only_cancelled_was_stopped_and_another_error_is_its_failure(run: Run, tmp_path: Path) -> None:
    cancelled = BaseExceptionGroup("in scope 'rl-run'", [Cancellation(), BaseExceptionGroup("", [Cancellation()])])
    with pytest.raises(BaseExceptionGroup), RunRecorder(run.parts):
        raise cancelled
    status = read_status(tmp_path / "digits")
    assert (status["state"], status["error"]) == ("stopped", "")
    failed = BaseExceptionGroup("in scope 'rl-run'", [Cancellation(), ExceptionGroup("", [RuntimeError("no memory")])])
    with pytest.raises(BaseExceptionGroup), RunRecorder(run.parts):
        raise failed
    status = read_status(tmp_path / "digits")
    assert (status["state"], status["error"]) == ("failed", "RuntimeError: no memory")


def test_a_step_that_cannot_be_replayed_is_named_as_it_was_asked_for(run: Run, tmp_path: Path) -> None:
    with RunRecorder(run.parts):
        pass
    with pytest.raises(InvalidRequest, match=r"step 99 of .* is not recorded: none is"):
        next(replay(tmp_path / "digits", 99))


def test_a_run_that_fails_as_its_preempted_job_ends_is_pending(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run.parts.output is not None
    monkeypatch.setattr(run_files, "own_job_id", lambda: "job-of-run-1")
    for preempted, expected in ((False, ("failed", "RuntimeError: its server is gone")), (True, ("pending", ""))):
        job = SimpleNamespace(preempted=preempted)
        monkeypatch.setattr(run_files, "current_job", lambda job=job: job)
        with pytest.raises(RuntimeError), RunRecorder(run.parts):
            raise RuntimeError("its server is gone")
        status = read_status(run.parts.output)
        assert (status["state"], status["error"]) == expected


class OwnTrainer(rl.BaseTrainer):
    """Trainer of a user."""

    def train(self, trajectories: list[rl.Trajectory]) -> dict[str, Any]:
        return {}


def test_a_step_of_an_own_trainer_is_refused_with_the_reason_and_another_way(run: Run, tmp_path: Path) -> None:
    output = tmp_path / "own"
    with RunRecorder(evolve(run, trainer=OwnTrainer(run.trainer), output=output).parts):
        pass
    with pytest.raises(InvalidRequest) as caught:
        next(replay(output, 3))
    for text in (
        "was trained by OwnTrainer, a class of yours: the run has its settings, and neither its code nor",
        f"OwnTrainer(...).train(read_step(Path('{output}'), 3).trajectories), with read_step of fray.rl.records.steps",
        f"`fray rl show {output} --step 3`",
    ):
        assert text in str(caught.value)


def test_a_look_shows_what_a_run_waits_for(run: Run, tmp_path: Path) -> None:
    with RunRecorder(run.parts) as recorder:
        recorder.write(STATUS, [])
        (tmp_path / "digits" / "metrics.jsonl").write_text('{"step": 7, "reward_mean": 0.5}\n{"step": 8, "rew')
        status = read_status(tmp_path / "digits")
    lines = [line.split(maxsplit=1) for line in status_lines(status, status["written_at"] + 60.0)]
    shown = "\n".join(status_lines(status, status["written_at"] + 60.0))
    assert ["reward", "0.500"] in lines
    assert ["step", "7 of 40"] in lines
    assert "the trainer waits: 12 of 32 groups; slowest: task 0-81-0, 41 s, of w" in shown
    assert "20 issued = 10 trained + 0 validated + 2 dropped + 8 open" in shown
    assert shown.index("KeyError: 'answer'") < shown.index("2 timeout")
    assert f"its process {status['pid']} on {status['host']} may be lost" in shown


@pytest.mark.parametrize(
    ("state", "says"), [("running", "for 20s: its process"), ("pending", "its job has been waiting")]
)
def test_a_look_shows_that_a_run_works_on_while_its_controller_is_away(
    state: str, says: str, run: Run, tmp_path: Path
) -> None:
    output = tmp_path / "digits"
    with RunRecorder(run.parts, "job-1") as recorder:
        recorder.write(STATUS, [])
        written = json.loads((output / "status.json").read_text())
        (output / "rollouts").mkdir()

        def look(silent_s: float) -> str:
            now = time.time()
            values = {**written, "state": state, "written_at": now - silent_s}
            (output / "status.json").write_text(json.dumps(values))
            return "\n".join(status_lines(read_status(output), now))

        assert "meanwhile" not in look(20.0)
        write_work(
            output / "rollouts", evolve(STATUS, waits_for="update 8 is done with 16 samples", issued=26, open=14)
        )
        shown = look(20.0)
        assert says in shown
        assert "meanwhile episodes and the update under way continue; the next update waits for it" in shown
        assert ("the cluster starts its job again" in shown) == (state == "running")
        assert "update 8 is done with 16 samples" in shown
        assert "26 issued = 10 trained + 0 validated + 2 dropped + 14 open" in shown
        # A moment later than the status, as in every run.
        assert "meanwhile" not in look(0.5)
        # Of an earlier start of the run.
        assert "update 8 is done with 16 samples" not in look(-0.5)


def test_failures_are_noted_with_their_tracebacks(tmp_path: Path) -> None:
    journal = RunJournal(tmp_path)
    journal.note_failure(3, "0-1-0", "KeyError", "Traceback …\nKeyError: 'answer'")
    assert read_failures(tmp_path) == [
        {"step": 3, "task": "0-1-0", "reason": "KeyError", "detail": "Traceback …\nKeyError: 'answer'"}
    ]
