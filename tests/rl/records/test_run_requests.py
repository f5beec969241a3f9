"""A run that is running is asked for changes, and answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import trio
import trio.testing

from fray.cli.main import main
from fray.errors import InvalidRequest
from fray.rl.records import run_requests
from fray.rl.records.run_files import STATUS_FILE
from fray.rl.records.run_requests import RunRequest, answer_requests, ask_run


@pytest.fixture
def output(tmp_path: Path) -> Path:
    write_state(tmp_path, "running")
    return tmp_path


def write_state(output: Path, state: str) -> None:
    status = {"name": "digits", "state": state, "pid": 1, "host": "h", "written_at": 0.0}
    (output / STATUS_FILE).write_text(json.dumps(status))


async def asked(output: Path, request: RunRequest) -> list[str | InvalidRequest]:
    """Ask, and let the run answer once."""
    found: list[str | InvalidRequest] = []

    async def ask() -> None:
        try:
            found.append(await ask_run(output, request))
        except InvalidRequest as error:
            found.append(error)

    async def follow(request: RunRequest) -> str:
        assert request.servers is not None
        if request.servers < 1:
            raise InvalidRequest("too few")
        return f"servers: 1 -> {request.servers}"

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        while not found:
            await trio.lowlevel.checkpoint()
            await answer_requests(output, follow)
    return found


async def test_a_request_is_answered_once_and_leaves_no_file(output: Path) -> None:
    assert await asked(output, RunRequest(4)) == ["servers: 1 -> 4"]
    assert list((output / "requests").iterdir()) == []


async def test_a_refusal_is_an_answer(output: Path) -> None:
    (error,) = await asked(output, RunRequest(0))
    assert isinstance(error, InvalidRequest)
    assert str(error) == "too few"


async def test_a_run_that_has_ended_is_not_asked(output: Path) -> None:
    write_state(output, "done")
    with pytest.raises(InvalidRequest, match="run digits is done: only one that is running can be changed"):
        await ask_run(output, RunRequest(4))


async def test_a_run_that_does_not_answer_is_not_asked_later(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_requests, "ANSWER_S", 0.0)
    with pytest.raises(InvalidRequest, match="its process 1 on h may be lost"):
        await ask_run(output, RunRequest(4))
    assert list((output / "requests").iterdir()) == []


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("server=4", "unknown setting 'server'; expected servers=4; did you mean servers?"),
        ("servers=many", "invalid 'servers=many': expected a whole number, such as servers=4"),
    ],
)
def test_a_wrong_setting_is_refused(
    setting: str, message: str, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rl", "scale", str(output), setting]) != 0
    assert message in capsys.readouterr().err
