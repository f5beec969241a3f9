"""Machines that are let in once: join tokens, the keys that hosts have afterwards, and who is kept out."""

from __future__ import annotations

import json
import logging
import os
import random
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import define, evolve, field
from hypothesis import given
from hypothesis import strategies as st

from fray.controller.join_tokens import JoinTokens, check_unit_attributes
from fray.controller.store import Store
from fray.errors import ChannelFull, FrayError, InvalidRequest, ProtocolMismatch, StoreError, Unauthorized
from fray.model.join_tokens import (
    HOSTS_LIMIT,
    JOIN_LIFE_LIMIT_S,
    JoinKey,
    MachineKey,
    read_join_key,
    read_machine_key,
)
from fray.model.join_tokens import read_token as read
from fray.model.messages.client import CreateJoinToken, Role
from fray.model.messages.node import JoinRequest, NodeHello
from fray.model.resources import Capacity
from fray.net.transport import Credential
from fray.node.config import NodeConfig
from fray.node.joining import FILE, JoinState
from fray.node.main import JOIN_VARIABLE, main, make_config, parse
from fray.node.run import run_node
from fray.scheduler.state.unit_rows import CloudUnit
from tests.node.test_node import FakeLauncher
from tests.support.controller import ADDRESS, TOKEN, Peer, Stage, spec, stage

NOW = 1_000_000.0


@define
class FakeStore:
    """The store's part that join tokens use."""

    meta: dict[str, Any] = field(factory=dict)

    def save(self, *, meta: dict[str, Any]) -> None:
        self.meta.update(json.loads(json.dumps(meta)))
        self.meta = {key: value for key, value in self.meta.items() if value is not None}


def book(store: FakeStore | None = None) -> JoinTokens:
    store = store or FakeStore()
    return JoinTokens(b"the store's secret", store, JoinTokens.load_units(store.meta))


def key_id(token: str) -> str:
    return read(token)[0].key_id


def asked(node: str = "a", worker: int = 0, claim: str = "mine") -> JoinRequest:
    return JoinRequest(node=node, worker=worker, claim=claim)


# Tokens --------------------------------------------------------------------------------------------------------------


def test_a_token_says_what_it_is_for_and_its_secret_shows_nowhere() -> None:
    token = book().mint("v5e-abc", 4, NOW, 60.0)
    key, secret = read(token)
    assert key == JoinKey("v5e-abc", 4, 1_000_060)
    given = book().redeem(key.key_id, asked(), "10.0.0.1", NOW)
    config = NodeConfig(name="a", controller="", token="", join_token=token, capacity=Capacity(1, 1, 1), state_dir="")
    kept = JoinState(key.key_id, "claim", given.key_id, given.key)
    for shown in (repr(book()), repr(config), repr(given), repr(kept), repr(asked(claim="claim"))):
        assert secret not in shown
        assert given.key not in shown
        assert "claim'" not in shown


def test_an_invalid_token_is_reported_without_repeating_it() -> None:
    for text in ("", "the-cluster's-token", "join:a:1:5", "join:a:x:5:key", "join:a:1:5:", "machine:a:0:n:key"):
        with pytest.raises(InvalidRequest, match="not a join token") as info:
            read(text)
        assert not text or text not in str(info.value)


def test_key_ids_are_read_as_they_are_written_and_in_no_other_way() -> None:
    assert read_join_key(JoinKey("a.b", 2, 7).key_id) == JoinKey("a.b", 2, 7)
    assert read_machine_key(MachineKey("a", 3, "a-3").key_id) == MachineKey("a", 3, "a-3")
    for key in ("join:a:02:7", "join:a:2", "join:a:-1:7", "join:a:2:7:8", "machine:a:3", "machine:a:03:n", "cluster"):
        assert read_join_key(key) is None
        assert read_machine_key(key) is None


