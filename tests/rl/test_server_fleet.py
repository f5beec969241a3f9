"""Servers of a run together: which get requests and weights, which are replaced, and which leave."""

from __future__ import annotations

import pytest

from fray.rl.core.server_fleet import REPLACEMENT_PERIOD_S, REPLACEMENTS, RequestRoute, RouteTable, ServerFleet
from fray.rl.core.server_states import ServerEvent, ServerRecord, ServerState
from fray.rl.core.versions import VersionName

V0, V1, V2 = VersionName(0, 0), VersionName(0, 1), VersionName(0, 2)


def live(name: str, version: VersionName = V0) -> ServerRecord:
    """Return a server that has loaded a version."""
    server = ServerRecord(name)
    server.observe(ServerEvent.READY, 0)
    server.observe(ServerEvent.LOADED, 0, version)
    return server


def fleet(*servers: ServerRecord, least: int = 1, freezes: bool = False, is_endless: bool = False) -> ServerFleet:
    named = {server.name: server for server in servers}
    return ServerFleet(named, least=least, freezes=freezes, is_endless=is_endless)


def accepting(of: ServerFleet) -> list[str]:
    return [route.name for route in of.routes(is_published=True) if route.accepts]


# Requests ------------------------------------------------------------------------------------------------------------


def test_a_request_goes_to_the_server_that_accepts_it_and_has_the_fewest_of_this_sender() -> None:
    table: RouteTable[RequestRoute] = RouteTable()
    table.replace([RequestRoute("a", V0), RequestRoute("b", V0), RequestRoute("c", V0, accepts=False)])
    chosen = []
    for _ in range(3):
        route = table.choose()
        assert route is not None
        table.in_flight[route.name] += 1
        chosen.append(route.name)
    assert chosen == ["a", "b", "a"]
    route = table.choose()
    assert route is not None
    table.lose(route)
    again = table.choose()
    assert again is not None
    assert again.name == "a"


def test_requests_of_a_silent_server_are_ended_only_if_another_accepts_them() -> None:
    table: RouteTable[RequestRoute] = RouteTable()
    silent, leaving, other = (
        RequestRoute("a", V0, accepts=False),
        RequestRoute("b", V0, False, leaves=True),
        RequestRoute("c", V0),
    )
    assert table.replace([silent, leaving]) == []
    assert table.replace([silent, leaving, other]) == [silent]


def test_only_a_healthy_server_accepts_requests() -> None:
    one, two, three, four = live("s1"), live("s2"), live("s3"), live("s4")
    two.observe(ServerEvent.DEADLINE_MISSED, 0)
    three.observe(ServerEvent.TRANSFER_MISSED, 0)
    four.observe(ServerEvent.ENDED, 0)
    routes = fleet(one, two, three, four).routes(is_published=True)
    assert routes == [RequestRoute("s1", V0), RequestRoute("s2", V0, accepts=False)]


@pytest.mark.parametrize(
    ("freezes", "version", "is_published", "expected"),
    [
        (False, V1, True, RequestRoute("s1", V1)),
        (True, V2, True, RequestRoute("s1", V2)),
        (True, V1, True, RequestRoute("s1", V1, accepts=False, leaves=True)),
        # The trainer has not published them yet: nothing waits for that.
        (True, V1, False, RequestRoute("s1", V1)),
    ],
)
def test_a_frozen_server_gets_no_new_requests_before_the_newest_weights_and_answers_those_it_has(
    freezes: bool, version: VersionName, is_published: bool, expected: RequestRoute
) -> None:
    servers = fleet(live("s1", version), freezes=freezes)
    servers.aim(V2)
    assert servers.routes(is_published=is_published) == [expected]


def test_a_silent_or_leaving_server_is_the_same_with_freezing() -> None:
    for event, leaves in ((ServerEvent.DEADLINE_MISSED, False), (ServerEvent.LEAVE, True)):
        for freezes in (False, True):
            server = live("s1", V1)
            server.observe(event, 0)
            servers = fleet(server, freezes=freezes)
            servers.aim(V2)
            assert servers.routes(is_published=True) == [RequestRoute("s1", V1, accepts=False, leaves=leaves)]


def test_too_few_servers_are_named() -> None:
    one, two = live("server-0"), live("server-1")
    servers = fleet(one, two, least=2)
    assert servers.missing_text() == ""
    two.observe(ServerEvent.DEADLINE_MISSED, 0)
    assert servers.missing_text() == "the run waits for servers: 1 of at least 2 answer (server-1 is suspect)"


