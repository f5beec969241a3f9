"""The corpus example: its pure parts, its merger under repetition and disorder, and the whole of it."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import textwrap
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import corpus
import corpus_screen
import corpus_text


def functions(source: str) -> dict[str, str]:
    found, _, _ = corpus_text.read_functions(textwrap.dedent(source).encode())
    return {one.name: " ".join(one.raw).replace("\n", ";").replace("\t", "{").replace("\b", "}") for one in found}


# Text to functions ---------------------------------------------------------------------------------------------------


def test_a_nested_function_keeps_its_tokens_to_itself() -> None:
    assert functions("""
        def outer(x):
            def inner(): return x  # a comment
            return inner
        x = 1
    """) == {"outer": "def outer ( x ) : ; { def return inner ;", "inner": "def inner ( ) : return x ;"}


def test_methods_and_async_functions_are_found_and_end_with_their_block() -> None:
    assert functions("""
        class C:
            async def f(self, a={'k': lambda: 1}):
                if a:
                    pass

            y = 2
            def g(self): ...
        z = 3
    """) == {
        "f": "def f ( self , a = { 'k' : lambda : 1 } ) : ; { if a : ; { pass ; }",
        "g": "def g ( self ) : ... ;",
    }


def test_comments_and_layout_make_no_other_function_and_literals_only_a_near_one() -> None:
    (one,) = corpus_text.read_functions(b"def f(a):\n    return a + 1, 'x'\n")[0]
    (same,) = corpus_text.read_functions(b"\n\ndef f( a ):  # why\n\n  return a+1, 'x'\n")[0]
    (near,) = corpus_text.read_functions(b"def f(a):\n    return a + 2, 'y'\n")[0]
    assert one.digest() == same.digest() != near.digest()
    assert one.shingles() == near.shingles()


def test_a_file_that_is_no_python_is_counted_and_reported(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("x = (\n")
    tally = corpus_text.Tally()
    assert tally.read(str(tmp_path), "bad.py") == []
    assert tally.counts["files"] == 1
    assert [file for file, _ in tally.unreadable] == ["bad.py"]


def test_packed_shingles_do_not_depend_on_what_was_packed_before() -> None:
    (one,) = corpus_text.read_functions(b"def f(a):\n    return a + 1\n")[0]
    used = {"other": 1, "words": 2}
    assert corpus_text.packed(one.shingles(), {}) == corpus_text.packed(one.shingles(), used)
    assert len(corpus_text.unpacked(corpus_text.packed(one.shingles(), {}))) == len(one.shingles())


# Sets to pairs -------------------------------------------------------------------------------------------------------

small_sets = st.lists(st.frozensets(st.integers(0, 12), min_size=1, max_size=10), max_size=14)


@given(small_sets)
def test_the_prefix_filter_finds_exactly_the_pairs_that_brute_force_finds(sets: list[frozenset[int]]) -> None:
    keyed = dict(enumerate(sets))
    brute = {
        (i, j) for i in keyed for j in keyed if i < j and len(keyed[i] & keyed[j]) / len(keyed[i] | keyed[j]) >= 0.8
    }
    assert set(corpus_text.near_pairs(keyed)) == brute == corpus_text.sampled_pairs(keyed, 0, keyed)


@given(small_sets)
def test_bands_find_together_what_one_search_finds(sets: list[frozenset[int]]) -> None:
    merger = corpus.Merger()
    rows = [(bytes([n]), 40, ("file", n, "f"), array("q", sorted(one)).tobytes()) for n, one in enumerate(sets)]
    merger.add("shard 0", ("w", 1, "m"), corpus_text.Tally(), rows)
    pairs = [pair for band in merger.plan() for pair in corpus.search_band(merger.band(*band), band[0])[0]]
    assert sorted(pairs) == corpus_text.near_pairs(dict(enumerate(sets)))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)).filter(lambda pair: pair[0] != pair[1])))
def test_clusters_are_what_pairs_connect(pairs: list[tuple[int, int]]) -> None:
    clusters = corpus_text.clusters_of(pairs)
    place = {key: number for number, cluster in enumerate(clusters) for key in cluster}
    assert sorted(place) == sorted({key for pair in pairs for key in pair})
    assert all(place[one] == place[other] for one, other in pairs)
    assert clusters == corpus_text.clusters_of(random.Random(1).sample(pairs, len(pairs)))


# The merger ----------------------------------------------------------------------------------------------------------


class Nearby:
    """A merger without a cluster: the same calls, awaited."""

    def __init__(self, merger: corpus.Merger) -> None:
        self.merger = merger

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any) -> Any:
            await trio.lowlevel.checkpoint()
            return getattr(self.merger, name)(*args)

        return call


@pytest.fixture
def sources(tmp_path: Path) -> tuple[str, list[str]]:
    """Twelve files of the standard library and two that are nearly one of them."""
    root, files = corpus.library_files(12)
    for number, file in enumerate(files):
        (tmp_path / f"m{number:02}.py").write_bytes((Path(root) / file).read_bytes())
    text = (Path(root) / "textwrap.py").read_text()
    (tmp_path / "same.py").write_text("# moved\n" + text)
    (tmp_path / "near.py").write_text(text.replace("self.width", "self.size"))
    (tmp_path / "text.py").write_text(text)
    return str(tmp_path), sorted(path.name for path in tmp_path.glob("*.py"))


async def distributed(root: str, files: list[str], order: Iterable[int], merger: Nearby) -> dict[str, Any]:
    shards = [files[n : n + 3] for n in range(0, len(files), 3)]
    for n in order:
        if n < len(shards):
            await corpus.process_shard(n, root, shards[n], merger)
    bands = await merger.plan()
    for n in [0, *reversed(range(len(bands)))]:
        await corpus.process_band(n, *bands[n], merger)
    return (await merger.result())[0]


async def test_disorder_and_repetition_of_shards_change_nothing(sources: tuple[str, list[str]]) -> None:
    plain = corpus_text.plain_result(*sources)
    assert plain["exact"]
    assert plain["near"]
    merger = Nearby(corpus.Merger())
    assert corpus_screen.differences(await distributed(*sources, [4, 0, 3, 2, 4, 1, 0], merger), plain) == []
    _, sample = await merger.result()
    assert sample["missed"] == sample["wrong"] == 0


async def test_a_lost_shard_is_seen_in_the_comparison(sources: tuple[str, list[str]]) -> None:
    found = await distributed(*sources, [0, 1, 2, 3], Nearby(corpus.Merger()))
    assert any(
        line.startswith("result.counts.files is 12")
        for line in corpus_screen.differences(found, corpus_text.plain_result(*sources))
    )


def test_what_a_killed_worker_had_begun_is_told_as_done_again() -> None:
    killing = corpus.Killing()
    killing.victim, killing.task = ("w-0", 10, "m"), "shard 3"
    begun = [("shard 2", ("w-0", 10, "m")), ("shard 3", ("w-0", 10, "m")), ("shard 3", ("w-1", 11, "m"))]
    done = {"shard 2": ("w-0", 10, "m"), "shard 3": ("w-1", 11, "m")}
    assert killing.story(begun, done) == {
        "worker": "w-0",
        "pid": 10,
        "task": "shard 3",
        "done_again": {"shard 3": "w-1 (pid 11)"},
    }


# The whole of it -----------------------------------------------------------------------------------------------------

EXAMPLE = Path(corpus.__file__)


def run_example(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLE), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)


def test_it_runs_in_one_process_and_its_result_is_that_of_plain_code() -> None:
    done = run_example("--cluster", "local", "--limit", "40", "--check")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("the same\n")


def test_a_killed_worker_changes_nothing_and_is_told_of(tmp_path: Path) -> None:
    done = run_example("--limit", "200", "--check", "--kill-worker", "--json", str(tmp_path / "report.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["killed"]["task"] in report["killed"]["done_again"]
    assert report["result"]["counts"]["files"] == 200
    assert f"(pid {report['killed']['pid']}) by SIGKILL" in done.stdout


def test_ctrl_c_ends_it_with_one_line() -> None:
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLE)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    next(line for line in process.stderr if "tokenize" in line)
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=60)
    assert process.returncode == 130
    assert rest.splitlines()[-1].startswith("corpus: interrupted")
    assert "Traceback" not in rest


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--cluster", "nonsense"], "is no cluster: write"),
        (["--cluster", "fray+unix:///nowhere/at/all"], "wants a token: set FRAY_TOKEN"),
        (["--workers", "0"], "--workers must be 1 or more"),
        (["--cluster", "local", "--kill-worker"], "--kill-worker needs workers that are processes"),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_status_2(arguments: list[str], says: str) -> None:
    done = run_example("--limit", "5", *arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