def test_tokens_are_bounded_in_life_and_hosts() -> None:
    joins = book()
    for life_s in (0.9, JOIN_LIFE_LIMIT_S + 1, float("nan")):
        with pytest.raises(InvalidRequest, match="a join token is valid for"):
            joins.mint("a", 1, NOW, life_s)
    for hosts in (0, HOSTS_LIMIT + 1):
        with pytest.raises(InvalidRequest, match="hosts must be"):
            joins.mint("a", hosts, NOW)
    with pytest.raises(InvalidRequest, match="cannot be the name of a machine"):
        joins.mint("a:b", 1, NOW)
    joins.mint("a", HOSTS_LIMIT, NOW, JOIN_LIFE_LIMIT_S)


def test_a_token_is_spent_by_the_first_machine_and_refused_to_the_second() -> None:
    joins = book()
    token = key_id(joins.mint("a", 1, NOW))
    given = joins.redeem(token, asked("a-0", claim="mine"), "10.0.0.1", NOW)
    assert read_machine_key(given.key_id) == MachineKey("a", 0, "a-0")
    with pytest.raises(Unauthorized, match=r"was already used: by node 'a-0' at 10\.0\.0\.1, as host 0"):
        joins.redeem(token, asked("a-0", claim="another"), "10.0.0.2", NOW)
    with pytest.raises(Unauthorized, match="was already used"):
        joins.redeem(token, asked("other", claim="mine"), "10.0.0.2", NOW)


def test_an_answer_that_got_lost_is_given_again_to_the_same_machine() -> None:
    store = FakeStore()
    token = key_id(book().mint("a", 1, NOW))
    first = book(store).redeem(token, asked(), "10.0.0.1", NOW)
    kept = json.dumps(store.meta)
    assert book(store).redeem(token, asked(), "10.0.0.9", NOW + 5) == first
    assert json.dumps(store.meta) == kept
    with pytest.raises(Unauthorized, match="was already used"):
        book(store).redeem(token, asked(claim="another"), "10.0.0.2", NOW)
    assert first.key not in kept
    assert "mine" not in kept


def test_each_host_of_a_slice_uses_it_once_and_there_are_no_more_hosts_than_were_said() -> None:
    joins = book()
    token = key_id(joins.mint("slice", 4, NOW))
    keys = {joins.redeem(token, asked(f"s-{worker}", worker, f"c{worker}"), "", NOW).key for worker in range(4)}
    assert len(keys) == 4
    for worker in (4, -1):
        with pytest.raises(InvalidRequest, match="has 4 hosts"):
            joins.redeem(token, asked("s-4", worker), "", NOW)
    for worker in range(4):
        with pytest.raises(Unauthorized, match="was already used"):
            joins.redeem(token, asked("thief", worker, "x"), "", NOW)


def test_a_second_token_of_a_unit_admits_no_further_host() -> None:
    joins = book()
    joins.redeem(key_id(joins.mint("a", 1, NOW)), asked(), "", NOW)
    with pytest.raises(Unauthorized, match="was already used"):
        joins.redeem(key_id(joins.mint("a", 1, NOW + 50)), asked(claim="x"), "", NOW)


def test_a_token_lives_until_its_time_and_not_a_second_longer() -> None:
    joins = book()
    token = key_id(joins.mint("a", 2, NOW, 60.0))
    joins.redeem(token, asked("a-0", 0), "", NOW + 60)
    with pytest.raises(Unauthorized, match="expired 1 s ago"):
        joins.redeem(token, asked("a-1", 1), "", NOW + 61)


def test_what_has_expired_stays_spent_for_who_used_it() -> None:
    """The key of a host does not expire: it can reconnect as long as its unit is wanted."""
    joins = book()
    given = joins.redeem(key_id(joins.mint("a", 1, NOW, 60.0)), asked(), "", NOW)
    assert joins.key_of(given.key_id) == given.key


def test_a_unit_that_was_given_up_cannot_join_and_its_hosts_cannot_reconnect() -> None:
    store = FakeStore()
    joins = book(store)
    token, other = joins.mint("a", 2, NOW), joins.mint("b", 1, NOW)
    given = joins.redeem(key_id(token), asked(), "", NOW)
    joins.revoke("a", NOW)
    for life in (joins, book(store)):
        assert life.key_of(key_id(token)) is None
        assert life.key_of(given.key_id) is None
        assert life.key_of(key_id(other)) is not None


