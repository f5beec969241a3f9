"""Output of attempts as real processes: all of it arrives, whichever process is killed in between."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import pytest
import trio

from fray.model.log_records import unpack
from fray.model.messages.node import ReadLog
from fray.model.specs import Phase
from fray.node.attempts.process_launcher import STATE_FORMAT
from fray.node.config import LogRules
from fray.node.logs.store import LogStore, next_number
from fray.node.logs.writer import LogWriter
from tests.processes.launcher_bench import LIMIT_S, Bench, open_bench


async def test_every_line_is_there_when_the_end_is_reported(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        attempt = bench.start("chatter")
        await bench.outcome(attempt)
        out = [text for _, stream, text in bench.lines if stream == "out"]
        assert out == ["first", "from a child", "no newline"]
        assert [text for _, stream, text in bench.lines if stream == "err"] == ["warning"]


async def test_a_flood_is_all_on_the_disk_and_does_not_starve_others(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        flood = bench.start("flood", env_vars={"LINES": "200000"})
        await bench.until_line(flood, "0 " + "x" * 200)
        assert await bench.value(bench.start("answer")) == b"42"
        assert not any(observed.phase is Phase.ENDED for observed, _ in bench.reports if observed.attempt_id == flood)
        await bench.outcome(flood)
        texts = [line.partition(" ")[0] for line in await logged(bench, flood)]
        assert texts == [str(number) for number in range(200000)]


async def logged(bench: Bench, attempt: str) -> list[str]:
    """All that is on the disk of it."""
    found: list[str] = []
    place = 0
    while True:
        page, data = await bench.launcher.logs.read(ReadLog(attempt_id=attempt, first=place))
        found += [text for _, _, _, texts in unpack(data) for text in texts]
        place = page.next
        if page.caught_up:
            return found


async def test_a_node_that_is_stopped_blocks_no_shim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def narrow_socketpair(*kind: int) -> tuple[socket.socket, socket.socket]:
        node_end, shim_end = socketpair(*kind)
        if not kind:
            shim_end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # room for a few messages, not for hundreds
        return node_end, shim_end

    socketpair = socket.socketpair
    monkeypatch.setattr(socket, "socketpair", narrow_socketpair)
    async with open_bench(tmp_path) as bench:
        job = bench.start("flood", env_vars={"LINES": "30000"})
        await bench.until_line(job, "0 " + "x" * 200)
        log = bench.launcher.logs.store.directory(job)
        deadline = time.monotonic() + 20.0
        while next_number(log) < 30000 and time.monotonic() < deadline:
            time.sleep(0.05)  # noqa: ASYNC251 - the node is this process, which does not run meanwhile
        assert next_number(log) == 30000
        await bench.outcome(job)
        assert [text.partition(" ")[0] for _, _, text in bench.lines] == [str(number) for number in range(30000)]


async def test_the_last_lines_of_a_killed_job_are_there(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        job = bench.start("murmur")
        await bench.until_line(job, "line 9")
        pid = (await bench.until_phase(job, Phase.RUNNING))[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await bench.outcome(job)
        assert (await logged(bench, job))[-1] == "unfinished"


async def test_lines_a_killed_shim_has_not_read_are_read_by_its_node(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        job = bench.start("murmur", env_vars={"AFTER": str(tmp_path / "go"), "SAID": str(tmp_path / "said")})
        await bench.until_line(job, "line 9")
        shim = bench.launcher.statistics()["attempts"][job][1]
        os.kill(shim, signal.SIGSTOP)  # the job keeps writing into its pipe
        (tmp_path / "go").touch()
        with trio.fail_after(LIMIT_S):
            while not (tmp_path / "said").exists():  # noqa: ASYNC110 - another process makes it
                await trio.sleep(0.01)
        os.kill(shim, signal.SIGKILL)
        await bench.outcome(job)
        assert await logged(bench, job) == [f"line {n}" for n in range(10)] + ["unfinished and ended", "late", "last"]


async def test_the_next_node_finishes_the_logs_of_the_one_before(tmp_path: Path) -> None:
    store = LogStore(tmp_path / "logs", LogRules())
    log = store.open("old:0:0", lambda chunk: None)
    spool = LogWriter(log.directory)
    spool.write("out", 1.0, b"whole\n", b"ha")
    spool.write("out", 2.0, b"", b"half")
    (tmp_path / "attempts").mkdir()
    (tmp_path / "format").write_text(f"{STATE_FORMAT}\n")
    async with open_bench(tmp_path) as bench:
        assert await logged(bench, "old:0:0") == ["whole", "half"]


async def test_the_node_writes_to_the_log_before_and_while_there_is_a_process(tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        attempt = bench.start("deaf")
        bench.launcher.say(attempt, "made ready\nin two lines")
        await bench.until_line(attempt, "ready")
        bench.launcher.say(attempt, "still here")
        await bench.until_line(attempt, "still here")
        bench.launcher.kill(attempt)
        await bench.outcome(attempt)
        assert [line for line in bench.lines if line[1] == "sys"] == [
            (attempt, "sys", "made ready"),
            (attempt, "sys", "in two lines"),
            (attempt, "sys", "still here"),
        ]
