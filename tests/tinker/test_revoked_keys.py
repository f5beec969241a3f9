"""Keys that are revoked while a service answers requests that were made with them."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import trio

from fray import rl, tinker
from fray.tinker.http_client import JsonConnection
from tests.tinker.services import warm_cluster
from tests.tinker.test_tinker_api import Api

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.torch

MODEL = rl.TinyLlama(layers=1, width=16, max_length=20_000)
LARGE_BYTES = 64 << 20
"""More than the buffers of a connection take."""


async def test_downloads_and_streams_under_way_end_when_the_key_of_their_user_is_revoked(tmp_path: Path) -> None:
    async with (
        warm_cluster() as cluster,
        tinker.serve(models=[MODEL], threads=1, directory=tmp_path, cluster=cluster, auth=True) as service,
    ):
        root = await service.create_key("root", is_admin=True)
        ada, bob = [(await service.create_key(name)).replace("otk_", "tml-") for name in ("ada", "bob")]
        await trio.to_thread.run_sync(converse, service.url, tmp_path, root, ada, bob)


def converse(url: str, directory: Path, root: str, ada: str, bob: str) -> None:
    api = Api(url, ada)
    saved = api.result(api.post("save_weights", model_id=api.model(), seq_id=1, path="here"))["path"]
    (weights,) = directory.rglob("adapter_model.safetensors")
    os.truncate(weights, LARGE_BYTES)
    route = saved.removeprefix("tinker://").replace("/", "/checkpoints/", 1)
    address = urlsplit(api.reply(f"training_runs/{route}/archive", method="GET").body["url"]).path
    streams = [
        openai.OpenAI(base_url=f"{url}/oai/api/v1", api_key=key, max_retries=0).completions.create(
            model="tiny", prompt="1", max_tokens=tokens, seed=9, stream=True, extra_body={"ignore_eos": True}
        )
        for key, tokens in ((ada, 15_000), (bob, 300))
    ]
    for stream in streams:
        next(stream)
    received = 0
    with httpx.Client() as client, client.stream("GET", url + address) as download:
        parts = download.iter_raw()
        received += len(next(parts))
        admin = JsonConnection(url, headers={"Authorization": f"Bearer {root}"})
        assert admin.request("DELETE", "/fray/keys/ada").body["is_revoked"]
        with pytest.raises(httpx.RemoteProtocolError, match="without sending complete message body"):
            for part in parts:
                received += len(part)
    assert download.status_code == 200
    assert 0 < received < LARGE_BYTES
    with pytest.raises(openai.APIError, match="Invalid API key"):
        list(streams[0])
    assert len(list(streams[1])) > 200, "that of another user continues"
    ended = JsonConnection(url).request("GET", address)
    assert (ended.status, ended.body) == (404, {"detail": "this address has ended with the key of its user"})