def test_a_unit_that_was_given_up_is_forgotten_when_its_last_token_has_expired() -> None:
    store = FakeStore()
    joins = book(store)
    token = key_id(joins.mint("a", 1, NOW, 60.0))
    joins.revoke("a", NOW, 60.0)
    joins.revoke("b", NOW + 60, 1.0)
    assert joins.key_of(token) is None
    joins.revoke("c", NOW + 62, 1.0)
    assert set(store.meta) == {"join:c"}
    with pytest.raises(Unauthorized, match="expired"):
        joins.redeem(token, asked(), "", NOW + 62)


def test_no_more_units_are_remembered_than_the_limit(monkeypatch: Any) -> None:
    monkeypatch.setattr("fray.controller.join_tokens.UNITS_LIMIT", 2)
    joins = book()
    for unit in ("a", "b"):
        joins.redeem(key_id(joins.mint(unit, 1, NOW)), asked(unit), "", NOW)
    with pytest.raises(ChannelFull, match=r"too many machines have joined .limit 2"):
        joins.redeem(key_id(joins.mint("c", 1, NOW)), asked("c"), "", NOW)
    joins.revoke("a", NOW, 1.0)
    joins.redeem(key_id(joins.mint("c", 1, NOW + 2000)), asked("c"), "", NOW + 4000)


def test_a_claim_is_short_and_there_is_one() -> None:
    joins = book()
    token = key_id(joins.mint("a", 1, NOW))
    for claim in ("", "c" * 101):
        with pytest.raises(InvalidRequest, match="a claim must have"):
            joins.redeem(token, asked(claim=claim), "", NOW)
    joins.redeem(token, asked(claim="c" * 100), "", NOW)


def test_a_claim_is_ascii() -> None:
    for claim in ("é", "\ud800", "\0é"):
        with pytest.raises(InvalidRequest, match="ASCII"):
            book().redeem(key_id(book().mint("a", 1, NOW)), asked(claim=claim), "", NOW)


SPENT = st.tuples(
    st.just("spend"), st.sampled_from("ab"), st.sampled_from("xyz"), st.integers(-1, 2), st.sampled_from("12")
)
STEPS = st.lists(
    st.one_of(
        SPENT,
        SPENT,
        SPENT,
        st.tuples(st.just("mint"), st.sampled_from("ab"), st.integers(1, 2)),
        st.tuples(st.just("give up"), st.sampled_from("ab")),
        st.tuples(st.just("restart")),
        st.tuples(st.just("later"), st.sampled_from([1.0, 45.0])),
    ),
    max_size=40,
)


@given(STEPS)
def test_whatever_is_shown_in_whatever_order_each_host_is_one_machine(steps: list[tuple[Any, ...]]) -> None:
    """Compare with a model that has the expiry of each unit's last token and the node that joined as each host."""
    store, now = FakeStore(), NOW
    joins = book(store)
    tokens = {unit: read_join_key(key_id(joins.mint(unit, 1, now, 60.0))) for unit in "ab"}
    let_in: dict[tuple[str, int], tuple[str, str, str]] = {}
    over: set[str] = set()
    for what, *words in steps:
        if what == "later":
            now += words[0]
        elif what == "restart":
            joins = book(store)
        elif what == "mint":
            tokens[words[0]] = read_join_key(key_id(joins.mint(words[0], words[1], now, 60.0)))
        elif what == "give up":
            joins.revoke(words[0], now)
            over.add(words[0])
        else:
            unit, node, worker, claim = words
            key = tokens[unit]
            assert key is not None
            who = let_in.get((unit, worker), (node, claim, ""))
            fine = now <= key.expires_s and 0 <= worker < key.hosts and who[:2] == (node, claim) and unit not in over
            if joins.key_of(key.key_id) is None:
                assert unit in over
                continue
            try:
                given = joins.redeem(key.key_id, asked(node, worker, claim), "", now)
            except (Unauthorized, InvalidRequest):
                assert not fine
            else:
                assert fine
                assert let_in.setdefault((unit, worker), (node, claim, given.key)) == (node, claim, given.key)
    for (unit, worker), (node, _, key) in let_in.items():
        assert joins.key_of(MachineKey(unit, worker, node).key_id) == (None if unit in over else key)
    assert len({key for _, _, key in let_in.values()}) == len(let_in), "no two have one key"


