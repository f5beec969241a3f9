"""Recipe of an environment: its contents, its key in the cache and the uv commands that build it. Pure.

Invariant: the key covers everything that the commands read, so equal keys mean the same environment; the code that the
author of a job edits is not part of it, so an edit needs no build. The price: the project has no console scripts, and
its local sources no compiled parts.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Mapping
from typing import Any

from attrs import Factory, asdict, frozen

from fray.model.environment import EnvironmentSpec

FORMAT = 1
"""Format of the directories, part of every key: changing it makes every environment be built again."""
PROJECT, LOCK = "pyproject.toml", "uv.lock"
CONSTRAINTS, REQUIREMENTS = "constraints.txt", "requirements.txt"
DROPPED_VARIABLES = ("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH", "PYTHONHOME", "UV_PROJECT_ENVIRONMENT", "UV_PYTHON")
"""Variables that are removed because they name the node's own environment."""


@frozen(kw_only=True)
class BaseEnvironment:
    """The part that all environments of one node share."""

    fray: str
    """Fingerprint of Fray and its requirements; see `overlay.fingerprint`."""
    python: str
    """Version of the node's Python, such as ``3.11``."""
    interpreter: str
    platform: str


@frozen(kw_only=True)
class Project:
    """The files of a workspace that determine its packages."""

    pyproject: str
    lock: str | None = None


@frozen(kw_only=True)
class Recipe:
    """Contents of one environment."""

    base: BaseEnvironment
    python: str
    extras: tuple[str, ...] = ()
    pip_packages: tuple[str, ...] = ()
    project: Project | None = None

    @property
    def key(self) -> str:
        """Hash of the contents, 64 bits: short enough for a path, long enough for all environments of a machine."""
        made_of = json.dumps([FORMAT, asdict(self)], sort_keys=True)
        return hashlib.sha256(made_of.encode()).hexdigest()[:16]

    def describe(self) -> str:
        """Return a text such as ``Python 3.11, project, extras gpu, packages polars>=1``."""
        parts = [f"Python {self.python}"]
        if self.project is not None:
            parts.append("project as locked" if self.project.lock is not None else "project")
        parts += [f"extras {', '.join(self.extras)}"] if self.extras else []
        parts += [f"packages {', '.join(self.pip_packages)}"] if self.pip_packages else []
        return without_credentials(", ".join(parts))


_CREDENTIALS = re.compile(r"(?<=://)[^/\s]*@")


def without_credentials(text: str) -> str:
    """Return the text with the credentials of URLs masked, for logs: ``https://****@example.org/alpha.whl``."""
    return _CREDENTIALS.sub("****@", text)


class BadRecipe(Exception):
    """The requested environment is impossible; the message says why."""


def recipe_of(spec: EnvironmentSpec, base: BaseEnvironment, project: Project | None) -> Recipe | None:
    """Return the recipe for a job, or None if it runs in the node's own environment: there is nothing to install and
    the job needs the node's Python version.

    Raises:
        BadRecipe: extras without a project.
    """
    python = spec.python or base.python
    if spec.extras and project is None:
        raise BadRecipe(
            f"extras {', '.join(spec.extras)} need a project: pass EnvironmentConfig a workspace= whose {PROJECT} "
            "defines them"
        )
    if python == base.python and not spec.pip_packages and project is None:
        return None
    return Recipe(
        base=base,
        python=python,
        # Sorted, so that equal sets share an environment.
        extras=tuple(sorted(set(spec.extras))),
        pip_packages=spec.pip_packages,
        project=project,
    )


def project_of(files: Mapping[str, str]) -> Project | None:
    """Return the project in ``files`` (`PROJECT` and `LOCK`, if they exist); None without a ``[project]`` table.

    Raises:
        BadRecipe: a file cannot be parsed.
    """
    text = files.get(PROJECT)
    if text is None or "project" not in _toml(text, PROJECT):
        return None
    return Project(pyproject=text, lock=files.get(LOCK))


def source_directories(project: Project) -> list[str]:
    """Return the directories of the project and of its local dependencies in the lock file, relative to the workspace.
    Their code is never installed: ``sys.path`` gets their directories, so that edits need no new environment.
    """
    if project.lock is None:
        return ["."]
    # The file comes with a job and may have any shape: each level is checked before it is used.
    packages = _toml(project.lock, LOCK).get("package", [])
    tables = [package for package in packages if isinstance(package, dict)] if isinstance(packages, list) else []
    sources = [package["source"] for package in tables if isinstance(package.get("source"), dict)]
    kinds = ("editable", "virtual", "directory")
    found = [source[kind] for source in sources for kind in kinds if isinstance(source.get(kind), str)]
    return list(dict.fromkeys([".", *found]))


