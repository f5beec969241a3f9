"""``fray man``: the manual pages of all commands, made of what prints ``--help``."""

from __future__ import annotations

import argparse
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fray.cli.administration.man import manual_pages
from fray.cli.main import main
from fray.cli.options import parser_of
from fray.controller.options import make_parser as controller_parser
from fray.node.main import make_parser as node_parser

CHECKS = (("mandoc", "-Tlint", "-Wwarning"), ("man", "--warnings", "-E", "UTF-8", "-l", "-Tutf8", "-Z"))
"""Programs that check a page, and name what is wrong with it."""


def parsers_below(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from parsers_below(below)


def plain(page: str) -> str:
    return page.replace("\\-", "-").replace("\\(ga", "`").replace("\\(aq", "'").replace("\\&", "").replace("\\e", "\\")


def test_each_command_has_a_page_with_its_options_and_examples() -> None:
    pages = manual_pages()
    # `fray node` only leads to `fray node show`: the page of its name is that of the daemon.
    commands = [each for each in parsers_below(parser_of()) if each.prog != "fray node"]
    for parser in (*commands, node_parser(), controller_parser()):
        page = plain(pages[f"{parser.prog.replace(' ', '-')}.1"])
        for action in parser._actions:
            if action.help != argparse.SUPPRESS:
                assert all(option in page for option in action.option_strings), (parser.prog, action.option_strings)
        for line in (parser.epilog or "").splitlines():
            assert line in page or line == "examples:", (parser.prog, line)
    assert len(pages) == len(commands) + 2


def test_the_pages_are_written_into_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "man" / "man1"
    assert main(["man", str(place)]) == 0
    assert {path.name for path in place.iterdir()} == manual_pages().keys()
    assert f"pages to {place}" in capsys.readouterr().err
    assert main(["man", str(place / "fray.1" / "below")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_without_a_directory_they_go_where_man_looks_for_the_fray_in_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "tool" / "bin" / "fray"
    tool.parent.mkdir(parents=True)
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "fray").symlink_to(tool)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert main(["man"]) == 0
    assert (tmp_path / "share" / "man" / "man1" / "fray-run.1").exists()
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("sys.prefix", str(tmp_path / "environment"))
    assert main(["man"]) == 0
    assert (tmp_path / "environment" / "share" / "man" / "man1" / "fray-run.1").exists()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check[0])
def test_programs_that_show_pages_find_nothing_wrong(check: tuple[str, ...], tmp_path: Path) -> None:
    if shutil.which(check[0]) is None or (check[0] == "man" and shutil.which("groff") is None):
        pytest.skip(f"needs {check[0]} (apt install mandoc, or man-db and groff)")
    for name, text in manual_pages().items():
        (tmp_path / name).write_text(text)
    files = sorted(map(str, tmp_path.iterdir()))
    done = subprocess.run([*check, *files], capture_output=True, text=True, check=False)
    found = done.stderr if check[0] == "man" else done.stdout
    assert (done.returncode, found) == (0, ""), found[:2000]
