"""Who goes first: shares, what is remembered of them, weights, bands and quotas; and that no walk overlooks anybody."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter

import pytest
from attrs import evolve
from hypothesis import given, settings
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
    law = Cluster(rules, policy=policy or Policy())
    law.driver()
    if cpu:
        law.node("n1", cpu=cpu, **what)
    return law


def running(law: Cluster) -> dict[str, int]:
    """CPUs in use, by user."""
    found: Counter[str] = Counter()
    for job_id in placed(law):
        found[law.state.jobs[job_id].spec.user] += 1
    return dict(found)


def of(user: str, count: int, first: int = 0, **more: object) -> list:  # type: ignore[type-arg]
    return [job(f"{user}{number}", user=user, **more) for number in range(first, first + count)]


# Shares


def test_two_with_equal_claims_get_equal_halves_of_a_burst() -> None:
    law = cluster(cpu=8)
    law.launch(*of("alice", 20), *of("bob", 20))
    assert running(law) == {"alice": 4, "bob": 4}


def test_a_weight_of_two_is_twice_as_much() -> None:
    law = cluster(Policy(users={"alice": TenantPolicy(weight=2)}), cpu=9)
    law.launch(*of("bob", 20), *of("alice", 20))
    assert running(law) == {"alice": 6, "bob": 3}


def test_the_share_is_that_of_the_resource_of_which_most_is_taken() -> None:
    """The example of the paper: 9 CPUs, 18 GB; tasks of 1 CPU and 4 GB get three, those of 3 CPUs and 1 GB two."""
    law = cluster(cpu=9, memory=18 * GB)
    law.launch(
        *(job(f"a{n}", demand(1, 4 * GB), user="a") for n in range(9)),
        *(job(f"b{n}", demand(3, GB), user="b") for n in range(9)),
    )
    assert running(law) == {"a": 3, "b": 2}
    shares = law.state.shares.users
    assert (shares["a"].share, shares["b"].share) == (12 / 18, 6 / 9)


def test_the_namespaces_of_a_user_share_what_is_his_by_their_weights() -> None:
    law = cluster(Policy(namespaces={"main": TenantPolicy(weight=3)}), cpu=8)
    law.launch(
        *(job(f"side{n}", user="alice", namespace="side") for n in range(9)),
        *(job(f"main{n}", user="alice", namespace="main") for n in range(9)),
        *of("bob", 9),
    )
    assert running(law) == {"alice": 4, "bob": 4}
    assert Counter(law.state.jobs[name].spec.namespace for name in placed(law)) == {"main": 3, "side": 1, "ns": 4}


def test_of_namespaces_with_equal_scores_the_one_that_waits_longest_goes_first() -> None:
    """Each job of the command line has a namespace of its own: by their names a later one would always pass."""
    law = cluster(cpu=1)
    law.launch(job("running"))
    law.launch(*(job(name, user="alice", namespace=name) for name in ("zebra", "mouse", "ant")))
    assert [applicant.id for applicant in in_order(law.state.queue)] == ["zebra", "mouse", "ant"]
    assert [law.state.queue.count_ahead(name) for name in ("zebra", "mouse", "ant")] == [0, 1, 2]
    law.see("running:0:0", ended())
    assert placed(law) == ["zebra"]


def test_the_children_of_a_job_are_its_users() -> None:
    law = cluster(cpu=4)
    law.launch(job("parent", user="alice"))
    law.process("parent:0:0")
    law.launch(*of("alice", 3), session="s-parent:0:0")
    assert law.state.shares.users["alice"].share == 1


def test_bands_go_before_shares_and_children_have_that_of_their_parent() -> None:
    law = cluster(cpu=2)
    law.launch(job("parent", user="alice", band=Band.PRODUCTION), job("other", user="alice", band=Band.PRODUCTION))
    law.process("parent:0:0")
    law.launch(job("bob", user="bob"))
    law.launch(job("child", user="alice"), session="s-parent:0:0")
    assert [applicant.id for applicant in in_order(law.state.queue)] == ["child", "bob"]
    law.see("other:0:0", ended())
    assert placed(law) == ["parent", "child"]


def test_what_takes_nothing_is_not_held_back_by_shares() -> None:
    law = cluster(Policy(users={"alice": TenantPolicy(quota=Amounts(cpu_milli=1000), borrow=False)}), cpu=1)
    law.launch(job("task", user="alice"), job("actor", demand(0), user="alice"), job("more", user="alice"))
    assert placed(law) == ["task", "actor"]


# What is remembered


def served(law: Cluster, seconds: float, lasts_s: float, rng: random.Random, **queued: int) -> dict[str, float]:
    """Users always have so many one-CPU tasks waiting; CPU seconds each got."""
    got: Counter[str] = Counter()
    numbers = itertools.count(law.refs * 1_000_000)
    ends: list[tuple[float, str, float]] = []
    known: dict[str, None] = {}
    until = law.now + seconds

    def look() -> None:
        for attempt in law.state.attempts.values():
            if attempt.living and attempt.attempt_id not in known:
                known[attempt.attempt_id] = None
                heapq.heappush(ends, (law.now + lasts_s * rng.uniform(0.5, 1.5), attempt.attempt_id, law.now))

    def fill() -> None:
        waits = Counter(applicant.tenant.user for applicant in law.state.queue)
        for user, count in queued.items():
            if waits[user] < count:
                law.launch(*of(user, 2 * count - waits[user], next(numbers) * 1000))

    fill()
    look()
    while ends and ends[0][0] <= until:
        law.now, attempt_id, began = heapq.heappop(ends)
        got[law.state.jobs[law.state.attempts[attempt_id].job_id].spec.user] += law.now - began  # type: ignore[assignment]
        law.see(attempt_id, ended())
        fill()
        look()
    law.now = until
    return dict(got)


RULES = SchedulerConfig(finished_limit=5, history_limit=5, starve_s=1e9)


def test_users_of_weights_1_and_2_get_a_third_and_two_thirds_under_load() -> None:
    law = cluster(Policy(half_life_s=HOUR, users={"bob": TenantPolicy(weight=2)}), cpu=6, rules=RULES)
    got = served(law, 2 * HOUR, 300.0, random.Random(1), alice=3, bob=3)
    assert got["alice"] / sum(got.values()) == pytest.approx(1 / 3, abs=0.03)


def test_a_newcomer_catches_up_and_long_idleness_gives_no_unbounded_credit() -> None:
    law = cluster(Policy(half_life_s=HOUR), cpu=6, rules=RULES)
    served(law, 4 * HOUR, 300.0, random.Random(2), alice=3)
    first = served(law, HOUR / 2, 300.0, random.Random(3), alice=3, bob=3)
    assert first["bob"] / sum(first.values()) > 0.6  # he goes first until he has caught up
    served(law, 3 * HOUR, 300.0, random.Random(4), alice=3, bob=3)
    later = served(law, HOUR, 300.0, random.Random(5), alice=3, bob=3)
    assert later["bob"] / sum(later.values()) == pytest.approx(0.5, abs=0.07)


def test_who_was_away_for_months_is_no_better_off_than_who_just_came() -> None:
    law = cluster(Policy(half_life_s=HOUR))
    law.launch(job("a", user="alice"), job("b", user="bob"))
    law.see("a:0:0", ended())
    law.see(
        "b:0:0",
        ended(),
    )
    law.now = 10_000 * HOUR
    law.launch(job("c", user="carol"))
    assert law.state.shares.users.keys() == {"carol"}  # the others are forgotten
    assert set(law.state.usage) == {"user:carol", "tenant:5:carol:ns"}


def test_the_mean_halves_in_a_half_life() -> None:
    law = cluster(Policy(half_life_s=HOUR))
    law.launch(job("a", demand(2), user="alice"))
    law.now = HOUR
    law.see("a:0:0", ended())
    alice = law.state.shares.users["alice"]
    assert (alice.share, alice.mean(HOUR, HOUR)) == (0, pytest.approx(0.25))
    assert alice.mean(3 * HOUR, HOUR) == pytest.approx(0.0625)


def test_a_restart_forgets_nothing_of_who_had_how_much() -> None:
    law = cluster(Policy(half_life_s=HOUR))
    law.launch(job("a", demand(2), user="alice"), job("b", demand(1), user="bob"))
    law.now = HOUR
    law.see("a:0:0", ended())
    law.now = 1.5 * HOUR
    before = {user: account.mean(law.now, HOUR) for user, account in law.state.shares.users.items()}
    law.restart(policy=Policy(half_life_s=HOUR))
    after = {user: account.mean(law.now, HOUR) for user, account in law.state.shares.users.items()}
    assert after == pytest.approx(before)
    assert law.state.shares.users["bob"].share == 0.25


def test_only_what_starts_and_ends_writes_rows() -> None:
    law = cluster()
    law.launch(job("a", user="alice"))
    law.state.touch("law", "law")
    assert law.state.take_dirty()[0][0][0] == "law"
    law.run("a:0:0")
    assert ("usage", "user:alice") in law.store
    law.store.clear()
    law.launch(job("b", demand(99), user="alice"))
    assert not [key for table, key in law.store if table == "usage"]


# Quotas


def test_what_is_within_its_quota_goes_before_what_borrows() -> None:
    law = cluster(Policy(users={"alice": TenantPolicy(quota=Amounts(cpu_milli=1000))}), cpu=3)
    law.launch(*of("alice", 1), job("full", demand(2), user="carol"))
    law.launch(*of("alice", 2, 1), *of("bob", 1))
    assert [applicant.id for applicant in in_order(law.state.queue)] == ["bob0", "alice1", "alice2"]
    law.see("full:0:0", ended())
    assert placed(law) == ["alice0", "bob0", "alice1"]


def test_without_borrowing_what_exceeds_the_quota_waits_until_there_is_less() -> None:
    terms = TenantPolicy(quota=Amounts(cpu_milli=2000), borrow=False)
    law = cluster(Policy(users={"alice": terms}), cpu=8)
    law.launch(*of("alice", 4), *of("bob", 2))
    assert running(law) == {"alice": 2, "bob": 2}
    assert law.info("alice2").reason.startswith("over the quota of user alice (2 CPUs in use of 2 CPUs)")
    law.see("alice0:0:0", ended())
    assert running(law) == {"alice": 2, "bob": 2}
    law.tell(PolicyChanged(policy=Policy()))
    assert running(law) == {"alice": 3, "bob": 2}


def test_what_is_more_than_a_quota_ever_allows_is_told_that_no_end_of_anything_would_help() -> None:
    terms = TenantPolicy(quota=Amounts(cpu_milli=1000), borrow=False)
    law = cluster(Policy(users={"alice": terms}), cpu=4)
    law.launch(job("wide", demand(2), user="alice"))
    assert law.info("wide").reason.startswith("asks for more than the quota of user alice ever allows (1 CPU)")
    assert "(1 CPU): only another policy would let it start" in explain(law.state, "wide", law.now)


def test_so_much_may_be_borrowed_as_the_policy_says() -> None:
    terms = TenantPolicy(quota=Amounts(cpu_milli=2000), borrow=Amounts(cpu_milli=1000))
    law = cluster(Policy(namespaces={"ns": terms}), cpu=8)
    law.launch(*of("alice", 4), *of("bob", 2))
    assert sum(running(law).values()) == 3


def test_a_quota_of_a_variant_counts_what_was_given_and_all_that_might_be() -> None:
    terms = TenantPolicy(quota=Amounts(devices={"gpu:h100": 1}), borrow=False)
    law = cluster(Policy(users={"alice": terms}), cpu=8, gpu="h100*4,a100*4")
    law.launch(
        job("h", demand(1, gpu=1, variant="h100"), user="alice"),
        job("any", demand(1, gpu=1), user="alice"),
        job("a", demand(1, gpu=1, variant="a100"), user="alice"),
        job("cpu", demand(1), user="alice"),
    )
    assert placed(law) == ["h", "a", "cpu"]


def test_a_smaller_quota_takes_nothing_away_and_a_broken_one_is_found() -> None:
    law = cluster(cpu=8)
    law.launch(*of("alice", 4))
    terms = TenantPolicy(quota=Amounts(cpu_milli=1000), borrow=False)
    law.tell(PolicyChanged(policy=Policy(users={"alice": terms})))
    assert running(law) == {"alice": 4}
    law.state.excess_at_policy_change.clear()
    assert "user:alice has 3000 of cpu more than its quota" in " ".join(check(law.state))
    law.state.shares.users["alice"].used[0] = 0
    assert "is charged with" in " ".join(check(law.state))


# The line


def test_the_place_in_the_line_is_by_the_order_of_turns() -> None:
    law = cluster(cpu=4)
    law.launch(*of("alice", 4), *of("bob", 2))
    law.launch(job("late", user="carol", band=Band.PRODUCTION), *of("dave", 1))
    order = [applicant.id for applicant in in_order(law.state.queue)]
    assert order == ["late", "dave0", "alice2", "alice3"] or order[:2] == ["late", "dave0"]
    queue = law.state.queue
    assert [queue.count_ahead(name) for name in order] == list(range(len(order)))


def formula(law: Cluster, user: str) -> float:
    """The score from the rows and the machines alone."""
    state, half_life = law.state, law.state.policy.half_life_s
    whole = [
        sum(n.capacity.cpu_milli for n in state.nodes.values()),
        sum(n.capacity.memory_bytes for n in state.nodes.values()),
    ]
    living = [a for a in state.attempts.values() if a.living and state.jobs[a.job_id].spec.user == user]
    took = [state.demand(state.jobs[a.job_id]) for a in living]
    used = [sum(d.cpu_milli for d in took), sum(d.memory_bytes for d in took)]
    share = max((have / of if of else float(have > 0)) for have, of in zip(used, whole, strict=True))
    row = state.usage.get(f"user:{user}")
    mean = share + (row.mean - share) * 0.5 ** ((law.now - row.at) / half_life) if row else 0.0
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
@given(EVENTS)
def test_order_and_placement_are_those_of_a_twin_that_sorts_everything(events: list) -> None:  # type: ignore[type-arg]
    """After each event `Cluster.overlooked` tries all that waits in the order of the line; that is checked here."""
    law = cluster(evolve(POLICY), cpu=4, rules=SchedulerConfig(starve_s=120.0), memory=8 * GB)
    names = itertools.count()
    for what, who, size, wait_s in events:
        law.now += wait_s / 10
        living = [a for a in law.state.attempts.values() if a.living]
        if what == "launch":
            need = demand((size + 1) / 2, memory=(5 - size) * GB // 2)
            band = Band.BATCH if size == 3 else None
            law.launch(
                *(job(f"j{next(names)}", need, user=f"u{who}", band=band, members=1 + (size == 5)) for _ in range(3))
            )
        elif what == "end" and living:
            law.see(living[size % len(living)].attempt_id, ended(EndReason.SUCCEEDED))
        elif what == "wait":
            law.now += wait_s
        elif what == "node":
            law.node(f"n{who}", incarnation=f"i{next(names)}", cpu=2 + size, memory=8 * GB)
        elif what == "lose":
            law.die("n1") if "n1" in law.state.nodes and law.state.on_node["n1"] else None
        elif what == "stop" and law.state.queue:
            law.terminate(list(law.state.queue)[size % len(law.state.queue)].id)
        _check_line(law)


def _check_line(law: Cluster) -> None:
    """By band, standing, the formula (as old as the law may have it), and acceptance."""
    slack = 2 * RANK_AGE
    keys = []
    for applicant in in_order(law.state.queue):
        user = applicant.tenant.user
        terms, has = POLICY.user(user), law.state.shares.users[user].used
        parts = [(d, p.members) for p in applicant.shape.request.parts for d in p.choices]
        want = [sum(d.cpu_milli * m for d, m in parts), sum(d.memory_bytes * m for d, m in parts)]
        over = terms.quota is not None and any(
            most is not None and need and have + need > most
            for most, need, have in zip((terms.quota.cpu_milli, terms.quota.memory_bytes), want, has, strict=False)
        )
        stands = 0 if not over else 2 if terms.borrow is False else 1
        keys.append((applicant.band.rank, stands, formula(law, user), user, applicant.order))
    for (band, stands, score, user, order), after in itertools.pairwise(keys):
        assert (band, stands) <= after[:2]
        if (band, stands) == after[:2]:
            assert score <= after[2] + slack
            assert user != after[3] or order < after[4]
