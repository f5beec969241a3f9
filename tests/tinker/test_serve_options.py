"""Options of ``fray tinker serve`` that are refused before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from fray.cli.main import USAGE, main
from fray.errors import InvalidRequest
from fray.rl.model_spec import TinyLlama

pytest.importorskip("starlette")
pytest.importorskip("hypercorn")
pytest.importorskip("httpx")
pytest.importorskip("google.protobuf")

from fray.tinker.service import named_models, serve

# What the service imports is in that environment alone.
pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--limit", "x=1"], "--limit x=1: expected NAME=N with N of at least 1 and one of body_bytes, "),
        (["--limit", "jobs=0"], "--limit jobs=0: expected NAME=N with N of at least 1 and one of body_bytes, "),
        (["--engines", "0"], "--engines 0: expected MIN..MAX with MIN of at least 1 and MAX of at least MIN, and "),
        (
            ["--engines", "3..2"],
            "--engines 3..2: expected MIN..MAX with MIN of at least 1 and MAX of at least MIN, and ",
        ),
        (["--engines", "2.."], "--engines 2..: expected a number, or MIN..MAX as in 1..4"),
        (["--engines", "many"], "--engines many: expected a number, or MIN..MAX as in 1..4"),
        (["--engines", "1..2", "--engine-idle", "0s"], "--engines 1..2: expected MIN..MAX with MIN of at least 1 and "),
        (["--engine-queue", "soon"], "--engine-queue 'soon' is not a valid duration; examples: 30s, 10m, 2h, 1d"),
        (["--engine-memory", "many"], "memory='many' is not a valid size"),
        (["--client-grace", "1y"], "--client-grace '1y' is not a valid duration; examples: 30s, 10m, 2h, 1d"),
        (["--tls-cert", "a.pem"], "--tls-cert and --tls-key belong together: the certificate and its key, in PEM"),
    ],
)
def test_a_wrong_option_is_refused_with_what_was_meant(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "service"
    assert main(["tinker", "serve", "--base-model", "tiny", "--directory", str(directory), *options]) == USAGE
    assert capsys.readouterr().err.startswith(f"fray: {message}")
    assert not directory.exists()


def test_a_directory_has_its_last_part_as_name_and_two_of_one_name_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a/tiny", "b/tiny"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a")
    model = TinyLlama()
    assert named_models(["./tiny", "Qwen/Qwen3-0.6B"]) == {
        "tiny": f"{tmp_path}/a/tiny",
        "Qwen/Qwen3-0.6B": "Qwen/Qwen3-0.6B",
    }
    assert named_models({"mine": "tiny", "other": model}) == {"mine": f"{tmp_path}/a/tiny", "other": model}
    for both in (["tiny/", "../b/tiny"], [model, "tiny"]):
        with pytest.raises(InvalidRequest, match=r"(a/tiny|TinyLlama.*) and .*tiny both have the name 'tiny': rename"):
            named_models(both)


async def test_a_service_has_at_least_one_engine() -> None:
    with pytest.raises(InvalidRequest, match="engines=0: expected at least 1"):
        async with serve([TinyLlama()], engines=0):
            pass
