"""Lists on terminals of 60, 80 and 120 columns, their colors, and ``--watch``."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from fray.cli import output
from fray.cli.formatting import LEAST, NAMES, table
from fray.cli.history.gone import described_gone, gone_table
from fray.cli.history.sums import cost_table, sum_table
from fray.cli.jobs import job_table, tree
from fray.cli.live.terminal import keys_of
from fray.cli.live.top import ClusterSnapshot, TopView, lines_of, running_jobs
from fray.cli.logs import print_log_line
from fray.cli.machines import group_table, machine_table
from fray.cli.nodes import actor_table, node_table
from fray.cli.options import parser_of
from fray.cli.output import note, say, screen
from fray.cli.queue import queue_table
from fray.cli.reservations import described_gone as described_gone_reservation
from fray.model.actors import ActorInfo, ActorStatus
from fray.model.log_records import LogLine
from fray.model.messages.client import NodeInfo
from fray.model.messages.history import AttemptRecord, NodeRecord, RecordedReservation
from fray.model.messages.machine_groups import GroupInfo, MachineInfo
from fray.model.messages.usage import QueueEntry, QueueInfo, UsageInfo
from fray.model.monitoring.accounting import Hours, UsageSum, cost
from fray.model.specs import AttemptInfo, JobInfo, JobState

TRANSCRIPT = Path(__file__).parents[1] / "transcripts" / "terminal" / "lists.txt"
WIDTHS = (60, 80, 120)
NOW = 10_000.0
ANONYMOUS = "anon-dc5f98679bf8"


def job(job_id: str, state: JobState, namespace: str = "prod", node: str = "", **more: Any) -> JobInfo:
    attempts = (AttemptInfo(attempt_id=f"{job_id}:0:0", node=node, start_time=9_000.0),) if node else ()
    return JobInfo(
        job_id=job_id,
        name=job_id.rpartition("-")[0],
        state=state,
        namespace=namespace,
        attempts=attempts,
        launch_time=8_000.0,
        start_time=9_000.0 if node else None,
        **more,
    )


JOBS = [
    job("prod/trainer-k3x9m2p4q5r6", JobState.RUNNING, node="gpu-7.lab.example"),
    job("prod/trainer/rollouts-a2b3c4d5e6f7", JobState.RUNNING, node="cpu-12", parent="prod/trainer-k3x9m2p4q5r6"),
    job(
        "evaluate-z8y7x6w5v4u3",
        JobState.FAILED,
        ANONYMOUS,
        "gpu-7.lab.example",
        end_time=9_500.0,
        error_message="exit code 1; last lines of stderr: FileNotFoundError: no such file: '/data/eval.jsonl'",
    ),
    job("sweep-m2n3p4q5r6s7", JobState.PENDING, reason="needs 8 gpu h100; gpu-7 has 0 of 8 free"),
]
NODES = [
    NodeInfo(
        name=name,
        alive=alive,
        cpu_milli=64_000,
        cpu_milli_free=3_500,
        memory_bytes=256 * 1024**3,
        memory_bytes_free=12 * 1024**3,
        standing=standing,
        attributes={"zone": "europe-west4-a", "isolation": "pid-namespace", "memory_limit": "cgroup"},
    )
    for name, alive, standing in (
        ("gpu-7.lab.example", True, ""),
        ("gpu-8.lab.example", True, "draining"),
        ("cpu-12", False, ""),
    )
]
ACTORS = [
    ActorInfo(
        actor_id=f"policy/{role}-{token}",
        name=f"policy/{role}",
        namespace=space,
        status=status,
        node=node,
        pid=4711,
        parent=parent,
    )
    for role, token, space, status, node, parent in (
        ("learner", "k3x9m2p4q5r6", "prod", ActorStatus.READY, "gpu-7.lab.example", JOBS[0].job_id),
        ("sampler", "a2b3c4d5e6f7", ANONYMOUS, ActorStatus.RESTARTING, "cpu-12", ""),
    )
]
QUEUE = QueueInfo(
    total=1,
    entries=(
        QueueEntry(
            id="sweep-m2n3p4q5r6s7",
            kind="job",
            position=1,
            user="ada.lovelace@example.com",
            namespace=ANONYMOUS,
            band="interactive",
            standing="within",
            priority=0,
            request="4 × 8 gpu h100, 16 CPUs, 64 GB memory",
            waiting_s=125.0,
            reason="needs 8 gpu h100; gpu-7 has 0 of 8 free",
        ),
    ),
    by_user={"ada.lovelace@example.com": 1},
)
GROUPS = [
    GroupInfo(name="v5e-spot", provider="gcp", kind="tpu v5litepod-16, 4 hosts", max=8, wanted=2, cost_per_hour=9.6)
]
MACHINES = [
    MachineInfo(
        name="fray-2c9a-v5e-spot-0017",
        group="v5e-spot",
        zone="europe-west4-b",
        phase="asked",
        age_s=75.0,
        hosts=4,
        reason="wanted by sweep-m2n3p4q5r6s7",
        state="PROVISIONING",
        provider_message="waiting for capacity in europe-west4-b",
    )
]


TOP = ClusterSnapshot(
    at=NOW,
    usage=UsageInfo(
        now=NOW,
        half_life_s=3600.0,
        capacity={"cpu": 192.0, "memory": 768.0 * 1024**3, "gpu": 16.0},
        used={"cpu": 181.5, "memory": 732.0 * 1024**3, "gpu": 16.0},
        users=(),
        namespaces=(),
    ),
    nodes=tuple(NODES),
    waiting=1,
    jobs=tuple(
        running_jobs(
            [
                evolve(
                    info,
                    user="ada.lovelace@example.com",
                    attempts=(evolve(info.attempts[0], cpu_s=cpu_s, memory_bytes=gib * 1024**3),),
                )
                for info, cpu_s, gib in zip(JOBS[:2], (800.0, 31_500.0), (200, 40), strict=True)
            ],
            [evolve(NODES[0], granted={"gpu0": f"{JOBS[0].job_id}:0:0", "gpu1": f"{JOBS[0].job_id}:0:0"})],
            NOW,
            None,
        )
    ),
)


def shown(width: int) -> Iterator[tuple[str, Sequence[str]]]:
    """Each list with its command."""
    yield "fray jobs", job_table([(0, info) for info in JOBS], True, NOW, width)
    yield "fray jobs --tree --namespace prod", job_table(tree(JOBS[:2]), False, NOW, width)
    yield "fray nodes", node_table(NODES, width)
    yield "fray actors", actor_table(ACTORS, True, width)
    yield "fray queue", queue_table(QUEUE, width)
    yield "fray top", lines_of(TOP, TopView(), NOW, width, 9)
    yield "fray machines", [*group_table(GROUPS, width), "", *machine_table(MACHINES, width)]


def test_lists_are_as_in_the_transcript() -> None:
    text = "".join(
        f"$ {command}{' ' * (40 - len(command))}# {width} columns\n" + "".join(f"{line}\n" for line in lines) + "\n"
        for width in WIDTHS
        for command, lines in shown(width)
    )
    if os.environ.get("FRAY_WRITE_TRANSCRIPTS"):
        TRANSCRIPT.write_text(text)
    assert text == TRANSCRIPT.read_text()


@pytest.mark.parametrize("width", WIDTHS)
def test_what_is_copied_is_shown_whole_and_lines_fit(width: int) -> None:
    lists = dict(shown(width))
    for command, lines in lists.items():
        assert all(len(line) <= width for line in lines), command
    assert all(any(info.job_id in line for line in lists["fray jobs"]) for info in JOBS)
    assert all(any(node.name in line for line in lists["fray nodes"]) for node in NODES)
    assert all(any(job.info.job_id in line for line in lists["fray top"]) for job in TOP.jobs)
    assert all(any(info.actor_id in line for line in lists["fray actors"]) for info in ACTORS)
    assert any("sweep-m2n3p4q5r6s7 " in line for line in lists["fray queue"])
    assert any("fray-2c9a-v5e-spot-0017 " in line for line in lists["fray machines"])


@pytest.mark.parametrize("width", WIDTHS)
def test_machines_that_are_gone_fit_and_show_what_ran_there(width: int) -> None:
    machine = NodeRecord(
        node="gpu-7.lab.example",
        incarnation="i",
        kind="h100",
        devices=8,
        cpu_milli=64_000,
        memory_bytes=256 * 1024**3,
        joined_at=NOW,
        gone_at=NOW + 7200,
        reason="the machine has ended the connection, and nothing dials again: its process was killed",
    )
    ran = AttemptRecord(
        attempt_id="prod/trainer-k3x9m2p4q5r6:0:0",
        job_id="prod/trainer-k3x9m2p4q5r6",
        name="prod/trainer",
        user="ada.lovelace@example.com",
        namespace="prod",
        band="batch",
        node=machine.node,
        machine="h100",
        cpu_milli=1000,
        memory_bytes=0,
        placed_at=NOW,
        ended_at=NOW + 3600,
        cause="machine_lost",
    )
    lines = gone_table([machine], width)
    assert all(len(line) <= width for line in lines)
    assert lines[1].startswith("gpu-7.lab.example ")
    shown = described_gone(machine, [ran], width)
    assert any("prod/trainer-k3x9m2p4q5r6:0:0" in line and "machine_lost" in line for line in shown)
    assert "nothing ran there" in described_gone(machine, [], width)
    assert "ran there; the last 50 of 51 attempts:" in described_gone(machine, [ran] * 51, width)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_reservation_that_is_gone_fits(width: int) -> None:
    gone = RecordedReservation(
        reservation_id="prod/nightly-k3x9m2p4q5r6",
        name="nightly",
        namespace="prod",
        user="ada.lovelace@example.com",
        band="batch",
        cpu_milli=64_000,
        memory_bytes=256 * 1024**3,
        device_kind="gpu",
        device_variant="h100",
        devices=8,
        hosts=4,
        min_units=2,
        max_units=4,
        units_given=3,
        nodes=tuple(f"gpu-{number}.lab.example" for number in range(12)),
        created_at=NOW,
        held_at=NOW + 60,
        ended_at=NOW + 3600,
        ended_by="released",
        reason="released by its owner, a driver that has ended: the command was interrupted",
    )
    shown = described_gone_reservation(gone, width)
    assert all(len(line) <= width for line in shown)
    assert any("gpu-11.lab.example" in line for line in shown)


@pytest.mark.parametrize("width", WIDTHS)
def test_sums_of_use_and_cost_fit_and_add_up(width: int) -> None:
    held = Hours(cpu=1234.5, memory_gib=98765.4, chips={"gpu:h100": 4321.0})
    ada = UsageSum(
        key="ada.lovelace@example.com", jobs=12, attempts=345, held=held, retried=Hours(chips={"gpu:h100": 432.1})
    )
    bob = UsageSum(key="bob", jobs=1, attempts=1, held=Hours(cpu=0.001), cpu_known=4.0, cpu_idle=3.0)
    lines = sum_table([ada, bob], "user", width)
    assert all(len(line) <= width for line in lines)
    assert lines[1].startswith("ada.lovelace@example.com ")
    assert "4,321.00" in lines[1]
    if width == max(WIDTHS):
        assert "10%" in lines[1]
        assert "75%" in lines[2]
    prices = {"cpu": 1.0, "gpu": 2.0}
    lines = cost_table([cost(ada, prices), cost(bob, prices)], "user", width)
    assert all(len(line) <= width for line in lines)
    assert [line.split()[:2] for line in lines[1:]] == [
        ["ada.lovelace@example.com", "9,876.50"],
        ["bob", "0.00"],
        ["total", "9,876.50"],
    ]


def test_names_are_whole_or_absent_and_text_is_cut_first() -> None:
    rows = [["a" * 30, "words " * 10]]
    assert table(["ID", "REASON"], rows, 50)[1] == f"{'a' * 30}  words words words…"
    assert table(["ID", "REASON"], rows, 40, optional=("REASON",)) == ["ID", "a" * 30]
    # Nothing may be left out: the line is longer than the terminal, and the id can still be copied.
    assert "a" * 30 in table(["ID", "REASON"], rows, 40)[1]
    assert {"ID", "KEY", "NODE"} <= NAMES
    assert len(table(["REASON"], [["x" * 99]], LEAST)[1]) == LEAST


def test_outside_a_terminal_nothing_is_cut_or_left_out() -> None:
    lines = job_table([(0, info) for info in JOBS], True, NOW, None)
    assert lines[0].split() == ["NAME", "STATE", "TIME", "NODE", "NAMESPACE", "ID", "REASON"]
    assert ANONYMOUS in lines[3]
    assert lines[3].endswith("'/data/eval.jsonl'")


# Colors --------------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Function that prints the list of jobs on a stream, with ``--color``."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")

    def printed(stream: io.StringIO, choice: str = "auto") -> str:
        monkeypatch.setattr("sys.stdout", stream)
        output.choose_colors(choice)
        say(job_table([(0, info) for info in JOBS], True, NOW, 120))
        return stream.getvalue()

    yield printed
    output.choose_colors("auto")


def test_states_have_colors_on_a_terminal_alone(printed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b[32mrunning\x1b[0m" in printed(Terminal())
    assert "\x1b[31mfailed\x1b[0m" in printed(Terminal())
    assert "\x1b" not in printed(io.StringIO())
    assert "\x1b[33mpending\x1b[0m" in printed(io.StringIO(), "always")
    assert "\x1b" not in printed(Terminal(), "never")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in printed(Terminal())
    assert "\x1b[31mfailed" in printed(Terminal(), "always"), "the option counts more"
    monkeypatch.setenv("NO_COLOR", "")
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in printed(Terminal())


def test_colors_of_a_message_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    say(table(["STATE", "REASON"], [["failed", "\x1b[32mfine\x1b[0m"]]))
    assert terminal.getvalue().splitlines()[1] == "\x1b[31mfailed\x1b[0m  ^[[32mfine^[[0m"


def test_a_terminal_without_colors_gets_logs_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    line = LogLine(
        time=1.0, stream="out", text="\x1b[31mred\x1b[0m\x07", attempt_id="j:0:0", job_id="j", name="j", number=0
    )
    options = argparse.Namespace(json=False, times=False, tree=False, raw=False)
    monkeypatch.setenv("NO_COLOR", "1")
    for stream, expected in ((Terminal(), "red^G\n"), (io.StringIO(), "\x1b[31mred\x1b[0m\x07\n")):
        monkeypatch.setattr("sys.stdout", stream)
        print_log_line(line, options)
        assert stream.getvalue() == expected


# Watching ------------------------------------------------------------------------------------------------------------


def commands(parser: argparse.ArgumentParser, words: str = "fray") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Each verb with its parser."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        yield words, parser
    for action in below:
        for name, command in action.choices.items():
            yield from commands(command, f"{words} {name}")


def test_every_verb_has_json_and_every_list_can_be_watched() -> None:
    found = dict(commands(parser_of()))
    assert [words for words, parser in found.items() if "--json" not in parser._option_string_actions] == []
    lists = {words for words, parser in found.items() if "--watch" in parser._option_string_actions}
    assert lists == {
        *("fray jobs", "fray groups", "fray events", "fray queue", "fray usage", "fray nodes", "fray machines"),
        *("fray reservations", "fray actors", "fray user list", "fray key list", "fray namespace list", "fray audit"),
        *(
            "fray actor ls",
            "fray reservation ls",
            "fray rl ls",
            "fray tinker ls",
            "fray tinker key list",
            "fray history",
            "fray status",
            "fray capacity",
            "fray cost",
        ),
    }


def test_a_screen_is_shown_at_once_with_its_notes_below(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, clear in ((Terminal(), "\x1b[H\x1b[2J"), (io.StringIO(), "")):
        monkeypatch.setattr("sys.stdout", stream)
        monkeypatch.setattr("sys.stderr", stream)
        with screen():
            note("only the newest 2 are shown")
            say(["one", "two"])
            assert stream.getvalue() == "", "it is not shown in pieces"
            assert sys.stdout.isatty() == stream.isatty()
        assert stream.getvalue() == f"{clear}one\ntwo\nfray: only the newest 2 are shown\n"


# The whole screen ----------------------------------------------------------------------------------------------------


def ids_of(lines: Sequence[str]) -> list[str]:
    """Ids of the jobs on a screen of `fray top`."""
    return [line.split()[0] for line in lines if line.startswith("prod/")]


def test_keys_sort_filter_and_scroll_the_jobs() -> None:
    trainer, rollouts = (job.info.job_id for job in TOP.jobs)
    view = TopView()

    def after(*keys: str) -> list[str]:
        assert all(map(view.press, keys))
        return ids_of(lines_of(TOP, view, NOW, 80, 24))

    assert after() == [rollouts, trainer], "by CPUs"
    assert after("s") == [trainer, rollouts], "by memory"
    assert after("r") == [rollouts, trainer]
    assert after("r", "/", *"rollq") == []
    assert after("backspace") == [rollouts], "q is typed, and ends nothing"
    assert after("escape") == [trainer, rollouts]
    assert after("m") == []
    assert any(line.startswith("gpu-8.lab.example") for line in lines_of(TOP, view, NOW, 80, 24))
    assert not view.press("q")


def test_a_screen_is_filled_exactly_and_scrolls_to_what_does_not_fit() -> None:
    trainer, rollouts = (job.info.job_id for job in TOP.jobs)
    view = TopView()
    for height in (7, 8, 9, 30):
        lines = lines_of(TOP, view, NOW, 60, height)
        assert len(lines) == height
        assert all(len(line) <= 60 for line in lines)
    assert ids_of(lines_of(TOP, view, NOW, 60, 8)) == [rollouts]
    view.press("down")
    assert ids_of(lines_of(TOP, view, NOW, 60, 8)) == [trainer]
    view.press("page down")
    assert ids_of(lines_of(TOP, view, NOW, 60, 8)) == [trainer], "not beyond the end"
    view.press("page up")
    assert ids_of(lines_of(TOP, view, NOW, 60, 8)) == [rollouts]


def test_cpus_in_use_are_those_since_the_last_looks() -> None:
    info = evolve(JOBS[0], attempts=(evolve(JOBS[0].attempts[0], cpu_s=120.0),))
    (now,) = running_jobs([info], NODES, NOW, (NOW - 10.0, {info.job_id: 100.0}))
    assert now.cpus == 2.0
    (restarted,) = running_jobs([info], NODES, NOW, (NOW - 10.0, {info.job_id: 5000.0}))
    assert restarted.cpus == 120.0 / restarted.runs_s


def test_keys_of_terminals_are_known_and_others_do_nothing() -> None:
    assert keys_of(b"\x1b[A") == ["up"]
    assert keys_of(b"\x1b[6~") == ["page down"]
    assert keys_of(b"\x1b[1;5C") == []
    assert keys_of("aé\r".encode()) == ["a", "é", "enter"]
    assert keys_of(b"") == []
