"""Line in which the process of an actor reports its calls: read back as written, and bounded."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fray.model.monitoring.progress_protocol import LINE_LIMIT_BYTES, format_line, parse
from fray.model.monitoring.served_calls import (
    ACTORS_LIMIT,
    CALLERS_LIMIT,
    ActorCalls,
    ActorMetrics,
    CallingProcess,
    ServedCalls,
    from_text,
)

COUNTS = st.integers(0, 1 << 40)
NAMES = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=80)


def buckets_of(first: int, counts: list[int]) -> tuple[int, ...]:
    return (*(0,) * first, *counts, 1)


METRICS = st.builds(
    ActorMetrics,
    calls=COUNTS,
    errors=COUNTS,
    cancelled=COUNTS,
    running=COUNTS,
    queued=COUNTS,
    latency_buckets=st.builds(buckets_of, st.integers(0, 30), st.lists(COUNTS, max_size=20)),
)
ACTORS = st.lists(st.builds(ActorCalls, actor_id=NAMES, name=NAMES, metrics=METRICS), max_size=ACTORS_LIMIT)
CALLERS = st.lists(st.builds(CallingProcess, incarnation=NAMES, calls=COUNTS, running=COUNTS), max_size=CALLERS_LIMIT)


@given(ACTORS, CALLERS)
def test_a_report_is_read_as_written_as_far_as_it_fits_a_line(
    actors: list[ActorCalls], callers: list[CallingProcess]
) -> None:
    line = format_line(ServedCalls(actors=tuple(actors), callers=tuple(callers)))
    assert len(line) <= LINE_LIMIT_BYTES
    found = parse(line)
    assert isinstance(found, ServedCalls)
    assert found.actors == tuple(actors[: len(found.actors)])
    assert found.callers == tuple(callers[: len(found.callers)])
    assert (len(found.actors) + found.more_actors, len(found.callers) + found.more_callers) == (
        len(actors),
        len(callers),
    )


def test_a_usual_report_fits_as_a_whole() -> None:
    metrics = ActorMetrics(
        calls=9**9, errors=9, cancelled=9, running=9, queued=9, latency_buckets=(0,) * 8 + (9**6,) * 9
    )
    actor = ActorCalls(actor_id="policy/server-1-abcdefghij", name="policy/server-1", metrics=metrics)
    callers = [
        CallingProcess(incarnation=f"rollout-{number}-abcdefghij:0:0", calls=9**9, running=9) for number in range(20)
    ]
    found = parse(format_line(ServedCalls(actors=(actor,) * 10, callers=tuple(callers))))
    assert isinstance(found, ServedCalls)
    assert (found.more_actors, found.more_callers) == (0, 0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[[],0,[]]",
        '[[["id","name",1,2,3]],0,[],0]',
        '[[["id","name",1,2,3,4,5,60,1,2,3,4,5]],0,[],0]',
        '[[["id","name",-1,2,3,4,5,0]],0,[],0]',
        '[[["id","name\\u001b[2J",1,2,3,4,5,0]],0,[],0]',
        '[[],0,[["caller",1.5,0]],0]',
        "[[],true,[],0]",
        "[" * 3_000,
    ],
)
def test_what_a_job_writes_by_mistake_is_no_report(text: str) -> None:
    assert from_text(text) is None
    assert parse(f"calls {text}".encode()) is None


def test_more_than_the_limits_is_not_read() -> None:
    caller, actor = ["caller", 1, 0], ["id", "name", 1, 2, 3, 4, 5, 0]
    found = from_text(json.dumps([[actor] * 100, 0, [caller] * 100, 0]))
    assert found is not None
    assert (len(found.actors), len(found.callers)) == (ACTORS_LIMIT, CALLERS_LIMIT)
