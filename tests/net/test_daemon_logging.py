"""Log lines of daemons: readable text, or JSON objects."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path

import pytest

from fray.net import daemon_logging


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def said(stream: io.StringIO, json_lines: bool | None = None) -> list[str]:
    daemon_logging.configure(json_lines, stream=stream)
    log = logging.getLogger("fray.controller")
    log.info("node joined", extra={"node": "n1", "_mark_of_a_library": 1})
    log.warning("half \udcff of %s", "it")
    log.debug("unheard")
    try:
        raise ValueError("why")
    except ValueError:
        log.exception("it failed")
    return stream.getvalue().splitlines()


def test_a_terminal_gets_readable_lines_with_facts_behind() -> None:
    lines = said(Terminal())
    assert lines[0].endswith(" controller  node joined  node=n1")
    assert lines[1].endswith(" controller  warning: half \\udcff of it")
    assert lines[2].endswith(" controller  error: it failed")
    assert lines[-1] == "ValueError: why"


def test_facts_that_the_text_has_are_not_repeated_on_a_terminal() -> None:
    stream = Terminal()
    daemon_logging.configure(stream=stream)
    facts = {"node": "n1", "epoch": 7, "job": ""}
    logging.getLogger("fray.node").info("node %s joined the cluster", "n1", extra=facts)
    assert stream.getvalue().endswith(" node  node n1 joined the cluster  epoch=7\n")


def test_anything_else_gets_one_json_object_a_line() -> None:
    entries = [json.loads(line) for line in said(io.StringIO())]
    assert [(entry["level"], entry["text"]) for entry in entries] == [
        ("info", "node joined"),
        ("warning", "half \udcff of it"),
        ("error", "it failed"),
    ]
    assert (entries[0]["part"], entries[0]["node"]) == ("fray.controller", "n1")
    assert entries[2]["error"].endswith("ValueError: why")


def test_the_format_can_be_chosen_and_configuring_again_does_not_duplicate_lines() -> None:
    daemon_logging.configure(stream=io.StringIO())
    assert said(Terminal(), json_lines=True)[0].startswith("{")
    assert len(said(Terminal(), json_lines=False)) == len(said(Terminal()))


def test_a_log_file_gets_json_lines_too_is_renamed_at_its_size_and_is_private(tmp_path: Path) -> None:
    file, stream = tmp_path / "controller.log", Terminal()
    daemon_logging.configure(False, file, stream=stream, file_bytes=300)
    for number in range(50):
        logging.getLogger("fray.controller").info("node %s joined", number)
    files = sorted(tmp_path.iterdir())
    assert [each.name for each in files] == ["controller.log", *(f"controller.log.{n}" for n in range(1, 5))]
    assert all(each.stat().st_size <= 300 and each.stat().st_mode & 0o777 == 0o600 for each in files)
    assert json.loads(file.read_text().splitlines()[-1])["text"] == "node 49 joined"
    assert stream.getvalue().endswith(" controller  node 49 joined\n")


def test_a_full_disk_costs_the_log_file_its_lines_and_standard_error_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stream = Terminal()
    daemon_logging.configure(False, Path("/dev/full"), stream=stream)
    logging.getLogger("fray.controller").info("node joined")
    assert stream.getvalue().endswith(" controller  node joined\n")
    assert capsys.readouterr().err == ""


def test_a_quiet_daemon_logs_to_its_file_alone(tmp_path: Path) -> None:
    stream, file = io.StringIO(), tmp_path / "log"
    daemon_logging.configure(False, file, quiet=True, stream=stream)
    logging.getLogger("fray.test").info("here")
    assert stream.getvalue() == ""
    assert json.loads(file.read_text())["text"] == "here"
    daemon_logging.configure(False, None, quiet=True, stream=stream)
    logging.getLogger("fray.test").info("there")
    assert "there" in stream.getvalue()
