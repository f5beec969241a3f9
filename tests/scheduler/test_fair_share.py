"""Fair shares: usage, weights, bands, quotas and the order of applicants; and that no pass overlooks an applicant."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter

import pytest
from attrs import evolve
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fray.model.policy.policy import Amounts, Policy, TenantPolicy
from fray.model.policy.priority import Band
from fray.model.specs import EndReason
from fray.scheduler.effects import PolicyChanged
from fray.scheduler.explain.explain import explain
from fray.scheduler.queue.fair_share import RANK_AGE
from fray.scheduler.queue.order import in_order
from fray.scheduler.state.rows import SchedulerConfig
from fray.testing.invariants.check import check
from tests.support.scheduler import GB, Cluster, demand, ended, job, placed

HOUR = 3600.0


def cluster(
    policy: Policy | None = None, cpu: float = 4, rules: SchedulerConfig | None = None, **what: object
) -> Cluster:
    scheduler = Cluster(rules, policy=policy or Policy())
    scheduler.driver()
    if cpu:
        scheduler.node("n1", cpu=cpu, **what)
    return scheduler


def running(scheduler: Cluster) -> dict[str, int]:
    """CPUs in use, by user."""
    found: Counter[str] = Counter()
    for job_id in placed(scheduler):
        found[scheduler.state.jobs[job_id].spec.user] += 1
    return dict(found)


def of(user: str, count: int, first: int = 0, **more: object) -> list:  # type: ignore[type-arg]
    return [job(f"{user}{number}", user=user, **more) for number in range(first, first + count)]


# Shares


def test_two_with_equal_claims_get_equal_halves_of_a_burst() -> None:
    scheduler = cluster(cpu=8)
    scheduler.launch(*of("alice", 20), *of("bob", 20))
    assert running(scheduler) == {"alice": 4, "bob": 4}


def test_a_weight_of_two_is_twice_as_much() -> None:
    scheduler = cluster(Policy(users={"alice": TenantPolicy(weight=2)}), cpu=9)
    scheduler.launch(*of("bob", 20), *of("alice", 20))
    assert running(scheduler) == {"alice": 6, "bob": 3}


def test_the_share_is_that_of_the_resource_of_which_most_is_taken() -> None:
    """The example of the paper: 9 CPUs, 18 GB; tasks of 1 CPU and 4 GB get three, those of 3 CPUs and 1 GB two."""
    scheduler = cluster(cpu=9, memory=18 * GB)
    scheduler.launch(
        *(job(f"a{n}", demand(1, 4 * GB), user="a") for n in range(9)),
        *(job(f"b{n}", demand(3, GB), user="b") for n in range(9)),
    )
    assert running(scheduler) == {"a": 3, "b": 2}
    shares = scheduler.state.shares.users
    assert (shares["a"].share, shares["b"].share) == (12 / 18, 6 / 9)


def test_the_namespaces_of_a_user_share_by_their_weights() -> None:
    scheduler = cluster(Policy(namespaces={"main": TenantPolicy(weight=3)}), cpu=8)
    scheduler.launch(
        *(job(f"side{n}", user="alice", namespace="side") for n in range(9)),
        *(job(f"main{n}", user="alice", namespace="main") for n in range(9)),
        *of("bob", 9),
    )
    assert running(scheduler) == {"alice": 4, "bob": 4}
    assert Counter(scheduler.state.jobs[name].spec.namespace for name in placed(scheduler)) == {
        "main": 3,
        "side": 1,
        "ns": 4,
    }


def test_of_namespaces_with_equal_scores_the_longest_waiting_goes_first() -> None:
    """Each job of the command line has a namespace of its own: by their names a later one would always pass."""
    scheduler = cluster(cpu=1)
    scheduler.launch(job("running"))
    scheduler.launch(*(job(name, user="alice", namespace=name) for name in ("zebra", "mouse", "ant")))
    assert [applicant.id for applicant in in_order(scheduler.state.queue)] == ["zebra", "mouse", "ant"]
    assert [scheduler.state.queue.count_ahead(name) for name in ("zebra", "mouse", "ant")] == [0, 1, 2]
    scheduler.see("running:0:0", ended())
    assert placed(scheduler) == ["zebra"]


def test_the_children_of_a_job_are_its_users() -> None:
    scheduler = cluster(cpu=4)
    scheduler.launch(job("parent", user="alice"))
    scheduler.process("parent:0:0")
    scheduler.launch(*of("alice", 3), session="s-parent:0:0")
    assert scheduler.state.shares.users["alice"].share == 1


def test_bands_go_before_shares_and_children_have_that_of_their_parent() -> None:
    scheduler = cluster(cpu=2)
    scheduler.launch(
        job("parent", user="alice", band=Band.PRODUCTION), job("other", user="alice", band=Band.PRODUCTION)
    )
    scheduler.process("parent:0:0")
    scheduler.launch(job("bob", user="bob"))
    scheduler.launch(job("child", user="alice"), session="s-parent:0:0")
    assert [applicant.id for applicant in in_order(scheduler.state.queue)] == ["child", "bob"]
    scheduler.see("other:0:0", ended())
    assert placed(scheduler) == ["parent", "child"]


def test_what_takes_nothing_is_not_held_back_by_shares() -> None:
    scheduler = cluster(Policy(users={"alice": TenantPolicy(quota=Amounts(cpu_milli=1000), borrow=False)}), cpu=1)
    scheduler.launch(job("task", user="alice"), job("actor", demand(0), user="alice"), job("more", user="alice"))
    assert placed(scheduler) == ["task", "actor"]


# What is remembered


def served(scheduler: Cluster, seconds: float, lasts_s: float, rng: random.Random, **queued: int) -> dict[str, float]:
    """Users always have so many one-CPU tasks waiting; CPU seconds each got."""
    got: Counter[str] = Counter()
    numbers = itertools.count(scheduler.refs * 1_000_000)
    ends: list[tuple[float, str, float]] = []
    known: dict[str, None] = {}
    until = scheduler.now + seconds

    def look() -> None:
        for attempt in scheduler.state.attempts.values():
            if attempt.living and attempt.attempt_id not in known:
                known[attempt.attempt_id] = None
                heapq.heappush(
                    ends, (scheduler.now + lasts_s * rng.uniform(0.5, 1.5), attempt.attempt_id, scheduler.now)
                )

    def fill() -> None:
        waits = Counter(applicant.tenant.user for applicant in scheduler.state.queue)
        for user, count in queued.items():
            if waits[user] < count:
                scheduler.launch(*of(user, 2 * count - waits[user], next(numbers) * 1000))

    fill()
    look()
    while ends and ends[0][0] <= until:
        scheduler.now, attempt_id, began = heapq.heappop(ends)
        got[scheduler.state.jobs[scheduler.state.attempts[attempt_id].job_id].spec.user] += scheduler.now - began  # type: ignore[assignment]
        scheduler.see(attempt_id, ended())
        fill()
        look()
    scheduler.now = until
    return dict(got)


RULES = SchedulerConfig(finished_limit=5, history_limit=5, starve_s=1e9)


def test_users_of_weights_1_and_2_get_a_third_and_two_thirds_under_load() -> None:
    scheduler = cluster(Policy(half_life_s=HOUR, users={"bob": TenantPolicy(weight=2)}), cpu=6, rules=RULES)
    got = served(scheduler, 2 * HOUR, 300.0, random.Random(1), alice=3, bob=3)
    assert got["alice"] / sum(got.values()) == pytest.approx(1 / 3, abs=0.03)


def test_a_newcomer_catches_up_and_long_idleness_gives_no_unbounded_credit() -> None:
    scheduler = cluster(Policy(half_life_s=HOUR), cpu=6, rules=RULES)
    served(scheduler, 4 * HOUR, 300.0, random.Random(2), alice=3)
    first = served(scheduler, HOUR / 2, 300.0, random.Random(3), alice=3, bob=3)
    assert first["bob"] / sum(first.values()) > 0.6  # he goes first until he has caught up
    served(scheduler, 3 * HOUR, 300.0, random.Random(4), alice=3, bob=3)
    later = served(scheduler, HOUR, 300.0, random.Random(5), alice=3, bob=3)
    assert later["bob"] / sum(later.values()) == pytest.approx(0.5, abs=0.07)


def test_a_user_away_for_months_has_the_score_of_a_new_user() -> None:
    scheduler = cluster(Policy(half_life_s=HOUR))
    scheduler.launch(job("a", user="alice"), job("b", user="bob"))
    scheduler.see("a:0:0", ended())
    scheduler.see(
        "b:0:0",
        ended(),
    )
    scheduler.now = 10_000 * HOUR
    scheduler.launch(job("c", user="carol"))
    assert scheduler.state.shares.users.keys() == {"carol"}  # the others are forgotten
    assert set(scheduler.state.usage) == {"user:carol", "tenant:5:carol:ns"}


def test_the_mean_halves_in_a_half_life() -> None:
    scheduler = cluster(Policy(half_life_s=HOUR))
    scheduler.launch(job("a", demand(2), user="alice"))
    scheduler.now = HOUR
    scheduler.see("a:0:0", ended())
    alice = scheduler.state.shares.users["alice"]
    assert (alice.share, alice.mean(HOUR, HOUR)) == (0, pytest.approx(0.25))
    assert alice.mean(3 * HOUR, HOUR) == pytest.approx(0.0625)


def test_past_usage_survives_a_restart() -> None:
    scheduler = cluster(Policy(half_life_s=HOUR))
    scheduler.launch(job("a", demand(2), user="alice"), job("b", demand(1), user="bob"))
    scheduler.now = HOUR
    scheduler.see("a:0:0", ended())
    scheduler.now = 1.5 * HOUR
    before = {user: account.mean(scheduler.now, HOUR) for user, account in scheduler.state.shares.users.items()}
    scheduler.restart(policy=Policy(half_life_s=HOUR))
    after = {user: account.mean(scheduler.now, HOUR) for user, account in scheduler.state.shares.users.items()}
    assert after == pytest.approx(before)
    assert scheduler.state.shares.users["bob"].share == 0.25


def test_only_what_starts_and_ends_writes_rows() -> None:
    scheduler = cluster()
    scheduler.launch(job("a", user="alice"))
    scheduler.state.touch("meta", "meta")
    assert scheduler.state.take_dirty()[0][0][0] == "meta"
    scheduler.run("a:0:0")
    assert ("usage", "user:alice") in scheduler.store
    scheduler.store.clear()
    scheduler.launch(job("b", demand(99), user="alice"))
    assert not [key for table, key in scheduler.store if table == "usage"]


# Quotas


def test_what_is_within_its_quota_goes_before_what_borrows() -> None:
    scheduler = cluster(Policy(users={"alice": TenantPolicy(quota=Amounts(cpu_milli=1000))}), cpu=3)
    scheduler.launch(*of("alice", 1), job("full", demand(2), user="carol"))
    scheduler.launch(*of("alice", 2, 1), *of("bob", 1))
    assert [applicant.id for applicant in in_order(scheduler.state.queue)] == ["bob0", "alice1", "alice2"]
    scheduler.see("full:0:0", ended())
    assert placed(scheduler) == ["alice0", "bob0", "alice1"]


def test_without_borrowing_what_exceeds_the_quota_waits_until_there_is_less() -> None:
    terms = TenantPolicy(quota=Amounts(cpu_milli=2000), borrow=False)
    scheduler = cluster(Policy(users={"alice": terms}), cpu=8)
    scheduler.launch(*of("alice", 4), *of("bob", 2))
    assert running(scheduler) == {"alice": 2, "bob": 2}
    assert scheduler.info("alice2").reason.startswith("over the quota of user alice (2 CPUs in use of 2 CPUs)")
    scheduler.see("alice0:0:0", ended())
    assert running(scheduler) == {"alice": 2, "bob": 2}
    scheduler.tell(PolicyChanged(policy=Policy()))
    assert running(scheduler) == {"alice": 3, "bob": 2}


def test_a_request_beyond_a_quota_is_explained_as_never_startable() -> None:
    terms = TenantPolicy(quota=Amounts(cpu_milli=1000), borrow=False)
    scheduler = cluster(Policy(users={"alice": terms}), cpu=4)
    scheduler.launch(job("wide", demand(2), user="alice"))
    assert scheduler.info("wide").reason.startswith("asks for more than the quota of user alice ever allows (1 CPU)")
    assert "(1 CPU): only another policy would let it start" in explain(scheduler.state, "wide", scheduler.now)


def test_so_much_may_be_borrowed_as_the_policy_says() -> None:
    terms = TenantPolicy(quota=Amounts(cpu_milli=2000), borrow=Amounts(cpu_milli=1000))
    scheduler = cluster(Policy(namespaces={"ns": terms}), cpu=8)
    scheduler.launch(*of("alice", 4), *of("bob", 2))
    assert sum(running(scheduler).values()) == 3


def test_a_quota_of_a_variant_counts_what_was_given_and_all_that_might_be() -> None:
    terms = TenantPolicy(quota=Amounts(devices={"gpu:h100": 1}), borrow=False)
    scheduler = cluster(Policy(users={"alice": terms}), cpu=8, gpu="h100*4,a100*4")
    scheduler.launch(
        job("h", demand(1, gpu=1, variant="h100"), user="alice"),
        job("any", demand(1, gpu=1), user="alice"),
        job("a", demand(1, gpu=1, variant="a100"), user="alice"),
        job("cpu", demand(1), user="alice"),
    )
    assert placed(scheduler) == ["h", "a", "cpu"]


def test_a_smaller_quota_ends_nothing_and_a_breach_is_found() -> None:
    scheduler = cluster(cpu=8)
    scheduler.launch(*of("alice", 4))
    terms = TenantPolicy(quota=Amounts(cpu_milli=1000), borrow=False)
    scheduler.tell(PolicyChanged(policy=Policy(users={"alice": terms})))
    assert running(scheduler) == {"alice": 4}
    scheduler.state.excess_at_policy_change.clear()
    assert "user:alice has 3000 of cpu more than its quota" in " ".join(check(scheduler.state))
    scheduler.state.shares.users["alice"].used[0] = 0
    assert "is charged with" in " ".join(check(scheduler.state))


# The line


def test_the_place_in_the_line_is_by_the_order_of_turns() -> None:
    scheduler = cluster(cpu=4)
    scheduler.launch(*of("alice", 4), *of("bob", 2))
    scheduler.launch(job("late", user="carol", band=Band.PRODUCTION), *of("dave", 1))
    order = [applicant.id for applicant in in_order(scheduler.state.queue)]
    assert order == ["late", "dave0", "alice2", "alice3"] or order[:2] == ["late", "dave0"]
    queue = scheduler.state.queue
    assert [queue.count_ahead(name) for name in order] == list(range(len(order)))


def formula(scheduler: Cluster, user: str) -> float:
    """The score from the rows and the machines alone."""
    state, half_life = scheduler.state, scheduler.state.policy.half_life_s
    whole = [
        sum(n.capacity.cpu_milli for n in state.nodes.values()),
        sum(n.capacity.memory_bytes for n in state.nodes.values()),
    ]
    living = [a for a in state.attempts.values() if a.living and state.jobs[a.job_id].spec.user == user]
    took = [state.demand(state.jobs[a.job_id]) for a in living]
    used = [sum(d.cpu_milli for d in took), sum(d.memory_bytes for d in took)]
    share = max((have / of if of else float(have > 0)) for have, of in zip(used, whole, strict=True))
    row = state.usage.get(f"user:{user}")
    mean = share + (row.mean - share) * 0.5 ** ((state.now - row.at) / half_life) if row else 0.0
    return (share + mean) / state.policy.user(user).weight


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["launch", "launch", "end", "wait", "node", "lose", "stop"]),
        st.integers(0, 3),
        st.integers(0, 5),
        st.sampled_from([1.0, 30.0, 400.0]),
    ),
    max_size=30,
)
POLICY = Policy(
    half_life_s=600.0,
    users={
        "u1": TenantPolicy(weight=2),
        "u2": TenantPolicy(quota=Amounts(cpu_milli=2000, memory_bytes=3 * GB)),
        "u3": TenantPolicy(quota=Amounts(cpu_milli=3000), borrow=False),
    },
)


@settings(max_examples=150, deadline=None)
@example(  # time passes without a step: scores are those of the scheduler's clock
    events=[
        ("launch", 0, 0, 1.0),
        ("launch", 0, 0, 1.0),
        ("launch", 1, 0, 1.0),
        ("launch", 2, 0, 1.0),
        ("wait", 0, 0, 400.0),
        ("node", 1, 0, 1.0),
        ("wait", 0, 0, 400.0),
    ]
)
@given(EVENTS)
def test_order_and_placement_equal_those_of_sorting_everything(events: list) -> None:  # type: ignore[type-arg]
    """`Cluster.overlooked` tries all applicants in order after each event; the order itself is checked here."""
    scheduler = cluster(evolve(POLICY), cpu=4, rules=SchedulerConfig(starve_s=120.0), memory=8 * GB)
    names = itertools.count()
    for what, who, size, wait_s in events:
        scheduler.now += wait_s / 10
        living = [a for a in scheduler.state.attempts.values() if a.living]
        if what == "launch":
            need = demand((size + 1) / 2, memory=(5 - size) * GB // 2)
            band = Band.BATCH if size == 3 else None
            scheduler.launch(
                *(job(f"j{next(names)}", need, user=f"u{who}", band=band, members=1 + (size == 5)) for _ in range(3))
            )
        elif what == "end" and living:
            scheduler.see(living[size % len(living)].attempt_id, ended(EndReason.SUCCEEDED))
        elif what == "wait":
            scheduler.now += wait_s
        elif what == "node":
            scheduler.node(f"n{who}", incarnation=f"i{next(names)}", cpu=2 + size, memory=8 * GB)
        elif what == "lose":
            scheduler.die("n1") if "n1" in scheduler.state.nodes and scheduler.state.on_node["n1"] else None
        elif what == "stop" and scheduler.state.queue:
            scheduler.terminate(list(scheduler.state.queue)[size % len(scheduler.state.queue)].id)
        _check_line(scheduler)


def _check_line(scheduler: Cluster) -> None:
    """Check the order: by band, quota status, score (as old as the scheduler may have it), and acceptance."""
    slack = 2 * RANK_AGE
    keys = []
    for applicant in in_order(scheduler.state.queue):
        user = applicant.tenant.user
        terms, has = POLICY.user(user), scheduler.state.shares.users[user].used
        parts = [(d, p.members) for p in applicant.shape.request.parts for d in p.choices]
        want = [sum(d.cpu_milli * m for d, m in parts), sum(d.memory_bytes * m for d, m in parts)]
        over = terms.quota is not None and any(
            most is not None and need and have + need > most
            for most, need, have in zip((terms.quota.cpu_milli, terms.quota.memory_bytes), want, has, strict=False)
        )
        stands = 0 if not over else 2 if terms.borrow is False else 1
        keys.append((applicant.band.rank, stands, formula(scheduler, user), user, applicant.order))
    for (band, stands, score, user, order), after in itertools.pairwise(keys):
        assert (band, stands) <= after[:2]
        if (band, stands) == after[:2]:
            assert score <= after[2] + slack
            assert user != after[3] or order < after[4]
