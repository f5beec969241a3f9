"""Fuzzers of handshakes, frames, messages and bundles, and the examples that are kept of them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from fray.errors import InvalidRequest
from tests.fuzz.corpus_file import add_example, read_examples
from tests.fuzz.fuzzing import LIVE, fuzz
from tests.fuzz.mutation import mutate, mutate_json
from tests.fuzz.targets import TARGETS, build_bundle

SECONDS = 10.0


@pytest.mark.parametrize("name", TARGETS)
def test_valid_and_kept_examples_are_read_or_refused(name: str) -> None:
    found = fuzz(name, 0.0, 1)
    assert not found.broken
    assert found.tried == len([*TARGETS[name].seeds(), *read_examples(name)]) > 0


@pytest.mark.full
@pytest.mark.parametrize("name", TARGETS)
def test_changed_examples_are_read_or_refused(name: str, pytestconfig: pytest.Config, tmp_path: Path) -> None:
    seed = int(pytestconfig.getoption("hypothesis_seed"))
    found = fuzz(name, SECONDS, seed)
    assert not found.broken, f"seed {seed}; add them with python -m tests.fuzz"
    assert len(found.outcomes) > 5, "the examples were all refused for one reason"


@pytest.mark.full
@pytest.mark.parametrize("name", LIVE)
def test_a_living_program_withstands_changed_examples(name: str, pytestconfig: pytest.Config) -> None:
    seed = int(pytestconfig.getoption("hypothesis_seed"))
    tried, broken = LIVE[name](SECONDS, seed)
    assert not broken, f"seed {seed}"
    assert tried > 100


def test_a_fuzzer_reports_an_error_that_is_not_a_refusal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(data: bytes) -> str:
        if data.startswith(b"no"):
            raise InvalidRequest("refused")
        return f"item {[1, 2][len(data) % 3]}"

    from attrs import evolve

    from tests.fuzz import targets

    target = evolve(TARGETS["frames"], run=run, seeds=lambda: [b"abc"])
    monkeypatch.setitem(targets.TARGETS, "frames", target)
    found = fuzz("frames", 0.2, 1, tmp_path)
    assert any("IndexError in run" in why for why in found.broken.values())
    for data, why in found.broken.items():
        add_example("frames", data, why, tmp_path)
    assert read_examples("frames", tmp_path) == list(found.broken)


def test_the_same_seed_changes_in_the_same_way() -> None:
    for change, data in ((mutate, b"some bytes"), (mutate_json, b'{"a": [1, {"b": "text"}]}')):
        first, second = ([change(data, [data], random.Random(seed)) for seed in range(50)] for _ in range(2))
        assert first == second
        assert len(set(first)) > 20


def test_no_chain_of_links_leads_out_of_a_workspace() -> None:
    build_bundle(b'{"files": [["b", "l", "p/q/a/../.."], ["p/q/a", "l", "../../top"], ["top/f", "f", "text"]]}')
