"""States of inference servers: the edges there are, those there must not be, and how long one may miss deadlines."""

from __future__ import annotations

from fray.rl.core.server_states import TRANSITIONS, BusyShare, ServerEvent, ServerRecord, ServerState
from fray.rl.core.versions import VersionName

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
    server = live("s1")
    server.observe(ServerEvent.ENDED, 0)
    server.observe(ServerEvent.BUDGET_SPENT, 0)
    assert server.state is ServerState.RETIRED
    assert not any(server.observe(event, 0) for event in ServerEvent if event is not ServerEvent.LEAVE)


def test_a_server_that_misses_every_deadline_of_a_minute_is_dead_and_to_be_ended() -> None:
    server = live("s1")
    for now in (100.0, 130.0, 159.9):
        server.observe(ServerEvent.DEADLINE_MISSED, 0, now=now)
        assert (server.state, server.is_overdue) == (ServerState.SUSPECT, False)
    server.observe(ServerEvent.DEADLINE_MISSED, 0, now=160.0)
    assert (server.state, server.is_overdue) == (ServerState.DEAD, True)
    assert not server.observe(ServerEvent.ANSWERED, 0), "nothing that it says later is believed"
    server.observe(ServerEvent.RESTARTED, 0)
    server.observe(ServerEvent.READY, 1)
    server.observe(ServerEvent.LOADED, 1, V0)
    assert server.state is ServerState.HEALTHY


def test_an_answer_renews_the_patience_with_a_server() -> None:
    server = live("s1")
    server.observe(ServerEvent.DEADLINE_MISSED, 0, now=0.0)
    server.observe(ServerEvent.ANSWERED, 0)
    server.observe(ServerEvent.DEADLINE_MISSED, 0, now=100.0)
    server.observe(ServerEvent.DEADLINE_MISSED, 0, now=159.0)
    assert server.state is ServerState.SUSPECT


def test_a_server_that_never_loads_weights_is_dead_after_ten_minutes_of_missed_transfers() -> None:
    server = live("s1")
    for now in (0.0, 120.0, 599.0):
        server.observe(ServerEvent.TRANSFER_MISSED, 0, now=now)
        assert server.state is ServerState.STALE
    server.observe(ServerEvent.TRANSFER_MISSED, 0, now=600.0)
    assert (server.state, server.is_overdue) == (ServerState.DEAD, True)


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
