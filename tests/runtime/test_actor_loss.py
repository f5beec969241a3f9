"""Outcomes of calls when connections break, hosts die, and machines fall silent."""

from __future__ import annotations

import gc
import random
import threading
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing
from attrs import evolve

from fray.errors import (
    ActorDied,
    ChannelFull,
    DeadlineExceeded,
    MachineLost,
    NoSuchActor,
    OutcomeUnknown,
    SessionEnded,
    Unauthorized,
)
from fray.model.messages.client import ActorEndpoint
from fray.model.specs import EndReason, Outcome
from fray.net.codec import Kind
from fray.net.transports.memory import MessageFault
from fray.runtime.actors.server import ActorHostServer
from fray.runtime.calls import host_connection
from fray.runtime.calls.route import PROOF_WAIT_S, REASON_WAIT_AWAY_S, CallOptions
from fray.runtime.serialization import errors
from tests.support.actors import Counter, Plain
from tests.support.calls import Stage, cut_at, inline, open_stage

KEY = "actor:a"
LARGE = np.arange(500_000)
"""An argument that travels beside the frames."""


# Connections come and go ---------------------------------------------------------------------------------------------


async def talk(stage: Stage, count: int = 12) -> tuple[list[Any], list[int]]:
    """A mixed conversation; what it answered, and what the actor did."""
    instance = Counter()
    counter = await stage.actor(instance)
    made = [counter.start("echo", number) if number % 2 else counter.start("add_async") for number in range(count)]
    answers = [await call for call in made]
    answers += [await counter.call("add") for _ in range(3)]
    return answers, instance.n


async def hops_of_a_conversation() -> int:
    async with open_stage() as stage:
        seen = []
        stage.network.on_message_sent = lambda hop: (seen.append(hop), MessageFault.DELIVER)[1]
        await talk(stage)
        return len(seen)


@pytest.mark.parametrize("fate", [MessageFault.LOSE, MessageFault.LAST], ids=["lost", "arrived"])
async def test_a_cut_at_any_message_loses_no_call_and_repeats_none(fate: MessageFault, autojump_clock: Any) -> None:
    async with open_stage() as stage:
        expected = await talk(stage)
    for number in range(1, await hops_of_a_conversation() + 3):
        async with open_stage() as stage:
            stage.network.on_message_sent = cut_at(number, fate)
            assert await talk(stage) == expected, f"cut at message {number}"


async def test_a_host_that_dropped_the_connection_still_has_the_calls(autojump_clock: Any) -> None:
    """The session is lost at one end only; the caller asks again and is attached."""
    async with open_stage() as stage:
        instance = Counter()
        counter = await stage.actor(instance)
        call = counter.start("wait_for_gate")
        assert await counter.call("add") == 1
        (place,) = stage.hosts["h1"]._acceptor._sessions.values()
        place.record.instance = "another"
        stage.network.drop("driver")
        instance.gate.set()
        assert await call == "open"
        assert await counter.call("add") == 2
        assert instance.log == ["waiting"]
        assert place.channel.error is not None, "it was a new conversation"


