"""Conversations of clients and nodes with a controller, over a network in memory."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import trio
import trio.testing
from attrs import evolve

from fray.controller.store import BLOB_LIMIT_BYTES
from fray.errors import (
    FrayError,
    InvalidRequest,
    NameInUse,
    NodeNameInUse,
    NoSuchJob,
    ProtocolMismatch,
    Unauthorized,
)
from fray.model.environment import EnvironmentSpec
from fray.model.log_records import unpack
from fray.model.messages.client import (
    ActorEndpoint,
    ClientHello,
    Done,
    EndSession,
    Explain,
    FetchBlob,
    FollowLogs,
    GetEvents,
    GetJobSpec,
    Launch,
    ListActors,
    ListJobs,
    ListNodes,
    LogLines,
    Names,
    ProcessMark,
    Register,
    Role,
    Terminate,
    Unregister,
    Unwatch,
    Watch,
    WatchJobs,
)
from fray.model.messages.node import DesiredState, NodeMoved, ObservedState
from fray.model.monitoring.health import HealthCheck
from fray.model.policy.priority import Band
from fray.model.resources import Demand
from fray.model.specs import EndReason, EntryKind, JobInfo, JobSpec, JobState, Outcome
from fray.net.codec import Kind, blob_id
from fray.net.process_identity import ProcessWatch, process_mark
from fray.net.transport import Credential
from fray.scheduler.lifecycle import NodePhase
from tests.support.controller import TOKEN, Client, spec, stage


def running(info: JobInfo) -> bool:
    return info.state is JobState.RUNNING


def endpoint(name: str = "counter", actor_id: str = "a1", **more: Any) -> ActorEndpoint:
    return ActorEndpoint(actor_id=actor_id, name=name, job_id="", namespace="", addresses=("tcp:here:1",), **more)


def child_key(desired: Any) -> Credential:
    return Credential(f"attempt:{desired.attempt_id}", desired.key)


# Jobs


async def test_a_launch_runs_on_a_node_and_its_value_comes_back(autojump_clock: Any) -> None:
    async with stage() as cluster:
        driver, node = await cluster.client(), await cluster.node()
        (info,) = await driver.launch(spec())
        assert info.job_id == "work-1"
        desired = await node.wait_desired("work-1:0:0")
        assert node.payloads[desired.spec.payload or ""] == b"payload"
        await driver.job("work-1", running)
        node.succeed("work-1:0:0", b"the result")
        info, blobs = await driver.job_ended("work-1")
        assert info.state is JobState.SUCCEEDED
        assert blobs == [b"the result"]
        await node.until(lambda: not node.desired)


async def test_a_repeated_launch_attaches_to_the_first(autojump_clock: Any) -> None:
    async with stage() as cluster:
        driver, node = await cluster.client(), await cluster.node()
        await driver.launch(spec())
        await node.wait_desired("work-1:0:0")
        await driver.job("work-1", running)
        (info,) = await driver.launch(spec())
        assert info.state is JobState.RUNNING
        node.succeed("work-1:0:0")
        await driver.job_ended("work-1")
        reply, blobs = await driver.ask_blobs(Launch(jobs=(spec(),)), [b"payload"])
        assert reply.jobs[0].state is JobState.SUCCEEDED
        assert blobs == [b"value"]
        assert [job.job_id for job in (await driver.ask(ListJobs())).jobs] == ["work-1"]


async def test_a_payload_that_is_there_already_need_not_be_sent_again(autojump_clock: Any) -> None:
    async with stage() as cluster:
        driver = await cluster.client()
        await driver.launch(spec())
        await driver.ask(Launch(jobs=(spec("other"),)))
        assert cluster.store.blobs() == {blob_id(b"payload")}


@pytest.mark.parametrize(
    ("jobs", "blobs", "match"),
    [
        ((), [], "must have 1 to 10000 jobs"),
        ((spec(),), [], "is not attached, or was damaged"),
        ((spec(),), [b"other bytes"], "is not attached, or was damaged"),
        ((spec(),), [b"payload", b"extra"], "no job of this launch names the attachment"),
        ((spec(job_id="other-1"),), [b"payload"], "job id 'other-1' must be the job's name"),
        ((spec(job_id="work-../x"),), [b"payload"], "must be the job's name, a dash, and letters or digits"),
        ((spec(name="two words"),), [b"payload"], "cannot be the name of a job"),
        ((spec(entry=EntryKind.BINARY),), [], "runs a program, but argv is empty"),
        ((spec(namespace="a b"),), [b"payload"], "cannot be the name of a namespace"),
        ((spec(members=0),), [b"payload"], "members=0 must be 1 to 100000"),
        (
            (spec(demand=Demand(cpu_milli=-1)),),
            [b"payload"],
            "no amount may be negative, or more than 1152921504",
        ),
        (
            (spec(demand=Demand(cpu_milli=10**400)),),
            [b"payload"],
            r"jobs\[0\].demand.cpu_milli: the number 10+\.\.\. \(401 characters\) has more than 64 bits",
        ),
        ((spec(demand=Demand(memory_bytes=2**60 + 1)),), [b"payload"], "no amount may be negative, or more than"),
        ((spec(backoff_s=float("inf")),), [b"payload"], "negative or endless"),
        ((spec(backoff_max_s=-1.0),), [b"payload"], "negative or endless"),
        ((spec(stall_s=float("nan")),), [b"payload"], "NaN is not a valid number"),
        ((spec(time_limit_s=-1.0),), [b"payload"], "time_limit_s=-1.0 must be more"),
        ((spec(stall_s=-1.0),), [b"payload"], "stall_s=-1.0 must be more"),
        ((spec(environment=EnvironmentSpec(docker_image="--privileged")),), [b"payload"], "invalid image name"),
        ((spec(),), [bytes(BLOB_LIMIT_BYTES + 1)], "exceeds the limit of 8388608"),
    ],
)
async def test_a_launch_that_makes_no_sense_is_refused_and_leaves_nothing(
    autojump_clock: Any, jobs: tuple[JobSpec, ...], blobs: list[bytes], match: str
) -> None:
    async with stage() as cluster:
        driver = await cluster.client()
        with pytest.raises(FrayError, match=match):
            await driver.ask(Launch(jobs=jobs), blobs)
        assert cluster.store.blobs() == set()
        assert (await driver.ask(ListJobs())).jobs == ()


async def test_a_launch_that_the_scheduler_refuses_leaves_no_payload(autojump_clock: Any) -> None:
    async with stage() as cluster:
        driver = await cluster.client()
        await driver.launch(spec())
        with pytest.raises(NameInUse, match="job name 'work' is taken"):
            await driver.launch(spec(job_id="work-2", payload=b"other"), payload=b"other")
        assert cluster.store.blobs() == {blob_id(b"payload")}


async def test_payload_and_value_are_forgotten_with_their_job(autojump_clock: Any) -> None:
    async with stage() as cluster:
        driver, node = await cluster.client(), await cluster.node()
        await driver.launch(spec())
        await node.wait_desired("work-1:0:0")
        node.succeed("work-1:0:0")
        await driver.job_ended("work-1")
        assert cluster.store.blobs() == {blob_id(b"value")}


async def test_any_client_may_watch_a_job_and_gets_its_value(autojump_clock: Any) -> None:
    async with stage() as cluster:
        driver, other, node = await cluster.client(), await cluster.client(), await cluster.node()
        await driver.launch(spec())
        assert (await other.ask(WatchJobs(jobs=("work-1",)))).jobs[0].name == "work"
        await node.wait_desired("work-1:0:0")
        node.succeed("work-1:0:0")
        assert (await other.job_ended("work-1"))[1] == [b"value"]
        late, blobs = await other.ask_blobs(WatchJobs(jobs=("work-1",)))
        assert late.jobs[0].state is JobState.SUCCEEDED
        assert blobs == [b"value"]
        assert (await other.ask_blobs(FetchBlob(blob=blob_id(b"value"))))[1] == [b"value"]
        with pytest.raises(NoSuchJob):
            await other.ask(WatchJobs(jobs=("work-1", "nothing-1")))
        with pytest.raises(InvalidRequest, match="no such blob"):
            await other.ask(FetchBlob(blob=blob_id(b"no such")))


async def test_a_terminated_job_stops_and_says_why(autojump_clock: Any) -> None:
    async with stage() as cluster:
        driver, node = await cluster.client(), await cluster.node()
        await driver.launch(spec())
        await node.wait_desired("work-1:0:0")
        await driver.ask(Terminate(jobs=("work-1", "unknown-1"), reason="enough"))
        info, blobs = await driver.job_ended("work-1")
        assert (info.state, info.cause, blobs) == (JobState.STOPPED, EndReason.STOPPED, [])


async def test_a_value_over_the_limit_fails_the_job_and_says_so(autojump_clock: Any) -> None:
    async with stage() as cluster:
        driver, node = await cluster.client(), await cluster.node()
        await driver.launch(spec())
        await node.wait_desired("work-1:0:0")
        node.succeed("work-1:0:0", bytes(BLOB_LIMIT_BYTES + 1))
        info, blobs = await driver.job_ended("work-1")
        assert (info.state, info.cause, blobs) == (JobState.FAILED, EndReason.FAILURE, [])
        assert "did not reach the controller" in (info.error_message or "")


async def test_every_state_explains_itself(autojump_clock: Any) -> None:
    async with stage() as cluster:
        driver = await cluster.client()
        await driver.launch(spec())
        assert "work-1" in (await driver.ask(Explain(job="work-1"))).text
        events = (await driver.ask(GetEvents(job="work-1"))).events
        assert events[0].what == "launched"
        for question in (Explain(job="nothing-1"), GetEvents(job="nothing-1")):
            with pytest.raises(NoSuchJob):
                await driver.ask(question)


async def test_the_request_of_a_job_is_shown_without_what_it_runs(autojump_clock: Any) -> None:
    hidden = {
        **dict.fromkeys(("argv", "sys_path"), ("hidden",)),
        **{name: {"KEY": "hidden"} for name in ("env_vars", "secrets")},
        "trace_vars": {"OTEL_SERVICE_NAME": "hidden"},
        **dict.fromkeys(("cwd", "signature", "result_storage"), "hidden"),
        "health": HealthCheck(path="/hidden"),
        "environment": EnvironmentSpec(pip_packages=("hidden",)),
    }
    async with stage() as cluster:
        driver = await cluster.client()
        await driver.launch(evolve(spec(), entry=EntryKind.BINARY, payload=None, max_retries_failure=7, **hidden))
        shown = (await driver.ask(GetJobSpec(job="work-1"))).spec
        assert (shown.max_retries_failure, shown.demand, shown.band) == (7, spec().demand, Band.INTERACTIVE)
        assert "hidden" not in repr(shown)
        with pytest.raises(NoSuchJob):
            await driver.ask(GetJobSpec(job="nothing-1"))


async def test_lists_are_of_the_own_namespace_unless_asked_otherwise(autojump_clock: Any) -> None:
    async with stage() as cluster:
        one, two = await cluster.client(namespace="one"), await cluster.client(namespace="two")
        tool = await cluster.client(role=Role.TOOL)
        await one.launch(spec("a"))
        await two.launch(spec("b"))
        await two.ask(Register(endpoint=endpoint("cat")))
        assert [job.name for job in (await one.ask(ListJobs())).jobs] == ["a"]
        assert [job.name for job in (await one.ask(ListJobs(namespace="two"))).jobs] == ["b"]
        assert [job.name for job in (await tool.ask(ListJobs(namespace="*"))).jobs] == ["a", "b"]
        assert (await one.ask(ListActors())).actors == ()
        assert [info.name for info in (await tool.ask(ListActors(prefix="c", namespace="*"))).actors] == ["cat"]
        await cluster.node("n1", cpu=4)
        (info,) = (await tool.ask(ListNodes())).nodes
        assert (info.name, info.alive, info.attempts) == ("n1", True, 0) or info.attempts == 2


async def test_a_machine_with_a_new_address_keeps_its_attempts_and_takes_more(autojump_clock: Any) -> None:
    async with stage() as cluster:
        driver, node = await cluster.client(), await cluster.node("n1", cpu=4)
        await driver.launch(spec("work"))
        await node.wait_desired("work-1:0:0")
        assert node.channel is not None
        node.channel.notice(NodeMoved(host="10.0.0.9"))
        await trio.testing.wait_all_tasks_blocked()
        await driver.launch(spec("more"))
        await node.wait_desired("more-1:0:0")
        (info,) = (await driver.ask(ListNodes())).nodes
        assert (info.host, info.alive, info.attempts) == ("10.0.0.9", True, 2)
        (second,) = (await driver.ask(ListJobs(prefix="more"))).jobs
        assert second.attempts[0].host == "10.0.0.9"


async def test_nonsense_is_answered_and_the_conversation_goes_on(autojump_clock: Any) -> None:
    async with stage() as cluster:
        driver = await cluster.client()
        for nonsense in (Done(), ObservedState(full=True)):
            with pytest.raises(ProtocolMismatch, match="unsupported request"):
                await driver.ask(nonsense)
        assert driver.channel is not None
        driver.channel.send_nowait(Kind.REQUEST, 999, b"\xff" * 10)
        assert (await driver.ask(ListJobs())).jobs == ()
        with pytest.raises(InvalidRequest, match="invalid key"):
            await driver.ask(Watch(key="nonsense"))


# Who may speak as whom


async def test_a_wrong_or_missing_token_gets_nothing(autojump_clock: Any) -> None:
    async with stage() as cluster:
        for credential in (
            Credential("cluster", "wrong"),
            Credential("other", TOKEN),
            Credential("attempt:work-1:0:0", TOKEN),
            Credential("", ""),
        ):
            with pytest.raises(Unauthorized):
                await cluster.client(credential=credential)


async def test_a_job_dials_with_its_attempts_key_and_owns_what_it_launches(autojump_clock: Any) -> None:
    async with stage() as cluster:
        driver, node = await cluster.client(namespace="home"), await cluster.node()
        await driver.launch(spec("parent"))
        desired = await node.wait_desired("parent-1:0:0")
        job = await cluster.client(
            role=Role.JOB, attempt_id=desired.attempt_id, credential=child_key(desired), host="n1"
        )
        assert job.welcomes[0].namespace == "home"
        (child,) = await job.launch(spec("child"))
        assert (child.owner, child.namespace) == ("parent-1:0:0", "home")
        await node.wait_desired("child-1:0:0")
        await driver.ask(WatchJobs(jobs=("child-1",)))
        node.succeed("parent-1:0:0")
        info, _ = await driver.job_ended("child-1")
        assert info.cause is EndReason.OWNER_ENDED
        await job.until(lambda: job.ended)


async def test_a_key_lets_one_speak_for_its_own_attempt_only(autojump_clock: Any) -> None:
    async with stage() as cluster:
        driver, node = await cluster.client(session="boss"), await cluster.node()
        await driver.launch(spec("one"), spec("two"))
        desired = await node.wait_desired("one-1:0:0")
        key = child_key(desired)
        with pytest.raises(Unauthorized, match="does not authorize"):
            await cluster.client(role=Role.DRIVER, credential=key)
        with pytest.raises(Unauthorized, match="does not authorize"):
            await cluster.client(role=Role.JOB, attempt_id="two-1:0:0", credential=key)
        with pytest.raises(Unauthorized, match="belongs to another key"):
            await cluster.client("boss", role=Role.JOB, attempt_id="one-1:0:0", credential=key)
        with pytest.raises(Unauthorized, match="does not authorize"):
            await cluster.client(role=Role.JOB, attempt_id="one-1:0:0")
        with pytest.raises(Unauthorized, match="must present the cluster token"):
            await cluster.node("n9", credential=key)
        with pytest.raises(Unauthorized):
            await cluster.client(
                role=Role.JOB, attempt_id="two-1:0:0", credential=Credential("attempt:two-1:0:0", desired.key)
            )


async def test_a_superseded_attempt_is_refused(autojump_clock: Any) -> None:
    async with stage() as cluster:
        driver, first = await cluster.client(), await cluster.node("n1")
        await driver.launch(spec())
        desired = await first.wait_desired("work-1:0:0")
        second = await cluster.node("n2")
        first.say_goodbye()
        await second.wait_desired("work-1:1:0")
        with pytest.raises(Unauthorized):
            await cluster.client(role=Role.JOB, attempt_id=desired.attempt_id, credential=child_key(desired))


async def test_a_driver_gets_a_namespace_of_its_own_and_keeps_it(autojump_clock: Any) -> None:
    async with stage() as cluster:
        first = await cluster.client("one")
        assert first.welcomes[0].namespace.startswith("anon-")
        assert not first.welcomes[0].session_known
        other = await cluster.client("two")
        assert other.welcomes[0].namespace != first.welcomes[0].namespace
        again = await cluster.client("one", namespace="something-else")
        assert again.welcomes[0] == evolve(first.welcomes[0], session_known=True, now=again.welcomes[0].now)


@pytest.mark.parametrize(
    "hello",
    [
        {"session": "two words"},
        {"session": "x" * 300},
        {"grace_s": -1.0},
        {"grace_s": float("inf")},
        {"grace_s": float("nan")},  # never gets so far
        {"namespace": "a b"},
    ],
)
async def test_a_greeting_that_makes_no_sense_is_refused(autojump_clock: Any, hello: dict[str, Any]) -> None:
    async with stage() as cluster:
        with pytest.raises((InvalidRequest, ProtocolMismatch)):
            await cluster.client(**hello)


async def test_a_session_that_has_ended_stays_ended(autojump_clock: Any) -> None:
    async with stage() as cluster:
        driver = await cluster.client("one")
        assert await driver.ask(EndSession()) == Done()
        await driver.until(lambda: driver.ended)
        with pytest.raises(FrayError, match=r"ended 0 s ago.*driver left.*Open the cluster again"):
            await cluster.client("one")


# Comings and goings of drivers


async def test_the_end_of_a_session_is_answered_when_all_it_owned_has_ended(autojump_clock: Any) -> None:
    async with stage() as cluster:
        driver, node = await cluster.client(), await cluster.node(obedient=False)
        await driver.launch(spec())
        await node.wait_desired("work-1:0:0")
        answered: list[object] = []

        async def leave() -> None:
            answered.append(await driver.ask(EndSession()))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(leave)
            await node.until(lambda: node.desired["work-1:0:0"].stop)
            assert not answered
            node.end("work-1:0:0", Outcome(cause=EndReason.OWNER_ENDED))
        assert answered == [Done()]
        assert (await driver.until(lambda: driver.ended)).details["reason"]


async def test_a_goodbye_ends_what_the_driver_owned_at_once(autojump_clock: Any) -> None:
    async with stage() as cluster:
        driver, node = await cluster.client(), await cluster.node()
        await driver.launch(spec())
        await node.wait_desired("work-1:0:0")
        before = trio.current_time()
        assert driver.channel is not None
        await driver.channel.close("done here")
        await node.until(lambda: not node.desired)
        assert trio.current_time() - before < 1


async def test_a_driver_that_comes_back_in_time_keeps_its_jobs_and_misses_nothing(autojump_clock: Any) -> None:
    async with stage() as cluster:
        driver, node = await cluster.client(grace_s=30), await cluster.node()
        await driver.launch(spec())
        await node.wait_desired("work-1:0:0")
        cluster.network.cut("driver", "controller")
        cluster.network.drop("driver")
        node.succeed("work-1:0:0")
        await node.until(lambda: not node.desired)
        await trio.sleep(20)
        cluster.network.heal("driver", "controller")
        info, blobs = await driver.job_ended("work-1")
        assert (info.state, blobs) == (JobState.SUCCEEDED, [b"value"])
        assert len(driver.welcomes) == 1


async def test_a_driver_that_stays_away_loses_its_jobs_after_its_grace(autojump_clock: Any) -> None:
    async with stage() as cluster:
        driver, node, other = await cluster.client(grace_s=30), await cluster.node(), await cluster.client(host="else")
        await driver.launch(spec())
        await other.ask(WatchJobs(jobs=("work-1",)))
        await node.wait_desired("work-1:0:0")
        lost_at = trio.current_time()
        cluster.network.crash("driver")
        cluster.network.cut("driver", "controller")
        info, _ = await other.job_ended("work-1")
        assert info.cause is EndReason.OWNER_ENDED
        assert 29 < trio.current_time() - lost_at < 32


async def test_a_client_that_restarts_under_its_session_keeps_its_jobs(autojump_clock: Any) -> None:
    async with stage() as cluster:
        driver, node = await cluster.client("one"), await cluster.node()
        await driver.launch(spec())
        await node.wait_desired("work-1:0:0")
        again = await cluster.client("one", host="elsewhere")
        await driver.until(lambda: driver.ended)
        await trio.sleep(100)
        assert (await again.ask(WatchJobs(jobs=("work-1",)))).jobs[0].state is JobState.RUNNING
        node.succeed("work-1:0:0")
        assert (await again.job_ended("work-1"))[1] == [b"value"]


async def test_a_peer_that_restarts_its_channel_has_not_said_goodbye(autojump_clock: Any) -> None:
    async with stage() as cluster:
        node = await cluster.node()
        lives = []
        for _ in range(2):
            lives.append(Client(lambda: ClientHello(session="one", role=Role.DRIVER)))
            lives[-1].channel_session = "the same"
            await cluster.dial(lives[-1], "driver")
            await lives[-1].launch(spec())
        await node.wait_desired("work-1:0:0")
        await trio.sleep(1)
        assert (await lives[1].ask(ListJobs())).jobs[0].state is JobState.RUNNING
        assert lives[1].welcomes[0].session_known


# Names


async def test_names_come_change_and_go_before_the_eyes_of_those_who_watch(autojump_clock: Any) -> None:
    async with stage() as cluster:
        host, caller = await cluster.client(namespace="ns"), await cluster.client(namespace="ns")
        key = "name:ns/counter"
        assert await caller.ask(Watch(key=key)) == Names(key=key, endpoints=())
        await host.ask(Register(endpoint=endpoint(key="dial-key")))
        names, _ = await caller.next_notice(Names)
        (found,) = names.endpoints
        assert (found.namespace, found.incarnation, found.key) == ("ns", host.greeting().session, "dial-key")  # type: ignore[attr-defined]
        await host.ask(Register(endpoint=endpoint(metadata={"v": "2"})))
        names, _ = await caller.next_notice(Names)
        assert names.endpoints[0].metadata == {"v": "2"}
        await host.ask(Unregister(actor_id="a1"))
        names, _ = await caller.next_notice(Names)
        assert names.endpoints == ()
        await caller.ask(Unwatch(key=key))
        await host.ask(Register(endpoint=endpoint()))
        await caller.ask(ListJobs())
        assert [notice for notice, _ in caller.notices if isinstance(notice, Names)][-1].endpoints == ()


async def test_an_exclusive_name_is_given_once(autojump_clock: Any) -> None:
    async with stage() as cluster:
        one, two = await cluster.client(namespace="ns"), await cluster.client(namespace="ns")
        await one.ask(Register(endpoint=endpoint(), exclusive=True))
        with pytest.raises(NameInUse):
            await two.ask(Register(endpoint=endpoint(actor_id="a2"), exclusive=True))
        with pytest.raises(InvalidRequest, match="cannot be the name of an actor"):
            await two.ask(Register(endpoint=endpoint("two words", actor_id="a3")))


async def test_the_end_of_an_actor_is_reported_with_its_error(autojump_clock: Any) -> None:
    async with stage() as cluster:
        driver, node = await cluster.client(), await cluster.node()
        await driver.launch(spec("actor", entry=EntryKind.ACTOR))
        await node.wait_desired("actor-1:0:0")
        assert (await driver.ask(Watch(key="actor:actor-1"))).ended is None
        error = b"pickled error"
        outcome = Outcome(cause=EndReason.FAILURE, message="ValueError: no", value=blob_id(error))
        node.end("actor-1:0:0", outcome, error)
        names, blobs = await driver.next_notice(Names, lambda names: names.ended is not None)
        assert names.ended is not None
        assert names.ended.cause is EndReason.FAILURE
        assert blobs == [error]


# Logs


async def test_the_driver_at_the_root_hears_what_its_jobs_print_before_it_hears_of_their_end(
    autojump_clock: Any,
) -> None:
    async with stage() as cluster:
        driver, node = await cluster.client(), await cluster.node()
        await driver.ask(FollowLogs(job=None))
        await driver.launch(spec("parent"))
        desired = await node.wait_desired("parent-1:0:0")
        job = await cluster.client(role=Role.JOB, attempt_id=desired.attempt_id, credential=child_key(desired))
        await job.launch(spec("child"))
        await node.wait_desired("child-1:0:0")
        node.print_lines("child-1:0:0", "from below")
        node.print_lines("parent-1:0:0", *(f"line {n}" for n in range(1000)))
        node.succeed("parent-1:0:0")
        await driver.job_ended("parent-1")
        lines = [(notice, blobs[0]) for notice, blobs in driver.notices if isinstance(notice, LogLines)]
        heard = {
            name: [text for n, data in lines if n.name == name for text in texts_of(data)]
            for name in ("parent", "child")
        }
        assert heard == {"parent": [f"line {n}" for n in range(1000)], "child": ["from below"]}
        assert {notice.name for notice, _ in lines} == {"parent", "child"}


def texts_of(data: bytes) -> list[str]:
    return [text for _, _, _, texts in unpack(data) for text in texts]


async def test_a_follower_gets_what_was_printed_before_and_after_and_may_stop(autojump_clock: Any) -> None:
    async with stage() as cluster:
        driver, node, reader = await cluster.client(), await cluster.node(), await cluster.client(role=Role.TOOL)
        await driver.launch(spec())
        await node.wait_desired("work-1:0:0")
        node.print_lines("work-1:0:0", "early")
        with pytest.raises(NoSuchJob):
            await reader.ask(FollowLogs(job="nothing-1"))
        await node.until(lambda: node.channel and node.channel.outbox.acked)
        await reader.ask(FollowLogs(job="work-1"))
        assert texts_of((await reader.next_notice(LogLines))[1][0]) == ["early"]
        node.print_lines("work-1:0:0", "late")
        assert texts_of((await reader.next_notice(LogLines))[1][0]) == ["late"]
        await reader.ask(FollowLogs(job="work-1", on=False))
        node.print_lines("work-1:0:0", "unheard")
        node.succeed("work-1:0:0")
        await driver.job_ended("work-1")
        await reader.ask(ListJobs())
        assert "unheard" not in [
            t for n, blobs in reader.notices if isinstance(n, LogLines) for t in texts_of(blobs[0])
        ]


async def test_a_frozen_reader_costs_bounded_memory_and_gets_the_number_of_lines_it_missed(autojump_clock: Any) -> None:
    async with stage() as cluster:
        driver, node, reader = await cluster.client(), await cluster.node(), await cluster.client(host="reader")
        await driver.launch(spec())
        await node.wait_desired("work-1:0:0")
        await reader.ask(FollowLogs(job="work-1"))
        cluster.network.freeze("reader")
        printed = 0
        for _ in range(60):
            node.print_lines("work-1:0:0", *("x" * 10_000 for _ in range(50)))
            printed += 50
            await driver.ask(ListJobs())
        link = cluster.controller.gateway._clients[reader.greeting().session]  # type: ignore[attr-defined]
        assert link.channel.outbox.size_bytes < 2 * 1024 * 1024
        cluster.network.thaw("reader")
        node.succeed("work-1:0:0")

        def heard() -> int:
            lines = [(n, blobs[0]) for n, blobs in reader.notices if isinstance(n, LogLines)]
            return sum(notice.skipped + len(texts_of(data)) for notice, data in lines)

        await reader.until(lambda: heard() >= printed)
        assert heard() == printed


# Nodes


async def test_a_payload_goes_to_a_node_once_for_each_attempt(autojump_clock: Any) -> None:
    async with stage() as cluster:
        driver, node = await cluster.client(), await cluster.node()
        await driver.launch(spec())
        await node.wait_desired("work-1:0:0")
        await driver.launch(spec("other"))
        await node.wait_desired("other-1:0:0")
        await driver.ask(Terminate(jobs=("other-1",)))
        await driver.job_ended("other-1")
        sent = [(n.full, [w.attempt_id for w in n.desired], b) for n, b in node.notices if isinstance(n, DesiredState)]
        payloads = [(ids, blobs) for _, ids, blobs in sent if blobs]
        assert payloads == [(["work-1:0:0"], [b"payload"]), (["other-1:0:0"], [b"payload"])]
        revisions = [n.revision for n, _ in node.notices if isinstance(n, DesiredState)]
        assert revisions == sorted(set(revisions))


async def test_a_node_that_reconnects_gets_the_whole_set_without_payloads_it_holds(autojump_clock: Any) -> None:
    async with stage() as cluster:
        driver, node = await cluster.client(), await cluster.node()
        await driver.launch(spec())
        await node.wait_desired("work-1:0:0")
        await node.until(lambda: node.held.get("work-1:0:0"))
        await driver.job("work-1", running)
        count = len(node.notices)
        node.scope.cancel()
        await node.until(lambda: node.ended)
        await driver.ask(ListJobs())
        assert cluster.controller.gateway._context.state.nodes["n1"].phase is NodePhase.SILENT  # not yet suspect
        again = await cluster.node(incarnation=node.greeting().incarnation, holds=["work-1:0:0"], obedient=False)  # type: ignore[attr-defined]
        assert len(node.notices) == count
        wanted, blobs = await again.next_notice(DesiredState)
        assert wanted.full
        assert [each.attempt_id for each in wanted.desired] == ["work-1:0:0"]
        assert blobs == []


async def test_a_connection_that_is_resumed_costs_a_running_job_nothing(autojump_clock: Any) -> None:
    async with stage() as cluster:
        driver, node = await cluster.client(), await cluster.node()
        await driver.launch(spec())
        await node.wait_desired("work-1:0:0")
        await driver.job("work-1", running)
        cluster.network.drop("n1")
        await node.until(lambda: node.suspensions)
        await node.until(lambda: node.channel and node.channel.connected)
        await driver.launch(spec("next"))
        await node.wait_desired("next-1:0:0")
        node.succeed("work-1:0:0")
        assert (await driver.job_ended("work-1"))[0].state is JobState.SUCCEEDED


async def test_more_payloads_than_one_message_carries_all_arrive(autojump_clock: Any) -> None:
    async with stage() as cluster:
        driver, node = await cluster.client(), await cluster.node(cpu=10)
        names = [f"job{n}" for n in range(9)]
        for number, name in enumerate(names):
            payload = bytes([number]) * BLOB_LIMIT_BYTES
            await driver.launch(spec(name, payload=payload), payload=payload)
        for name in names:
            await node.wait_desired(f"{name}-1:0:0")
        assert len(node.payloads) == 9
        again = await cluster.node("n2", incarnation="x", cpu=10, obedient=False)
        node.say_goodbye()
        await again.until(lambda: len(again.desired) == 9)
        assert len(again.payloads) == 9
        wanted = [(notice, blobs) for notice, blobs in again.notices if isinstance(notice, DesiredState)]
        assert max(sum(map(len, blobs)) for _, blobs in wanted) <= 2 * BLOB_LIMIT_BYTES


async def test_a_second_node_under_a_living_name_is_turned_away(autojump_clock: Any) -> None:
    async with stage() as cluster:
        await cluster.node("n1", incarnation="first")
        with pytest.raises(NodeNameInUse, match=r"node name .n1. is in use.*another --name"):
            await cluster.node("n1", incarnation="second")
        cluster.network.cut("n1", "controller")
        cluster.network.drop("n1")
        cluster.network.heal("n1", "controller")


async def test_a_later_life_of_the_same_process_takes_its_name_over(autojump_clock: Any) -> None:
    """A controller that was stopped hears hellos of lives that are long over, one after the other."""
    mark = ProcessMark(boot_id="another machine's", pid=7, start_ticks=1)
    async with stage() as cluster:
        await cluster.node("n1", incarnation="first", process=mark)
        await cluster.node("n1", incarnation="second", process=mark)
        with pytest.raises(NodeNameInUse):
            await cluster.node("n1", incarnation="third", process=evolve(mark, pid=8))


async def test_a_node_whose_machine_ends_its_connection_is_suspect_after_one_second(autojump_clock: Any) -> None:
    """Kill `fray-node` alone: the kernel of its machine closes its connections, and nothing dials again."""
    async with stage() as cluster:
        node = await cluster.node("n1")
        # The node has its answer before the controller has begun to watch the connection.
        await trio.testing.wait_all_tasks_blocked()
        row = cluster.controller.gateway._context.state.nodes["n1"]
        cluster.network._rejected.add(("n1", "controller"))
        node.channel._connection.transport.abort()
        await trio.sleep(0.9)
        assert row.phase is NodePhase.SILENT
        # Not the very moment of the change, at which either task may be the first.
        await trio.sleep(0.11)
        assert row.phase is NodePhase.SUSPECT
        cluster.network.accept("n1", "controller")
        await node.until(lambda: row.phase is NodePhase.ALIVE)


async def test_a_node_whose_connection_is_lost_on_the_way_is_only_silent(autojump_clock: Any) -> None:
    async with stage() as cluster:
        await cluster.node("n1")
        cluster.network.reject("n1", "controller")
        await trio.sleep(20)
        assert cluster.controller.gateway._context.state.nodes["n1"].phase is NodePhase.SILENT


async def test_a_machine_that_was_rebooted_takes_over_its_name(autojump_clock: Any) -> None:
    """Lose the power: the first connection is never ended."""
    async with stage() as cluster:
        await cluster.node("n1", incarnation="first", boot_id="boot 1", state_id="state")
        with pytest.raises(NodeNameInUse):
            await cluster.node("n1", incarnation="other", boot_id="boot 2", state_id="another")
        await cluster.node("n1", incarnation="second", boot_id="boot 2", state_id="state")


async def test_a_node_that_was_started_again_takes_over_its_name(autojump_clock: Any) -> None:
    """Change the address of the machine first: the first connection is never ended."""
    first = ProcessMark(boot_id="another machine's", pid=9, start_ticks=5)
    for later, is_accepted in (
        (evolve(first, pid=7, start_ticks=6), True),
        (evolve(first, pid=7, start_ticks=4), False),
        (None, False),
    ):
        async with stage() as cluster:
            await cluster.node("n1", incarnation="first", process=first, state_id="state")
            with nullcontext() if is_accepted else pytest.raises(NodeNameInUse):
                await cluster.node("n1", incarnation="second", process=later, state_id="state")


async def test_a_new_incarnation_of_a_node_without_connection_takes_over(autojump_clock: Any) -> None:
    async with stage() as cluster:
        driver, first = await cluster.client(), await cluster.node("n1", incarnation="first")
        await driver.launch(spec())
        await first.wait_desired("work-1:0:0")
        first.scope.cancel()
        cluster.network.drop("n1")
        await first.until(lambda: first.ended)
        second = await cluster.node("n1", incarnation="second")
        await second.wait_desired("work-1:1:0")


async def test_what_a_node_held_that_said_goodbye_is_placed_again_at_once(autojump_clock: Any) -> None:
    async with stage() as cluster:
        driver, first = await cluster.client(), await cluster.node("n1")
        await driver.launch(spec())
        await first.wait_desired("work-1:0:0")
        second = await cluster.node("n2")
        before = trio.current_time()
        first.say_goodbye()
        await second.wait_desired("work-1:1:0")
        assert trio.current_time() == before


async def test_what_a_silent_node_held_is_placed_again_only_after_its_lease(autojump_clock: Any) -> None:
    async with stage() as cluster:
        driver, first = await cluster.client(), await cluster.node("n1")
        await driver.launch(spec())
        await first.wait_desired("work-1:0:0")
        second = await cluster.node("n2")
        before, second.patience_s = trio.current_time(), 1000
        cluster.network.cut("n1", "controller")
        await second.wait_desired("work-1:1:0")
        assert 600 <= trio.current_time() - before < 700
        cluster.network.heal("n1", "controller")
        first.succeed("work-1:0:0", b"from the past")
        await first.until(lambda: not first.desired)
        second.succeed("work-1:1:0", b"from the present")
        assert (await driver.job_ended("work-1"))[1] == [b"from the present"]


async def test_a_payload_damaged_in_the_store_ends_the_job_and_says_so(autojump_clock: Any) -> None:
    async with stage() as cluster:
        driver = await cluster.client()
        await driver.launch(spec())
        cluster.store.delete_blobs([blob_id(b"payload")])
        await cluster.node()
        info, _ = await driver.job_ended("work-1")
        assert info.cause is EndReason.ENVIRONMENT
        assert "payload is damaged" in (info.error_message or "")


# Proof of death (real processes, real time)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def mark_of(pid: int) -> ProcessMark:
    return process_mark(pid)


async def test_a_driver_that_is_killed_loses_its_jobs_at_once_though_its_socket_stays_open(
    sleeper: subprocess.Popen[bytes],
) -> None:
    async with stage() as cluster:
        driver, node = await cluster.client(process=mark_of(sleeper.pid)), await cluster.node()
        await driver.launch(spec())
        await node.wait_desired("work-1:0:0")
        with trio.fail_after(5):
            sleeper.kill()
            await node.until(lambda: not node.desired)


async def test_a_node_that_is_killed_is_known_to_be_dead_and_its_name_is_free(
    sleeper: subprocess.Popen[bytes],
) -> None:
    async with stage() as cluster:
        driver, first = await cluster.client(), await cluster.node("n1", process=mark_of(sleeper.pid))
        await driver.launch(spec())
        await first.wait_desired("work-1:0:0")
        second = await cluster.node("n2")
        with trio.fail_after(5):
            sleeper.kill()
            await second.wait_desired("work-1:1:0")
            first.scope.cancel()
            await cluster.node("n1", incarnation="reborn")


async def test_who_died_while_there_was_no_controller_is_not_waited_for_by_the_next(
    sleeper: subprocess.Popen[bytes], other: subprocess.Popen[bytes]
) -> None:
    """Neither the driver's grace nor the node's lease restarts for a process that is known to have ended."""
    async with stage() as cluster:
        driver, staying = await cluster.client(process=mark_of(sleeper.pid)), await cluster.client()
        first = await cluster.node("n1", process=mark_of(other.pid))
        await driver.launch(spec("of-the-dead"))
        await staying.launch(spec("of-the-living"))
        await first.wait_desired("of-the-dead-1:0:0")
        await first.wait_desired("of-the-living-1:0:0")
        await cluster.crash()
        for gone, process in ((driver, sleeper), (first, other)):
            gone.scope.cancel()
            process.kill()
            process.wait()
        await cluster.start()
        second = await cluster.node("n2")
        with trio.fail_after(5):
            await second.wait_desired("of-the-living-1:1:0")
            jobs = {job.name: job for job in (await staying.ask(ListJobs(namespace="*"))).jobs}
            assert jobs["of-the-dead"].state is JobState.STOPPED


async def test_a_living_driver_that_only_lost_its_connection_keeps_its_jobs(sleeper: subprocess.Popen[bytes]) -> None:
    async with stage() as cluster:
        driver, node = await cluster.client(process=mark_of(sleeper.pid)), await cluster.node()
        await driver.launch(spec())
        await node.wait_desired("work-1:0:0")
        cluster.network.drop("driver")
        await driver.until(lambda: driver.suspensions)
        assert (await driver.ask(ListJobs())).jobs[0].state is JobState.RUNNING


def test_a_mark_that_fits_no_process_of_this_machine_proves_nothing(sleeper: subprocess.Popen[bytes]) -> None:
    mark = mark_of(sleeper.pid)
    assert ProcessWatch.open(None) is None
    assert ProcessWatch.open(mark_of(os.getpid())) is None
    assert ProcessWatch.open(ProcessMark(boot_id="other", pid=mark.pid, start_ticks=mark.start_ticks)) is None
    assert ProcessWatch.open(ProcessMark(boot_id=mark.boot_id, pid=mark.pid, start_ticks=mark.start_ticks + 1)) is None
    sleeper.kill()
    sleeper.wait()
    assert ProcessWatch.open(mark) is None


async def test_a_zombie_is_dead(sleeper: subprocess.Popen[bytes]) -> None:
    witness = ProcessWatch.open(mark_of(sleeper.pid))
    assert witness is not None
    assert not witness.has_exited()
    sleeper.kill()
    await witness.wait_exited()
    assert witness.has_exited()
    witness.close()
    with pytest.raises(trio.ClosedResourceError):
        await witness.wait_exited()
