"""Output of the command line about jobs and machines, and its verbs."""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import evolve

from fray.cli.formatting import span_of
from fray.cli.jobs import advice, described, job_table, lasted, state_now
from fray.cli.logs import print_log_line
from fray.cli.main import main, print_error
from fray.cli.nodes import described as node_described
from fray.cli.nodes import node_table, state_of
from fray.cli.options import parser_of
from fray.cli.output import say, say_screen
from fray.cli.run import WaitReporter
from fray.errors import InvalidRequest
from fray.model.log_records import LogLine
from fray.model.messages.client import NodeInfo
from fray.model.monitoring.health import Progress
from fray.model.specs import AttemptInfo, EndReason, JobInfo, JobState
from fray.model.text import visible_text
from fray.runtime.controller_client.log_lines import print_lines


def info(state: JobState, *attempts: AttemptInfo, **more: Any) -> JobInfo:
    return JobInfo(job_id="train-k3x9", name="train", state=state, attempts=attempts, **more)


def attempt(number: int = 0, **more: Any) -> AttemptInfo:
    return AttemptInfo(attempt_id=f"train-k3x9:{number}:0", node="alpha", **more)


RUNNING = info(JobState.RUNNING, attempt(start_time=100.0, health="stalled"), start_time=100.0)
HELD = info(JobState.PENDING, attempt(cause=EndReason.FAILURE, start_time=100.0, end_time=110.0), start_time=100.0)
QUEUED = info(JobState.PENDING, launch_time=90.0, reason="needs 8 gpu h100")
BROKEN = info(JobState.FAILED, cause=EndReason.ENVIRONMENT, launch_time=90.0, end_time=100.0)


@pytest.mark.parametrize(
    ("owner", "text"),
    [
        ("", "the cluster (detached)"),
        ("run-a2b3:0:0", "run-a2b3:0:0"),
        ("run-a2b3", "job run-a2b3, also while it restarts"),
    ],
)
def test_show_prints_the_owner_of_a_job(owner: str, text: str) -> None:
    shown = described(evolve(RUNNING, owner=owner, parent="run-a2b3"), 130.0, None)
    assert f"owner {text}" in [" ".join(line.split()) for line in shown]


@pytest.mark.parametrize(
    ("job", "state", "lasting", "next_word"),
    [
        (RUNNING, "running for 30s, stalled", "30s", "`fray logs -f train-k3x9`; `fray stacks"),
        (HELD, "pending for 20s", "20s", "`fray logs train-k3x9`; `fray nodes`; `fray stop"),
        (QUEUED, "pending for 40s", "40s", "`fray explain train-k3x9` shows the reason"),
        (BROKEN, "failed (environment) 30s ago", "", "it is not retried: fix the cause"),
        (info(JobState.FAILED, cause=EndReason.FAILURE), "failed", "", "`fray events train-k3x9`"),
    ],
)
def test_show_prints_state_duration_and_advice(job: JobInfo, state: str, lasting: str, next_word: str) -> None:
    assert state_now(job, 130.0) == state
    assert lasted(job, 130.0) == lasting
    assert next_word in advice(job)
    assert f"state {state}" in [" ".join(line.split()) for line in described(job, 130.0, None)]


def test_a_succeeded_job_has_no_advice() -> None:
    assert advice(info(JobState.SUCCEEDED)) == ""


def test_empty_columns_are_left_out_and_an_attempt_shows_its_progress() -> None:
    one = attempt(start_time=100.0, health="well", progress=Progress(done=3, total=10, unit="files"), swept=2)
    head, row = described(info(JobState.RUNNING, one), 130.0, None)[-2:]
    assert head.split() == ["ATTEMPT", "NODE", "STARTED", "TIME", "STATE", "LEFT", "PROGRESS"]
    assert row.split()[-7:] == ["well", "2", "3", "of", "10", "files", "(30%)"]


def test_the_list_shows_a_stalled_job() -> None:
    assert job_table([(0, RUNNING)], False, 130.0, None)[1].endswith("stalled")


def test_the_state_of_a_machine_shows_that_it_is_out_of_service() -> None:
    there = NodeInfo(name="alpha", alive=True, cpu_milli=1, cpu_milli_free=1, memory_bytes=1, memory_bytes_free=1)
    assert state_of(there) == "alive"
    out = evolve(there, alive=False, standing="draining", standing_reason="is being drained by ada (new kernel)")
    assert state_of(out) == "silent, draining"
    assert node_table([out], None)[1].split()[1:3] == ["silent,", "draining"]
    assert any("no: it is being drained by ada" in line for line in node_described(out, [], 0.0, None))


def test_a_deadline_is_a_duration() -> None:
    assert span_of("2h", "--deadline") == 7200.0
    assert span_of(None, "--deadline") is None
    with pytest.raises(InvalidRequest, match="examples: 30s, 10m, 2h, 1d"):
        span_of("soon", "--deadline")


