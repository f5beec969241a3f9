"""Corpus example: its pure parts, its merger under repetition and disorder, and complete runs."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
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


def test_tokens_of_a_nested_function_belong_to_it_only() -> None:
    assert functions("""
        def outer(x):
            def inner(): return x  # a comment
            return inner
        x = 1
    """) == {"outer": "def outer ( x ) : ; { def return inner ;", "inner": "def inner ( ) : return x ;"}


def test_methods_and_async_functions_end_with_their_block() -> None:
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


def test_functions_that_differ_in_comments_are_copies_and_in_literals_near_copies() -> None:
    (one,) = corpus_text.read_functions(b"def f(a):\n    return a + 1, 'x'\n")[0]
    (same,) = corpus_text.read_functions(b"\n\ndef f( a ):  # why\n\n  return a+1, 'x'\n")[0]
    (near,) = corpus_text.read_functions(b"def f(a):\n    return a + 2, 'y'\n")[0]
    assert one.digest() == same.digest() != near.digest()
    assert one.shingles() == near.shingles()


def test_an_invalid_python_file_is_counted_and_reported(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("x = (\n")
    tally = corpus_text.Tally()
    assert tally.read(str(tmp_path), "bad.py") == []
    assert tally.counts["files"] == 1
    assert [file for file, _ in tally.unreadable] == ["bad.py"]


def shingles_of_words(words: list[str]) -> set[tuple[str, ...]]:
    """Return the shingles themselves: the slow twin of `corpus_text.Function.shingles`."""
    return {tuple(words[n : n + 5]) for n in range(len(words) - 4)}


def test_shingles_are_equal_in_every_process() -> None:
    program = """
