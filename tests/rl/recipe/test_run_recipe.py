"""A recipe with the keys of `fray.rl.Run` becomes that run; what is wrong in it is refused with its path."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import attrs
import pytest

from fray import rl
from fray.errors import InvalidRequest
from fray.rl.recipe.run_recipe import BY_PROGRAM, load_run, source_env_file
from fray.rl.recipe.user_files import load_object
from fray.runtime.serialization.pickling import dumps

WORKER = """
from helper import LIMIT

async def solve(task, llm):
    return await llm.completion(task["prompt"], max_tokens=LIMIT)

def not_async(task, llm): ...

def loss(batch): ...
"""


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "worker.py").write_text(WORKER)
    (tmp_path / "helper.py").write_text("LIMIT = 3")
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "1"}\n{"prompt": "2"}\n')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("NEXRL_PATH", str(tmp_path))
    return tmp_path


def recipe(**options: Any) -> dict[str, Any]:
    trainer = {"groups": 2, "group_size": 3, "steps": 4}
    base = {"model": {"layers": 1}, "data": "tasks.jsonl", "rollout": "worker.py:solve", "trainer": trainer}
    return base | options


def test_a_recipe_is_the_run_that_a_program_would_write(directory: Path) -> None:
    run = load_run(recipe(sync="fully-async", rollout_workers=8, output="out", trainer={"kl": {"coefficient": 0.1}}))
    assert run.model == rl.TinyLlama(layers=1)
    assert run.trainer == rl.GRPO(kl=rl.KlPenalty(0.1))
    assert (run.sync, run.rollout_workers, run.output) == ("fully-async", 8, directory / "out")
    assert run.parts.name == "out"
    assert [row["prompt"] for row in run.parts.rows] == ["1", "2"]


def test_all_settings_of_a_run_are_keys(directory: Path) -> None:
    written = load_run(recipe())
    # Those that the program gives, what has to be read, and what follows from the rest.
    others = {*BY_PROGRAM, "parts", "model", "data", "rollout", "trainer", "resources"}
    settings = [one.name for one in attrs.fields(rl.Run) if one.init]
    same = {name: getattr(written, name) for name in settings if name not in others}
    again = load_run(recipe(**same))
    assert {name: getattr(again, name) for name in same} == same


def test_names_and_no_trainer(directory: Path) -> None:
    run = load_run(recipe(model="Qwen/Qwen3-0.6B", trainer=None, name="evaluation", env_vars={"A": "1"}))
    assert (run.model, run.trainer, run.parts.name, run.parts.env_vars) == (
        "Qwen/Qwen3-0.6B",
        None,
        "evaluation",
        {"A": "1"},
    )
    (directory / "my-model").mkdir()
    assert load_run(recipe(model="my-model")).model == str(directory / "my-model")


def test_functions_of_files_reach_other_processes_by_value(directory: Path) -> None:
    solve = load_object("worker.py:solve", directory)
    assert load_object("worker.py:solve", directory) is solve
    assert solve.__globals__["LIMIT"] == 3
    name = solve.__module__.encode()
    copy = pickle.loads(dumps(solve).replace(name, b"x" * len(name)))
    assert copy.__globals__["LIMIT"] == 3
    assert load_object("json:dumps", directory)([1]) == "[1]"


def test_resources_are_read(directory: Path) -> None:
    run = load_run(recipe(resources={"trainer": {"gpu": "h100:2", "memory": "64GB"}, "rollout": {"cpu": 4}}))
    assert run.resources["trainer"].device.count == 2  # type: ignore[union-attr]
    assert run.resources["trainer"].memory == "64GB"
    assert run.resources["rollout"].cpu == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inference_server": 2}, "invalid config: inference_server: unknown key; did you mean inference_servers"),
        ({"rollout_workers": "many"}, "rollout_workers: found 'many' (str); expected a whole number"),
        ({"sync": "fuly-async"}, "invalid sync 'fuly-async'; expected one of 'sync', 'batch-async', 'fully-async'"),
        ({"trainer": {"lrr": 1}}, "trainer.lrr: unknown key; did you mean lr?"),
        ({"trainer": {"lr": "fast"}}, "trainer.lr: found 'fast' (str); expected a number"),
        ({"trainer": {"kl": {"coefficent": 1}}}, "trainer.kl.coefficent: unknown key; did you mean coefficient?"),
        ({"trainer": {"loss": "clp"}}, "trainer: invalid loss='clp' of GRPO"),
        ({"trainer": {"loss": "worker.py:los"}}, "trainer.loss: worker.py has no 'los'; did you mean loss"),
        ({"trainer": 3}, "trainer: found 3; expected the arguments of GRPO, or nothing"),
        ({"model": {"layer": 1}}, "model.layer: unknown key; did you mean layers?"),
        ({"model": {"layers": 0}}, "model: layers=0: TinyLlama needs an integer of at least 1"),
        ({"model": 7}, "model: found 7; expected a name, a directory, or the arguments of TinyLlama"),
        ({"data": "task.jsonl"}, "task.jsonl': there is no such file"),
        ({"rollout": "worker.py"}, "rollout: found 'worker.py'; expected file.py:name or module:name"),
        ({"rollout": "worker.py:sove"}, "rollout: worker.py has no 'sove'; did you mean solve?"),
        ({"rollout": "workr.py:solve"}, "rollout: there is no such file: "),
        ({"rollout": "worker.py:not_async"}, "expected an async function, async def solve(task, llm)"),
        ({"rollout": "no_such_module:solve"}, "rollout: importing no_such_module raised ModuleNotFoundError"),
        ({"resources": {"server": {"gpus": 1}}}, "resources.server: "),
        ({"resources": 3}, "resources: found 3"),
        ({"env_vars": {"A": 1, "B": "2"}}, "invalid config: env_vars.A: found 1 (int); expected text"),
        ({"trackers": "wandb"}, "trackers: found 'wandb' (str); expected a list"),
    ],
)
def test_what_is_wrong_is_refused_with_its_path(directory: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        load_run(recipe(**options))
    assert message in str(caught.value)
    assert str(caught.value).startswith("invalid config: ")


def test_missing_keys_are_named(directory: Path) -> None:
    with pytest.raises(InvalidRequest) as caught:
        load_run({"model": "m", "trainer": None})
    assert str(caught.value).splitlines() == [
        "invalid config: 2 errors",
        "  data: missing; it has no default",
        "  rollout: missing; it has no default",
    ]


def test_a_file_that_raises_is_refused_with_its_line(directory: Path) -> None:
    (directory / "broken.py").write_text("import json\n\njson.loads('{')\n")
    with pytest.raises(InvalidRequest) as caught:
        load_run(recipe(rollout="broken.py:solve"))
    assert "broken.py raised JSONDecodeError" in str(caught.value)
    assert f"line 3 of {directory}/broken.py: json.loads('{{')" in str(caught.value)
    (directory / "no_python.py").write_text("def (")
    with pytest.raises(InvalidRequest, match=r"no_python\.py raised SyntaxError: .*no_python\.py, line 1"):
        load_run(recipe(rollout="no_python.py:solve"))


def test_the_environment_file_is_sourced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RECIPE_A", "RECIPE_B", "RECIPE_SAME"):
        monkeypatch.setenv(name, "before")
    monkeypatch.setenv("BASE", "b")
    (tmp_path / "digits.env.sh").write_text("RECIPE_A=$BASE/a\nexport RECIPE_B='two\nlines'\nRECIPE_SAME=before\n")
    assert source_env_file(tmp_path / "digits.yaml") == {"RECIPE_A": "b/a", "RECIPE_B": "two\nlines"}
    assert os.environ["RECIPE_A"] == "b/a"
    assert source_env_file(tmp_path / "other.yaml") == {}
    (tmp_path / "broken.env.sh").write_text("ls /no/such/directory\n")
    with pytest.raises(InvalidRequest, match=r"broken\.env\.sh failed with exit code 2: .*/no/such/directory"):
        source_env_file(tmp_path / "broken.yaml")
