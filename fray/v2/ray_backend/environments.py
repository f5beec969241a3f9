"""Translation of `EnvironmentConfig` to Ray's runtime_env; does not import Ray."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fray.v2.types import EnvironmentConfig, credentials_of, refuse_setup_scripts

SECRETS = "RAY_AUTH_TOKEN"
EXCLUDED = [".git", ".venv", "__pycache__", "node_modules"]
"""Directories of a workspace that are not uploaded, besides those in its ``.gitignore`` and ``.rayignore``."""


def runtime_env(
    environment: EnvironmentConfig | None, image: str | None, *, one_machine: bool
) -> tuple[dict[str, Any], str | None]:
    """Return the runtime_env of a job, and the directory that the job enters itself (None: none).

    On a Ray of this one machine the job enters the workspace, and nothing is copied: `create_environment` names the
    working directory by default, which may have gigabytes. Otherwise the workspace is the
    ``working_dir``: Ray packs it, 512 MiB at most, and each machine unpacks it once.

    Raises:
        ValueError: an extra that is not in the workspace's pyproject.toml; Ray's token among the variables; scripts.
    """
    if environment is None:
        return ({"image_uri": image} if image else {}), None
    refuse_setup_scripts(environment)
    variables = dict(environment.env_vars) | credentials_of(environment)  # Ray has nothing else to send them by
    if SECRETS in variables:
        raise ValueError(f"{SECRETS} cannot be set for jobs: the workers of a Ray cluster have its token already")
    workspace = environment.workspace or None
    made: dict[str, Any] = {"env_vars": variables}
    packages = [*environment.pip_packages, *_packages_of_extras(workspace, environment.extras)]
    if packages:
        made["pip"] = packages
    if image := environment.docker_image or image:
        made["image_uri"] = image
    if workspace is not None and not one_machine:
        made |= {"working_dir": workspace, "excludes": EXCLUDED}
    made = {key: value for key, value in made.items() if value}
    return made, workspace if one_machine else None


def _packages_of_extras(workspace: str | None, extras: Sequence[str]) -> list[str]:
    """Return the packages of a project's extras: Ray does not install the project itself."""
    if not extras:
        return []
    path = Path(workspace or ".") / "pyproject.toml"
    try:
        optional = tomllib.loads(path.read_text())["project"]["optional-dependencies"]
    except (OSError, KeyError, tomllib.TOMLDecodeError):
        optional = {}
    if unknown := [extra for extra in extras if extra not in optional]:
        raise ValueError(
            f"extras {unknown} are not in {path}, which has {sorted(optional)}: name packages in pip_packages instead"
        )
    return [package for extra in extras for package in optional[extra]]