# Weights -------------------------------------------------------------------------------------------------------------


def test_no_request_goes_to_weights_of_a_lost_trainer() -> None:
    one, two = live("s1", VersionName(0, 3)), live("s2", VersionName(0, 3))
    servers = fleet(one, two)
    servers.aim(VersionName(0, 3))
    two.observe(ServerEvent.DEADLINE_MISSED, 0)
    again = VersionName(1, 2)
    assert servers.aim(again)
    assert servers.routes(is_published=True) == []
    servers.note_loaded(one, 0, VersionName(0, 3))
    assert accepting(servers) == [], "a transfer that was under way when the trainer was lost"
    servers.note_loaded(one, 0, again)
    assert accepting(servers) == ["s1"]


def test_servers_keep_their_requests_while_the_next_version_of_the_same_trainer_comes() -> None:
    servers = fleet(live("s1"))
    servers.aim(V0)
    assert not servers.aim(V1)
    assert accepting(servers) == ["s1"]


def test_a_version_is_loaded_when_every_server_that_answers_has_it() -> None:
    one, two, stale = live("s1"), live("s2"), live("s3", V1)
    servers = fleet(one, two, stale)
    stale.observe(ServerEvent.TRANSFER_MISSED, 0)
    # The stale one has the version, but must say so.
    assert servers.to_load(V1) == [stale, one, two]
    one.observe(ServerEvent.LOADED, 0, V1)
    assert not servers.has_loaded(V1)
    two.observe(ServerEvent.ENDED, 0)
    assert servers.has_loaded(V1)
    assert servers.to_load(V1) == [stale]


def test_a_suspect_server_is_not_waited_for_and_is_stale_without_the_version() -> None:
    one, two = live("s1"), live("s2")
    servers = fleet(one, two)
    one.observe(ServerEvent.LOADED, 0, V1)
    two.observe(ServerEvent.DEADLINE_MISSED, 0)
    assert servers.has_loaded(V1)
    servers.end_transfer(V1, 0.0)
    assert (one.state, two.state) == (ServerState.HEALTHY, ServerState.STALE)
    assert not two.observe(ServerEvent.ANSWERED, 0)
    two.observe(ServerEvent.LOADED, 0, V1)
    assert two.state is ServerState.HEALTHY


# Number --------------------------------------------------------------------------------------------------------------


def test_a_server_that_leaves_gets_no_requests_and_no_weights_and_does_not_come_back() -> None:
    one, two = live("server-0"), live("server-1", V1)
    servers = fleet(one, two)
    two.observe(ServerEvent.DEADLINE_MISSED, 0)
    assert servers.let_leave(1) == [two], "one that answers nothing leaves first"
    assert accepting(servers) == ["server-0"]
    assert servers.to_load(V2) == [one]
    assert not any(two.observe(event, 0) for event in ServerEvent)
    servers.remove("server-1")
    assert servers.staying == [one]
    assert servers.add(1) == ["server-1"]


def retire(of: ServerFleet, name: str) -> None:
    server = of.servers[name]
    server.observe(ServerEvent.READY, server.incarnation)
    server.observe(ServerEvent.ENDED, server.incarnation)
    server.observe(ServerEvent.BUDGET_SPENT, server.incarnation)


@pytest.mark.parametrize("is_endless", [False, True])
def test_a_retired_server_is_replaced_a_few_times_an_hour(is_endless: bool) -> None:
    servers = fleet(live("server-0"), is_endless=is_endless)
    for times in range(REPLACEMENTS):
        retire(servers, "server-0")
        replacement = servers.replace("server-0", float(times))
        assert replacement is not None
        assert (replacement.incarnation, replacement.state) == (times + 1, ServerState.RESTARTING)
    retire(servers, "server-0")
    assert (servers.replace("server-0", 10.0) is not None) == is_endless
    if is_endless:
        retire(servers, "server-0")
    assert servers.replace("server-0", 10.0 + REPLACEMENT_PERIOD_S) is not None


def test_a_server_that_was_never_ready_is_not_replaced() -> None:
    servers = ServerFleet()
    servers.add(1)
    server = servers.servers["server-0"]
    server.observe(ServerEvent.ENDED, 0)
    server.observe(ServerEvent.BUDGET_SPENT, 0)
    assert servers.replace("server-0", 0.0) is None
