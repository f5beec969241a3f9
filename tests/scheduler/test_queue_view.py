"""The queue and the shares as people see them: the API, the command line, the plot; and the page about fairness."""

from __future__ import annotations

import builtins
import json
import re
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

import fray
from fray.cli.plot import check_plot, plot
from fray.cli.queue import described, queue_table
from fray.controller.metrics.usage_history import UsageHistory
from fray.errors import InvalidRequest
from fray.model.policy.policy import Amounts, Policy, TenantPolicy
from fray.model.policy.priority import Band
from fray.scheduler.explain.queue_view import queue_info, usage_info
from fray.scheduler.queue.order import in_order
from tests.scheduler.test_fair_share import of
from tests.support.scheduler import GB, Cluster, demand, ended, job

HOUR = 3600.0
PAGE = Path(__file__).parents[2] / "docs" / "fairness.md"


@pytest.fixture
def scheduler() -> Cluster:
    policy = Policy(
        half_life_s=HOUR,
        users={
            "alice": TenantPolicy(weight=2, quota=Amounts(cpu_milli=1000)),
            "carol": TenantPolicy(quota=Amounts(), borrow=False),
        },
        namespaces={"tight": TenantPolicy(quota=Amounts(memory_bytes=0), borrow=False)},
    )
    scheduler = Cluster(policy=policy)
    scheduler.driver()
    scheduler.node("n1", cpu=4, memory=8 * GB)
    scheduler.launch(*of("alice", 2))
    scheduler.launch(*of("bob", 3), job("tight", demand(0, GB), user="bob", namespace="tight"))
    scheduler.launch(job("prod", user="dave", band=Band.PRODUCTION), job("x", demand(1, GB), user="alice", members=2))
    scheduler.now = 90.0
    return scheduler


def test_the_queue_is_listed_in_its_order_with_the_reason_of_each(scheduler: Cluster) -> None:
    found = queue_info(scheduler.state, 100, None, scheduler.now)
    assert [line.id for line in found.entries] == [applicant.id for applicant in in_order(scheduler.state.queue)]
    assert [line.id for line in found.entries] == ["prod", "bob2", "x", "tight"]
    assert found.by_user == {"alice": 1, "bob": 2, "dave": 1}
    assert [line.standing for line in found.entries] == ["within", "within", "borrows", "waits"]
    lines = queue_table(found, None)
    assert lines[0].split()[:5] == ["#", "ID", "KIND", "USER", "NAMESPACE"]
    assert "2 × 1 CPU, 1 GB memory" in lines[3]
    assert lines[2].endswith("n1 has 0 of 4 CPUs free (held by alice0, alice1, bob0, bob1)")
    assert "beyond its quota; n1 has" in lines[3]
    assert lines[4].endswith("asks for more than the quota of namespace tight ever allows (0 B memory)")
    assert lines[-1] == "waiting by user: alice 1, bob 2, dave 1"
    short = queue_info(scheduler.state, 1, "bob", scheduler.now)
    assert [(line.position, line.id) for line in short.entries] == [(2, "bob2")]
    assert queue_table(queue_info(Cluster().state, 9, None, 0.0), None) == ["the queue is empty"]


def test_usage_is_listed_by_user_and_namespace_with_quotas(scheduler: Cluster) -> None:
    found = usage_info(scheduler.state, scheduler.now)
    assert found.used == {"cpu": 4.0}
    alice = next(one for one in found.users if one.user == "alice")
    assert (alice.share, alice.weight, alice.waiting) == (0.5, 2, 1)
    assert alice.mean == pytest.approx(0.5 * (1 - 0.5 ** (90 / HOUR)))
    assert alice.score == pytest.approx((alice.share + alice.mean) / 2)
    assert (alice.quota, alice.limit, alice.borrowed) == ({"cpu": 1.0}, None, {"cpu": 1.0})
    assert [(one.user, one.namespace) for one in found.namespaces] == [("alice", "ns"), ("bob", "ns")]
    lines = described(found, None)
    assert "CPUs       4 of 4 in use" in lines[0]
    assert any(line.split()[:2] == ["alice", "2"] and "1 CPU " in line for line in lines)