# At the door ---------------------------------------------------------------------------------------------------------


def minted(place: Stage, unit: str = "a", hosts: int = 1, life_s: float = 60.0) -> str:
    return place.controller.join_tokens.mint(unit, hosts, place.controller.loop.current_time(), life_s)


def machine(token: str, name: str = "a-0", **config: Any) -> NodeConfig:
    attributes = config.pop("attributes", {})
    return NodeConfig(
        name=name,
        controller=ADDRESS,
        token="",
        join_token=token,
        capacity=Capacity(cpu_milli=1000, memory_bytes=1, disk_bytes=1, attributes=attributes),
        state_dir=config.pop("state_dir", ""),
        **config,
    )


async def join(place: Stage, config: NodeConfig) -> trio.CancelScope:
    """Be this node in the background, from when it has joined on; cancel the scope to kill it."""
    scope = trio.CancelScope()

    async def live(task_status: trio.TaskStatus[FrayError | None]) -> None:
        network, rng = place.network.at(config.name), random.Random(config.name)
        with scope:
            try:
                await run_node(config, network, FakeLauncher(), rng=rng, task_status=Started(task_status))
            except FrayError as error:
                task_status.started(error)

    refused: FrayError | None = await place.nursery.start(live)
    if refused is not None:
        raise refused
    return scope


class Started(trio.TaskStatus[None]):
    def __init__(self, status: Any) -> None:
        self._status = status

    def started(self, value: None = None) -> None:
        self._status.started(None)


def nodes(place: Stage) -> dict[str, str]:
    return {node.name: node.capacity.attributes["machine"] for node in place.controller.state.nodes.values()}


async def until(condition: Any) -> None:
    while not condition():  # noqa: ASYNC110  # the scheduler notifies only clients
        await trio.sleep(0.1)


async def test_a_machine_joins_with_its_token_and_is_a_node_of_its_unit(autojump_clock: Any) -> None:
    async with stage() as place:
        await join(place, machine(minted(place)))
        await until(lambda: nodes(place) == {"a-0": "a"})


async def test_of_machines_that_show_one_token_at_once_one_is_let_in(autojump_clock: Any) -> None:
    async with stage() as place:
        token, refused = minted(place, "s", 3), []

        async def come(number: int) -> None:
            try:
                await join(place, machine(token, f"s-{number}", attributes={"tpu_worker": str(number % 3)}))
            except Unauthorized as error:
                refused.append(str(error))

        async with trio.open_nursery() as nursery:
            for number in range(9):
                nursery.start_soon(come, number)
        assert len(refused) == 6
        assert all("was already used" in why for why in refused)
        await until(lambda: len(nodes(place)) == 3)
        joined = [node.capacity.attributes["tpu_worker"] for node in place.controller.state.nodes.values()]
        assert sorted(joined) == ["0", "1", "2"]


