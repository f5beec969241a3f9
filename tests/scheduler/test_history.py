"""Records of ended attempts and of machines that are gone, which the scheduler gives to the store."""

from __future__ import annotations

from fray.model.messages.history import AttemptRecord, NodeRecord
from fray.model.specs import EndReason
from fray.scheduler.effects import Effect, HistoryRecorded
from fray.scheduler.state.rows import SchedulerConfig
from tests.support.scheduler import Cluster, demand, ended, job

GB = 1024**3


def recorded(effects: list[Effect]) -> list[AttemptRecord | NodeRecord]:
    return [effect.record for effect in effects if isinstance(effect, HistoryRecorded)]


def cluster(rules: SchedulerConfig | None = None) -> Cluster:
    """A cluster with a driver and one machine with two GPUs."""
    scheduler = Cluster(rules)
    scheduler.driver()
    scheduler.now = 100.0
    scheduler.node(cpu=8, gpu="h100*2")
    return scheduler


def test_the_end_of_an_attempt_is_recorded_with_what_it_held() -> None:
    scheduler = cluster()
    scheduler.launch(job("a", demand(2, 3 * GB, gpu=1), user="ada"))
    scheduler.run("a:0:0")
    scheduler.now = 160.0
    end = ended(EndReason.FAILURE, exit_code=3, cpu_s=17.0, peak_memory_bytes=GB)
    (record,) = recorded(scheduler.see("a:0:0", end))
    assert record == AttemptRecord(
        attempt_id="a:0:0",
        job_id="a",
        name="a",
        user="ada",
        namespace="ns",
        band="interactive",
        node="n1",
        machine="h100",
        cpu_milli=2000,
        memory_bytes=3 * GB,
        device_kind="gpu",
        device_variant="h100",
        devices=1,
        queued_at=100.0,
        placed_at=100.0,
        started_at=100.0,
        ended_at=160.0,
        cause="failure",
        exit_code=3,
        cpu_s=17.0,
        peak_memory_bytes=GB,
        recorded_at=160.0,
    )


def test_each_member_of_a_gang_and_each_retry_has_its_record() -> None:
    scheduler = cluster()
    scheduler.launch(job("a", members=2, max_retries_failure=1))
    scheduler.run("a:0:0", "a:0:1")
    effects = [*scheduler.see("a:0:0", ended(EndReason.FAILURE)), *scheduler.see("a:0:1", ended(EndReason.GANG))]
    scheduler.run("a:1:0", "a:1:1")
    effects += [*scheduler.see("a:1:0", ended()), *scheduler.see("a:1:1", ended())]
    found = [(one.attempt_id, one.cause) for one in recorded(effects) if isinstance(one, AttemptRecord)]
    assert found == [("a:0:0", "failure"), ("a:0:1", "gang"), ("a:1:0", "succeeded"), ("a:1:1", "succeeded")]


def test_an_attempt_of_a_lost_machine_held_it_until_it_fell_silent() -> None:
    scheduler = cluster()
    scheduler.launch(job("a"))
    scheduler.run("a:0:0")
    scheduler.now = 150.0
    scheduler.silence()
    scheduler.tick()
    (record,) = (one for one in recorded(scheduler.tick()) if isinstance(one, AttemptRecord))
    assert (record.cause, record.ended_at, record.recorded_at) == ("machine_lost", 150.0, 750.0)


def test_a_machine_that_died_is_recorded_with_the_time_and_the_reason() -> None:
    scheduler = cluster()
    scheduler.now = 400.0
    (record,) = recorded(scheduler.die())
    assert isinstance(record, NodeRecord)
    assert (record.node, record.kind, record.devices, record.cpu_milli) == ("n1", "h100", 2, 8000)
    assert (record.joined_at, record.gone_at) == (100.0, 400.0)
    assert record.reason


def test_a_machine_whose_process_was_replaced_has_a_record_of_the_first_one() -> None:
    scheduler = cluster()
    scheduler.now = 400.0
    (record,) = recorded(scheduler.node(incarnation="i2"))
    assert isinstance(record, NodeRecord)
    assert (record.incarnation, record.gone_at) == ("i1", 400.0)
    assert record.reason == "its process was replaced by a new one"
    assert scheduler.state.nodes["n1"].joined_at == 400.0


def test_a_machine_that_stays_silent_is_recorded_when_it_leaves_the_list() -> None:
    scheduler = cluster(SchedulerConfig(forget_node_s=1000.0))
    scheduler.now = 400.0
    scheduler.silence()
    assert recorded(scheduler.tick()) == []
    assert recorded(scheduler.tick()) == []
    (record,) = recorded(scheduler.tick())
    assert isinstance(record, NodeRecord)
    assert (record.gone_at, scheduler.now) == (400.0, 2000.0)
    assert "n1" not in scheduler.state.nodes
