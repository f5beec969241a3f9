"""What an environment is made of, under which key it is kept, and by which steps uv makes it. Pure.

Law: the key covers everything that the steps read, so two equal keys are the same environment, and what a job's author
edits besides (his code) is in none.
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
"""Of the directories; another number makes every environment anew."""
PROJECT, LOCK = "pyproject.toml", "uv.lock"
CONSTRAINTS, REQUIREMENTS = "constraints.txt", "requirements.txt"
DROPPED_VARIABLES = ("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH", "PYTHONHOME", "UV_PROJECT_ENVIRONMENT", "UV_PYTHON")
"""Of the node's variables: they name the node's own environment."""


@frozen(kw_only=True)
class BaseEnvironment:
    """What every environment of one node begins with."""

    fray: str
    """Version of Fray, and a mark of the overlay."""
    python: str
    """``3.11`` of the node itself."""
    interpreter: str
    platform: str


@frozen(kw_only=True)
class Project:
    """What of a workspace decides about packages."""

    pyproject: str
    lock: str | None = None


@frozen(kw_only=True)
class Recipe:
    """One environment."""

    base: BaseEnvironment
    python: str
    extras: tuple[str, ...] = ()
    pip_packages: tuple[str, ...] = ()
    project: Project | None = None

    @property
    def key(self) -> str:
        """Short enough for a path, long enough for a lab."""
        made_of = json.dumps([FORMAT, asdict(self)], sort_keys=True)
        return hashlib.sha256(made_of.encode()).hexdigest()[:16]

    def describe(self) -> str:
        """For people: ``Python 3.11, project, extras gpu, packages polars>=1``."""
        parts = [f"Python {self.python}"]
        if self.project is not None:
            parts.append("project as locked" if self.project.lock is not None else "project")
        parts += [f"extras {', '.join(self.extras)}"] if self.extras else []
        parts += [f"packages {', '.join(self.pip_packages)}"] if self.pip_packages else []
        return without_credentials(", ".join(parts))


_CREDENTIALS = re.compile(r"(?<=://)[^/\s]*@")


def without_credentials(text: str) -> str:
    """What is said of addresses is read by all who read the log: ``https://****@example.org/alpha.whl``."""
    return _CREDENTIALS.sub("****@", text)


class BadRecipe(Exception):
    """What is asked for cannot be; says why."""


def recipe_of(spec: EnvironmentSpec, base: BaseEnvironment, project: Project | None) -> Recipe | None:
    """None where the node's own environment is the one: nothing to install, and the author's Python is the node's.

    Raises:
        BadRecipe: extras without a project.
    """
    python = spec.python or base.python
    if spec.extras and project is None:
        raise BadRecipe(
            f"extras {', '.join(spec.extras)} are of a project, and the job brings none: give EnvironmentConfig a "
            f"workspace= whose {PROJECT} has them"
        )
    if python == base.python and not spec.pip_packages and project is None:
        return None
    return Recipe(
        base=base,
        python=python,
        extras=tuple(sorted(set(spec.extras))),
        pip_packages=spec.pip_packages,
        project=project,
    )


def project_of(files: Mapping[str, str]) -> Project | None:
    """``files``: `PROJECT` and `LOCK` as far as they are there. None if they describe no project with packages.

    Raises:
        BadRecipe: the file cannot be read.
    """
    text = files.get(PROJECT)
    if text is None or "project" not in _toml(text, PROJECT):
        return None
    return Project(pyproject=text, lock=files.get(LOCK))


def source_directories(project: Project) -> list[str]:
    """Of the project and what it finds on the disk by the lock file: relative to the workspace. Their code is never
    installed: it goes on ``sys.path`` from where it is, so that edits need no new environment.
    """
    if project.lock is None:
        return ["."]
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


