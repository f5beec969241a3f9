"""Pipeline example: computation, decisions, storage, and complete runs on `LocalClient`."""

from __future__ import annotations

import argparse
import json
import sys
import sysconfig
import threading
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fray.v2 import LocalClient, ResourceConfig

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import pipeline
import pipeline_text as text
from pipeline_backend import ActorBackend
from pipeline_ledger import MOST_LOSSES, Ledger, ShardFailed
from pipeline_plan import Dataset, Row, part_of, spread
from pipeline_screen import Screen
from pipeline_shards import OtherPlan, Store, finished_shards, list_files, open_output, sources, stored_rows
from pipeline_workers import ExecutionHint

SMALL = ResourceConfig(cpu=0.1)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Return a directory with nine library modules, a near copy, an invalid Python file, and prose."""
    directory, stdlib = tmp_path / "texts", Path(sysconfig.get_path("stdlib"))
    directory.mkdir()
    for name in ("bisect", "copy", "heapq", "keyword", "queue", "sched", "shlex", "textwrap", "types"):
        (directory / f"{name}.py").write_text((stdlib / f"{name}.py").read_text())
    (directory / "wrapping.py").write_text((stdlib / "textwrap.py").read_text().replace("given text", "given prose"))
    (directory / "broken.py").write_text("x = (\n")
    (directory / "prose.txt").write_text("\n\n".join(["one two three four five six seven eight nine ten " * 2] * 2))
    return directory


def dataset_of(directory: Path, shards: int = 4) -> Dataset:
    return pipeline.near_copies(str(directory), list_files(str(directory)), shards)


def plainly(directory: Path) -> dict[str, Any]:
    return text.plain_result(sources(str(directory), [path for path, _, _ in list_files(str(directory))]))


# Computation ---------------------------------------------------------------------------------------------------------


def test_documents_are_docstrings_of_python_and_paragraphs_of_other_texts() -> None:
    python = "class C:\n    'A class.'\n    def f(self):\n        '''It does.'''\ndef g(): pass\n"
    found = [(one["id"], one["name"], one["text"]) for one in text.documents({"path": "a.py", "text": python})]
    assert found == [("a.py:1", "C", "A class."), ("a.py:3", "C.f", "It does.")]
    prose = "One\nparagraph.\n \n\nAnd another."
    found = [(one["id"], one["name"], one["text"]) for one in text.documents({"path": "a.txt", "text": prose})]
    assert found == [("a.txt:1", "", "One\nparagraph."), ("a.txt:5", "", "And another.")]
    assert list(text.documents({"path": "a.py", "text": "x = ("})) == []


@given(st.lists(st.frozensets(st.integers(0, 12), min_size=1, max_size=10), max_size=12))
def test_groups_by_first_shingles_find_exactly_the_near_pairs_once(sets: list[frozenset[int]]) -> None:
    rows = [{"id": f"{n:02}", "shingles": text.packed(one)} for n, one in enumerate(sets)]
    sketch = sorted((row for one in rows for row in text.first_shingles(one)), key=itemgetter("key"))
    found = [
        (pair["one"], pair["other"])
        for key, members in groupby(sketch, itemgetter("key"))
        for pair in text.near_pairs(key, list(members))
    ]
    brute = [
        (f"{i:02}", f"{j:02}")
        for i, one in enumerate(sets)
        for j, other in enumerate(sets)
        if i < j and len(one & other) / len(one | other) >= 0.8
    ]
    assert sorted(found) == brute


@given(st.lists(st.integers(0, 50), max_size=20), st.integers(1, 8))
def test_input_is_split_in_order_into_shards_that_are_not_empty(sizes: list[int], shards: int) -> None:
    files = [(f"{n:02}", size, 0.0) for n, size in enumerate(sizes)]
    split = spread(files, shards)
    assert [file for shard in split for file in shard] == files
    assert len(split) == max(1, min(shards, len(files)))


def test_parts_of_keys_are_the_same_in_every_process() -> None:
    assert [part_of(key, 7) for key in ("asyncio", "email", 12, -3)] == [5, 5, 1, 0]


def test_an_invalid_dataset_is_refused_with_advice() -> None:
    files = Dataset.from_files("/", [("a", 1, 0.0), ("b", 1, 0.0)], 2)
    with pytest.raises(ValueError, match=r"store\(name, columns\)"):
        files.map(dict).plan()
    stored = files.store("a", (("x", "int64"),))
    with pytest.raises(ValueError, match="two stages are named 'a'"):
        stored.store("a", (("x", "int64"),))
    with pytest.raises(ValueError, match="with the same shards"):
        stored.union(stored.shuffle("b", (("x", "int64"),), "x", 3))


# Decisions -----------------------------------------------------------------------------------------------------------


def test_an_unfinished_shard_of_a_lost_worker_goes_to_another() -> None:
    ledger = Ledger("docs", 3, finished={1})
    assert ledger.take("a", "ab") == (0, 1)
    assert ledger.take("a", "ab") == (0, 1)
    assert ledger.take("b", "ab") == (2, 1)
    assert ledger.take("c", "abc") is None
    assert ledger.lose("a") == [0]
    assert ledger.take("c", "bc") == (0, 2)
    ledger.succeed(0, 10)
    ledger.succeed(0, 10)
    ledger.succeed(2, 5)
    assert ledger.finished()
    assert (ledger.rows, ledger.retried, ledger.skipped) == ({0: 10, 2: 5}, 1, 1)


def test_a_failed_shard_goes_to_a_worker_that_has_not_tried_it_if_there_is_one() -> None:
    ledger = Ledger("docs", 1)
    assert ledger.take("a", "ab") == (0, 1)
    ledger.fail("a", 0, 1, "ValueError: no")
    assert ledger.take("a", "ab") is None
    assert ledger.take("a", "a") == (0, 2)


def test_an_error_is_raised_after_a_second_try() -> None:
    ledger = Ledger("docs", 2)
    assert ledger.take("a", "ab") == (0, 1)
    ledger.fail("a", 0, 1, "Traceback\nValueError: once")
    ledger.fail("a", 0, 1, "Traceback\nValueError: the same again, with notes")
    assert ledger.take("b", "ab") == (0, 2)
    with pytest.raises(ShardFailed, match="shard 0 of stage 'docs' failed 2 times, last with: ValueError: twice"):
        ledger.fail("b", 0, 2, "Traceback\nValueError: twice")


def test_a_shard_that_loses_several_workers_is_given_up() -> None:
    ledger = Ledger("docs", 1)
    for number in range(MOST_LOSSES - 1):
        assert ledger.take(f"worker {number}") == (0, number + 1)
        ledger.lose(f"worker {number}")
    ledger.take("the last")
    with pytest.raises(ShardFailed, match="its worker was lost"):
        ledger.lose("the last")


def test_results_of_a_worker_considered_lost_count_and_its_errors_do_not() -> None:
    ledger = Ledger("docs", 2)
    ledger.take("a", "ab")
    ledger.lose("a")
    assert ledger.take("b", "b") == (0, 2)
    ledger.fail("a", 0, 1, "ValueError: late")
    assert ledger.take("b", "b") == (0, 2)
    ledger.succeed(0, 1)
    assert ledger.take("b", "b") == (1, 1)


@given(st.integers(1, 4), st.lists(st.tuples(st.sampled_from("sfl"), st.integers(0, 2)), max_size=40))
def test_a_random_history_assigns_one_shard_per_worker_and_ends_with_all_shards_finished(
    shards: int, events: list[tuple[str, int]]
) -> None:
    ledger, names = Ledger("docs", shards), ["a", "b", "c"]
    try:
        for number, (what, place) in enumerate(events):
            held = [taken for name in names if (taken := ledger.take(name, names)) is not None]
            assert len({shard for shard, _ in held}) == len(held) == ledger.busy
            taken = ledger.take(names[place], names)
            if what == "l":
                assert ledger.lose(names[place]) == ([] if taken is None else [taken[0]])
                names[place] = f"{names[place]}{number}"
            elif taken is not None and what == "f":
                ledger.fail(names[place], *taken, "ValueError: no")
            elif taken is not None:
                ledger.succeed(taken[0], 1)
        while not ledger.finished():
            ledger.succeed(next(taken for name in names if (taken := ledger.take(name, names)) is not None)[0], 1)
    except ShardFailed as failed:
        assert failed.tries >= 2  # noqa: PT017
    else:
        assert ledger.rows == dict.fromkeys(range(shards), 1)


# Storage -------------------------------------------------------------------------------------------------------------


def run_plan(directory: Path, output: str, **changes: Any) -> tuple[list[Row], dict[str, Any]]:
    with LocalClient() as client, ActorBackend(client, 2, SMALL, **changes) as backend:
        return backend.execute(dataset_of(directory), ExecutionHint(output)), backend.summary


def test_a_half_written_shard_does_not_count_and_is_deleted(texts: Path, tmp_path: Path) -> None:
    plan = dataset_of(texts).plan()
    store, _ = open_output(str(tmp_path / "out"), plan)

    def half(file: Any) -> None:
        file.write(b"PAR1 etc.")
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        store.write(plan.stages[0].file(0), half)
    assert store.files("docs") == set()
    (tmp_path / "out" / "docs" / "00001-of-00004.parquet.1f.tmp").write_bytes(b"PAR1 etc.")
    assert finished_shards(store, plan.stages[0]) == set()
    assert open_output(str(tmp_path / "out"), plan)[1] == 1
    assert store.files("docs") == set()


def test_a_rerun_computes_the_missing_shards_only(texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first, _ = run_plan(texts, str(out))
    (out / "sketch" / "00002-of-00004.parquet").unlink()
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.parquet")}
    second, summary = run_plan(texts, str(out))
    assert sorted(first, key=str) == sorted(second, key=str)
    assert {stage["stage"]: stage["shards"] - stage["skipped"] for stage in summary["stages"]}["sketch"] == 1
    assert all(path.stat().st_mtime_ns == written for path, written in before.items())
    assert summary["stages"][0]["rows"] > 40


def test_the_output_of_another_input_is_refused(texts: Path, tmp_path: Path) -> None:
    run_plan(texts, str(tmp_path / "out"))
    (texts / "more.py").write_text("'''More.'''\n")
    with pytest.raises(OtherPlan, match="pass another --output"):
        run_plan(texts, str(tmp_path / "out"))


def test_any_storage_of_fsspec_works(texts: Path) -> None:
    rows, _ = run_plan(texts, "memory://pipeline/out")
    assert sorted(rows, key=str) == sorted(plainly(texts)["table"], key=str)
    assert len(stored_rows("memory://pipeline/out", dataset_of(texts).plan(), "docs")) > 40
    assert not any(name.endswith(".tmp") for name in Store("memory://pipeline/out").files("docs"))


# Complete runs -------------------------------------------------------------------------------------------------------


def options(directory: Path, out: Path, *more: str) -> argparse.Namespace:
    return pipeline.arguments(["--input", str(directory), "--output", str(out), "--shards", "4", *more])


@pytest.mark.parametrize("style", ["actor", "job"])
def test_the_result_is_that_of_the_reference_although_a_worker_is_lost(style: str, texts: Path, tmp_path: Path) -> None:
    chosen = options(texts, tmp_path / "out", "--coordinator", style, "--workers", "3", "--kill-worker", "--check")
    with LocalClient() as client, Screen() as screen:
        report = pipeline.run(client, chosen, screen)
    assert report["check"] == "the same"
    assert report["result"]["table"][0].keys() == {"package", "docs", "words", "copies"}
    assert ["textwrap.py", "wrapping.py"] in files_of(report["result"]["pairs"])
    assert ["prose.txt:1", "prose.txt:3"] in report["result"]["groups"]
    (lost,) = report["run"]["lost"]
    assert [lost["worker"][:7], len(lost["shards"])] == ["worker-", 1]
    assert report["run"]["stages"][0]["retried"] == 1


def files_of(pairs: list[list[str]]) -> list[list[str]]:
    return [[place.partition(":")[0] for place in pair] for pair in pairs]


attempts: list[str] = []


def explode(row: Row) -> Row:
    attempts.append(threading.current_thread().name)
    raise LookupError(f"no {row['path']} for you")


@pytest.mark.parametrize("style", ["actor", "job"])
def test_an_operation_that_raises_is_tried_by_a_second_worker_and_its_error_is_raised(
    style: Any, texts: Path, tmp_path: Path
) -> None:
    attempts.clear()
    files = list_files(str(texts))[:1]
    dataset = Dataset.from_files(str(texts), files, 1).map(explode).store("bad", (("x", "int64"),))
    with (
        LocalClient() as client,
        ActorBackend(client, 2, SMALL, coordinator=style) as backend,
        pytest.raises(ShardFailed, match="LookupError: no bisect") as caught,
    ):
        backend.execute(dataset, ExecutionHint(str(tmp_path / "out")))
    assert len(set(attempts)) == len(attempts) == 2
    assert "in explode" in caught.value.reason


def test_a_backend_executes_several_datasets_also_after_a_failed_one(texts: Path, tmp_path: Path) -> None:
    files = list_files(str(texts))
    bad = Dataset.from_files(str(texts), files, 2).map(explode).store("docs", (("x", "int64"),))
    with LocalClient() as client, ActorBackend(client, 2, SMALL) as backend:
        with pytest.raises(ShardFailed):
            backend.execute(bad, ExecutionHint(str(tmp_path / "bad")))
        for name in ("one", "two"):
            rows = backend.execute(dataset_of(texts), ExecutionHint(str(tmp_path / name)))
            assert sorted(rows, key=str) == sorted(plainly(texts)["table"], key=str)


def test_no_thread_is_alive_afterwards(texts: Path, tmp_path: Path) -> None:
    before = set(threading.enumerate())
    run_plan(texts, str(tmp_path / "out"))
    left = [thread for thread in threading.enumerate() if thread not in before]
    for thread in left:
        thread.join(timeout=2)
    assert [thread.name for thread in left if thread.is_alive()] == []


# The command ---------------------------------------------------------------------------------------------------------


def test_the_report_is_text_or_json(texts: Path, tmp_path: Path, capsys: Any) -> None:
    asked = ["--client", "local", "--input", str(texts), "--output", str(tmp_path / "out"), "--shards", "2", "--check"]
    assert pipeline.main(asked) == 0
    said = capsys.readouterr()
    assert "groups of near copies; the largest:" in said.out
    assert "a single loop over the same files: the same" in said.err
    assert pipeline.main([*asked, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {stage["skipped"] == stage["shards"] for stage in report["run"]["stages"]} == {True}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--workers", "0"], "--workers must be 1 or more"),
        (["--client", "local", "--workers", "1", "--kill-worker"], "needs --workers 2 or more"),
        (["--client", "nonsense"], "expected one of local, machine, fray://host:port"),
        (["--client", "local", "--input", "/nowhere/at/all"], "there is no directory /nowhere/at/all"),
    ],
)
def test_invalid_options_print_one_line_and_exit_with_2(
    arguments: list[str], says: str, tmp_path: Path, capsys: Any
) -> None:
    try:
        status = pipeline.main(["--output", str(tmp_path), *arguments])
    except SystemExit as ended:
        status = ended.code  # type: ignore[assignment]
    assert status == 2
    said = capsys.readouterr().err
    assert says in said
    assert "Traceback" not in said