import corpus_text
(one,) = corpus_text.read_functions(b"def f(a): return a + 1")[0]
print(*one.shingles())
"""
    printed = {
        subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            cwd=EXAMPLE.parent,
            env=os.environ | {"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(printed) == 1
    assert len(printed.pop().split()) == len(["def", "f", "(", "a", ")", ":", "return", "a", "+", "1", ";"]) - 4


def test_hashes_of_shingles_find_the_pairs_of_the_words_themselves() -> None:
    root, files = corpus.library_files(40)
    found = [
        one
        for file in files
        for one in corpus_text.read_functions((Path(root) / file).read_bytes())[0]
        if len(one.raw) >= corpus_text.MIN_TOKENS
    ]
    words = [shingles_of_words(one.normal) for one in found]
    assert [len(one.shingles()) for one in found] == [len(one) for one in words]
    pairs = [
        (i, j)
        for i, j in itertools.combinations(range(len(found)), 2)
        if 5 * len(words[i] & words[j]) >= 4 * len(words[i] | words[j])
    ]
    assert pairs
    assert corpus_text.near_pairs({key: one.shingles() for key, one in enumerate(found)}) == pairs


# Sets to pairs -------------------------------------------------------------------------------------------------------

small_sets = st.lists(st.frozensets(st.integers(0, 12), min_size=1, max_size=10), max_size=14)


@given(small_sets)
def test_the_prefix_filter_and_brute_force_find_the_same_pairs(sets: list[frozenset[int]]) -> None:
    keyed = dict(enumerate(sets))
    brute = {
        (i, j) for i in keyed for j in keyed if i < j and len(keyed[i] & keyed[j]) / len(keyed[i] | keyed[j]) >= 0.8
    }
    ordered = {key: sorted(one) for key, one in keyed.items()}
    assert set(corpus_text.near_pairs(ordered)) == brute == corpus_text.sampled_pairs(ordered, 0, ordered)


@given(small_sets)
def test_all_bands_together_find_the_pairs_of_a_single_search(sets: list[frozenset[int]]) -> None:
    merger = corpus.Merger()
    rows = [(bytes([n]), 40, ("file", n, "f"), array("q", sorted(one))) for n, one in enumerate(sets)]
    merger.add("shard 0", ("w", 1, "m"), corpus_text.Tally(), rows)
    pairs = [
        pair
        for low, high in merger.plan()
        for pair in corpus_text.search(corpus_text.unpack(merger.band(low, high)), low)[0]
    ]
    assert sorted(pairs) == corpus_text.near_pairs({key: sorted(one) for key, one in enumerate(sets)})


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)).filter(lambda pair: pair[0] != pair[1])))
def test_clusters_are_connected_by_pairs(pairs: list[tuple[int, int]]) -> None:
    clusters = corpus_text.clusters_of(pairs)
    place = {key: number for number, cluster in enumerate(clusters) for key in cluster}
    assert sorted(place) == sorted({key for pair in pairs for key in pair})
    assert all(place[one] == place[other] for one, other in pairs)
    assert clusters == corpus_text.clusters_of(random.Random(1).sample(pairs, len(pairs)))


# The merger ----------------------------------------------------------------------------------------------------------


class Nearby:
    """Merger without a cluster: the same calls, awaited."""

    def __init__(self, merger: corpus.Merger) -> None:
        self.merger = merger

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any) -> Any:
            await trio.lowlevel.checkpoint()
            return getattr(self.merger, name)(*args)

        return call


@pytest.fixture
def sources(tmp_path: Path) -> tuple[str, list[str]]:
    """Return twelve files of the standard library and two near copies of one of them."""
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
            await corpus.process_shards([(n, shards[n])], root, merger)
    bands = await merger.plan()
    for n in [0, *reversed(range(len(bands)))]:
        await corpus.process_band(n, *bands[n], merger)
    return (await merger.result())[0]


@pytest.mark.parametrize(
    ("shards", "workers", "sizes"),
    [(0, 2, []), (1, 1, [1]), (20, 1, [5, 3, 3, 2, 1, 1, 1, 1, 1, 1, 1]), (20, 8, [1] * 20)],
)
def test_batches_shrink_towards_the_end(shards: int, workers: int, sizes: list[int]) -> None:
    numbered = [(number, [f"{number}.py"]) for number in range(shards)]
    batches = list(corpus.batches_of(numbered, workers))
    assert [len(batch) for batch in batches] == sizes
    assert [shard for batch in batches for shard in batch] == numbered


async def test_order_and_repetition_of_shards_change_nothing(sources: tuple[str, list[str]]) -> None:
    plain, plain_sample = corpus_text.plain_result(*sources)
    assert plain["exact"]
    assert plain["near"]
    merger = Nearby(corpus.Merger())
    assert corpus_screen.differences(await distributed(*sources, [4, 0, 3, 2, 4, 1, 0], merger), plain) == []
    _, sample = await merger.result()
    assert sample == plain_sample
    assert sample["missed"] == sample["wrong"] == 0


async def test_the_comparison_shows_a_lost_shard(sources: tuple[str, list[str]]) -> None:
    found = await distributed(*sources, [0, 1, 2, 3], Nearby(corpus.Merger()))
    assert any(
        line.startswith("result.counts.files is 12")
        for line in corpus_screen.differences(found, corpus_text.plain_result(*sources)[0])
    )


def test_the_report_lists_the_repeated_tasks_of_a_killed_worker() -> None:
    killing = corpus.Killing()
    killing.victim, killing.task = ("w-0", 10, "m"), "shard 3"
    begun = [("shard 2", ("w-0", 10, "m")), ("shard 3", ("w-0", 10, "m")), ("shard 3", ("w-1", 11, "m"))]
    done = {"shard 2": ("w-0", 10, "m"), "shard 3": ("w-1", 11, "m")}
    assert killing.events(begun, done) == {
        "worker": "w-0",
        "pid": 10,
        "task": "shard 3",
        "done_again": {"shard 3": "w-1 (pid 11)"},
    }


# Complete runs -------------------------------------------------------------------------------------------------------

EXAMPLE = Path(corpus.__file__)


def run_example(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLE), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)


def test_the_result_on_local_is_that_of_the_reference() -> None:
    done = run_example("--cluster", "local", "--limit", "40", "--check")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("the same\n")


def test_compare_reports_the_speed_of_plain_processes_side_by_side() -> None:
    done = run_example("--limit", "40", "--workers", "2", "--compare")
    assert done.returncode == 0, done.stdout + done.stderr
    plain, own = done.stdout.splitlines()[-2:]
    plain_found = re.fullmatch(r" +2 plain processes +([\d.]+) s +[\d.]+ jobs a minute", plain)
    own_found = re.match(r" +Fray, 2 workers +([\d.]+) s +[\d.]+ jobs a minute = ([\d.]+) x their speed", own)
    assert plain_found is not None, plain
    assert own_found is not None, own
    assert abs(float(own_found[2]) - float(plain_found[1]) / 2 / float(own_found[1])) < 0.1
    assert own.endswith("results: the same")


def test_compare_shows_a_plain_result_that_differs(
    sources: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root, files = sources
    monkeypatch.setattr(corpus, "library_files", lambda limit: (root, files))
    result, sample = corpus_text.plain_result(root, files[1:])
    options = corpus.arguments(["--compare", "--workers", "1"])
    assert corpus.compare(options, {"result": result, "sample": sample, "process_s": 1.0}) == 1
    printed = capsys.readouterr().out
    assert "differs: result.counts.files is" in printed
    assert printed.rstrip().endswith("results: 1 of 1 results differ")


def test_the_first_line_is_printed_before_the_modules_of_fray_are_imported() -> None:
    program = """
import sys, corpus, corpus_screen
def say(self, text):
    print("fray.public_names" in sys.modules, text)
    sys.exit(0)
corpus_screen.Screen.say = say
corpus.main([])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=EXAMPLE.parent
    )
    assert re.fullmatch(r"False \d+ files of .*\n", done.stdout), done.stdout


def test_a_killed_worker_changes_nothing_and_is_reported(tmp_path: Path) -> None:
    done = run_example("--limit", "200", "--check", "--kill-worker", "--json", str(tmp_path / "report.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["killed"]["task"] in report["killed"]["done_again"]
    assert report["result"]["counts"]["files"] == 200
    assert f"(pid {report['killed']['pid']}) by SIGKILL" in done.stdout


def test_ctrl_c_ends_the_example_with_one_line() -> None:
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
        (["--cluster", "nonsense"], "'machine?nodes=2&cpu=4' or 'fray://host:port'"),
        (
            ["--cluster", "fray+unix:///nowhere/at/all"],
            "authentication required: `fray login fray+unix:///nowhere/at/all`",
        ),
        (["--workers", "0"], "--workers must be 1 or more"),
        (["--cluster", "local", "--kill-worker"], "--kill-worker needs workers that are processes"),
    ],
)
def test_invalid_options_print_one_line_and_exit_with_2(arguments: list[str], says: str) -> None:
    done = run_example("--limit", "5", *arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
