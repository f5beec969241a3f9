"""Requests of OpenTinker's clients and their answers, in tests/tinker/opentinker/, sent by a plain HTTP client.

In a file, ``{name}`` is a value that an earlier answer had (``keep``), a text that begins with ``~`` an expression for
a text or for JSON, and the key ``...`` stands for further keys.
"""

from __future__ import annotations

import json
import re
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import trio

from tests.tinker.services import running

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

RECORDED = sorted(Path(__file__).with_name("opentinker").glob("*.json"))


def filled(value: Any, known: dict[str, str]) -> Any:
    """Return a value with what is known in the place of ``{name}``."""
    if isinstance(value, dict):
        return {key: filled(each, known) for key, each in value.items()}
    if isinstance(value, list):
        return [filled(each, known) for each in value]
    if isinstance(value, str):
        return re.sub(r"\{(\w+)\}", lambda found: known.get(found[1], found[0]), value)
    return value


def difference(found: Any, expected: Any, place: str = "body") -> str:
    """Return where an answer differs from the recorded one, and how; empty: nowhere."""
    if isinstance(expected, dict) and isinstance(found, dict):
        keys = expected.keys() - {"..."}
        if keys - found.keys() or ("..." not in expected and found.keys() - keys):
            return f"{place} has the keys {sorted(found)}, not {sorted(keys)}"
        differences = [difference(found[key], expected[key], f"{place}.{key}") for key in keys]
    elif isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        pairs = enumerate(zip(found, expected, strict=True))
        differences = [difference(one, other, f"{place}[{index}]") for index, (one, other) in pairs]
    elif isinstance(expected, str) and expected.startswith("~"):
        text = found if isinstance(found, str) else json.dumps(found)
        differences = [] if re.fullmatch(expected[1:], text, re.DOTALL) else [f"{place}: {text!r}, not {expected!r}"]
    else:
        differences = [] if found == expected else [f"{place}: {found!r}, not {expected!r}"]
    return next(filter(None, differences), "")


def replay(url: str, known: dict[str, str]) -> None:
    """Send what is recorded, on one connection; compare the answers."""
    connection = HTTPConnection(urlsplit(url).netloc)
    for file in RECORDED:
        for exchange in json.loads(file.read_text()):
            request = filled(exchange["request"], known)
            path = request["path"].removeprefix(url)
            body = json.dumps(request["body"]) if "body" in request else None
            headers = {**request.get("headers", {}), **({"Content-Type": "application/json"} if body else {})}
            wanted = filled(exchange["answer"], known)
            while True:
                connection.request(request["method"], path, body, headers)
                response = connection.getresponse()
                answer = json.loads(response.read())
                problem = difference(answer, wanted["body"])
                if response.status == wanted["status"] and (not problem or not exchange.get("repeat_until_it_matches")):
                    break
                assert exchange.get("repeat_until_it_matches"), (file.name, request, response.status, answer)
            assert not problem, (file.name, request["method"], path, problem)
            for name, place in exchange.get("keep", {}).items():
                value = answer
                for key in place.split("."):
                    value = value[key]
                known[name] = value
    connection.close()


def texts_below(directory: Path) -> str:
    return "".join(file.read_bytes().decode("latin-1") for file in directory.rglob("*") if file.is_file())


async def test_recorded_requests_of_opentinkers_clients_have_the_recorded_answers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    async with running(tmp_path, auth=True, virtual_gpus=2, open_registration=True) as (_, service):
        known = {"admin_key": await service.create_key("root", is_admin=True)}
        await trio.to_thread.run_sync(replay, service.url, known)
    # The directory has all that is kept, beside what the process writes.
    kept = await trio.to_thread.run_sync(texts_below, tmp_path)
    kept += capfd.readouterr().err + caplog.text
    for secret in (known["key"], known["other_key"], known["admin_key"], "wandb-secret"):
        assert secret not in kept
        assert secret.removeprefix("otk_") not in kept
