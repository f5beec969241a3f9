"""Opening a runtime: a driver connects to the controller at once, a job when it first needs it."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import trio
import trio.testing

from fray.errors import ActorDied, ChannelClosed, Unreachable
from fray.model.ids import attempt_id
from fray.model.messages.client import ListNodes, Role
from fray.net.transports.memory import MemoryNetwork
from fray.net.transports.websocket import WebSocketNetwork
from fray.runtime.actors.server import ACTOR_HOST, host_of
from fray.runtime.open import RuntimeConfig, local_user, open_runtime
from fray.runtime.runtime import CONNECTIONS

ADDRESS = "memory:controller/main"


async def test_a_job_that_needs_nothing_of_the_controller_never_dials_it(autojump_clock: object) -> None:
    config = RuntimeConfig(role=Role.JOB, attempt_id=attempt_id("j-1", 0, 0), namespace="n")
    async with open_runtime(MemoryNetwork(random.Random(1)), [ADDRESS], None, config, rng=random.Random(1)) as runtime:
        await trio.sleep(3600)  # nothing listens at the address: a connection would have ended the session by now
        assert runtime.services.get(CONNECTIONS) is runtime.services.get(ACTOR_HOST) is None
        assert not runtime.nursery.child_tasks
        assert runtime.client.ended is None  # made now, without a connection: nothing was sent
        assert not runtime.client.ready.is_set()


async def test_what_uses_the_cluster_for_the_first_time_after_its_job_has_left_fails_at_once() -> None:
    config = RuntimeConfig(role=Role.JOB, attempt_id=attempt_id("j-1", 0, 0), namespace="n")
    async with open_runtime(MemoryNetwork(random.Random(1)), [ADDRESS], None, config, rng=random.Random(1)) as runtime:
        pass
    with pytest.raises(ChannelClosed, match="this job has left the cluster"):
        await runtime.client.request(ListNodes())
    with pytest.raises(ActorDied, match="shutting down"):
        await host_of(runtime).listen()
    assert runtime.caller.is_closed


async def test_the_connections_of_a_job_are_made_on_any_thread_and_run_in_its_loop(autojump_clock: object) -> None:
    config = RuntimeConfig(role=Role.JOB, attempt_id=attempt_id("j-1", 0, 0), namespace="n")
    async with open_runtime(MemoryNetwork(random.Random(1)), [ADDRESS], None, config, rng=random.Random(1)) as runtime:
        caller = await trio.to_thread.run_sync(lambda: runtime.caller)
        await trio.testing.wait_all_tasks_blocked()
        assert caller is runtime.caller
        assert len(runtime.nursery.child_tasks) == 2


@pytest.mark.parametrize("has_tls", [True, False])
async def test_actors_behind_the_relay_show_the_certificate_of_their_process_if_the_controller_has_tls(
    has_tls: bool, tmp_path: Path
) -> None:
    directory = str(tmp_path)
    config = RuntimeConfig(
        role=Role.JOB, attempt_id=attempt_id("j-1", 0, 0), namespace="n", host_directory=lambda: directory
    )
    address = f"tls:10.0.0.5:7421#{'0' * 64}" if has_tls else "tcp:127.0.0.1:7421"
    network = WebSocketNetwork()
    async with open_runtime(network, [address], None, config, rng=random.Random(1)) as runtime:
        tunnels = runtime.client.tunnels
        assert tunnels is not None
        assert tunnels.tls is (network.tls_server if has_tls else None)
        addresses = await host_of(runtime).listen()
        own = f"#{network.tls_server.pins[0]}" if has_tls else ""
        assert addresses[-1] == f"relay:{runtime.session}{own}"


async def test_a_driver_dials_at_once(autojump_clock: object) -> None:
    config = RuntimeConfig(role=Role.DRIVER)
    with pytest.raises(Unreachable):
        async with open_runtime(MemoryNetwork(random.Random(1)), [ADDRESS], None, config, rng=random.Random(1)):
            raise AssertionError("opened without a controller")


def test_a_login_name_that_is_not_utf_8_is_read_as_latin_1(monkeypatch: pytest.MonkeyPatch) -> None:
    for raw, name in ((b"j\xf6rg", "jörg"), ("jörg".encode(), "jörg"), (b"ada", "ada")):
        monkeypatch.setenv("FRAY_USER", os.fsdecode(raw))
        assert local_user() == name