async def test_no_part_of_one_token_goes_with_a_part_of_another(autojump_clock: Any) -> None:
    async with stage() as place:
        key, secret = read(minted(place, "a"))
        other, others = read(minted(place, "b"))
        longer, of_longer = read(minted(place, "a", life_s=3600.0))
        foreign = JoinTokens(b"another store's secret", FakeStore(), {}).mint("a", 1, NOW, JOIN_LIFE_LIMIT_S)
        own = place.controller.join_tokens._derive("machine:a:0:a")
        attempts = [
            (key.key_id, others),
            (other.key_id, secret),
            (longer.key_id, secret),
            (key.key_id, of_longer),
            (key.key_id, secret[:-1]),
            (key.key_id, secret + "0"),
            (key.key_id, secret.upper()),
            (key.key_id, ""),
            (key.key_id, own),
            (key.key_id[:-1], secret),
            (key.key_id.upper(), secret),
            (f"{key.key_id} ", secret),
            (f"{key.key_id}\n", secret),
            ("machine:a:0:a", secret),
            ("join:", secret),
            (f"join:{'a' * 100_000}:1:{10**11}", secret),
            (f"join:a:{'1' * 5_000}:1", secret),
            (read(foreign)[0].key_id, read(foreign)[1]),
        ]
        for name, word in attempts:
            with pytest.raises(Unauthorized) as info:
                await place.dial(Peer(asked), "n1", Credential(name, word))
            assert secret not in str(info.value)
        assert not nodes(place)
        await join(place, machine(f"{key.key_id}:{secret}"))


async def test_a_machine_that_says_it_has_more_than_can_be_is_refused(autojump_clock: Any) -> None:
    """Reject values that would crash the scheduler: users of a machine can read its host's key."""
    async with stage() as place:
        with pytest.raises(InvalidRequest, match="no amount may be negative, or more than"):
            await place.node("n1", cpu=2 * 10**15)
        with pytest.raises(InvalidRequest, match=r"capacity.cpu_milli: the number .* has more than 64 bits"):
            await place.node("n1", cpu=10**400)
        with pytest.raises(InvalidRequest, match="no amount may be negative"):
            await place.node("n1", cpu=-1)
        with pytest.raises(ProtocolMismatch, match="NaN is not a valid number"):
            await place.node("n1", lease_s=float("nan"))


async def test_all_hosts_of_a_slice_join_with_one_token(autojump_clock: Any) -> None:
    async with stage() as place:
        token = minted(place, "s", 3)
        for worker in range(3):
            await join(place, machine(token, f"s-{worker}", attributes={"tpu_worker": str(worker)}))
        await until(lambda: nodes(place) == {"s-0": "s", "s-1": "s", "s-2": "s"})
        with pytest.raises(InvalidRequest, match="set the attribute tpu_worker to the number of this one"):
            await join(place, machine(token, "s-3"))


async def test_a_second_machine_that_shows_the_token_is_refused_and_no_secret_is_logged(
    autojump_clock: Any, caplog: Any
) -> None:
    caplog.set_level(logging.DEBUG)
    async with stage() as place:
        token = minted(place)
        await join(place, machine(token))
        with pytest.raises(
            Unauthorized, match="the join token of machine 'a' was already used: by node 'a-0' at"
        ) as info:
            await join(place, machine(token, "thief"))
        assert [record for record in caplog.records if "was presented twice" in record.message]
        key = place.controller.join_tokens.key_of("machine:a:0:a-0") or ""
        for secret in (read(token)[1], key):
            assert secret not in caplog.text + str(info.value)
        assert list(nodes(place)) == ["a-0"]


async def test_an_expired_token_is_refused_in_words(autojump_clock: Any) -> None:
    async with stage() as place:
        token = minted(place, life_s=60.0)
        await trio.sleep(62)
        with pytest.raises(Unauthorized, match="expired"):
            await join(place, machine(token))


async def test_a_join_token_opens_nothing_but_the_way_to_a_key(autojump_clock: Any) -> None:
    async with stage() as place:
        key, secret = read(minted(place))
        credential = Credential(key.key_id, secret)
        for role, attempt in ((Role.DRIVER, None), (Role.TOOL, None), (Role.JOB, "j:0:0")):
            with pytest.raises(Unauthorized, match="does not authorize"):
                await place.client(role=role, attempt_id=attempt, credential=credential)
        with pytest.raises(Unauthorized, match="must present the cluster token"):
            await place.node("a-0", credential=credential, attributes={"machine": "a"})
        with pytest.raises(Unauthorized):
            await place.client(credential=Credential(key.key_id, "guessed"))
        with pytest.raises(Unauthorized):
            await place.client(credential=Credential(key.key_id.replace(":1:", ":9:"), secret))