def _toml(text: str, name: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadRecipe(f"the workspace's {name} cannot be read: {error}") from None


# Build steps ---------------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class Step:
    """One run of uv."""

    argv: tuple[str, ...]
    """Arguments after ``uv``."""
    in_workspace: bool = False
    variables: dict[str, str] = Factory(dict)

    @property
    def title(self) -> str:
        return "uv " + " ".join(word for word in self.argv[:2] if not word.startswith("-"))


def steps(recipe: Recipe, directory: str, interpreter: str) -> list[Step]:
    """Return the uv commands that build the environment in ``directory``, which contains `files` already.

    Requirements are passed in files: every user of the machine can read a command line, and its length is limited.
    """
    venv = f"{directory}/venv"
    found = [Step(argv=("venv", "--no-project", "--python", interpreter, venv))]
    project, extras = recipe.project, [word for extra in recipe.extras for word in ("--extra", extra)]
    # Fray's own requirements as constraints: it runs in the same process.
    install = ["pip", "install", "--python", f"{venv}/bin/python", "--constraints", f"{directory}/{CONSTRAINTS}"]
    if project is not None and project.lock is not None:
        found.append(
            Step(
                argv=(
                    # --frozen: the lock file is used as it is, so equal keys mean equal environments.
                    *("sync", "--frozen", "--no-dev", "--no-install-project", "--no-install-workspace"),
                    *("--no-install-local", "--python", f"{venv}/bin/python", *extras),
                ),
                in_workspace=True,
                variables={"UV_PROJECT_ENVIRONMENT": venv},
            )
        )
        if recipe.pip_packages:
            found.append(Step(argv=(*install, "-r", f"{directory}/{REQUIREMENTS}")))
    elif project is not None or recipe.pip_packages:
        from_project = ["-r", PROJECT, *extras] if project is not None else []
        from_packages = ["-r", f"{directory}/{REQUIREMENTS}"] if recipe.pip_packages else []
        found.append(Step(argv=(*install, *from_project, *from_packages), in_workspace=project is not None))
    return found


def files(recipe: Recipe, constraints: list[str]) -> dict[str, str]:
    """Return the contents of the files that the steps read, by name."""
    return {
        CONSTRAINTS: "".join(f"{line}\n" for line in constraints),
        REQUIREMENTS: "".join(f"{line}\n" for line in recipe.pip_packages),
    }


def uv_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of uv: the node's (proxies, indexes, certificates, uv's own), adapted."""
    inherited = {key: value for key, value in environ.items() if key not in DROPPED_VARIABLES}
    # Without downloads of Python: a machine has the interpreters that its operator has installed.
    return {**inherited, "UV_PYTHON_DOWNLOADS": "never", "UV_NO_PROGRESS": "1", "NO_COLOR": "1"}


def variables_in(venv: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that ``activate`` would change; an empty value means unset."""
    path = environ.get("PATH", "/usr/local/bin:/usr/bin:/bin")
    return {
        **{key: "" for key in DROPPED_VARIABLES if key in environ},
        "VIRTUAL_ENV": venv,
        "PATH": f"{venv}/bin:{path}",
    }


@frozen(kw_only=True)
class BuildPlan:
    """Input of a builder process."""

    recipe: Recipe
    root: str
    """Directory of the cache."""
    workspace: str | None
    node_pid: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> BuildPlan:
        fields: dict[str, Any] = json.loads(text)
        recipe = fields["recipe"]
        project = Project(**recipe["project"]) if recipe["project"] is not None else None
        lists = {name: tuple(recipe[name]) for name in ("extras", "pip_packages")}
        base = BaseEnvironment(**recipe["base"])
        return cls(**{**fields, "recipe": Recipe(**{**recipe, **lists, "base": base, "project": project})})


# Error messages ------------------------------------------------------------------------------------------------------

LAST_LINES = 20
_FULL = re.compile(r"No space left on device|os error 28|Disk quota exceeded|os error 122|File too large|os error 27")


_CONSTRAINTS_NOTE = "\n(Version bounds in it that are not the job's are Fray's, which runs in the same process.)"


def is_full(text: str) -> bool:
    """Return whether a tool reports that the disk is full."""
    return _FULL.search(text) is not None


def failed_step(title: str, code: int, lines: list[str]) -> str:
    """Return the error message of a failed step, with the tool's last lines."""
    status = f"signal {-code}" if code < 0 else f"exit code {code}"
    message = "\n".join([f"{title} failed ({status}):", *lines[-LAST_LINES:]])
    return message + _CONSTRAINTS_NOTE if "unsatisfiable" in message else message


def no_python(recipe: Recipe) -> str:
    return (
        f"the job was submitted by Python {recipe.python}, this node runs Python {recipe.base.python}, and the machine "
        f"has no Python {recipe.python}: functions pickled by one version cannot be loaded by the other. Run the "
        f"driver with Python {recipe.base.python}, or install Python {recipe.python} on the node "
        f"(uv python install {recipe.python})"
    )


def conflict(code: int, lines: list[str]) -> str:
    """Return the error message of an environment in which Fray cannot be imported."""
    return "\n".join(
        [
            f"Fray cannot be imported with these packages (exit code {code}); one of them shadows a version that Fray "
            "needs:",
            *lines[-LAST_LINES:],
        ]
    )
