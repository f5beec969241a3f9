"""Environment of a job's process: packages, a workspace, an image, variables, secrets."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from attrs import field

from fray.errors import InvalidRequest
from fray.model.frozen import frozen
from fray.model.ids import BlobId

INSIDE = "workspace://"
"""Prefix in a spec's ``cwd`` and ``sys_path`` that stands for the workspace, wherever it is on the machine; a path in
it follows."""
UNSENT = "directory:"
"""Prefix in place of a bundle id, before a spec leaves its author: the directory that is to become a bundle follows."""
WORKSPACE_NAME = "workspace"
"""Name of the workspace's directory in the attempt's directory."""


@frozen
class Secret:
    """Placeholder for a variable's value: the secret of this name, which is configured on the machines or sent by the
    driver.

    ``env_vars={"WANDB_API_KEY": Secret("WANDB_API_KEY")}``: the value reaches the process, but no store, log or error.
    """

    name: str

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.name, str) or not _SECRET.match(self.name):
            raise InvalidRequest(f"Secret({self.name!r}): a secret's name has 1 to 100 letters, digits and _ . -")


_SECRET = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}\Z")
OURS = "FRAY_"
"""Prefix of the variables that are reserved for Fray."""


def check_variable(name: str, value: object) -> None:
    """Raise InvalidRequest unless ``name`` and ``value`` can be a process's variable and the name is not reserved."""
    if not isinstance(name, str) or not name or "=" in name or "\0" in name:
        raise InvalidRequest(f"{name!r} cannot be the name of a variable")
    if name.startswith(OURS):
        raise InvalidRequest(f"{name}: names that begin with {OURS} are reserved for Fray; choose another name")
    if isinstance(value, Secret):
        return
    if not isinstance(value, str):
        raise InvalidRequest(f"variable {name}={value!r} must be a string: write {str(value)!r}")
    if "\0" in value:
        raise InvalidRequest(f"the value of variable {name} has a NUL character, which no environment can hold")


def _variables(given: Mapping[str, str | Secret]) -> dict[str, str | Secret]:
    for name, value in given.items():
        check_variable(name, value)
    return dict(given)


def plain_variables(variables: Mapping[str, str | Secret]) -> dict[str, str]:
    """Return the variables that hold plain values."""
    return {name: value for name, value in variables.items() if isinstance(value, str)}


def secret_names(variables: Mapping[str, str | Secret]) -> dict[str, str]:
    """Return the variables that hold secrets, with the name of each secret."""
    return {name: value.name for name, value in variables.items() if isinstance(value, Secret)}


def _packages(names: Sequence[str]) -> tuple[str, ...]:
    for name in _check_strings("pip_packages", names):
        if name.lstrip().startswith("-") or not name.isprintable():
            raise InvalidRequest(
                f"invalid requirement in pip_packages: {name!r}; expected for example 'polars>=1'. Options of uv are "
                "set by variables where fray-node runs (UV_INDEX_URL, UV_FIND_LINKS); files travel with workspace="
            )
    return tuple(names)


def _extras(names: Sequence[str]) -> tuple[str, ...]:
    for name in _check_strings("extras", names):
        if not _EXTRA.match(name):
            raise InvalidRequest(f"invalid name in extras: {name!r}; expected letters, digits and . _ -, as in 'gpu'")
    return tuple(names)


def _image(name: str | None) -> str | None:
    """Check an image name: it becomes an argument of the container engine's client, so it must not look like an
    option."""
    if name is not None and not (isinstance(name, str) and _IMAGE.match(name)):
        raise InvalidRequest(f"invalid image name docker_image={name!r}; expected for example 'ghcr.io/me/train:3'")
    return name


def check_spec(spec: EnvironmentSpec) -> None:
    """Check the environment of a submitted spec: a driver need not have built it from an `EnvironmentConfig`.

    Raises:
        InvalidRequest: a value that `EnvironmentConfig` would reject.
    """
    _extras(spec.extras)
    _packages(spec.pip_packages)
    _image(spec.docker_image)


_EXTRA = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,98}[A-Za-z0-9])?\Z")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,999}\Z")


def _check_strings(what: str, names: Sequence[str]) -> tuple[str, ...]:
    if isinstance(names, str) or not all(isinstance(name, str) and name.strip() for name in names):
        raise InvalidRequest(f"{what}={names!r} must be a list of names, as ['polars>=1']")
    return tuple(names)


@frozen
class EnvironmentConfig:
    """Environment of a job's process, on top of the node's own.

    Attributes:
        extras: extras of the workspace's project (its ``pyproject.toml``). Without ``workspace``, the project in the
            working directory is used, which then becomes the workspace.
        pip_packages: requirements in pip's syntax: ``"polars>=1"``.
        env_vars: values, or `Secret` in their place; names that begin with ``FRAY_`` are reserved.
        workspace: directory whose files (tracked by git, or untracked and not ignored) are copied to the job's machine
            as its working directory. Default None: nothing is copied.
        docker_image: run in a container of this image, on machines with docker or podman. Python code needs ``python3``
            of the author's version in the image; Fray itself is mounted. Default None.
    """

    extras: tuple[str, ...] = field(default=(), converter=_extras)
    pip_packages: tuple[str, ...] = field(default=(), converter=_packages)
    env_vars: dict[str, str | Secret] = field(factory=dict, converter=_variables)
    workspace: str | None = None
    docker_image: str | None = field(default=None, converter=_image)

    def __attrs_post_init__(self) -> None:
        if self.docker_image is not None and (self.extras or self.pip_packages):
            raise InvalidRequest(
                f"docker_image={self.docker_image!r} brings its own packages: build an image with them, and leave "
                "extras and pip_packages out"
            )

    @classmethod
    def create(
        cls,
        extras: Sequence[str] | None = None,
        pip_packages: Sequence[str] | None = None,
        env_vars: Mapping[str, str | Secret] | None = None,
        workspace: str | None = None,
        docker_image: str | None = None,
    ) -> EnvironmentConfig:
        return cls(tuple(extras or ()), tuple(pip_packages or ()), dict(env_vars or {}), workspace, docker_image)


@frozen(kw_only=True)
class EnvironmentSpec:
    """Serialized form of an environment. Equal specs are the same environment: its cache key is derived from this
    alone."""

    extras: tuple[str, ...] = ()
    pip_packages: tuple[str, ...] = ()
    bundle: BlobId | None = None
    """Hash of the workspace's manifest, which lists paths, modes and hashes of its files."""
    docker_image: str | None = None
    python: str = ""
    """Python version of the author's process (``3.11``): pickled functions need the same. Empty for programs."""
