"""Sums over attempts that the controller makes in SQL, compared with those over the records one by one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import asdict, evolve
from hypothesis import given
from hypothesis import strategies as st

from fray.api.history import daily
from fray.controller.history import sums as history_sums
from fray.controller.history.sums import SumInput, recorded_namespaces, sum_attempts
from fray.controller.store import Store
from fray.errors import InvalidRequest, StoreError
from fray.model.messages.history import AttemptRecord, AttemptSum, AttemptSums, SumAttempts
from fray.model.monitoring.accounting import DAY_S, GIB, KEYS, UsageSum, check_key, join_sums, sums
from fray.model.specs import JobState
from tests.controller.test_history_requests import all_attempts
from tests.support.controller import Stage, spec, stage

NOW = 20_000 * DAY_S + 40_000.0
DEVICES = (("", "", 0), ("gpu", "h100", 8), ("gpu", "", 1), ("tpu", "v5litepod-16", 4))
CAUSES = ("succeeded", "failure", "preempted", "machine_lost")
# Whole quarters of an hour, so that ends and beginnings meet, and at the edges of days.
times = st.integers(-4 * 24 * 3, 8).map(lambda number: NOW - NOW % DAY_S + number * 900.0)


@st.composite
def histories(draw: st.DrawFn) -> list[AttemptRecord]:
    """Attempts of a few jobs, living and ended; those of one job in generations, some with several members."""
    made: list[AttemptRecord] = []
    for job in range(draw(st.integers(1, 4))):
        user, space = draw(st.sampled_from("ab")), draw(st.sampled_from(("x", "y", "")))
        for generation in range(draw(st.integers(1, 3))):
            for member in range(draw(st.integers(1, 2))):
                begin, end = sorted((draw(times), draw(times)))
                lives = draw(st.booleans())
                kind, variant, devices = draw(st.sampled_from(DEVICES))
                one = AttemptRecord(
                    attempt_id=f"job-{job}:{generation}:{member}",
                    job_id=f"job-{job}",
                    name=f"name {job % 2}",
                    user=user,
                    namespace=space,
                    band="batch",
                    node=draw(st.sampled_from(("n1", "n2"))),
                    machine=variant or "cpu",
                    cpu_milli=draw(st.sampled_from((0, 500, 3000))),
                    memory_bytes=draw(st.sampled_from((0, GIB))),
                    device_kind=kind,
                    device_variant=variant,
                    devices=devices,
                    queued_at=begin - draw(st.sampled_from((0.0, 600.0, -5.0))),
                    placed_at=begin,
                    ended_at=None if lives else end,
                    cause="" if lives else draw(st.sampled_from(CAUSES)),
                    cpu_s=draw(st.sampled_from((0.0, 100.0, 1e6))),
                    recorded_at=0.0 if lives else end,
                )
                made.append(one)
    return made


queries = st.builds(
    SumAttempts,
    by=st.sampled_from([*KEYS, "day"]),
    since=times,
    until=st.just(NOW),
    user=st.sampled_from(("", "a")),
    namespace=st.sampled_from(("", "x")),
    job=st.sampled_from(("", "job-0", "name 1")),
    node=st.sampled_from(("", "n1")),
)


def store_of(attempts: Sequence[AttemptRecord], store: Store | None = None) -> Store:
    store = store or Store.memory()
    ended = [one for one in attempts if one.ended_at is not None]
    store.save(history=sorted(ended, key=lambda one: one.recorded_at))
    return store


def in_sql(store: Store, attempts: Sequence[AttemptRecord], query: SumAttempts, **more: Any) -> list[AttemptSum]:
    # The controller has filtered the living ones.
    living = [one for one in chosen(attempts, query) if one.ended_at is None]
    return sum_attempts(store._db, SumInput(query, *store.history.sum_rows(query.since), living, **more))


def chosen(attempts: Sequence[AttemptRecord], query: SumAttempts) -> list[AttemptRecord]:
    """Return what a client gets for such a query, in its order."""
    found = [
        one
        for one in attempts
        if query.user in ("", one.user)
        and query.namespace in ("", one.namespace)
        and query.node in ("", one.node)
        and query.job in ("", one.job_id, one.name)
        and (one.ended_at is None or one.ended_at >= query.since)
    ]
    return sorted(found, key=lambda one: (one.placed_at, one.attempt_id))


def close_to(found: Any) -> Any:
    """Return a value that another one is equal to if its numbers are close."""
    if isinstance(found, dict):
        return {key: close_to(value) for key, value in found.items()}
    if isinstance(found, float):
        return pytest.approx(found, abs=1e-9)
    return [close_to(each) for each in found] if isinstance(found, list) else found


def as_rows(found: Sequence[UsageSum] | Sequence[AttemptSum]) -> list[dict[str, Any]]:
    rows = [asdict(each) for each in found]
    for row in rows:
        for part in ("held", "retried", "preempted"):
            if part in row:
                row[part]["chips"] = {kind: hours for kind, hours in row[part]["chips"].items() if hours}
    return rows


@given(histories(), queries)
def test_sums_in_sql_are_those_of_the_records_one_by_one(attempts: list[AttemptRecord], query: SumAttempts) -> None:
    found = in_sql(store_of(attempts), attempts, query)
    some = chosen(attempts, query)
    if query.by == "day":
        by_day = ("key", "user", "namespace", "machine", "attempts", "cpu", "memory_gib", "chips")
        expected = [{name: getattr(each, name) for name in by_day} for each in daily(some, query.since, query.until)]
        assert [{name: getattr(each, name) for name in by_day} for each in found] == close_to(expected)
        return
    expected_sums = sums(some, query.by, query.since, query.until)
    by_key = {each.key: each for each in expected_sums}
    joined = join_sums(found)
    assert as_rows(joined) == close_to(as_rows([by_key[each.key] for each in joined]))
    assert len(joined) == len(expected_sums)
    # The order is the same, but for sums that differ by less than rounding.
    held = [(each.held.all_chips, each.held.cpu) for each in joined]
    assert held == [pytest.approx((each.held.all_chips, each.held.cpu)) for each in expected_sums]


@given(histories(), queries)
def test_a_person_gets_the_sums_of_its_own(attempts: list[AttemptRecord], query: SumAttempts) -> None:
    own = [one for one in attempts if one.user == "a" or one.namespace == "x"]
    found = in_sql(store_of(attempts), own, query, user="a", namespaces=("x",))
    assert found == in_sql(store_of(own), own, query)


async def test_a_thread_reads_what_the_loop_has_written(tmp_path: Path) -> None:
    store = Store(tmp_path / "store?")
    attempts = [
        AttemptRecord(
            attempt_id="job-1:0:0",
            job_id="job-1",
            name="job",
            user="ada",
            namespace="x",
            band="batch",
            node="n1",
            machine="cpu",
            cpu_milli=2000,
            memory_bytes=0,
            placed_at=NOW - 7200,
            ended_at=NOW - 3600,
            cause="succeeded",
            recorded_at=NOW - 3600,
        )
    ]
    store_of(attempts, store)
    query = SumAttempts(by="user", since=NOW - 9000, until=NOW)
    given_to = SumInput(query, *store.history.sum_rows(query.since), ())
    # Two times: each has a connection, and so tables, of its own.
    for _ in range(2):
        (row,) = await store.read_apart(lambda db: sum_attempts(db, given_to))
        assert (row.key, row.jobs, row.attempts, row.cpu) == ("ada", 1, 1, 2.0)
    assert await store.read_apart(recorded_namespaces) == ["x"]
    with pytest.raises(StoreError, match="cannot be read: attempt to write a readonly database"):
        await store.read_apart(lambda db: db.execute("DELETE FROM past_attempts"))
    store.close()


# The request


async def run_one(cluster: Stage) -> Any:
    """Ada's job has ended, and Bob's lives; of each the client is returned."""
    admin = await cluster.client(host="admin", user="root")
    node = await cluster.node(cpu=2)
    ada = await cluster.client(host="ada", credential=await cluster.person("ada", "user", admin))
    bob = await cluster.client(host="bob", credential=await cluster.person("bob", "user", admin))
    await ada.launch(spec("own"))
    await bob.launch(spec("other"))
    await bob.job("other-1", lambda info: info.state is JobState.RUNNING)
    await trio.sleep(3600)
    node.succeed("own-1:0:0")
    await ada.job_ended("own-1")
    return admin, ada, bob


async def test_each_role_gets_the_sums_of_what_it_may_see(autojump_clock: Any) -> None:
    async with stage() as cluster:
        admin, ada, bob = await run_one(cluster)
        everything = SumAttempts(by="user", since=0.0, until=cluster.controller.loop.current_time())
        for client, users in ((admin, ["ada", "bob"]), (ada, ["ada"]), (bob, ["bob"])):
            reply = await client.ask(everything)
            assert isinstance(reply, AttemptSums)
            assert [row.key for row in reply.rows] == users
            assert all(row.cpu == pytest.approx(1.0, abs=0.01) for row in reply.rows)
            assert reply.is_complete
        with pytest.raises(InvalidRequest, match="by='moon' is not one of user"):
            await ada.ask(evolve(everything, by="moon"))


async def test_more_rows_than_a_reply_has_are_left_to_the_client(
    autojump_clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stage() as cluster:
        admin, _, _ = await run_one(cluster)
        until = cluster.controller.loop.current_time()
        monkeypatch.setattr(history_sums, "ROWS_LIMIT", 1)
        monkeypatch.setattr("fray.controller.connections.history_requests.ROWS_LIMIT", 1)
        reply = await admin.ask(SumAttempts(by="user", since=0.0, until=until))
        assert (reply.rows, reply.is_complete) == ((), False)
        assert len(sums(await all_attempts(admin), "user", 0.0, until)) == 2


def test_a_key_of_a_request_is_no_sql() -> None:
    with pytest.raises(InvalidRequest):
        check_key("user; DROP TABLE past_attempts", history_sums.DAY)