async def test_a_hosts_key_opens_nothing_but_its_own_node(autojump_clock: Any) -> None:
    async with stage() as place:
        given = place.controller.join_tokens.redeem(
            key_id(minted(place)), asked("a-0"), "", place.controller.loop.current_time()
        )
        credential = Credential(given.key_id, given.key)
        with pytest.raises(Unauthorized, match="does not authorize"):
            await place.client(role=Role.TOOL, credential=credential)
        for name, attributes in (("a-1", {"machine": "a"}), ("a-0", {"machine": "b"}), ("a-0", {})):
            with pytest.raises(Unauthorized, match="is for node 'a-0' with the attribute machine=a"):
                await place.node(name, credential=credential, attributes=attributes)
        await place.node("a-0", credential=credential, attributes={"machine": "a"})
        unknown = place.controller.join_tokens._derive("machine:a:1:a-1")
        with pytest.raises(Unauthorized, match="no host of machine 'a' has joined as node 'a-1'"):
            await place.node("a-1", credential=Credential("machine:a:1:a-1", unknown), attributes={"machine": "a"})


def test_a_host_of_a_unit_that_was_asked_for_cannot_say_that_it_is_of_another() -> None:
    """Else who has read one token could have jobs of any group, or be half of another slice."""
    units = {"g-1": CloudUnit(name="g-1", group="g", provider="tpu", order=1)}

    def hello(**attributes: str) -> NodeHello:
        return NodeHello(node="n", incarnation="i", boot_id="b", capacity=Capacity(1, 1, 1, attributes=attributes))

    for fine in ({}, {"machine": "by-hand", "group": "x"}, {"machine": "g-1"}, {"machine": "g-1", "slice": "g-1"}):
        check_unit_attributes(hello(**fine), units)
    for key in ("group", "slice"):
        with pytest.raises(Unauthorized, match=f"claims {key}=other, but machine 'g-1' is of g"):
            check_unit_attributes(hello(machine="g-1", **{key: "other"}), units)


async def test_the_clusters_token_is_no_join_token(autojump_clock: Any) -> None:
    async with stage() as place:
        with pytest.raises(Unauthorized, match="is not a join token"):
            await place.dial(Peer(asked), "n1", Credential("cluster", TOKEN))


async def test_a_node_that_starts_again_has_its_key_and_needs_no_second_token(
    autojump_clock: Any, tmp_path: Path
) -> None:
    async with stage() as place:
        config = machine(minted(place, life_s=60.0), state_dir=str(tmp_path / "node"))
        scope = await join(place, config)
        file = tmp_path / "node" / FILE
        assert file.stat().st_mode & 0o777 == 0o600
        await until(lambda: nodes(place))
        scope.cancel()
        await trio.sleep(90)
        await join(place, config)
        file.unlink()
        with pytest.raises(Unauthorized, match="expired"):
            await join(place, evolve(config, name="a-1"))


async def test_hosts_are_known_to_the_next_life_of_the_controller(autojump_clock: Any) -> None:
    async with stage(Store.memory()) as place:
        token = minted(place)
        await join(place, machine(token))
        await until(lambda: nodes(place))
        await place.crash()
        await place.start()
        (node,) = place.controller.state.nodes.values()
        await until(lambda: node.phase.value == "alive")
        with pytest.raises(Unauthorized, match="was already used"):
            await join(place, machine(token, "thief"))


async def test_a_use_that_cannot_be_saved_ends_the_controller_and_is_not_answered(
    autojump_clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*rows: Any, meta: dict[str, Any] | None = None, **more: Any) -> None:
        if meta and any(key.startswith("join:") for key in meta):
            raise StoreError("the disk is full")

    with pytest.raises(StoreError, match="the disk is full"):
        async with stage() as place:
            token = minted(place)
            monkeypatch.setattr(place.store, "save", full)
            await join(place, machine(token))
            pytest.fail("it was let in")