def test_samples_reach_back_to_the_start_in_bounded_room(scheduler: Cluster) -> None:
    samples = UsageHistory(period_s=1.0, limit=8)
    for second in range(100):
        if samples.next_at <= second:
            samples.take_sample(scheduler.state, float(second))
    kept = samples.all(scheduler.state, 100.0)
    assert (kept[0].at, kept[-1].at) == (0, 100)
    assert len(kept) <= 10
    assert samples.period_s == 16.0
    assert kept[0].utilisation == {"cpu": 1.0, "memory": 0.0}
    assert kept[0].shares == {"alice": 0.5, "bob": 0.5}


def test_a_plot_is_drawn(scheduler: Cluster, tmp_path: Path) -> None:
    samples = UsageHistory(period_s=1.0)
    samples.take_sample(scheduler.state, 90.0)
    scheduler.see("alice0:0:0", ended())
    plot(
        evolve(usage_info(scheduler.state, 100.0), samples=samples.all(scheduler.state, 100.0)), str(tmp_path / "p.svg")
    )
    assert (tmp_path / "p.svg").read_text().startswith("<?xml")


def test_a_plot_needs_matplotlib_and_a_file_it_can_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequest, match=r"\.svg, \.png"):
        check_plot("shares.txt")
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InvalidRequest, match=r"pip install 'fray\[plot\]'"):
        check_plot("shares.svg")


async def test_a_driver_can_ask_for_both(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text('[users."*"]\nquota = { cpu = 1 }\nborrow = false\n')
    async with fray.open_cluster(f"local?policy={tmp_path}/policy.toml") as cluster:
        assert (await cluster.queue()).entries == ()
        async with cluster.open_scope("s") as scope:
            request = fray.JobRequest(
                name="large",
                entrypoint=fray.Entrypoint.from_callable(print),
                resources=fray.ResourceConfig.with_cpu(cpu=2),
            )
            large = await scope.launch(request)
            (line,) = (await cluster.queue(limit=5)).entries
            assert (line.kind, line.standing) == ("job", "waits")
            assert "ever allows (1 CPU)" in line.reason
            usage = await cluster.usage(samples=True)
            assert (len(usage.samples) > 0, usage.users[0].waiting) == (True, 1)
            with pytest.raises(InvalidRequest, match="limit=0"):
                await cluster.queue(limit=0)
            await cluster.terminate(large)


# The page


def test_the_numbers_of_the_page_are_those_of_the_scheduler() -> None:
    """The example in words: its table is played, and must come out."""
    rows = re.findall(r"^\| (\d+) h \| ([\d.]+) \| ([\d.]+) \| (\w+) \|$", PAGE.read_text(), re.MULTILINE)
    assert len(rows) == 4
    scheduler = Cluster(policy=Policy(half_life_s=HOUR))
    scheduler.driver()
    scheduler.node("n1", cpu=8)
    scheduler.launch(job("all", demand(8), user="alice"))
    for hour, alice, bob, first in rows:
        scheduler.now = int(hour) * HOUR
        if hour == "2":
            scheduler.launch(*of("alice", 8), *of("bob", 8))
            scheduler.see("all:0:0", ended())
        users = {one.user: one for one in usage_info(scheduler.state, scheduler.now).users}
        listed = [f"{users[user].score:.3f}" if user in users else "0.000" for user in ("alice", "bob")]
        assert listed == [alice, bob], hour
        assert min(("alice", "bob"), key=lambda user: users[user].score if user in users else 0.0) == first


def test_the_words_of_the_reply_are_plain_json(scheduler: Cluster) -> None:
    from fray.cli.output import plain

    listed = json.loads(json.dumps(plain(usage_info(scheduler.state, scheduler.now))))
    assert listed["capacity"]["cpu"] == 4.0
    assert {"user", "namespace", "weight", "share", "mean", "score", "quota", "limit", "borrowed"} <= listed["users"][
        0
    ].keys()
