"""Sources of settings: YAML files, mappings, and the DictConfig of OmegaConf; the one file that imports omegaconf."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from attrs import field, frozen

from fray.errors import InvalidRequest

Source: TypeAlias = str | os.PathLike[str] | Mapping[str, Any] | Any
"""A YAML file, a mapping, a DictConfig, or `Settings` that were read."""
NEXRL_PATH = "NEXRL_PATH"
"""Variable of the environment with the directory to which relative paths refer, if it is set."""


@frozen
class Settings:
    """Settings as plain dicts, lists, texts and numbers."""

    values: dict[str, Any]
    name: str
    """Description of the source, for messages: ``recipe train.yaml``."""
    directory: Path
    """Directory to which relative paths refer."""
    file: Path | None = None
    given: dict[str, Any] = field(factory=dict)
    """``values`` before interpolations were resolved."""


def read_settings(source: Source, overrides: Sequence[str] = ()) -> Settings:
    """Return the settings of a source, its interpolations resolved.

    Args:
        overrides: ``key.below=value`` each, the value as YAML; they replace what the source has.

    Raises:
        InvalidRequest: there is no such file, it is not YAML or not a mapping, an override has no ``=``, or an
            interpolation names nothing; or OmegaConf is needed and not installed.
    """
    if isinstance(source, Settings):
        return source
    file = Path(source).absolute() if isinstance(source, str | os.PathLike) else None
    name = f"recipe {source}" if file is not None else "config"
    base = os.environ.get(NEXRL_PATH)
    directory = Path(base).absolute() if base else (file.parent if file is not None else Path.cwd())
    if file is not None:
        if not file.is_file():
            raise InvalidRequest(f"invalid recipe {str(source)!r}: there is no such file in {Path.cwd()}")
        values, given = _resolved(file, overrides, name)
    elif _is_dict_config(source) or overrides:
        values, given = _resolved(source, overrides, name)
    elif isinstance(source, Mapping):
        # Without interpolations nothing is left to resolve: no package of the extra is needed.
        values, given = _resolved(source, (), name) if "${" in repr(source) else (dict(source), dict(source))
    else:
        kind = type(source).__name__
        raise InvalidRequest(f"invalid config of type {kind}; expected a YAML file, a mapping or a DictConfig")
    return Settings(values, name, directory, file, given)


def _is_dict_config(source: object) -> bool:
    omegaconf = sys.modules.get("omegaconf")
    return omegaconf is not None and isinstance(source, omegaconf.DictConfig)


def _resolved(source: Any, overrides: Sequence[str], name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings, and what they were before interpolations were resolved. Raises InvalidRequest."""
    try:
        from omegaconf import DictConfig, OmegaConf
        from omegaconf.errors import OmegaConfBaseException
        from yaml import YAMLError
    except ImportError:
        raise InvalidRequest("recipes need OmegaConf: pip install fray[rl]") from None
    for override in overrides:
        if not override.partition("=")[0] or "=" not in override:
            raise InvalidRequest(f"invalid override {override!r}: expected key=value, such as trainer.lr=2e-5")
    try:
        loaded = OmegaConf.load(source) if isinstance(source, Path) else OmegaConf.create(source)
        if not isinstance(loaded, DictConfig):
            raise InvalidRequest(f"invalid {name}: found a list; expected a mapping")
        # A struct, as Hydra makes them, would refuse overrides of keys that it does not have.
        OmegaConf.set_struct(loaded, False)
        merged = OmegaConf.merge(loaded, OmegaConf.from_dotlist(list(overrides)))
        given: Any = OmegaConf.to_container(merged, resolve=False)
        values: Any = OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)
    except (OmegaConfBaseException, YAMLError, UnicodeDecodeError, OSError) as error:
        raise InvalidRequest(f"invalid {name}: {error}") from None
    return {str(key): value for key, value in values.items()}, {str(key): value for key, value in given.items()}
