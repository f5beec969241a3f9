"""Names: shared and exclusive, bound to incarnations, hidden with silent machines, gone with the dead."""

from __future__ import annotations

from typing import Any

import pytest

from fray.errors import ActorDied, InvalidRequest, NameInUse
from fray.model.specs import EndReason, EntryKind, Outcome
from fray.scheduler import views
from fray.scheduler.effects import NamesChanged
from fray.scheduler.state.rows import SchedulerConfig
from fray.scheduler.views import list_actors
from tests.support.scheduler import Cluster, ended, job


@pytest.fixture
def scheduler() -> Cluster:
    """Two actor jobs with a retry each, running on two machines, their processes connected."""
    scheduler = Cluster()
    scheduler.driver()
    for node, name in (("n1", "a"), ("n2", "b")):
        scheduler.node(node, cpu=1)
        scheduler.launch(job(name, entry=EntryKind.ACTOR, max_retries_failure=1, max_retries_preemption=1))
        scheduler.run(f"{name}:0:0")
        scheduler.process(f"{name}:0:0")
    return scheduler


def test_a_name_is_found_under_its_namespace_and_its_actor(scheduler: Cluster) -> None:
    effects = scheduler.register("counter", "a", "s-a:0:0")
    moved = [effect.key for effect in effects if isinstance(effect, NamesChanged)]
    assert moved == ["name:ns/counter", "actor:a"]
    (endpoint,) = scheduler.names("name:ns/counter").endpoints
    assert (endpoint.incarnation, endpoint.job_id, endpoint.namespace) == ("a:0:0", "a", "ns")
    assert scheduler.names("actor:a").endpoints == (endpoint,)
    assert scheduler.actors("name:other/counter") == []


def test_a_shared_name_lists_its_actors_oldest_first(scheduler: Cluster) -> None:
    scheduler.register("server", "b", "s-b:0:0")
    scheduler.register("server", "a", "s-a:0:0")
    assert scheduler.actors("name:ns/server") == ["b", "a"]


def test_registering_again_replaces_and_keeps_its_place(scheduler: Cluster) -> None:
    scheduler.register("server", "a", "s-a:0:0")
    scheduler.register("server", "b", "s-b:0:0")
    scheduler.register("server", "a", "s-a:0:0")
    assert scheduler.actors("name:ns/server") == ["a", "b"]


def test_an_actor_that_takes_another_name_leaves_the_first(scheduler: Cluster) -> None:
    scheduler.register("old", "a", "s-a:0:0")
    effects = scheduler.register("new", "a", "s-a:0:0")
    moved = [effect.key for effect in effects if isinstance(effect, NamesChanged)]
    assert moved == ["name:ns/old", "actor:a", "name:ns/new"]
    assert (scheduler.actors("name:ns/old"), scheduler.actors("name:ns/new")) == ([], ["a"])


@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True), (True, True)])
def test_an_exclusive_name_has_one_holder_and_the_refusal_names_it(
    scheduler: Cluster, first: bool, second: bool
) -> None:
    scheduler.register("only", "a", "s-a:0:0", exclusive=first)
    with pytest.raises(NameInUse, match="actor a of a:0:0 has it") as caught:
        scheduler.register("only", "b", "s-b:0:0", exclusive=second)
    assert caught.value.details["holder"] == "a"
    assert caught.value.details["incarnation"] == "a:0:0"


def test_no_actor_is_launched_under_a_name_that_another_holds_for_itself(scheduler: Cluster) -> None:
    scheduler.register("only", "light", "s-a:0:0", exclusive=True)
    scheduler.register("shared", "served", "s-a:0:0")
    with pytest.raises(NameInUse, match="actor light of a:0:0 has it"):
        scheduler.launch(job("only", entry=EntryKind.ACTOR))
    scheduler.launch(job("only"), job("shared", entry=EntryKind.ACTOR))
    scheduler.launch(job("only", job_id="other", entry=EntryKind.ACTOR, namespace="elsewhere"))


def test_a_name_that_an_actor_on_its_way_will_take_is_taken(scheduler: Cluster) -> None:
    scheduler.launch(job("waiting", entry=EntryKind.ACTOR))
    with pytest.raises(NameInUse, match="is starting"):
        scheduler.register("waiting", "light", "s-a:0:0", exclusive=True)
    scheduler.register("waiting", "served", "s-a:0:0")


