"""Scenarios as text files: ``python -m tests.simulation --shrink FILE`` writes one, ``--scenario FILE`` runs it again.

One line for each act, fault and machine, to be read by people. Each line ends with a checksum of the file up to it, so
that a file that was edited is refused with the line: what it says then was never seen to happen.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from attrs import frozen

from fray.model.messages.session import VERSION
from fray.model.policy.policy import TenantPolicy
from fray.model.resources import Capacity
from fray.net.codec import from_json, to_json
from tests.simulation.scenario_plans import PlannedAct, PlannedFault, ScenarioPlan

TITLE = "fray scenario 1"
_FLAGS = ("declares", "on_disk", "cloud", "slices")


class BadScenarioFile(Exception):
    """A scenario file cannot be read."""


@frozen
class RecordedScenario:
    """A scenario, and what it was seen to do."""

    seed: int
    plan: ScenarioPlan
    expects: str
    """Kind of the violation (`tests.simulation.shrink.kind_of`)."""
    digest: str
    """Digest of its trace."""
    version: str = VERSION
    """Version of Fray that ran it."""


def write(scenario: RecordedScenario) -> str:
    """Return the text of a scenario file."""
    checksum, lines = 0, []
    for line in (*_lines(scenario), "end"):
        checksum = zlib.crc32(line.encode(), checksum)
        lines.append(f"{line}  #{checksum:08x}\n")
    return "".join(lines)


def _lines(scenario: RecordedScenario) -> Iterator[str]:
    plan = scenario.plan
    yield TITLE
    yield f"version {scenario.version}"
    yield f"seed {scenario.seed}"
    yield f"expects {scenario.expects}"
    yield f"trace {scenario.digest}"
    yield f"drivers {plan.drivers}"
    yield f"flags {' '.join(flag for flag in _FLAGS if getattr(plan, flag))}"
    for machine in plan.machines:
        yield f"machine {to_json(machine)}"
    for user, terms in plan.terms.items():
        yield f"terms {json.dumps(user)} {to_json(terms)}"
    for act in plan.acts:
        yield f"act {act.number} at {act.at_s} of {act.driver}: {act.kind}"
    for fault in plan.faults:
        yield f"fault {fault.number} at {fault.at_s} for {fault.span_s}: {fault.kind}"


def read(text: str) -> RecordedScenario:
    """Return the scenario of a file.

    Raises:
        BadScenarioFile: the text has another format, or was edited; the message says the line.
    """
    words: dict[str, list[str]] = {}
    for line in _checked(text.splitlines()):
        what, _, rest = line.partition(" ")
        words.setdefault(what, []).append(rest)
    plan = ScenarioPlan(
        machines=tuple(from_json(Capacity, each) for each in words.get("machine", [])),
        drivers=int(words["drivers"][0]),
        acts=tuple(map(_act, words.get("act", []))),
        faults=tuple(map(_fault, words.get("fault", []))),
        terms=dict(map(_terms, words.get("terms", []))),
        **_flags(words["flags"][0]),
    )
    return RecordedScenario(
        int(words["seed"][0]), plan, words["expects"][0], words["trace"][0], version=words["version"][0]
    )


def _checked(lines: Sequence[str]) -> Iterator[str]:
    """Yield the lines without their checksums."""
    checksum = 0
    line = ""
    for number, written in enumerate(lines, start=1):
        line, _, given = written.rpartition("  #")
        checksum = zlib.crc32(line.encode(), checksum)
        if number == 1 and line != TITLE:
            raise BadScenarioFile(f"line 1 is {written[:60]!r} and not {TITLE!r}, with which scenario files begin")
        if given != f"{checksum:08x}":
            raise BadScenarioFile(f"line {number} was edited, or one before it removed: {written[:120]!r}")
        yield line
    if line != "end":
        raise BadScenarioFile(f"the file ends after line {len(lines)}, without its end")


def _flags(text: str) -> dict[str, bool]:
    given = text.split()
    return {flag: flag in given for flag in _FLAGS}


def _act(text: str) -> PlannedAct:
    place, _, kind = text.partition(": ")
    number, _, at_s, _, driver = place.split()
    return PlannedAct(float(at_s), int(driver), kind, int(number))


def _fault(text: str) -> PlannedFault:
    place, _, kind = text.partition(": ")
    number, _, at_s, _, span_s = place.split()
    return PlannedFault(float(at_s), kind, float(span_s), int(number))


def _terms(text: str) -> tuple[str, Any]:
    user, _, terms = text.partition(" ")
    return json.loads(user), from_json(TenantPolicy, terms)