# How -----------------------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class Step:
    """One run of uv."""

    argv: tuple[str, ...]
    """After ``uv``."""
    in_workspace: bool = False
    variables: dict[str, str] = Factory(dict)

    @property
    def title(self) -> str:
        return "uv " + " ".join(word for word in self.argv[:2] if not word.startswith("-"))


def steps(recipe: Recipe, directory: str, interpreter: str) -> list[Step]:
    """What to run, one after the other, to make it in ``directory``, where `files` are already.

    Requirements go by file: a command line is for everyone to see, and has an end.
    """
    venv = f"{directory}/venv"
    found = [Step(argv=("venv", "--no-project", "--python", interpreter, venv))]
    project, extras = recipe.project, [word for extra in recipe.extras for word in ("--extra", extra)]
    install = ["pip", "install", "--python", f"{venv}/bin/python", "--constraints", f"{directory}/{CONSTRAINTS}"]
    if project is not None and project.lock is not None:
        found.append(
            Step(
                argv=(
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
    """What the steps read, by name."""
    return {
        CONSTRAINTS: "".join(f"{line}\n" for line in constraints),
        REQUIREMENTS: "".join(f"{line}\n" for line in recipe.pip_packages),
    }


def uv_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The node's variables (proxies, indexes, certificates, uv's own), as uv shall have them."""
    handed = {key: value for key, value in environ.items() if key not in DROPPED_VARIABLES}
    return {**handed, "UV_PYTHON_DOWNLOADS": "never", "UV_NO_PROGRESS": "1", "NO_COLOR": "1"}


def variables_in(venv: str, environ: Mapping[str, str]) -> dict[str, str]:
    """What ``activate`` would change; empty ones are as good as unset."""
    path = environ.get("PATH", "/usr/local/bin:/usr/bin:/bin")
    return {
        **{key: "" for key in DROPPED_VARIABLES if key in environ},
        "VIRTUAL_ENV": venv,
        "PATH": f"{venv}/bin:{path}",
    }


@frozen(kw_only=True)
class BuildPlan:
    """What a node tells its builder."""

    recipe: Recipe
    root: str
    """Of the cache."""
    workspace: str | None
    node_pid: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> BuildPlan:
        text_in: dict[str, Any] = json.loads(text)
        recipe = text_in["recipe"]
        project = Project(**recipe["project"]) if recipe["project"] is not None else None
        lists = {name: tuple(recipe[name]) for name in ("extras", "pip_packages")}
        base = BaseEnvironment(**recipe["base"])
        return cls(**{**text_in, "recipe": Recipe(**{**recipe, **lists, "base": base, "project": project})})


# What went wrong -----------------------------------------------------------------------------------------------------

LAST_LINES = 20
_FULL = re.compile(r"No space left on device|os error 28|Disk quota exceeded|os error 122|File too large|os error 27")


_FRAYS_OWN = "\n(Bounds in it that nobody wrote are Fray's: it runs in the same process.)"


def is_full(text: str) -> bool:
    """Whether a tool complains that the disk has no room."""
    return _FULL.search(text) is not None


def failed_step(title: str, code: int, lines: list[str]) -> str:
    """The message of a step that failed, with the tool's own last words."""
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    text_in = "\n".join([f"{title} failed ({how}):", *lines[-LAST_LINES:]])
    return text_in + _FRAYS_OWN if "unsatisfiable" in text_in else text_in


def no_python(recipe: Recipe) -> str:
    return (
        f"the job was made by Python {recipe.python}, this node runs Python {recipe.base.python}, and there is no "
        f"Python {recipe.python} on the machine: what is pickled by one cannot be opened by the other. Run the driver "
        f"with Python {recipe.base.python}, or install the other one here (uv python install {recipe.python})"
    )


def conflict(code: int, lines: list[str]) -> str:
    """Fray does not run beside what was installed."""
    return "\n".join(
        [
            f"Fray cannot be imported beside these packages (exit code {code}); one of them stands in the place of "
            "another version that Fray needs:",
            *lines[-LAST_LINES:],
        ]
    )