def test_a_name_goes_with_its_process_and_is_free_again(scheduler: Cluster) -> None:
    scheduler.register("only", "a", "s-a:0:0", exclusive=True)
    effects = scheduler.see("a:0:0", ended(EndReason.FAILURE))
    assert NamesChanged(key="name:ns/only") in effects
    scheduler.register("only", "b", "s-b:0:0", exclusive=True)
    assert scheduler.actors("name:ns/only") == ["b"]


def test_the_dead_register_nothing(scheduler: Cluster) -> None:
    scheduler.see("a:0:0", ended(EndReason.FAILURE))
    with pytest.raises(ActorDied, match="has ended"):
        scheduler.register("zombie", "a", "s-a:0:0")


def test_a_restarting_actor_is_on_its_way_and_then_there_as_another_incarnation(scheduler: Cluster) -> None:
    scheduler.register("counter", "a", "s-a:0:0")
    scheduler.see("a:0:0", ended(EndReason.FAILURE))
    assert (scheduler.names("actor:a").endpoints, scheduler.names("actor:a").ended) == ((), None)
    scheduler.run("a:1:0")
    scheduler.process("a:1:0")
    scheduler.register("counter", "a", "s-a:1:0")
    assert scheduler.names("actor:a").endpoints[0].incarnation == "a:1:0"


def test_an_actor_that_will_not_come_back_says_why(scheduler: Cluster) -> None:
    scheduler.see("a:0:0", ended(EndReason.FAILURE))
    scheduler.see("a:1:0", ended(EndReason.KILLED, "killed by signal 9", signal=9))
    message = "killed by signal 9 (it was retried once, after failure)"
    assert scheduler.names("actor:a").ended == ended(EndReason.KILLED, message, signal=9)


def test_an_unknown_actor_has_never_been(scheduler: Cluster) -> None:
    assert scheduler.names("actor:unknown").ended == Outcome(cause=EndReason.FAILURE, message="no such actor")


def test_an_actor_of_a_server_leaves_the_reason_of_its_end(scheduler: Cluster) -> None:
    scheduler.register("served", "token", "s-a:0:0")
    scheduler.see("a:0:0", ended(EndReason.FAILURE, "boom"))
    gone = scheduler.names("actor:token").ended
    assert gone is not None
    assert gone.message == "actor 'served' is gone: its process a:0:0 ended: failure: boom"


def test_graves_are_bounded() -> None:
    scheduler = Cluster(SchedulerConfig(finished_limit=2))
    scheduler.driver()
    for index in range(5):
        scheduler.register("n", f"actor{index}", "d")
        scheduler.unregister(f"actor{index}", "d")
    assert list(scheduler.state.actor_tombstones) == ["actor3", "actor4"]


def test_actors_of_a_silent_machine_are_hidden_until_it_is_back(scheduler: Cluster) -> None:
    scheduler.register("only", "a", "s-a:0:0", exclusive=True)
    scheduler.silence("n1")
    assert scheduler.actors("name:ns/only") == ["a"]
    effects = scheduler.tick()
    assert NamesChanged(key="name:ns/only") in effects
    assert NamesChanged(key="actor:a") in effects
    assert scheduler.actors("name:ns/only") == []
    gone = scheduler.names("actor:a").ended
    assert gone is not None
    assert scheduler.names("actor:a").may_return
    assert (gone.cause, gone.message) == (EndReason.MACHINE_LOST, "its machine n1 has been silent for 30 s")
    with pytest.raises(NameInUse, match="on a machine that is silent now"):
        scheduler.register("only", "b", "s-b:0:0", exclusive=True)
    effects = scheduler.node("n1")
    assert NamesChanged(key="actor:a") in effects
    assert scheduler.actors("name:ns/only") == ["a"]
    assert scheduler.names("actor:a").ended is None


def test_an_actor_on_its_way_on_a_silent_machine_counts_as_lost_too(scheduler: Cluster) -> None:
    scheduler.silence("n1")
    assert NamesChanged(key="actor:a") in scheduler.tick()
    gone = scheduler.names("actor:a").ended
    assert gone is not None
    assert gone.cause is EndReason.MACHINE_LOST


def test_only_the_incarnation_that_made_a_name_takes_it_back(scheduler: Cluster) -> None:
    scheduler.register("served", "token", "s-a:0:0")
    scheduler.unregister("token", "s-b:0:0")
    assert scheduler.actors("name:ns/served") == ["token"]
    scheduler.unregister("token", "s-a:0:0")
    assert scheduler.actors("name:ns/served") == []
    scheduler.unregister("token", "s-a:0:0")


