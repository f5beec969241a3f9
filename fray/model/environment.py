"""What the process of a job is made of: packages, a workspace, an image, variables, secrets."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from attrs import field

from fray.errors import InvalidRequest
from fray.model.frozen import frozen
from fray.model.ids import BlobId

INSIDE = "workspace://"
"""In a spec's ``cwd`` and ``sys_path``: the workspace, wherever it is on the machine; what follows is a path in it."""
UNSENT = "directory:"
"""In place of a bundle, before a spec leaves its author: the directory that is to become one."""
WORKSPACE_NAME = "workspace"
"""Of its directory in that of the attempt."""


@frozen
class Secret:
    """In the place of a variable's value: the secret of this name, known to the machines or brought by the driver.

    ``env_vars={"WANDB_API_KEY": Secret("WANDB_API_KEY")}``: it reaches the process, and no store, log or error.
    """

    name: str

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.name, str) or not _SECRET.match(self.name):
            raise InvalidRequest(f"Secret({self.name!r}): a secret's name has 1 to 100 letters, digits and _ . -")


_SECRET = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}\Z")
OURS = "FRAY_"
"""How the variables begin that Fray sets, and nobody else."""


def check_variable(name: str, value: object) -> None:
    """Raises InvalidRequest: it cannot be a variable of a process, or is one of Fray's own."""
    if not isinstance(name, str) or not name or "=" in name or "\0" in name:
        raise InvalidRequest(f"{name!r} cannot be the name of a variable")
    if name.startswith(OURS):
        raise InvalidRequest(f"{name}: variables that begin with {OURS} are Fray's own: choose another name")
    if isinstance(value, Secret):
        return
    if not isinstance(value, str):
        raise InvalidRequest(f"variable {name}={value!r} must be a text: write {str(value)!r}")
    if "\0" in value:
        raise InvalidRequest(f"the value of variable {name} has a NUL, which no process can be given")


def _variables(given: Mapping[str, str | Secret]) -> dict[str, str | Secret]:
    for name, value in given.items():
        check_variable(name, value)
    return dict(given)


def plain_variables(variables: Mapping[str, str | Secret]) -> dict[str, str]:
    """Those that are no secrets."""
    return {name: value for name, value in variables.items() if isinstance(value, str)}


def secret_names(variables: Mapping[str, str | Secret]) -> dict[str, str]:
    """Those that are secrets, and of which name."""
    return {name: value.name for name, value in variables.items() if isinstance(value, Secret)}


def _packages(words: Sequence[str]) -> tuple[str, ...]:
    for word in _words("pip_packages", words):
        if word.lstrip().startswith("-") or not word.isprintable():
            raise InvalidRequest(
                f"pip_packages: {word!r} is no requirement like 'polars>=1': indexes and other options of uv are set "
                "by variables where fray-node runs (UV_INDEX_URL, UV_FIND_LINKS), files by workspace="
            )
    return tuple(words)


def _extras(words: Sequence[str]) -> tuple[str, ...]:
    for word in _words("extras", words):
        if not _EXTRA.match(word):
            raise InvalidRequest(f"extras: {word!r} is no name of one: letters, digits and . _ -, as in 'gpu'")
    return tuple(words)


def _image(word: str | None) -> str | None:
    """It stands on the command line of the engine's client, where options do."""
    if word is not None and not (isinstance(word, str) and _IMAGE.match(word)):
        raise InvalidRequest(f"docker_image={word!r} is no name of an image, such as 'ghcr.io/me/train:3'")
    return word


def check_spec(spec: EnvironmentSpec) -> None:
    """What a driver sends need not have been an `EnvironmentConfig` before.

    Raises:
        InvalidRequest: it could not have been one.
    """
    _extras(spec.extras)
    _packages(spec.pip_packages)
    _image(spec.docker_image)


_EXTRA = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,98}[A-Za-z0-9])?\Z")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,999}\Z")


def _words(what: str, words: Sequence[str]) -> tuple[str, ...]:
    if isinstance(words, str) or not all(isinstance(word, str) and word.strip() for word in words):
        raise InvalidRequest(f"{what}={words!r} must be a list of names, as ['polars>=1']")
    return tuple(words)


@frozen
class EnvironmentConfig:
    """Environment of a job's process, on top of the node's own.

    Attributes:
        extras: of the workspace's project (its ``pyproject.toml``). Where no workspace is named, of the project in the
            working directory, which is the workspace then.
        pip_packages: requirements as pip writes them: ``"polars>=1"``.
        env_vars: values, or `Secret` in their place; names that begin with ``FRAY_`` are Fray's own.
        workspace: directory whose files (tracked by git, or untracked and not ignored) travel to where the job runs and
            are its working directory there. Default None: nothing travels.
        docker_image: run in a container of this image, on machines with docker or podman. Python code needs ``python3``
            of the author's version in it; Fray itself is brought along. Default None.
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
    """What travels of it. Two equal ones are one environment: its key is made of this and of nothing else."""

    extras: tuple[str, ...] = ()
    pip_packages: tuple[str, ...] = ()
    bundle: BlobId | None = None
    """Names the manifest of the workspace: paths, modes and hashes of its files."""
    docker_image: str | None = None
    python: str = ""
    """``3.11``: of the author's process; pickles of functions need the same. Empty for programs."""
