"""HTTP port of a server for other machines: TLS by an authority of the run, and its key; clients in another process."""

from __future__ import annotations

import json
import os
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

pytest.importorskip("hypercorn", reason="needs hypercorn: make test-rl")

import httpx
import trio
from attrs import define, evolve

from fray import rl
from fray.rl.gateway.agent_address import AgentUrl
from fray.rl.http_access.access import HttpAccess, make_access
from fray.rl.inference.http_port import server_app
from fray.rl.inference.http_settings import HttpPort
from fray.rl.inference.openai_requests import ApiError
from fray.rl.inference.server import InferenceServer
from tests.support.counting_engine import CountingEngine

pytestmark = pytest.mark.torch
HOST = "127.0.0.2"
"""Address of this machine that is not one of those without TLS."""
BODY = {"prompt": "12", "max_tokens": 2}
WITH_OPENAI = """
import openai
with openai.OpenAI() as client:                       # address, key and authority: of the environment
    answer = client.completions.create(model="policy", prompt="12", max_tokens=2)
    parts = client.completions.create(model="policy", prompt="12", max_tokens=2, stream=True)
    print(answer.choices[0].text, "".join(part.choices[0].text for part in parts), end="")
"""


@define
class Port:
    """A port that is served, and its authority in a file."""

    url: str
    access: HttpAccess
    ca_file: str
    engine: CountingEngine

    def client(self, key: str = "", ca_file: str = "") -> httpx.AsyncClient:
        context = ssl.create_default_context(cafile=ca_file or self.ca_file)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.AsyncClient(base_url=self.url, headers=headers, verify=context)


@asynccontextmanager
async def serving(directory: Path) -> AsyncIterator[Port]:
    engine, access, ca_file = CountingEngine(), make_access(HOST), directory / "ca.pem"
    ca_file.write_bytes(access.authority.chain)
    server = InferenceServer(lambda: engine)
    try:
        async with trio.open_nursery() as nursery:
            settings = HttpPort(rl.TinyLlama(), name="policy", key="control", access=access)
            nursery.start_soon(server.serve_http, settings)
            yield Port(await server.http_url(), access, str(ca_file), engine)
            nursery.cancel_scope.cancel()
    finally:
        await server.aclose()


async def test_an_unmodified_openai_client_in_another_process_uses_the_port(tmp_path: Path) -> None:
    pytest.importorskip("openai")
    async with serving(tmp_path) as port:
        assert port.url.startswith(f"https://{HOST}:")
        variables = AgentUrl(f"{port.url}/v1", port.access.key, port.ca_file).env
        done = await trio.run_process(
            [sys.executable, "-c", WITH_OPENAI], capture_stdout=True, env={**os.environ, **variables}
        )
        assert done.stdout.decode() == "34 34"
        # NexRL's client gets the same as settings.
        settings = {"backend": "vllm", "url": f"{port.url}/v1", "api_key": port.access.key, "ca_file": port.ca_file}
        client = rl.LLMServiceClient(settings)
        reply = await trio.to_thread.run_sync(lambda: client.completion("12", max_tokens=2))
        assert reply["response"] == "34"
        stranger = rl.LLMServiceClient({**settings, "api_key": "other", "max_retries": 0})
        with pytest.raises(ApiError, match="401"):
            await trio.to_thread.run_sync(lambda: stranger.completion("12"))


@pytest.mark.parametrize(
    ("method", "path", "key", "status", "text"),
    [
        ("POST", "/v1/completions", "", 401, "this port needs the key of the run"),
        ("POST", "/v1/completions", "other", 401, "this port needs the key of the run"),
        ("POST", "/v1/chat/completions", "", 401, "this port needs the key of the run"),
        ("GET", "/v1/models", "other", 401, "this port needs the key of the run"),
        ("GET", "/metrics", "", 401, "this port needs the key of the run"),
        ("POST", "/pause", "", 401, "this port needs the key of the run"),
        ("POST", "/pause", "KEY", 401, "/pause needs the key for control routes"),
        ("POST", "/update_weights", "KEY", 401, "/update_weights needs the key for control routes"),
        ("POST", "/update_weights_from_disk", "KEY", 401, "needs the key for control routes"),
        ("POST", "/resume", "control", 200, "resumed"),
        ("POST", "/v1/completions", "KEY", 200, "34"),
        ("GET", "/health", "", 200, "ok"),
    ],
)
async def test_requests_show_the_key_of_the_run_and_those_for_control_its_own(
    method: str, path: str, key: str, status: int, text: str, tmp_path: Path
) -> None:
    async with serving(tmp_path) as port, port.client(key.replace("KEY", port.access.key)) as client:
        answer = await client.request(method, path, json=BODY)
        assert (answer.status_code, text in answer.text) == (status, True), answer.text
        paused = await client.get("/is_paused", headers={"Authorization": f"bearer {port.access.key}"})
        assert paused.json() == {"is_paused": False}


def error_of(url: str, ca_file: str, **extensions: str) -> str:
    """Return the error of a request to ``/health``; empty if it is answered."""
    try:
        with httpx.Client(base_url=url, verify=ssl.create_default_context(cafile=ca_file)) as client:
            client.get("/health", extensions=extensions)
    except httpx.TransportError as error:
        return f"{type(error).__name__}: {error}"
    return ""


async def test_who_trusts_another_authority_or_speaks_no_tls_gets_no_answer(tmp_path: Path) -> None:
    other = tmp_path / "other.pem"
    other.write_bytes(make_access(HOST).authority.chain)
    async with serving(tmp_path) as port:

        def ask_all() -> None:
            assert error_of(port.url, port.ca_file) == ""
            assert error_of(port.url, port.ca_file, sni_hostname="localhost") == ""
            assert "CERTIFICATE_VERIFY_FAILED" in error_of(port.url, str(other))
            # The certificate is of this machine's names, and not of any.
            assert "Hostname mismatch" in error_of(port.url, port.ca_file, sni_hostname="other.lab")
            assert error_of(port.url.replace("https", "http"), port.ca_file).startswith("RemoteProtocolError")

        await trio.to_thread.run_sync(ask_all)


async def test_a_port_without_a_control_key_has_no_control_routes() -> None:
    access, server = make_access(HOST), InferenceServer(CountingEngine)
    app = server_app(server, HttpPort(rl.TinyLlama(), access=access))
    headers = {"Authorization": f"Bearer {access.key}"}
    try:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://here", headers=headers
        ) as client:
            answer = await client.post("/pause")
            assert (answer.status_code, json.loads(answer.text)["error"]["code"]) == (403, "control_off")
    finally:
        await server.aclose()
    assert access.key not in repr(HttpPort(rl.TinyLlama(), access=evolve(access, host="gpu1")))
