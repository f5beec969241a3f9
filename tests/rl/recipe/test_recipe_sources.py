"""YAML, DictConfig and dict give the same settings; overrides and interpolations are resolved."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from fray.cli.main import main
from fray.errors import InvalidRequest
from fray.rl.recipe.guide_config import load_guide_config
from fray.rl.recipe.sources import read_settings

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(importlib.util.find_spec("omegaconf") is None, reason="needs OmegaConf: make test-rl"),
]
YAML = """
experiment_name: ${project_name}-1
project_name: digits
trainer: {lr: 1e-5, total_train_steps: 3, checkpoint_path: ckpt}
trajectory_pool:
  group_size: 4
  batch_size: ${trajectory_pool.group_size}
"""
GUIDE_YAML = """
project_name: digits
data: {type: mock, size: "${oc.decode:${oc.env:RECIPE_SIZE}}"}
rollout_worker: {type: simple, num_workers: 4}
trajectory_pool: {group_size: 2, batch_size: 4, key_list: [group_id]}
trainer: {total_train_steps: 2, checkpoint_path: ckpt}
service: {inference_service: {servers: 2, api_key: secret, model: {layers: 1}}}
"""


def test_yaml_mapping_and_dictconfig_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from omegaconf import OmegaConf

    file = tmp_path / "digits.yaml"
    file.write_text(YAML)
    monkeypatch.chdir(tmp_path)
    created = OmegaConf.create(YAML)
    OmegaConf.set_struct(created, True)  # as Hydra does
    written = load_guide_config(file)
    assert written.experiment_name == "digits-1"
    assert (written.trainer.lr, written.batch_size) == (1e-5, 4)
    assert written.trainer.checkpoint_path == str(tmp_path / "ckpt")
    assert written == load_guide_config(created) == load_guide_config(OmegaConf.to_container(created))
    assert written == load_guide_config(OmegaConf.to_container(created, resolve=True))


def test_overrides_replace_and_add(tmp_path: Path) -> None:
    file = tmp_path / "digits.yaml"
    file.write_text(YAML)
    config = load_guide_config(file, ["trainer.lr=2e-5", "trajectory_pool.group_size=8", "resume.mode=auto"])
    assert (config.trainer.lr, config.batch_size, config.resume.mode) == (2e-5, 8, "auto")
    assert read_settings(file, ["logger.backend=[a,b]"]).values["logger"] == {"backend": ["a", "b"]}
    assert read_settings({"a": 1}, ["b=2"]).values == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("a: [", [], "while parsing a flow node"),
        ("- 1", [], "found a list; expected a mapping"),
        ("a: ${b}", [], "Interpolation key 'b' not found"),
        ("a: 1", ["trainer.lr"], "invalid override 'trainer.lr': expected key=value, such as trainer.lr=2e-5"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path: Path, text: str, overrides: list[str], message: str) -> None:
    file = tmp_path / "digits.yaml"
    file.write_text(text)
    with pytest.raises(InvalidRequest) as caught:
        read_settings(file, overrides)
    assert message in str(caught.value)


def test_the_command_takes_recipes_in_the_words_of_the_guide(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RECIPE_SIZE", "before")
    (tmp_path / "guide.env.sh").write_text("RECIPE_SIZE=6\n")
    (tmp_path / "guide.yaml").write_text(GUIDE_YAML)
    changed = ["rollout_worker.num_workers=70", "service.train_service.world_size=2"]
    assert main(["rl", "run", str(tmp_path / "guide.yaml"), *changed, "--dry", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["recipe"]["service"]["inference_service"]["api_key"] == "***"
    assert plan["recipe"]["data"]["size"] == 6
    assert [(one["part"], one["count"], one["does"]) for one in plan["processes"]] == [
        ("coordinator", 1, "data, groups, versions"),
        ("trainer", 2, "updates TinyLlama, a share of each batch"),
        ("server", 2, "generates with TinyLlama"),
        ("rollout", 2, "35 episodes at once"),
    ]
    assert not list(tmp_path.glob("ckpt*"))
    assert main(["rl", "run", str(tmp_path / "guide.yaml"), "weight.sync_mod=sync"]) == 2
    assert "weight.sync_mod: unknown key; did you mean sync_mode" in capsys.readouterr().err


def test_settings_may_follow_the_options_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "guide.yaml").write_text(GUIDE_YAML.replace("${oc.env:RECIPE_SIZE}", "6"))
    recipe = str(tmp_path / "guide.yaml")
    assert main(["rl", "run", recipe, "data.size=7", "--dry", "--json", "data.seed=3", "trainer.lr=0.5"]) == 0
    planned = json.loads(capsys.readouterr().out)["recipe"]
    assert (planned["data"]["size"], planned["data"]["seed"], planned["trainer"]["lr"]) == (7, 3, 0.5)
    assert main(["rl", "run", recipe, "--dri", "data.seed=3"]) == 2
    assert "unknown option '--dri'; did you mean --dry?" in capsys.readouterr().err


def test_a_recipe_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="there is no such file"):
        read_settings(tmp_path / "none.yaml")
