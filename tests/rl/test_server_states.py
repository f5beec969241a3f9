"""States of inference servers: the edges there are, and those there must not be."""

from __future__ import annotations

from fray.rl.core.server_states import TRANSITIONS, BusyShare, ServerEvent, ServerFleet, ServerRecord, ServerState
from fray.rl.core.versions import VersionLine, VersionName

V0, V1 = VersionName(0, 0), VersionName(0, 1)


def live(name: str, version: VersionName = V0) -> ServerRecord:
    """Return a server that has loaded a version."""
    server = ServerRecord(name)
    server.observe(ServerEvent.READY, 0)
    server.observe(ServerEvent.LOADED, 0, version)
    assert server.state is ServerState.HEALTHY
    return server


def test_every_way_from_dead_to_healthy_leads_through_loading_weights() -> None:
    edges = {(before, after) for (before, event), after in TRANSITIONS.items() if event is not ServerEvent.LOADED}
    reached, todo = set(), [ServerState.DEAD]
    while todo:
        state = todo.pop()
        reached.add(state)
        todo += [after for before, after in edges if before is state and after not in reached]
    assert ServerState.HEALTHY not in reached
    assert ServerState.STALE in reached


def test_every_state_but_the_last_can_be_left_and_reached() -> None:
    left = {before for before, _ in TRANSITIONS}
    assert left == set(ServerState) - {ServerState.LEAVING}
    assert set(TRANSITIONS.values()) == set(ServerState)


def test_a_restarted_server_has_no_weights_and_a_new_incarnation() -> None:
    server = live("s1")
    server.observe(ServerEvent.ENDED, 0)
    assert (server.state, server.version) == (ServerState.DEAD, None)
    server.observe(ServerEvent.RESTARTED, 0)
    assert server.incarnation == 1
    server.observe(ServerEvent.READY, 1)
    assert server.state is ServerState.STALE


def test_what_an_earlier_incarnation_says_is_ignored() -> None:
    server = live("s1")
    server.observe(ServerEvent.ENDED, 0)
    server.observe(ServerEvent.RESTARTED, 0)
    server.observe(ServerEvent.READY, 1)
    assert not server.observe(ServerEvent.LOADED, 0, V1)
    assert (server.state, server.version) == (ServerState.STALE, None)
    assert not server.observe(ServerEvent.ENDED, 0)
    assert server.state is ServerState.STALE


def test_a_spent_budget_retires_a_server() -> None:
    server = ServerRecord("s1", restarts_left=1)
    server.observe(ServerEvent.ENDED, 0)
    server.observe(ServerEvent.RESTARTED, 0)
    server.observe(ServerEvent.ENDED, 1)
    server.observe(ServerEvent.RESTARTED, 1)
    assert server.state is ServerState.RETIRED
    assert not any(server.observe(event, 1) for event in ServerEvent if event is not ServerEvent.LEAVE)


def test_a_server_that_leaves_gets_no_requests_and_no_weights_and_does_not_come_back() -> None:
    fleet = ServerFleet({"s1": live("s1"), "s2": live("s2", V1)})
    leaving = fleet.servers["s1"]
    assert leaving.observe(ServerEvent.LEAVE, 0)
    assert fleet.choose(VersionLine(number=1)) is fleet.servers["s2"]
    assert fleet.to_load(V1) == []
    assert fleet.has_loaded(V1)
    assert not any(leaving.observe(event, 0) for event in ServerEvent)
    assert leaving.state is ServerState.LEAVING


def test_requests_go_to_the_healthy_server_with_the_fewest() -> None:
    line = VersionLine()
    one, two, three = live("s1"), live("s2"), live("s3")
    fleet = ServerFleet({server.name: server for server in (one, two, three)})
    one.in_flight, two.in_flight, three.in_flight = 3, 1, 1
    assert fleet.choose(line) is two
    two.observe(ServerEvent.DEADLINE_MISSED, 0)
    assert fleet.choose(line) is three
    three.observe(ServerEvent.TRANSFER_MISSED, 0)
    one.observe(ServerEvent.ENDED, 0)
    assert fleet.choose(line) is None


def test_no_request_goes_to_weights_of_a_lost_line() -> None:
    line = VersionLine(number=3)
    fleet = ServerFleet({"s1": live("s1", VersionName(0, 3))})
    line.fork(2)
    assert fleet.choose(line) is None
    fleet.servers["s1"].observe(ServerEvent.LOADED, 0, line.current)
    assert fleet.choose(line) is not None


def test_a_version_is_loaded_when_every_server_that_answers_has_it() -> None:
    one, two, stale = live("s1"), live("s2"), live("s3", V1)
    fleet = ServerFleet({server.name: server for server in (one, two, stale)})
    stale.observe(ServerEvent.TRANSFER_MISSED, 0)
    # The stale one has the version, but must say so.
    assert fleet.to_load(V1) == [stale, one, two]
    one.observe(ServerEvent.LOADED, 0, V1)
    assert not fleet.has_loaded(V1)
    two.observe(ServerEvent.ENDED, 0)
    assert fleet.has_loaded(V1)
    assert fleet.to_load(V1) == [stale]


def test_a_suspect_server_is_not_waited_for_and_is_stale_without_the_version() -> None:
    one, two = live("s1"), live("s2")
    fleet = ServerFleet({server.name: server for server in (one, two)})
    one.observe(ServerEvent.LOADED, 0, V1)
    two.observe(ServerEvent.DEADLINE_MISSED, 0)
    assert fleet.has_loaded(V1)
    fleet.end_transfer(V1)
    assert (one.state, two.state) == (ServerState.HEALTHY, ServerState.STALE)
    assert not two.observe(ServerEvent.ANSWERED, 0)
    two.observe(ServerEvent.LOADED, 0, V1)
    assert two.state is ServerState.HEALTHY


def test_the_busy_share_is_of_all_servers_since_it_was_taken() -> None:
    share = BusyShare()
    assert share.take() is None
    share.add((100.0, 5.0), (101.0, 6.0))
    share.add((7.0, 0.0), (8.0, 0.5))
    assert share.take() == 0.75
    assert share.take() == 0.75, "an update that ends before the servers were asked again"
    share.add((101.0, 6.0), (103.0, 6.0))
    assert share.take() == 0
    share.add((103.0, 6.0), (104.0, 9.0))
    assert share.take() == 1, "a step that began before this time has ended in it"