async def test_calls_wait_while_there_is_no_connection(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        counter = await stage.actor(Counter())
        await counter.call("add")
        stage.network.cut("driver", "h1")
        stage.network.drop("driver")
        made = [counter.start("add") for _ in range(3)]
        await trio.sleep(20)
        assert not any(call.done() for call in made)
        stage.network.heal("driver", "h1")
        assert [await call for call in made] == [2, 3, 4]


async def test_calls_made_before_the_caller_runs_are_sent_in_order(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        counter = await stage.actor(Counter())
        made = [counter.start("add") for _ in range(5)]
        assert [await call for call in made] == [1, 2, 3, 4, 5]


async def test_too_many_unanswered_calls_are_refused_and_a_patient_caller_waits(
    autojump_clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_connection, "OPEN_CALLS_LIMIT", 10)
    async with open_stage() as stage:
        instance = Counter()
        counter = await stage.actor(instance)
        made = [counter.start("note", number) for number in range(10)]
        with pytest.raises(ChannelFull, match="await some before making more"):
            counter.start("add")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(counter.call, "note", "patient")
            await trio.testing.wait_all_tasks_blocked()
            assert "patient" not in instance.log
            instance.gate.set()
            for call in made:
                await call
        assert instance.log[-1] == "patient"


async def test_a_host_holds_calls_back_while_their_caller_settles_nothing(
    autojump_clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_stage() as stage:
        counter = await stage.actor(Counter())
        await counter.call("add")
        (session,) = stage.hosts["h1"]._sessions.values()
        session.dedup.kept_limit_bytes = 1
        peer = counter.route.binding.connection
        held = counter.start("add")
        await trio.testing.wait_all_tasks_blocked()
        assert not held.done()
        peer._channel.send_nowait(Kind.SETTLED, 0, peer.table.take_settled(force=True))
        assert await held == 2


async def test_a_connection_is_made_again_at_the_address_that_the_directory_names_now(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        counter, endpoint = await keyed(stage, Counter())
        assert await counter.call("add") == 1
        # The machine has another address: nothing answers at the first one any more.
        await stage.hosts["h1"]._open("memory:elsewhere")
        stage.network.cut("driver", "h1")
        stage.directory.say(KEY, evolve(endpoint, addresses=("memory:elsewhere",)))
        stage.network.drop("driver")
        with trio.fail_after(10):
            assert await counter.call("add") == 2


# Death ---------------------------------------------------------------------------------------------------------------


async def keyed(stage: Stage, instance: Any, incarnation: str = "h1") -> tuple[Any, ActorEndpoint]:
    """An actor that the directory knows, and the way to it by its key."""
    host = await stage.host(incarnation)
    endpoint = stage.endpoint(host, host.register(instance, "a", actor_id="a"))
    stage.directory.say(KEY, endpoint)
    return stage.way(stage.caller.route(KEY, "counter")), endpoint


async def test_a_caller_that_closes_while_it_asks_why_a_host_is_gone_leaves_no_call_unanswered(
    autojump_clock: Any,
) -> None:
    async with open_stage() as stage:
        host = await stage.host("h1")
        number = host.register(Counter(), "a", actor_id="a")
        stage.directory.say(KEY, stage.endpoint(host, number))
        counter = stage.way(stage.caller.route(KEY))
        call = counter.start("wait_for_gate")
        assert await counter.call("add") == 1
        stage.kill("h1")
        assert counter.route.binding is not None
        await counter.route.binding.connection.closed.wait()  # the channel has found out; the directory says nothing
        assert not call.done()
        stage.nursery.cancel_scope.cancel()
    assert isinstance(call.exception(), OutcomeUnknown)


async def test_the_reason_of_a_death_is_waited_for_while_the_directory_is_away(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        way, _ = await keyed(stage, Counter())
        call = way.start("wait_for_gate")
        assert await way.call("add") == 1
        stage.directory.is_away = True
        stage.kill("h1")
        await trio.sleep(REASON_WAIT_AWAY_S - 1)
        assert not call.done()
        stage.directory.end(KEY, EndReason.FAILURE, "its process was killed by signal 9")
        with pytest.raises(OutcomeUnknown, match="signal 9"):
            await call


async def test_calls_of_a_lost_host_do_not_wait_longer_for_a_directory_that_is_away(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        way, _ = await keyed(stage, Counter())
        call = way.start("wait_for_gate")
        assert await way.call("add") == 1
        stage.directory.is_away = True
        stage.kill("h1")
        with trio.fail_after(REASON_WAIT_AWAY_S + 1), pytest.raises(OutcomeUnknown):
            await call


async def test_calls_of_a_lost_host_end_with_the_session_if_that_ends_before_the_reason_is_known(
    autojump_clock: Any,
) -> None:
    async with open_stage() as stage:
        way, _ = await keyed(stage, Counter())
        call = way.start("wait_for_gate")
        assert await way.call("add") == 1
        stage.directory.is_away = True
        stage.kill("h1")
        await trio.sleep(REASON_WAIT_AWAY_S - 1)
        stage.caller.end(SessionEnded("the driver was gone for 30 s"))
        assert isinstance(call.exception(), SessionEnded), "at once: the task that awaits it may be cancelled next"


async def test_a_call_in_flight_when_the_host_dies_has_an_unknown_outcome(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        counter = await stage.actor(Counter())
        call = counter.start("wait_for_gate")
        await counter.call("add")
        stage.kill("h1")
        with pytest.raises(OutcomeUnknown, match="may or may not have taken effect") as caught:
            await call
        assert isinstance(caught.value, ActorDied)
        with pytest.raises(ActorDied):
            await counter.call("add")


async def test_calls_to_an_actor_that_is_not_there_yet_wait_for_it(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        way = stage.way(stage.caller.route(KEY, "counter"))
        made = [way.start("add") for _ in range(3)]
        await trio.sleep(100)
        await keyed(stage, Counter())
        assert [await call for call in made] == [1, 2, 3]


async def test_an_actor_that_restarts_gets_the_calls_that_were_not_delivered(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        way, _ = await keyed(stage, Counter())
        under_way = way.start("wait_for_gate")
        assert await way.call("add") == 1
        stage.kill("h1")
        await trio.testing.wait_all_tasks_blocked()
        queued = way.start("add")
        with pytest.raises(OutcomeUnknown):
            await under_way
        stage.directory.say(KEY)
        await trio.sleep(10)
        assert not queued.done()
        await keyed(stage, Counter(), "h2")
        assert await queued == 1


async def test_an_idempotent_call_goes_to_the_next_incarnation(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        first, second = Counter(), Counter()
        way, _ = await keyed(stage, first)
        call = way.start("wait_for_gate", idempotent=True)
        once = way.start("wait_for_gate", retry=1)
        await way.call("add")
        stage.kill("h1")
        await keyed(stage, second, "h2")
        await trio.testing.wait_all_tasks_blocked()
        assert second.log == ["waiting", "waiting"]
        stage.kill("h2")
        third = Counter()
        third.gate.set()
        await keyed(stage, third, "h3")
        assert await call == "open"
        with pytest.raises(OutcomeUnknown):
            await once


@pytest.mark.parametrize("error", [None, RuntimeError("the actor has failed")], ids=["drained", "failed"])
async def test_an_idempotent_call_under_way_in_an_actor_that_ends_goes_to_the_next_incarnation(
    error: Exception | None, autojump_clock: Any
) -> None:
    async with open_stage() as stage:

        async def end(incarnation: str) -> None:
            (actor,) = stage.hosts[incarnation].actors.values()
            actor.close(ActorDied("it ends"))
            actor.end_calls(error)
            await trio.testing.wait_all_tasks_blocked()

        ending = OutcomeUnknown if error is None else type(error)
        second, third = Counter(), Counter()
        way, _ = await keyed(stage, Counter())
        plain = way.start("wait_for_gate")
        call = way.start("wait_for_gate", idempotent=True)
        large = way.start("note", LARGE, idempotent=True)
        once = way.start("wait_for_gate", retry=1)
        await trio.testing.wait_all_tasks_blocked()
        await end("h1")
        with pytest.raises(ending, match=r"shut down|has failed"):
            await plain
        # The directory still names the actor that ends.
        await trio.sleep(1)
        await keyed(stage, second, "h2")
        await trio.testing.wait_all_tasks_blocked()
        assert sorted(map(len, second.log)) == sorted([len("waiting"), len("waiting"), len(LARGE)])
        await end("h2")
        with pytest.raises(ending):
            await once
        third.gate.set()
        await keyed(stage, third, "h3")
        assert await call == "open"
        await large
        assert any(np.array_equal(each, LARGE) for each in third.log)


async def test_the_directory_says_why_an_actor_has_ended(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        way, _ = await keyed(stage, Counter())
        call = way.start("wait_for_gate")
        await way.call("add")
        stage.kill("h1")
        await trio.sleep(0.2)
        error = errors.dump_error(LookupError("no model"))
        stage.directory.end(KEY, EndReason.FAILURE, "its process exited with code 1", error)
        with pytest.raises(OutcomeUnknown, match="its process exited with code 1") as caught:
            await call
        assert isinstance(caught.value.__cause__, LookupError)
        with pytest.raises(ActorDied, match="its process exited with code 1"):
            await way.call("add")


async def test_calls_lost_with_an_actor_that_has_ended_say_whether_they_were_allowed_to_be_repeated(
    autojump_clock: Any,
) -> None:
    async with open_stage() as stage:
        way, _ = await keyed(stage, Counter())
        call = way.start("wait_for_gate")
        allowed = way.start("wait_for_gate", idempotent=True)
        await way.call("add")
        stage.kill("h1")
        stage.directory.end(KEY, EndReason.FAILURE, "its process exited with code 1")
        with pytest.raises(OutcomeUnknown, match="pass idempotent=True"):
            await call
        with pytest.raises(OutcomeUnknown, match="no next incarnation"):
            await allowed


async def test_the_directory_can_end_calls_on_a_connection_without_answers(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        way, _ = await keyed(stage, Counter())
        call = way.start("wait_for_gate")
        await way.call("add")
        stage.network.freeze("h1")
        began = trio.current_time()
        stage.directory.end(KEY, EndReason.MACHINE_LOST, "node-3 has been silent for 30 s")
        with pytest.raises(MachineLost, match="node-3"):
            await call
        assert trio.current_time() - began == pytest.approx(PROOF_WAIT_S)


async def test_an_answer_that_is_on_its_way_takes_precedence_over_the_directory(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        instance = Counter()
        way, _ = await keyed(stage, instance)
        await way.call("add")
        stage.network.set_delay("h1", "driver", 0.5)
        call = way.start("add")
        await trio.sleep(0.1)
        stage.directory.end(KEY, EndReason.SUCCEEDED)
        assert await call == 2


async def test_a_silent_machine_that_is_declared_lost_ends_calls_as_lost(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        way, _ = await keyed(stage, Counter())
        call = way.start("wait_for_gate")
        await way.call("add")
        stage.network.cut("driver", "h1")
        stage.network.drop("driver")
        await trio.sleep(30)
        assert not call.done()
        stage.directory.say(KEY)
        with pytest.raises(MachineLost):
            await call


async def test_a_firewall_that_resets_ends_no_call(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        instance = Counter()
        way, _ = await keyed(stage, instance)
        call = way.start("wait_for_gate")
        assert await way.call("add") == 1
        stage.network.reject("driver", "h1")
        later = way.start("add")
        await trio.sleep(3)
        assert not call.done()
        stage.network.accept("driver", "h1")
        assert await later == 2
        instance.gate.set()
        assert await call == "open"
        assert instance.log == ["waiting"]


async def test_an_incarnation_that_the_directory_still_names_is_dialed_again(autojump_clock: Any) -> None:
    """Take a living host for dead, like a caller on its machine whose socket was away for a moment."""
    async with open_stage() as stage:
        way, _ = await keyed(stage, Counter())
        assert await way.call("add") == 1
        address = stage.hosts["h1"].addresses[0]
        listener = stage.network._listeners.pop(address)
        stage.network.drop("driver")
        with trio.fail_after(1):
            await way.route.binding.connection.closed.wait()
        later = way.start("add")
        stage.network._listeners[address] = listener
        with trio.fail_after(10):
            assert await later == 2


SILENT = Outcome(cause=EndReason.MACHINE_LOST, message="node-3 has been silent for 30 s")


async def test_calls_to_a_suspect_machine_that_answers_its_caller_continue(autojump_clock: Any) -> None:
    """The connection of the caller is a better witness than that of the controller, until it is silent too."""
    async with open_stage() as stage:
        instance = Counter()
        way, endpoint = await keyed(stage, instance)
        call = way.start("wait_for_gate")
        assert await way.call("add") == 1
        for _ in range(3):
            stage.directory.say(KEY, ended=SILENT, may_return=True)
            assert await way.call("add") > 1
            stage.network.drop("driver")
            await trio.sleep(20)
            stage.directory.say(KEY, endpoint)
        instance.gate.set()
        assert await call == "open"
        assert await way.call("add") == 5


async def test_new_calls_to_a_suspect_machine_fail_once_it_is_silent_for_its_caller_too(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        way, endpoint = await keyed(stage, Counter())
        assert await way.call("add") == 1
        stage.directory.say(KEY, ended=SILENT, may_return=True)
        assert await way.call("add") == 2
        stage.network.cut("driver", "h1")
        stage.network.drop("driver")
        with trio.fail_after(PROOF_WAIT_S + 1), pytest.raises(MachineLost, match="node-3"):
            await way.call("add")
        assert way.route.loss is not None
        stage.network.heal("driver", "h1")
        stage.directory.say(KEY, endpoint)
        assert await way.call("add") == 3


async def test_a_suspect_machine_that_is_declared_lost_ends_calls_although_it_answers(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        way, _ = await keyed(stage, Counter())
        call = way.start("wait_for_gate")
        stage.directory.say(KEY, ended=SILENT, may_return=True)
        assert await way.call("add") == 1
        stage.directory.end(KEY, EndReason.MACHINE_LOST, "node-3 has been silent for 600 s")
        for late in (call, way.start("add")):
            with trio.fail_after(10), pytest.raises(MachineLost, match="600 s"):
                await late


@pytest.mark.parametrize("is_known_before", [True, False])
async def test_calls_that_may_be_repeated_wait_while_their_machine_is_silent(
    is_known_before: bool, autojump_clock: Any
) -> None:
    async with open_stage() as stage:
        way, _ = await keyed(stage, Counter())
        under_way = []
        if is_known_before:
            under_way = [way.start("wait_for_gate", **options) for options in ({"idempotent": True}, {"retry": 1})]
            assert await way.call("add") == 1
        stage.network.freeze("h1")
        stage.directory.say(KEY, ended=SILENT, may_return=True)
        waiting = [way.start("add", idempotent=True), way.start("add", retry=1)]
        limited = way.start("add", idempotent=True, timeout_s=30)
        if not is_known_before:
            with pytest.raises(MachineLost):
                await way.call("add")
        await trio.sleep(20)
        with pytest.raises(MachineLost):
            await way.call("add")
        # said again, with another number of seconds
        stage.directory.say(KEY, ended=SILENT, may_return=True)
        with pytest.raises(DeadlineExceeded):
            await limited
        assert not any(call.done() for call in (*under_way, *waiting))
        stage.kill("h1")
        second = Counter()
        second.gate.set()
        await keyed(stage, second, "h2")
        assert [await call for call in (*under_way, *waiting)] == ["open"] * len(under_way) + [1, 2]


async def test_calls_that_wait_for_a_silent_machine_end_with_it(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        stage.directory.say(KEY, ended=SILENT, may_return=True)
        way = stage.way(stage.caller.route(KEY, "counter"))
        waiting = way.start("add", idempotent=True)
        with pytest.raises(MachineLost, match="node-3"):
            await way.call("add")
        await trio.sleep(20)
        assert not waiting.done()
        stage.directory.end(KEY, EndReason.MACHINE_LOST, "node-3 has been silent for 600 s")
        with pytest.raises(MachineLost, match="600 s"):
            await waiting


async def test_calls_of_a_suspect_machine_that_is_silent_end_within_seconds(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        way, _ = await keyed(stage, Counter())
        call = way.start("wait_for_gate")
        assert await way.call("add") == 1
        stage.network.freeze("h1")
        lost = Outcome(cause=EndReason.MACHINE_LOST, message="node-3 has been silent for 30 s")
        stage.directory.say(KEY, ended=lost, may_return=True)
        with trio.fail_after(10), pytest.raises(MachineLost, match="node-3"):
            await call


async def test_calls_made_before_a_machine_fell_silent_are_answered_elsewhere(autojump_clock: Any) -> None:
    """Repeat them at the next incarnation, which an actor with ``may_overlap`` has soon."""
    async with open_stage() as stage:
        way, _ = await keyed(stage, Counter())
        call = way.start("add_async", idempotent=True)
        stage.network.freeze("h1")
        stage.directory.say(KEY)
        await trio.sleep(1)
        await keyed(stage, Counter(), "h2")
        with trio.fail_after(10):
            assert await call == 1


async def test_an_unregistered_actor_still_answers_calls_it_has_begun(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        instance = Counter()
        way, endpoint = await keyed(stage, instance)
        call = way.start("wait_for_gate")
        await way.call("add")
        stage.directory.say(KEY)
        stage.hosts["h1"].unregister(endpoint.number)
        later = way.start("add")
        await trio.sleep(100)
        instance.gate.set()
        assert await call == "open"
        stage.directory.end(KEY, EndReason.SUCCEEDED, "it was unregistered")
        with pytest.raises(ActorDied, match="unregistered"):
            await later


async def test_a_call_that_the_host_refused_goes_to_the_next_incarnation(autojump_clock: Any) -> None:
    """Unregistered at its host before the directory says so: surely not run."""
    async with open_stage() as stage:
        way, endpoint = await keyed(stage, Counter())
        await way.call("add")
        stage.hosts["h1"].unregister(endpoint.number)
        call = way.start("add")
        await trio.sleep(1)
        assert not call.done()
        await keyed(stage, Counter(), "h2")
        assert await call == 1


async def test_an_endpoint_whose_actor_is_gone_says_so(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        counter = await stage.actor(Counter())
        await counter.call("add")
        stage.hosts["h1"].unregister(1)
        with pytest.raises(NoSuchActor):
            await counter.call("add")


async def test_another_process_at_the_same_address_is_no_heir(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        counter = await stage.actor(Counter())
        call = counter.start("wait_for_gate")
        await counter.call("add")
        stage.kill("h1")
        instance = Counter()
        heir = await stage.host("h2", machine="h1", key=stage.hosts["h1"].key)
        heir.register(instance, "a")
        with pytest.raises(OutcomeUnknown):
            await call
        assert instance.n == 0


async def test_a_wrong_key_gets_nothing(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        host = await stage.host("h1")
        endpoint = stage.endpoint(host, host.register(Counter(), "a"))
        for key in ("", "wrong"):
            wrong = ActorEndpoint(
                actor_id="a",
                name="a",
                job_id="",
                namespace="",
                incarnation="h1",
                number=endpoint.number,
                addresses=host.addresses,
                key=key,
            )
            caller = stage.caller
            with pytest.raises(Unauthorized):
                await caller.route_to(wrong).call("add", (), {}, CallOptions())
            caller.forget(caller.route_to(wrong))


async def test_an_address_without_a_listener_is_dead_at_once(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        nowhere = ActorEndpoint(
            actor_id="a", name="a", job_id="", namespace="", incarnation="h9", number=1, addresses=("memory:h9",)
        )
        with pytest.raises(ActorDied, match="process is gone"):
            await stage.way(stage.caller.route_to(nowhere)).call("add")


async def test_a_host_that_shuts_down_answers_everybody(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        instance = Counter()
        counter = await stage.actor(instance, max_concurrency=1)
        running = counter.start("wait_for_gate")
        queued = counter.start("note", "queued")
        await trio.testing.wait_all_tasks_blocked()
        began = trio.current_time()
        await stage.hosts["h1"].shutdown(grace_s=3)
        assert trio.current_time() - began == pytest.approx(3, abs=0.1)
        for call in (running, queued):
            with pytest.raises(ActorDied):
                await call
        assert instance.log == ["waiting", "cancelled"]
        with pytest.raises(ActorDied):
            await counter.call("add")


async def test_calls_that_a_host_no_longer_read_are_undelivered(autojump_clock: Any) -> None:
    """Calls on the wire at the goodbye of the host, which says up to which call it has listened."""
    async with open_stage() as stage:
        host = await stage.host("h1")
        way = stage.way(stage.caller.route("actor:a"))
        stage.directory.say("actor:a", stage.endpoint(host, host.register(Counter(), "a", actor_id="a")))
        assert await way.call("add") == 1
        heard = way.start("wait_for_gate")
        await trio.testing.wait_all_tasks_blocked()
        for session in host._sessions.values():
            session.announce_close()
        late = [way.start("add") for _ in range(3)]  # on their way while the goodbye is
        await host.shutdown()
        with pytest.raises(ActorDied, match="shut down"):
            await heard
        stage.directory.end("actor:a", EndReason.STOPPED, "its end was requested")
        for call in late:
            with pytest.raises(ActorDied, match="end was requested") as died:
                await call
            assert not isinstance(died.value, OutcomeUnknown)


async def test_a_host_that_is_cancelled_says_goodbye(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        counter = await stage.actor(Counter())
        call = counter.start("wait_for_gate")
        await counter.call("add")
        stage.scopes["h1"].cancel()
        began = trio.current_time()
        with pytest.raises(ActorDied):
            await call
        assert trio.current_time() - began < 1


async def test_a_host_that_is_cancelled_as_it_begins_ends(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        host = ActorHostServer(stage.network, incarnation="h1", rng=stage.rng)
        with trio.CancelScope() as scope:
            scope.cancel()
            await host.run()
        assert scope.cancelled_caught
        with pytest.raises(ActorDied):
            await host.listen()


# Without a directory -------------------------------------------------------------------------------------------------


async def test_a_host_tells_which_number_a_name_has(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        host = await stage.host("h1")
        number = host.register(Counter(), "counter", actor_id="counter-1")
        endpoint = await stage.caller.bind(host.addresses, "counter", key=host.key)
        assert (endpoint.number, endpoint.actor_id, endpoint.incarnation) == (number, "counter-1", "h1")
        assert await stage.way(stage.caller.route_to(endpoint)).call("add") == 1
        with pytest.raises(NoSuchActor, match="there are: counter"):
            await stage.caller.bind(host.addresses, "other", key=host.key)
        with pytest.raises(Unauthorized):
            await stage.caller.bind(host.addresses, "counter", key="wrong")


async def test_a_process_that_took_over_a_bound_address_gets_none_of_the_calls(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        host = await stage.host("h1")
        host.register(Counter(), "counter")
        endpoint = await stage.caller.bind(host.addresses, "counter", key=host.key)
        way = stage.way(stage.caller.route_to(endpoint))
        call = way.start("wait_for_gate")
        await way.call("add")
        stage.kill("h1")
        heir = Counter()
        (await stage.host("h2", machine="h1", key=host.key)).register(heir, "counter")
        with pytest.raises(OutcomeUnknown):
            await call
        assert heir.log == []


async def test_inline_execution_needs_no_thread(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        host = await stage.host("h1", make_runner=inline)
        before = set(threading.enumerate())
        way = stage.way(stage.caller.route_to(stage.endpoint(host, host.register(Plain(), "plain"))))
        assert [await call for call in [way.start("add") for _ in range(10)]] == list(range(1, 11))
        assert set(threading.enumerate()) <= before


# Everything at once --------------------------------------------------------------------------------------------------


class Diary:
    """Writes down which calls it has run."""

    def __init__(self, pages: list[int]) -> None:
        self.pages = pages

    def write(self, page: int) -> int:
        self.pages.append(page)
        return page

    async def write_slowly(self, page: int, seconds: float) -> int:
        self.pages.append(page)
        await trio.sleep(seconds)
        return page


async def storm(seed: int) -> tuple[list[list[int]], dict[int, str]]:
    """Calls while connections break and the actor dies and comes back: what ran where, and what was said of each."""
    rng = random.Random(seed)
    lives: list[list[int]] = []
    said: dict[int, str] = {}

    async with open_stage(seed) as stage:
        stage.network.set_delay("driver", "h0", 0.0, 0.02)
        for life in range(1, 4):
            stage.network.set_delay("driver", f"h{life}", 0.0, 0.02)

        def on_hop(hop: Any) -> MessageFault:
            return rng.choices([MessageFault.DELIVER, MessageFault.LOSE, MessageFault.LAST], [96, 2, 2])[0]

        async def one(page: int) -> None:
            way = stage.way(stage.caller.route(KEY, "diary"))
            await trio.sleep(rng.uniform(0, 4))
            try:
                if rng.random() < 0.5:
                    await way.call("write", page)
                else:
                    await way.call("write_slowly", page, rng.uniform(0, 0.5))
                said[page] = "done"
            except OutcomeUnknown:
                said[page] = "unknown"
            except ActorDied:
                said[page] = "died"

        async def live_and_die() -> None:
            for life in range(4):
                lives.append([])
                await keyed(stage, Diary(lives[-1]), f"h{life}")
                await trio.sleep(rng.uniform(0.5, 1.5))
                if life < 3:
                    stage.kill(f"h{life}")
                    await trio.sleep(rng.uniform(0, 0.5))
                    if rng.random() < 0.5:
                        stage.directory.say(KEY)
                        await trio.sleep(rng.uniform(0, 0.5))

        stage.network.on_message_sent = on_hop
        async with trio.open_nursery() as nursery:
            nursery.start_soon(live_and_die)
            for page in range(100):
                nursery.start_soon(one, page)
    return lives, said


@pytest.mark.parametrize("seed", range(20))
async def test_in_a_storm_every_call_ends_and_none_runs_twice(seed: int, autojump_clock: Any) -> None:
    with trio.fail_after(600):
        lives, said = await storm(seed)
    ran = sorted(page for pages in lives for page in pages)
    assert len(said) == 100, "every call has ended"
    assert len(set(ran)) == len(ran), "none ran twice, here or there"
    for page, word in said.items():
        assert word in ("done", "unknown"), "it came back each time, so nothing died undelivered"
        assert word != "done" or page in ran


async def test_an_actor_that_has_ended_and_whose_handle_is_gone_is_forgotten(autojump_clock: Any) -> None:
    async with open_stage() as stage:
        for number in range(20):
            key = f"actor:{number}"
            host = await stage.host(f"h{number}")
            actor = host.register(Counter(), "a", actor_id=str(number))
            stage.directory.say(key, stage.endpoint(host, actor))
            way = stage.way(stage.caller.route(key))
            assert await way.call("add") == 1
            stage.kill(f"h{number}")
            stage.directory.end(key, EndReason.FAILURE, "killed")
            with pytest.raises(ActorDied):
                await way.call("add")
            del way
        await trio.sleep(PROOF_WAIT_S + 1)
        gc.collect()
        assert len(stage.caller._routes) == len(stage.caller._connections) == 0
        assert not any(stage.directory.listeners.values())