def test_an_actor_id_belongs_to_one_living_incarnation(scheduler: Cluster) -> None:
    scheduler.register("served", "token", "s-a:0:0")
    with pytest.raises(InvalidRequest, match="belongs to a:0:0, which lives"):
        scheduler.register("served", "token", "s-b:0:0")
    with pytest.raises(InvalidRequest, match="belongs to the job of that id"):
        scheduler.register("mine", "b", "s-a:0:0")


def test_a_drivers_actor_lives_as_long_as_its_session(scheduler: Cluster) -> None:
    scheduler.register("mine", "token", "d")
    assert scheduler.names("name:ns/mine").endpoints[0].incarnation == "d"
    scheduler.lose()
    assert scheduler.actors("name:ns/mine") == ["token"]
    scheduler.tick()
    assert scheduler.actors("name:ns/mine") == []


def test_names_survive_a_restart_of_the_controller(scheduler: Cluster) -> None:
    scheduler.register("counter", "a", "s-a:0:0")
    scheduler.restart()
    assert scheduler.actors("name:ns/counter") == ["a"]


def test_actors_are_listed_by_namespace_and_prefix(scheduler: Cluster) -> None:
    scheduler.register("worker-2", "a", "s-a:0:0")
    scheduler.register("worker-1", "b", "s-b:0:0")
    scheduler.register("server", "token", "d")
    assert [info.name for info in list_actors(scheduler.state, "ns")] == ["a", "b", "server"]
    assert [info.name for info in list_actors(scheduler.state, "ns", "serv")] == ["server"]
    assert len(list_actors(scheduler.state)) == 3
    assert list_actors(scheduler.state, "other") == ()


def test_an_actor_names_the_job_that_serves_or_has_created_it(scheduler: Cluster) -> None:
    scheduler.register("served", "token", "s-a:0:0")
    scheduler.register("of the driver", "another", "d")
    scheduler.launch(job("created", entry=EntryKind.ACTOR), session="s-a:0:0")
    parents = {info.name: info.parent for info in list_actors(scheduler.state)}
    assert parents == {"a": "", "b": "", "served": "a", "created": "a", "of the driver": ""}


def test_ended_actors_are_listed_before_those_that_live_and_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Cluster()
    scheduler.driver()
    scheduler.node(cpu=8)
    for number in range(4):
        scheduler.now = float(number)
        scheduler.launch(job(f"a{number}", entry=EntryKind.ACTOR))
        scheduler.see(f"a{number}:0:0", ended())
    scheduler.launch(job("living", entry=EntryKind.ACTOR), job("work"))
    scheduler.register("served", "actor-x", session="d")
    scheduler.unregister("actor-x", session="d")

    def listed(**more: Any) -> list[str]:
        return [info.name for info in list_actors(scheduler.state, ended=True, **more)]

    monkeypatch.setattr(views, "ENDED_ACTORS", 5)
    assert listed() == ["a0", "a1", "a2", "a3", "served", "living"]
    monkeypatch.setattr(views, "ENDED_ACTORS", 4)
    assert listed() == ["a1", "a2", "a3", "served", "living"]
    assert listed(prefix="a") == ["a0", "a1", "a2", "a3"]
    assert [info.name for info in list_actors(scheduler.state)] == ["living"]


def test_p5_a_process_that_comes_back_can_neither_take_its_name_back_nor_away(scheduler: Cluster) -> None:
    scheduler.register("counter", "a", "s-a:0:0", exclusive=True)
    scheduler.die("n1")
    scheduler.node("n3", cpu=1)
    scheduler.run("a:1:0")
    scheduler.process("a:1:0")
    scheduler.register("counter", "a", "s-a:1:0", exclusive=True)
    scheduler.process("a:0:0")
    with pytest.raises(ActorDied, match="has ended"):
        scheduler.register("counter", "a", "s-a:0:0", exclusive=True)
    scheduler.unregister("a", "s-a:0:0")
    assert [endpoint.incarnation for endpoint in scheduler.names("name:ns/counter").endpoints] == ["a:1:0"]
    assert [endpoint.incarnation for endpoint in scheduler.names("actor:a").endpoints] == ["a:1:0"]
