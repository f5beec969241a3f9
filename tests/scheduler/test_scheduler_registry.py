"""Names: shared and exclusive, bound to incarnations, hidden with silent machines, gone with the dead."""

from __future__ import annotations

import pytest

from fray.errors import ActorDied, InvalidRequest, NameInUse
from fray.model.specs import EndReason, EntryKind, Outcome
from fray.scheduler.effects import NamesChanged
from fray.scheduler.explain.actors import list_actors
from fray.scheduler.state.rows import SchedulerConfig
from tests.support.scheduler import Cluster, ended, job


@pytest.fixture
def law() -> Cluster:
    """Two actor jobs with a retry each, running on two machines, their processes connected."""
    law = Cluster()
    law.driver()
    for node, name in (("n1", "a"), ("n2", "b")):
        law.node(node, cpu=1)
        law.launch(job(name, entry=EntryKind.ACTOR, max_retries_failure=1, max_retries_preemption=1))
        law.run(f"{name}:0:0")
        law.process(f"{name}:0:0")
    return law


def test_a_name_is_found_under_its_namespace_and_its_actor(law: Cluster) -> None:
    effects = law.register("counter", "a", "s-a:0:0")
    moved = [effect.key for effect in effects if isinstance(effect, NamesChanged)]
    assert moved == ["name:ns/counter", "actor:a"]
    (endpoint,) = law.names("name:ns/counter").endpoints
    assert (endpoint.incarnation, endpoint.job_id, endpoint.namespace) == ("a:0:0", "a", "ns")
    assert law.names("actor:a").endpoints == (endpoint,)
    assert law.actors("name:other/counter") == []


def test_a_shared_name_lists_its_actors_oldest_first(law: Cluster) -> None:
    law.register("server", "b", "s-b:0:0")
    law.register("server", "a", "s-a:0:0")
    assert law.actors("name:ns/server") == ["b", "a"]


def test_registering_again_replaces_and_keeps_its_place(law: Cluster) -> None:
    law.register("server", "a", "s-a:0:0")
    law.register("server", "b", "s-b:0:0")
    law.register("server", "a", "s-a:0:0")
    assert law.actors("name:ns/server") == ["a", "b"]


def test_an_actor_that_takes_another_name_leaves_the_first(law: Cluster) -> None:
    law.register("old", "a", "s-a:0:0")
    effects = law.register("new", "a", "s-a:0:0")
    moved = [effect.key for effect in effects if isinstance(effect, NamesChanged)]
    assert moved == ["name:ns/old", "actor:a", "name:ns/new"]
    assert (law.actors("name:ns/old"), law.actors("name:ns/new")) == ([], ["a"])


@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True), (True, True)])
def test_an_exclusive_name_has_one_holder_and_the_refusal_names_it(law: Cluster, first: bool, second: bool) -> None:
    law.register("only", "a", "s-a:0:0", exclusive=first)
    with pytest.raises(NameInUse, match="actor a of a:0:0 has it") as caught:
        law.register("only", "b", "s-b:0:0", exclusive=second)
    assert caught.value.details["holder"] == "a"
    assert caught.value.details["incarnation"] == "a:0:0"


def test_no_actor_is_launched_under_a_name_that_another_holds_for_itself(law: Cluster) -> None:
    law.register("only", "light", "s-a:0:0", exclusive=True)
    law.register("shared", "served", "s-a:0:0")
    with pytest.raises(NameInUse, match="actor light of a:0:0 has it"):
        law.launch(job("only", entry=EntryKind.ACTOR))
    with pytest.raises(NameInUse, match="actor light of a:0:0 has it"):
        law.launch(job("only", entry=EntryKind.ACTOR, exclusive_name=False))
    law.launch(job("only"), job("shared", entry=EntryKind.ACTOR))
    law.launch(job("only", job_id="other", entry=EntryKind.ACTOR, namespace="elsewhere"))


def test_a_name_that_an_actor_on_its_way_will_take_is_taken(law: Cluster) -> None:
    law.launch(job("waiting", entry=EntryKind.ACTOR))
    with pytest.raises(NameInUse, match="is on its way"):
        law.register("waiting", "light", "s-a:0:0", exclusive=True)
    law.register("waiting", "served", "s-a:0:0")


def test_a_name_goes_with_its_process_and_is_free_again(law: Cluster) -> None:
    law.register("only", "a", "s-a:0:0", exclusive=True)
    effects = law.see("a:0:0", ended(EndReason.FAILURE))
    assert NamesChanged(key="name:ns/only") in effects
    law.register("only", "b", "s-b:0:0", exclusive=True)
    assert law.actors("name:ns/only") == ["b"]


def test_the_dead_register_nothing(law: Cluster) -> None:
    law.see("a:0:0", ended(EndReason.FAILURE))
    with pytest.raises(ActorDied, match="has ended"):
        law.register("zombie", "a", "s-a:0:0")


def test_a_restarting_actor_is_on_its_way_and_then_there_as_another_incarnation(law: Cluster) -> None:
    law.register("counter", "a", "s-a:0:0")
    law.see("a:0:0", ended(EndReason.FAILURE))
    assert (law.names("actor:a").endpoints, law.names("actor:a").ended) == ((), None)
    law.run("a:1:0")
    law.process("a:1:0")
    law.register("counter", "a", "s-a:1:0")
    assert law.names("actor:a").endpoints[0].incarnation == "a:1:0"