async def test_a_connection_that_breaks_during_the_joining_costs_nothing(autojump_clock: Any, tmp_path: Path) -> None:
    """Killed at every moment of its first seconds: the same claim comes again, whatever was answered."""
    async with stage() as place:
        config = machine(minted(place, life_s=3600.0), state_dir=str(tmp_path))
        for tick in range(12):
            with trio.move_on_after(0.0005 * tick):
                await run_node(config, place.network.at("a-0"), FakeLauncher(), rng=random.Random(tick))
            place.network.crash("a-0")
        await trio.sleep(120)
        await join(place, config)
        await until(lambda: nodes(place) == {"a-0": "a"})


async def test_who_has_its_key_is_shown_out(autojump_clock: Any) -> None:
    async with stage() as place:
        key, secret = read(minted(place))
        peer = Peer(asked)
        await place.dial(peer, "n1", Credential(key.key_id, secret))
        await peer.until(lambda: peer.suspensions or peer.ended)
        peer.scope.cancel()


# On the machine ------------------------------------------------------------------------------------------------------

HERE = ("--controller", "fray://127.0.0.1:7500", "--name", "node-a")


def test_a_join_token_takes_the_place_of_the_clusters(tmp_path: Path) -> None:
    token = book().mint("unit", 1, NOW)
    file = tmp_path / "join"
    file.write_text(token + "\n")
    for argv, environ in ((("--join-token-file", str(file)), {}), ((), {JOIN_VARIABLE: token, "FRAY_TOKEN": "x"})):
        made = make_config(parse((*HERE, *argv)), environ)
        assert (made.join_token, made.token, made.capacity.attributes["machine"]) == (token, "", "unit")


@pytest.mark.parametrize(
    ("content", "more", "said"),
    [
        ("", (), "is empty"),
        ("the-token-of-the-cluster", (), "not a join token"),
        ("join:unit:1:5:key", ("--token-file", "x"), "not both"),
    ],
)
def test_a_wrong_join_token_is_reported_at_the_start(
    content: str, more: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    (tmp_path / "join").write_text(content)
    with pytest.raises(InvalidRequest, match=said):
        make_config(parse((*HERE, "--join-token-file", str(tmp_path / "join"), *more)), {})


def test_a_node_of_another_machine_than_its_token_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "node.toml").write_text('[attributes]\nmachine = "other"\n')
    with pytest.raises(InvalidRequest, match="is for machine 'unit', but this node has machine=other"):
        make_config(parse((*HERE, "--config", str(tmp_path / "node.toml"))), {JOIN_VARIABLE: book().mint("unit", 1, 0)})


def test_the_variable_is_gone_before_anything_else_is_done(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv(JOIN_VARIABLE, "nonsense")
    assert main([*HERE]) == 2
    assert JOIN_VARIABLE not in os.environ
    assert "nonsense" not in capsys.readouterr().err


# For operators -------------------------------------------------------------------------------------------------------


async def test_who_has_the_clusters_token_may_ask_for_one_and_a_job_may_not(autojump_clock: Any) -> None:
    async with stage() as place:
        tool, node = await place.client(role=Role.TOOL), await place.node()
        minted_here = await tool.ask(CreateJoinToken(machine="a", hosts=2, life_s=60.0))
        key, _ = read(minted_here.token)
        assert (key.unit, key.hosts) == ("a", 2)
        assert minted_here.token not in repr(minted_here)
        with pytest.raises(InvalidRequest, match="hosts must be"):
            await tool.ask(CreateJoinToken(machine="a", hosts=0))
        await (await place.client()).launch(spec("work"))
        desired = await node.wait_desired("work-1:0:0")
        job = await place.client(
            role=Role.JOB,
            attempt_id=desired.attempt_id,
            credential=Credential(f"attempt:{desired.attempt_id}", desired.key),
        )
        with pytest.raises(Unauthorized, match="may not send CreateJoinToken"):
            await job.ask(CreateJoinToken(machine="a"))
        await join(place, machine(minted_here.token, attributes={"tpu_worker": "1"}))
