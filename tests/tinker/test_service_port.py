"""Port of a service that is started again, and who asks it to serve."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

import fray
from fray import rl
from fray.errors import ActorDied

pytest.importorskip("hypercorn", reason="needs hypercorn: make test-tinker")

from fray import tinker
from fray.tinker import service

pytestmark = pytest.mark.torch


async def test_a_service_that_is_started_again_waits_until_its_port_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve_http, refused = service.serve_http, list[int]()

    async def taken_at_first(*args: Any, port: int, **options: Any) -> None:
        if len(refused) < 3:
            refused.append(port)
            raise OSError(errno.EADDRINUSE, "taken")
        await serve_http(*args, port=port, **options)

    async with fray.open_cluster("local", logs=False) as cluster:

        def serving() -> Any:
            return tinker.serve(models=[rl.TinyLlama()], directory=tmp_path, cluster=cluster)

        monkeypatch.setattr(service, "PORT_RETRY_S", 0.001)
        async with serving() as first:
            url = first.url
        monkeypatch.setattr(service, "serve_http", taken_at_first)
        async with serving() as second:
            assert second.url == url
        assert refused == [int(url.rpartition(":")[2])] * 3


async def test_the_first_start_on_a_port_that_is_taken_fails_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def taken(*args: Any, **options: Any) -> None:
        raise OSError(errno.EADDRINUSE, "taken")

    monkeypatch.setattr(service, "serve_http", taken)
    monkeypatch.setattr(service, "PORT_RETRY_S", float("inf"))
    async with fray.open_cluster("local", logs=False) as cluster:
        with pytest.RaisesGroup(OSError, flatten_subgroups=True):
            async with tinker.serve(models=[rl.TinyLlama()], directory=tmp_path, port=1, cluster=cluster):
                pass


async def test_a_service_is_asked_to_serve_until_an_incarnation_does(autojump_clock: trio.testing.MockClock) -> None:
    calls, serving = list[int](), trio.Event()

    class Actor:
        async def run(self) -> None:
            calls.append(len(calls))
            if len(calls) < 4:
                raise ActorDied("an earlier incarnation ended")
            serving.set()
            await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(service._serve_again, Actor())
        await serving.wait()
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert calls == [0, 1, 2, 3]