def test_every_verb_runs_a_function_that_exists() -> None:
    verbs = [text for command in _commands(parser_of()) if (text := command.get_default("verb"))]
    assert len(verbs) > 20
    for module, _, function in (text.partition(":") for text in verbs):
        assert callable(getattr(import_module(f"fray.cli.{module}"), function))


def _commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _commands(command)


async def test_a_wait_of_the_command_is_reported_once_if_it_is_long(
    autojump_clock: object, capsys: pytest.CaptureFixture[str]
) -> None:
    waits = WaitReporter()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(waits.run)
        waits.begin("a short wait")
        await trio.sleep(1)  # virtual, as all below
        waits.begin("the controller to answer")
        await trio.sleep(60)
        waits.begin("another short wait")
        await trio.sleep(2)
        waits.end()
        await trio.sleep(60)
        waits.begin("the controller to end this session")
        await trio.sleep(4)
        nursery.cancel_scope.cancel()
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "fray: waits for the controller to answer",
        "fray: waits for the controller to end this session",
    ]


def test_verbs_on_the_machine_of_a_controller_print_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "token").write_text("a-token-hard-to-guess")
    store, out = f"--store={tmp_path}", str(tmp_path / "alpha.pem")

    def printed(*words: str) -> Any:
        assert main(words) == 0
        return json.loads(capsys.readouterr().out)

    authority = printed("ca", "init", store, "--json")
    assert printed("--json", "ca", "show", store) == authority, "the option may come first"
    issued = printed("ca", "issue", "alpha", store, "--out", out, "--json")
    assert (issued["node"], issued["file"], Path(out).exists()) == ("alpha", out, True)
    rotated = printed("key", "rotate-token", store, "--json")
    assert (rotated["file"], rotated["finished"]) == (str(tmp_path / "token"), False)
    assert printed("key", "rotate-token", store, "--finish", "--json")["finished"] is True


# Control characters --------------------------------------------------------------------------------------------------

EVIL = "\x1b]0;owned\x07\x1b[2J\x1b[31mred\x1b[0m \x9b31m\ttab\r\x7f"


def test_control_characters_do_nothing_on_a_terminal() -> None:
    assert visible_text("plain ünïcode 😀") == "plain ünïcode 😀"
    assert visible_text(EVIL) == "^[]0;owned^G^[[2J^[[31mred^[[0m \\x9b31m\ttab^M^?"
    assert visible_text(EVIL, colors=True) == ("^[]0;owned^G^[[2J\x1b[31mred\x1b[0m \\x9b31m\ttab^M^?\x1b[0m")
    # Nothing but sequences of colors is left that begins with ESC.
    for code in (*range(32), *range(127, 160)):
        shown = visible_text(f"a{chr(code)}b", colors=True)
        assert shown.isprintable() or code == 9


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_screen_replaces_what_a_terminal_shows_and_a_file_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, expected in ((Terminal(), "\x1b[H\x1b[2Ja^[[2Jb\n"), (io.StringIO(), "a\x1b[2Jb\n")):
        monkeypatch.setattr("sys.stdout", stream)
        say_screen(["a\x1b[2Jb"])
        assert stream.getvalue() == expected


def test_terminals_get_visible_text_and_programs_what_was_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    line = LogLine(time=1.0, stream="out", text=EVIL, attempt_id="j:0:0", job_id="j", name="j", number=0)
    for stream, raw, expected in (
        (Terminal(), False, visible_text(EVIL, colors=True)),
        (Terminal(), True, EVIL),
        (io.StringIO(), False, EVIL),
    ):
        monkeypatch.setattr("sys.stdout", stream)
        print_log_line(line, argparse.Namespace(json=False, times=False, tree=False, raw=raw))
        assert stream.getvalue() == f"{expected}\n"
    for stream, expected in ((Terminal(), f"{visible_text(EVIL)}\nnext"), (io.StringIO(), f"{EVIL}\nnext")):
        monkeypatch.setattr("sys.stdout", stream)
        say([f"{EVIL}\nnext"])
        assert stream.getvalue() == f"{expected}\n"
        monkeypatch.setattr("sys.stderr", stream)
        print_error(InvalidRequest(EVIL))
        assert stream.getvalue().endswith(f"fray: {expected.partition(chr(10))[0]}\n")


def test_a_drivers_own_terminal_gets_what_its_jobs_print(monkeypatch: pytest.MonkeyPatch) -> None:
    line = LogLine(time=1.0, stream="out", text=EVIL, attempt_id="j:0:0", job_id="j", name="j", number=0)
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    print_lines([line])
    assert terminal.getvalue() == f"(j) {EVIL}\n"
