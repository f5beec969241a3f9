"""Recipes in the words of `fray.rl.Run`: a file with its settings."""

from __future__ import annotations

import inspect
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fray.errors import FrayError, InvalidRequest
from fray.model.resources import ResourceConfig
from fray.rl.model_spec import TinyLlama
from fray.rl.recipe.sources import Settings, Source, read_settings
from fray.rl.recipe.typed import invalid, plain_class, structure
from fray.rl.recipe.user_files import load_object
from fray.rl.run import Run
from fray.rl.train.lora import LoRA
from fray.rl.train.settings import GRPO, Critic, KlPenalty, OffPolicyCorrection

BY_PROGRAM = ("on_step", "on_validation", "on_post", "on_end")
"""Settings of a run that are functions of the program that starts it, and not of a recipe."""


def load_run(source: Source, overrides: Sequence[str] = (), **options: Any) -> Run:
    """Return the run of a recipe.

    Args:
        source: a YAML file, a mapping or a DictConfig with the keys of `Run`. ``rollout`` is ``file.py:function`` or
            ``module:function``, ``model`` a name, a directory, or the arguments of `TinyLlama`, ``trainer`` the
            arguments of `GRPO`, or nothing. Relative paths refer to the directory of ``NEXRL_PATH``, else to that of
            the file, else to the current one.
        overrides: ``trainer.lr=2e-5`` each.
        options: arguments of `Run` that replace those of the recipe.

    Raises:
        InvalidRequest: it cannot be read, or a setting is wrong; the message has a line for each, with its path.
    """
    variables = source_env_file(source) if isinstance(source, str | os.PathLike) else {}
    settings = read_settings(source, overrides)
    return run_of(settings, **{**({"env_vars": variables} if variables else {}), **options})


def run_of(settings: Settings, **options: Any) -> Run:
    """Return the run of settings that were read; see `load_run`."""
    name, directory = settings.name, settings.directory
    # Checked before anything of it is loaded.
    recipe = structure(settings.values, plain_class(Run, BY_PROGRAM), name)
    found = {key: getattr(recipe, key) for key in settings.values}
    with _at(name, "model"):
        found["model"] = _model(found["model"], directory, name)
    for key in ("data", "validation_data"):
        if isinstance(found.get(key), str):
            found[key] = directory / found[key]
    found["rollout"] = _loaded(found["rollout"], directory, name, "rollout")
    found["trainer"] = _trainer(found["trainer"], directory, name)
    if found.get("output") is not None and "://" not in str(found["output"]):
        found["output"] = directory / str(found["output"])
    if "resources" in found:
        found["resources"] = resources_of(found["resources"], name)
    with _at(name, ""):
        return Run(**{**found, **options})


def source_env_file(recipe: str | os.PathLike[str]) -> dict[str, str]:
    """Return the variables that ``NAME.env.sh`` beside ``NAME.yaml`` exports, and set them in this process.

    Bash runs the file in its directory. Nothing happens if there is none.

    Raises:
        InvalidRequest: the file fails; the message has its last line of errors.
    """
    file = Path(recipe).absolute().with_suffix(".env.sh")
    if not file.is_file():
        return {}
    command = ["bash", "-c", 'set -ea; . "$1" >&2; env -0', "bash", str(file)]
    done = subprocess.run(command, cwd=file.parent, capture_output=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise InvalidRequest(f"{file} failed with exit code {done.returncode}: {last}")
    found = dict(line.split("=", 1) for line in done.stdout.decode(errors="surrogateescape").split("\0") if line)
    own = {"_", "SHLVL", "PWD", "OLDPWD", "LINES", "COLUMNS"}
    variables = {key: value for key, value in found.items() if key not in own and os.environ.get(key) != value}
    os.environ.update(variables)
    return variables


class _at:
    """Adds the path of a key to the errors of what it names."""

    def __init__(self, source: str, path: str) -> None:
        self._source, self._path = source, path

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, InvalidRequest | ValueError) and not str(error).startswith(f"invalid {self._source}:"):
            raise invalid(self._source, [(self._path, str(error))]) from error.__cause__


def _given(values: Mapping[str, Any], kind: Any, source: str, path: str) -> dict[str, Any]:
    """Return arguments of ``kind``, their names and plain types checked."""
    checked = structure(values, plain_class(kind), source, path)
    return {key: getattr(checked, key) for key in values}


def _made(values: Any, kind: type[Any], source: str, path: str) -> Any:
    if not isinstance(values, Mapping):
        return values
    with _at(source, path):
        return kind(**_given(values, kind, source, path))


def _model(value: Any, directory: Path, source: str) -> str | TinyLlama:
    if isinstance(value, Mapping):
        made: TinyLlama = _made(value, TinyLlama, source, "model")
        return made
    if not isinstance(value, str):
        raise InvalidRequest(f"found {value!r}; expected a name, a directory, or the arguments of TinyLlama")
    # A name of Hugging Face looks like a path.
    return str(directory / value) if (directory / value).is_dir() else value


def _trainer(value: Any, directory: Path, source: str) -> GRPO | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise invalid(source, [("trainer", f"found {value!r}; expected the arguments of GRPO, or nothing")])
    found = dict(value)
    for key, kind in _NESTED.items():
        if key in found:
            found[key] = _made(found[key], kind, source, f"trainer.{key}")
    if isinstance(found.get("loss"), str) and ":" in found["loss"]:
        found["loss"] = _loaded(found["loss"], directory, source, "trainer.loss")
    trainer: GRPO = _made(found, GRPO, source, "trainer")
    return trainer


_NESTED: dict[str, type[Any]] = {"kl": KlPenalty, "correction": OffPolicyCorrection, "lora": LoRA, "critic": Critic}
"""Settings below those of the trainer."""


def _loaded(reference: Any, directory: Path, source: str, path: str) -> Any:
    with _at(source, path):
        if not isinstance(reference, str):
            raise InvalidRequest(f"found {reference!r}; expected file.py:function or module:function")
        return load_object(reference, directory)


def resources_of(value: Any, source: str) -> dict[str, ResourceConfig]:
    """Return what each part of a run reserves. Raises InvalidRequest with the path of what is wrong."""
    if not isinstance(value, Mapping):
        raise invalid(source, [("resources", f"found {value!r}; expected a mapping, such as trainer: {{gpu: 1}}")])
    return {part: _reserved(wanted, source, f"resources.{part}") for part, wanted in value.items()}


def _reserved(wanted: Any, source: str, path: str) -> ResourceConfig:
    """Return what ``{gpu: h100:2, cpu: 4, memory: 32GB}`` reserves."""
    with _at(source, path):
        if not isinstance(wanted, Mapping):
            raise InvalidRequest(f"found {wanted!r}; expected a mapping, such as {{cpu: 4, memory: 32GB}}")
        values = dict(wanted)
        gpu = values.pop("gpu", None)
        make = ResourceConfig.with_cpu if gpu is None else ResourceConfig.with_gpu
        if gpu is not None:
            kind, _, count = str(gpu).rpartition(":")
            values |= {"count": int(count)} | ({"gpu_type": kind} if kind else {})
        try:
            return make(**values)
        except (TypeError, FrayError) as error:
            known = ", ".join(["gpu", *list(inspect.signature(ResourceConfig.with_cpu).parameters)])
            raise InvalidRequest(f"{error}; expected keys of {known}") from None
