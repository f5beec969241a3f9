"""Completion of commands: what is offered, and the scripts in the shells for which they are."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fray.cli.administration import completion
from fray.cli.administration.completion import candidates
from fray.cli.main import main
from fray.cli.options import parser_of


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("FRAY_CLUSTER_SPEC", "FRAY_TOKEN", "FRAY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["jo"], ["jobs"]),
        (["--js"], ["--json"]),
        (["nosuch"], []),
        (["node", ""], ["show"]),
        (["node", "show", "--js"], ["--json"]),
        (["jobs", "--state", "r"], ["running"]),
        (["--cluster", "fray://lab:7421", "jobs", "--state", "s"], ["stopped", "succeeded"]),
        (["jobs", "--limit", "5", "--unt"], ["--until"]),
        (["jobs", "x", ""], []),
        (["run", "--token-file", "/et"], []),  # files are the shell's
        (["completion", ""], ["bash", "fish", "zsh"]),
        (["stop", "tr"], []),  # no cluster
        (["tinker", "show", ""], []),  # jobs of a service are not those of the cluster
    ],
)
def test_what_may_follow(words: list[str], found: list[str]) -> None:
    assert candidates(words) == found


def test_all_verbs_are_offered_at_the_beginning() -> None:
    verbs = completion._verbs(parser_of()).choices
    assert candidates([""]) == sorted(verbs)
    assert len(verbs) > 30


def test_jobs_and_machines_that_live_are_offered_where_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, list[str]]] = []

    def living(argument: str, words: list[str]) -> list[str]:
        asked.append((argument, words))
        actors = ["counter"] if argument in completion.ACTORS else ["alpha", "beta"]
        return ["train", "tokenize", "serve"] if argument in completion.JOBS else actors

    monkeypatch.setattr(completion, "_living", living)
    assert candidates(["logs", "-f", "t"]) == ["tokenize", "train"]
    assert candidates(["logs", "train", ""]) == []  # it takes one
    assert candidates(["stop", "train", "s"]) == ["serve"]  # it takes several
    assert candidates(["node", "show", "a"]) == ["alpha"]
    assert candidates(["events", "--node", "b"]) == ["beta"]
    assert candidates(["exec", "tr"]) == ["train"]
    assert candidates(["actor", "call", "c"]) == ["counter"]
    assert asked[0] == ("job", ["logs", "-f"])


SHELLS = {
    "bash": """source {script}
        COMP_WORDS=(fray jobs --state s); COMP_CWORD=3
        _fray
        printf '%s\\n' "${{COMPREPLY[@]}}" """,
    "zsh": """compdef() {{ }}
        source {script}
        words=(fray jobs --state s); CURRENT=4
        compadd() {{ print -l $found }}
        _fray""",
    "fish": "source {script}; complete -C 'fray jobs --state s'",
}


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes_with_its_script(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    assert main(["completion", shell]) == 0
    script = tmp_path / "script"
    script.write_text(capsys.readouterr().out)
    program = tmp_path / "fray"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m fray.cli "$@"\n')
    program.chmod(0o755)
    environ = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": os.getcwd(),
        "HOME": str(tmp_path),
    }
    command = [shell, "-c", SHELLS[shell].format(script=script)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["stopped", "succeeded"], done.stderr
