"""Fray's part of each environment: links to its own package and to exactly its requirements.

Invariant: it comes after the environment's own packages on ``sys.path`` (a ``.pth`` line comes after
``site-packages``), so a job gets the versions it requested. It needs no network and no copy, and takes a millisecond.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

from fray.node.environments.recipe import BaseEnvironment

ROOTS = ("anyio", "attrs", "cattrs", "cloudpickle", "cryptography", "trio")
"""Fray's requirements, for a Fray that is not installed but found on the path."""
OPTIONAL = ("fsspec",)
"""Optional requirements that a job may use: linked if the node has them."""
NOT_IN_JOBS = {"uv"}
PTH = "zz_fray.pth"
"""Read after other ``.pth`` files, so that its directory is the last."""
_NAME = re.compile(r"[A-Za-z0-9._-]+")


def closure() -> dict[str, metadata.Distribution]:
    """Return Fray's transitive requirements by canonical name, as installed where this code runs."""
    found: dict[str, metadata.Distribution] = {}
    todo = [*map(_requirement_name, _without_extras(_own_requires())), *OPTIONAL]
    while todo:
        name = _canonical(todo.pop())
        if name in found or name in NOT_IN_JOBS:
            continue
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # not needed on this platform (a marker says so), or optional
        todo += [_requirement_name(line) for line in _without_extras(found[name].requires)]
    return found


def constraints() -> list[str]:
    """Return Fray's transitive requirements as constraints for uv: so that the resolver chooses versions that Fray can
    run with, or reports itself why there are none."""
    lines = [line for dist in closure().values() for line in _without_extras(dist.requires)]
    with_own = [*_without_extras(_own_requires()), *lines]
    return sorted({line for line in with_own if _canonical(_requirement_name(line)) not in NOT_IN_JOBS})


def _own_requires() -> list[str]:
    try:
        return metadata.distribution("fray").requires or []
    except metadata.PackageNotFoundError:
        return list(ROOTS)


def _without_extras(requires: list[str] | None) -> list[str]:
    """Return the requirements that do not belong to extras."""
    return [line for line in requires or [] if "extra ==" not in line and "extra==" not in line and "[" not in line]


def _requirement_name(line: str) -> str:
    match = _NAME.match(line)
    return match.group() if match else line


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


# On the disk ---------------------------------------------------------------------------------------------------------


def links() -> dict[str, str]:
    """Return the target of each link of the overlay, by name."""
    found = {"fray": str(Path(__file__).parents[2])}
    for dist in closure().values():
        found |= dict(_top_level_paths(dist))
    return found


def _top_level_paths(dist: metadata.Distribution) -> Iterator[tuple[str, str]]:
    for file in dist.files or []:
        top = file.parts[0]
        # Scripts lie outside of site-packages, and .pth files would run code in an environment they were not installed
        # in.
        if top in ("..", "__pycache__", "bin") or top.endswith(".pth"):
            continue
        yield top, str(Path(str(dist.locate_file(top))))


def fingerprint() -> str:
    """Return the versions and the location of Fray's packages, as one string for the key of an environment."""
    dists = closure()
    return ";".join(f"{name}={dists[name].version}" for name in sorted(dists)) + f";{links()['fray']}"


def create(directory: Path) -> None:
    """Create the links that are missing in ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, target in links().items():
        link = directory / name
        if not link.is_symlink():
            link.symlink_to(target)


def site_packages(venv: Path, python: str) -> Path:
    """Return the ``site-packages`` of a virtual environment for ``python`` (``3.11``)."""
    return venv / "lib" / f"python{python}" / "site-packages"


def add_path(venv: Path, python: str, overlay: Path) -> None:
    (site_packages(venv, python) / PTH).write_text(f"{overlay}\n")


def is_installed(venv: Path, python: str, name: str) -> bool:
    """Return whether the environment has a distribution of this name, apart from the overlay."""
    own = metadata.distributions(path=[str(site_packages(venv, python))])
    return any(_canonical(dist.name or "") == name for dist in own)


@cache
def base() -> BaseEnvironment:
    """Return the base of this node's environments. Reads the metadata of the installed packages once: 20 ms."""
    return BaseEnvironment(
        fray=fingerprint(),
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        interpreter=_base_interpreter(),
        platform=f"{sys.platform}-{os.uname().machine}",
    )


def _base_interpreter() -> str:
    """Return the interpreter behind the virtual environment this runs in, which may be removed."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
