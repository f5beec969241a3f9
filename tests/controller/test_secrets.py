"""Secrets that only drivers know, over the lives of controllers: brought again, waited for, never stored."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from fray.controller.secret_store import SECRET_WAIT_S
from fray.errors import ChannelFull, InvalidRequest
from fray.model.messages.client import Launch, ProvideSecrets, Role, Terminate, WatchJobs
from fray.model.resources import Demand
from fray.model.specs import EndReason, EntryKind, Outcome
from fray.net.transport import Credential
from tests.support.controller import Client, Node, Stage, spec, stage

VALUE = "only-the-driver-knows"
WANTS = {"payload": b"payload", "secrets": {"TOKEN": "T"}}
PROGRAM = {"entry": EntryKind.BINARY, "argv": ("x",), "secrets": {"TOKEN": "T"}}


async def launch(client: Client, **more: Any) -> None:
    payloads = [] if more.get("entry") is EntryKind.BINARY else [b"payload"]
    await client.ask(Launch(jobs=(spec(**more),), secrets={"T": VALUE}), payloads)


async def placed_by_the_next_controller(place: Stage, **more: Any) -> tuple[Client, Node]:
    """A job that waited for a machine when its controller crashed; the machine has come since."""
    client = await place.client()
    await launch(client, **more)
    await place.crash()
    await place.start()
    await client.ask(WatchJobs(jobs=("work-1",)))
    return client, await place.node()


@pytest.mark.parametrize("more", [WANTS, PROGRAM], ids=["callable", "program"])
async def test_an_attempt_waits_until_its_driver_has_brought_the_secret_again(
    more: dict[str, Any], autojump_clock: Any
) -> None:
    async with stage() as place:
        client, node = await placed_by_the_next_controller(place, **more)
        with trio.move_on_after(SECRET_WAIT_S / 2):
            await node.wait_desired("work-1:0:0")
        assert not node.desired
        await client.ask(ProvideSecrets(secrets={"work-1": {"T": VALUE}}))
        desired = await node.wait_desired("work-1:0:0")
        assert desired.secrets == {"T": VALUE}
        assert VALUE not in repr(desired)


async def test_without_it_the_job_ends_and_says_which_one_is_missing(autojump_clock: Any) -> None:
    async with stage() as place:
        client, node = await placed_by_the_next_controller(place, **WANTS)
        before, client.patience_s = trio.current_time(), 2 * SECRET_WAIT_S
        info, _ = await client.job_ended("work-1")
        assert info.cause is EndReason.ENVIRONMENT
        assert "its secret T is no longer known: the controller was restarted" in (info.error_message or "")
        assert trio.current_time() - before == pytest.approx(SECRET_WAIT_S, abs=5)
        assert not node.desired


async def test_a_stop_does_not_wait_for_secrets(autojump_clock: Any) -> None:
    async with stage() as place:
        client, _ = await placed_by_the_next_controller(place, **WANTS)
        before = trio.current_time()
        await client.ask(Terminate(jobs=("work-1",)))
        info, _ = await client.job_ended("work-1")
        assert info.cause is EndReason.STOPPED
        assert trio.current_time() - before < 5


async def test_only_who_launched_a_job_brings_its_secrets(autojump_clock: Any) -> None:
    async with stage() as place:
        _, node = await placed_by_the_next_controller(place, **WANTS)
        stranger = await place.client()
        await stranger.ask(ProvideSecrets(secrets={"work-1": {"T": "forged"}, "unknown-1": {"T": "x"}}))
        with trio.move_on_after(1):
            await node.wait_desired("work-1:0:0")
        assert not node.desired


async def test_the_next_attempt_of_a_job_brings_the_secrets_of_the_actors_of_that_job(
    autojump_clock: Any,
) -> None:
    async with stage() as place:
        driver, node = await place.client(), await place.node(cpu=1)
        await driver.launch(spec("run", max_retries_failure=1), spec("other", demand=Demand()))
        other = await attempt(place, node, "other-1:0:0")
        first = await attempt(place, node, "run-1:0:0")
        own = {**WANTS, "entry": EntryKind.ACTOR, "owned_by_job": True, "demand": Demand(cpu_milli=2000)}
        await launch(first, **own)
        node.end("run-1:0:0", Outcome(cause=EndReason.FAILURE))
        second = await attempt(place, node, "run-1:1:0")
        await place.crash()
        await place.start()
        await second.ask(WatchJobs(jobs=("work-1",)))
        large = await place.node("large")
        for client in (driver, other):
            await client.ask(ProvideSecrets(secrets={"work-1": {"T": "forged"}}))
        with trio.move_on_after(SECRET_WAIT_S / 2):
            await large.wait_desired("work-1:0:0")
        assert not large.desired
        await second.ask(ProvideSecrets(secrets={"work-1": {"T": VALUE}}))
        assert (await large.wait_desired("work-1:0:0")).secrets == {"T": VALUE}


async def attempt(place: Stage, node: Node, attempt_id: str) -> Client:
    """Connect as the process of an attempt."""
    desired = await node.wait_desired(attempt_id)
    credential = Credential(f"attempt:{attempt_id}", desired.key)
    return await place.client(role=Role.JOB, attempt_id=attempt_id, credential=credential, host="n1")


async def test_a_running_attempt_is_not_sent_its_secrets_again(autojump_clock: Any) -> None:
    async with stage() as place:
        client, node = await place.client(), await place.node()
        await launch(client, **WANTS)
        assert (await node.wait_desired("work-1:0:0")).secrets == {"T": VALUE}
        await place.crash()
        await place.start()
        await node.until(lambda: len(node.welcomes) == 2 and not node.desired["work-1:0:0"].secrets)


async def test_values_are_gone_with_their_job_and_never_were_in_the_store(autojump_clock: Any) -> None:
    async with stage() as place:
        client, node = await place.client(), await place.node()
        await launch(client, **WANTS)
        await node.wait_desired("work-1:0:0")
        rows = [text for _, _, text in place.store.load().rows]
        assert any("TOKEN" in text for text in rows)
        assert not any(VALUE in text for text in rows)
        book = place.controller.gateway._context.secrets
        assert repr(book) == "<SecretStore of 1 jobs>"
        node.succeed("work-1:0:0")
        await client.job_ended("work-1")
        assert repr(book) == "<SecretStore of 0 jobs>"


async def test_a_launch_without_the_value_is_refused_while_no_node_knows_it(autojump_clock: Any) -> None:
    async with stage() as place:
        client = await place.client()
        await place.node()
        with pytest.raises(InvalidRequest, match=r"secret 'T' .* is unknown"):
            await client.ask(Launch(jobs=(spec(**WANTS),)), [b"payload"])
        assert repr(place.controller.gateway._context.secrets) == "<SecretStore of 0 jobs>"


async def test_a_launch_that_a_full_inbox_refuses_leaves_no_value(autojump_clock: Any) -> None:
    async with stage() as place:
        client = await place.client()
        place.controller.loop._inbox_limit_events = 0
        with pytest.raises(ChannelFull):
            await launch(client, **WANTS)
        assert repr(place.controller.gateway._context.secrets) == "<SecretStore of 0 jobs>"