def test_an_actor_that_will_not_come_back_says_why(law: Cluster) -> None:
    law.see("a:0:0", ended(EndReason.FAILURE))
    law.see("a:1:0", ended(EndReason.KILLED, "killed by signal 9", signal=9))
    told = "killed by signal 9 (it was retried once, after failure)"
    assert law.names("actor:a").ended == ended(EndReason.KILLED, told, signal=9)


def test_an_unknown_actor_has_never_been(law: Cluster) -> None:
    assert law.names("actor:nobody").ended == Outcome(cause=EndReason.FAILURE, message="no such actor")


def test_an_actor_of_a_server_leaves_the_reason_of_its_end(law: Cluster) -> None:
    law.register("served", "token", "s-a:0:0")
    law.see("a:0:0", ended(EndReason.FAILURE, "boom"))
    gone = law.names("actor:token").ended
    assert gone is not None
    assert gone.message == "actor 'served' is gone: its process a:0:0 ended: failure: boom"


def test_graves_are_bounded() -> None:
    law = Cluster(SchedulerConfig(finished_limit=2))
    law.driver()
    for index in range(5):
        law.register("n", f"actor{index}", "d")
        law.unregister(f"actor{index}", "d")
    assert list(law.state.actor_tombstones) == ["actor3", "actor4"]


def test_a_silent_machines_actors_are_hidden_told_and_back_when_it_is(law: Cluster) -> None:
    law.register("only", "a", "s-a:0:0", exclusive=True)
    law.silence("n1")
    assert law.actors("name:ns/only") == ["a"]
    effects = law.tick()
    assert NamesChanged(key="name:ns/only") in effects
    assert NamesChanged(key="actor:a") in effects
    assert law.actors("name:ns/only") == []
    gone = law.names("actor:a").ended
    assert gone is not None
    assert law.names("actor:a").may_return
    assert (gone.cause, gone.message) == (EndReason.MACHINE_LOST, "its machine n1 has been silent for 30 s")
    with pytest.raises(NameInUse, match="on a machine that is silent now"):
        law.register("only", "b", "s-b:0:0", exclusive=True)
    effects = law.node("n1")
    assert NamesChanged(key="actor:a") in effects
    assert law.actors("name:ns/only") == ["a"]
    assert law.names("actor:a").ended is None


def test_an_actor_on_its_way_on_a_silent_machine_counts_as_lost_too(law: Cluster) -> None:
    law.silence("n1")
    assert NamesChanged(key="actor:a") in law.tick()
    gone = law.names("actor:a").ended
    assert gone is not None
    assert gone.cause is EndReason.MACHINE_LOST


def test_only_the_incarnation_that_made_a_name_takes_it_back(law: Cluster) -> None:
    law.register("served", "token", "s-a:0:0")
    law.unregister("token", "s-b:0:0")
    assert law.actors("name:ns/served") == ["token"]
    law.unregister("token", "s-a:0:0")
    assert law.actors("name:ns/served") == []
    law.unregister("token", "s-a:0:0")


def test_an_actor_id_belongs_to_one_living_incarnation(law: Cluster) -> None:
    law.register("served", "token", "s-a:0:0")
    with pytest.raises(InvalidRequest, match="belongs to a:0:0, which lives"):
        law.register("served", "token", "s-b:0:0")
    with pytest.raises(InvalidRequest, match="belongs to the job of that id"):
        law.register("mine", "b", "s-a:0:0")


def test_a_drivers_actor_lives_as_long_as_its_session(law: Cluster) -> None:
    law.register("mine", "token", "d")
    assert law.names("name:ns/mine").endpoints[0].incarnation == "d"
    law.lose()
    assert law.actors("name:ns/mine") == ["token"]
    law.tick()
    assert law.actors("name:ns/mine") == []


def test_names_survive_a_restart_of_the_controller(law: Cluster) -> None:
    law.register("counter", "a", "s-a:0:0")
    law.restart()
    assert law.actors("name:ns/counter") == ["a"]


def test_actors_are_listed_by_namespace_and_prefix(law: Cluster) -> None:
    law.register("worker-2", "a", "s-a:0:0")
    law.register("worker-1", "b", "s-b:0:0")
    law.register("server", "token", "d")
    assert [info.name for info in list_actors(law.state, "ns")] == ["a", "b", "server"]
    assert [info.name for info in list_actors(law.state, "ns", "serv")] == ["server"]
    assert len(list_actors(law.state)) == 3
    assert list_actors(law.state, "other") == ()


def test_p5_a_process_that_comes_back_can_neither_take_its_name_back_nor_away(law: Cluster) -> None:
    law.register("counter", "a", "s-a:0:0", exclusive=True)
    law.die("n1")
    law.node("n3", cpu=1)
    law.run("a:1:0")
    law.process("a:1:0")
    law.register("counter", "a", "s-a:1:0", exclusive=True)
    law.process("a:0:0")
    with pytest.raises(ActorDied, match="has ended"):
        law.register("counter", "a", "s-a:0:0", exclusive=True)
    law.unregister("a", "s-a:0:0")
    assert [endpoint.incarnation for endpoint in law.names("name:ns/counter").endpoints] == ["a:1:0"]
    assert [endpoint.incarnation for endpoint in law.names("actor:a").endpoints] == ["a:1:0"]
