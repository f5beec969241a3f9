"""Checks of a history against small models: names, counters, effects of calls, attempts of jobs, ends of what was lost.

Each violation is a sentence with the two records that contradict one another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations

from attrs import evolve

from bench.histories.orders import CounterModel, Model, NameModel, first_impossible, holder_of
from bench.histories.records import Kind, Operation, Outcome

COUNTING = (Kind.INCREMENT, Kind.READ)
NAMING = (Kind.CLAIM, Kind.RELEASE, Kind.LOOKUP)


def violations(history: Sequence[Operation]) -> list[str]:
    """Return each contradiction between the history and what Fray promises, as a sentence."""
    return [*names(history), *counters(history), *effects(history), *attempts(history), *ends(history)]


def names(history: Sequence[Operation]) -> Iterator[str]:
    """Check that a name has one actor at most, that a lookup finds it, and that it is free once its owner is lost."""
    lost = {one.process: one for one in history if one.kind is Kind.LOST_OWNER}
    for name, found in _by_key(history, NAMING).items():
        released = {one.value for one in found if one.kind is Kind.RELEASE}
        whole = [_bounded(one, lost) if one.kind is Kind.RELEASE else one for one in found]
        for claim in (one for one in found if one.kind is Kind.CLAIM and one.value not in released):
            release = Operation(claim.process, Kind.RELEASE, name, claim.begin)
            if claim.outcome is Outcome.UNKNOWN:
                whole.append(evolve(release, value=holder_of(claim)))
            elif claim.value and claim.process in lost:
                end = lost[claim.process]
                whole.append(_bounded(evolve(release, begin=end.begin, value=claim.value), lost))
        ids = [one.value for one in found if one.kind is Kind.CLAIM and one.value]
        yield from _unexplained(f"name {name}", whole, NameModel(ids))


def counters(history: Sequence[Operation]) -> Iterator[str]:
    """Check that each increment of a counter took effect once, in an order that explains what all saw."""
    for counter, found in _by_key(history, COUNTING).items():
        yield from _unexplained(f"counter {counter}", found, CounterModel())


def effects(history: Sequence[Operation]) -> Iterator[str]:
    """Check that a call has one effect at most, one if it was answered, and none if it failed without one.

    One that may be repeated has one at least if it was answered. An effect comes after the begin of its call, and, if
    the call was answered, one comes before its end.
    """
    calls = {one.key: one for one in history if one.kind in (Kind.CALL, Kind.REPEATABLE_CALL)}
    for key, found in _by_key(history, (Kind.EFFECT,)).items():
        call = calls.pop(key, None)
        if call is None:
            yield f"an effect without a call: {found[0]}"
            continue
        first = min(found, key=lambda one: one.begin)
        if call.kind is Kind.CALL and len(found) > 1:
            yield f"a call took effect {len(found)} times: {found[0]}; {found[1]}"
        if call.outcome is Outcome.ERROR:
            yield f"a call failed as one without an effect, and has one: {call}; {first}"
        if first.begin < call.begin:
            yield f"an effect comes before its call: {first}; {call}"
        if call.outcome is Outcome.VALUE and call.end is not None and first.begin > call.end:
            yield f"an effect comes after the answer to its call: {call}; {first}"
    for call in calls.values():
        if call.outcome is Outcome.VALUE:
            yield f"a call was answered without an effect: {call}"


def attempts(history: Sequence[Operation]) -> Iterator[str]:
    """Check that an attempt begins once, that two generations of a job never run at once, and that all members of a job
    that succeeded were done in one generation, together."""
    launches = {one.key: one for one in history if one.kind is Kind.LAUNCH}
    runs = _by_key(history, (Kind.RUN,))
    for job, found in runs.items():
        for one, other in combinations(sorted(found, key=lambda run: run.begin), 2):
            if one.process == other.process:
                yield f"an attempt of {job} began twice: {one}; {other}"
            elif generation_of(one) != generation_of(other) and other.begin < _last_sign(one):
                yield f"two generations of {job} ran at once: {one}; {other}"
    for job, launch in launches.items():
        if launch.outcome is Outcome.VALUE:
            yield from _incomplete(launch, runs.get(job, []))


def _incomplete(launch: Operation, runs: Iterable[Operation]) -> Iterator[str]:
    """Yield why a job that succeeded did not run as a whole."""
    done: dict[str, dict[str, Operation]] = defaultdict(dict)
    for run in runs:
        if run.outcome is Outcome.VALUE and run.begin >= launch.begin and _last_sign(run) <= (launch.end or 0.0):
            done[generation_of(run)][run.process] = run
    whole = [list(members.values()) for members in done.values() if len(members) == launch.value]
    if not whole:
        yield f"a job succeeded of which no generation has {launch.value} members that were done: {launch}"
        return
    latest, first_gone = max(whole[-1], key=lambda run: run.begin), min(whole[-1], key=_last_sign)
    if latest.begin > _last_sign(first_gone):
        yield f"members of a gang did not run together: {first_gone}; {latest}"


def ends(history: Sequence[Operation]) -> Iterator[str]:
    """Check that nothing runs longer than allowed after its owner or its machine was lost."""
    lost: dict[str, list[Operation]] = defaultdict(list)
    for one in history:
        if one.kind in (Kind.LOST_OWNER, Kind.LOST_MACHINE):
            lost[one.process].append(one)
    for run in (one for one in history if one.kind is Kind.RUN):
        for end in (*lost[run.owner], *lost[run.machine]):
            is_new = end.kind is Kind.LOST_MACHINE and run.begin >= end.begin
            if end.end is not None and _last_sign(run) > end.end and not is_new:
                yield f"a run outlived what was lost: {end}; {run}"


def generation_of(run: Operation) -> str:
    """Return the generation of an attempt, whose id is ``job:generation:member``."""
    return run.process.rsplit(":", 2)[1]


def _last_sign(run: Operation) -> float:
    return run.begin if run.end is None else run.end


def _bounded(release: Operation, lost: dict[str, Operation]) -> Operation:
    """Return a release, with the moment by which it has ended, if its process was lost before it did."""
    if release.outcome is Outcome.VALUE or release.process not in lost:
        return release
    return evolve(release, end=lost[release.process].end, outcome=Outcome.VALUE)


def _by_key(history: Iterable[Operation], kinds: Sequence[Kind]) -> dict[str, list[Operation]]:
    found: dict[str, list[Operation]] = defaultdict(list)
    for one in history:
        if one.kind in kinds:
            found[one.key].append(one)
    return found


def _unexplained(what: str, found: Sequence[Operation], model: Model) -> Iterator[str]:
    broken = first_impossible(found, model)
    if broken is not None:
        after = "the first one" if broken[1] is None else f"after {broken[1]}"
        yield f"{what}: no order explains {broken[0]}; {after}"
