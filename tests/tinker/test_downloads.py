"""Signed addresses of saved weights, and the tar that they give."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from attrs import evolve

pytest.importorskip("google.protobuf")
pytest.importorskip("httpx")

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fray import rl
from fray.tinker.api_store import TinkerCheckpoint, TinkerStore
from fray.tinker.tinker_api import downloads
from fray.tinker.tinker_api.base_engine import AdapterPlan
from fray.tinker.tinker_api.downloads import Downloads, TarMember, tar_parts, tar_size
from fray.tinker.tinker_api.tinker_runs import TinkerRuns

PATH = "tinker://a:train:0/weights/x"


@asynccontextmanager
async def serving(
    directory: Path, keys: dict[str, str] | None = None
) -> AsyncIterator[tuple[TinkerRuns, httpx.AsyncClient]]:
    """Serve addresses of one checkpoint: ``/url?user=ada`` returns one. ``keys``: hashes of the keys of users."""
    plan = AdapterPlan({"tiny": rl.TinyLlama()}, directory / "engines")
    saved = plan.directory_of("tiny") / "a.train.0/weights/x"
    saved.mkdir(parents=True)
    (saved / "adapter_config.json").write_text("{}")
    (saved / "adapter_model.safetensors").write_bytes(os.urandom(3_000_001))
    (saved / "optimizer.pt").write_bytes(b"not given out")
    store = TinkerStore(directory)
    runs = TinkerRuns(store, plan)
    runs.checkpoints[PATH] = TinkerCheckpoint(PATH, "ada", "a:train:0", "tiny", {}, "a.train.0/weights/x", 1, 5.0)
    addresses = Downloads(runs, ({"ada": "1", "eve": "2"} if keys is None else keys).get)

    async def url(request: Request) -> Response:
        found = addresses.url(request, request.query_params["user"], runs.checkpoints[PATH])
        return JSONResponse({"url": found[0]})

    app = Starlette(routes=[Route("/url", url), addresses.route()])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
        yield runs, client
    store.close()


async def test_a_tar_is_sent_in_parts_and_has_what_peft_reads(tmp_path: Path) -> None:
    async with serving(tmp_path) as (runs, client):
        address = (await client.get("/url?user=ada")).json()["url"]
        answer = await client.get(address)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/x-tar")
    assert int(answer.headers["content-length"]) == len(answer.content)
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as tar:
        found = {each.name: tar.extractfile(each).read() for each in tar}  # type: ignore[union-attr]
    saved = runs.plan.directory_of("tiny") / "a.train.0/weights/x"
    assert found == {
        "adapter_config.json": b"{}",
        "adapter_model.safetensors": (saved / "adapter_model.safetensors").read_bytes(),
        "checkpoint_complete": b"",
    }
    members = [TarMember("a", 3_000_001, saved / "adapter_model.safetensors"), TarMember("b", 0, None)]
    sizes = [len(part) async for part in tar_parts(members, 0)]
    assert max(sizes) == downloads.PART_BYTES, "a file is never in memory as a whole"
    assert sum(sizes) == tar_size(members)


async def test_an_address_that_was_changed_is_old_or_anothers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as (runs, client):

        async def refusal(address: str) -> str:
            answer = await client.get(address)
            assert answer.status_code == 404
            text: str = answer.json()["detail"]
            return text

        address = (await client.get("/url?user=ada")).json()["url"]
        token = address.split("/")[-2]
        other = (await client.get("/url?user=eve")).json()["url"].split("/")[-2]
        mixed = f"{other.partition('.')[0]}.{token.partition('.')[2]}"
        for wrong in (mixed, token[:-1] + ("0" if token[-1] != "0" else "1"), "é.é", "a", "a."):
            assert "is not of this service" in await refusal(f"/api/v1/downloads/{wrong}/checkpoint.tar")
        assert await refusal(address.replace(token, other)) == f"there is no checkpoint '{PATH}' any more"
        runs.checkpoints[PATH] = evolve(runs.checkpoints[PATH], is_public=True)
        assert (await client.get(address.replace(token, other))).status_code == 200
        monkeypatch.setattr(downloads, "URL_S", 0.0)
        late = (await client.get("/url?user=ada")).json()["url"]
        assert "has expired: it was valid for 0 s" in await refusal(late)
        (runs.plan.directory_of("tiny") / "a.train.0/weights/x/adapter_config.json").unlink()
        assert "has no file adapter_config.json: No such file" in await refusal(address)
        del runs.checkpoints[PATH]
        assert await refusal(address) == f"there is no checkpoint '{PATH}' any more"


async def test_an_address_ends_with_the_key_of_its_user(tmp_path: Path) -> None:
    keys = {"ada": "first"}
    async with serving(tmp_path, keys) as (_, client):
        address = (await client.get("/url?user=ada")).json()["url"]
        assert (await client.get(address)).status_code == 200
        del keys["ada"]
        refused = await client.get(address)
        assert (refused.status_code, refused.json()["detail"]) == (
            404,
            "this address has ended with the key of its user",
        )
        keys["ada"] = "second"
        assert (await client.get(address)).status_code == 404
        assert (await client.get((await client.get("/url?user=ada")).json()["url"])).status_code == 200
