"""Options of ``fray tinker serve`` that are refused before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from fray.cli.main import USAGE, main

pytest.importorskip("starlette")
pytest.importorskip("hypercorn")
pytest.importorskip("httpx")
# What the service imports is in that environment alone.
pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--limit", "x=1"], "--limit x=1: expected NAME=N with N of at least 1 and one of body_bytes, "),
        (["--limit", "jobs=0"], "--limit jobs=0: expected NAME=N with N of at least 1 and one of body_bytes, "),
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
