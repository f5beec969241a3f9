"""What of Fray goes into each environment: links to its own package and to exactly what that needs.

Law: it stands behind the environment's own packages (a ``.pth`` line comes after ``site-packages``), so what a job
asked for is what it gets. It needs no network and no copy, and takes a millisecond.
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

ROOTS = ("attrs", "cattrs", "cloudpickle", "trio", "trio-websocket")
"""What Fray needs, where it is not installed but found on the path."""
OPTIONAL = ("fsspec",)
"""Optional parts of Fray a job may use: they go with it where the node has them."""
NOT_IN_JOBS = {"uv"}
PTH = "zz_fray.pth"
"""Read after other ``.pth`` files, so that its directory is the last."""
_NAME = re.compile(r"[A-Za-z0-9._-]+")


def closure() -> dict[str, metadata.Distribution]:
    """By canonical name: what Fray needs, and what that needs, as installed where this code runs."""
    found: dict[str, metadata.Distribution] = {}
    todo = [*_roots(), *OPTIONAL]
    while todo:
        name = _canonical(todo.pop())
        if name in found or name in NOT_IN_JOBS:
            continue
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # a marker says it is not needed here, or nobody needs it
        todo += [_requirement_name(line) for line in _without_extras(found[name].requires)]
    return found


def constraints() -> list[str]:
    """Requirements of Fray and of what it needs, as uv reads constraints: so that the resolver chooses what Fray can
    run beside, or says itself why it cannot."""
    lines = [line for dist in closure().values() for line in _without_extras(dist.requires)]
    with_own = [*_without_extras(_own_requires()), *lines]
    return sorted({line for line in with_own if _canonical(_requirement_name(line)) not in NOT_IN_JOBS})


def _roots() -> list[str]:
    return [_requirement_name(line) for line in _without_extras(_own_requires())]


def _own_requires() -> list[str]:
    try:
        return metadata.distribution("fray").requires or []
    except metadata.PackageNotFoundError:
        return list(ROOTS)


def _without_extras(requires: list[str] | None) -> list[str]:
    """Without those that belong to extras."""
    return [line for line in requires or [] if "extra ==" not in line and "extra==" not in line and "[" not in line]


def _requirement_name(line: str) -> str:
    match = _NAME.match(line)
    return match.group() if match else line


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


# On the disk ---------------------------------------------------------------------------------------------------------


def links() -> dict[str, str]:
    """Name in the overlay to what it stands for."""
    found = {"fray": str(Path(__file__).parents[2])}
    for dist in closure().values():
        found |= dict(_top_level_paths(dist))
    return found


def _top_level_paths(dist: metadata.Distribution) -> Iterator[tuple[str, str]]:
    for file in dist.files or []:
        top = file.parts[0]
        if top in ("..", "__pycache__", "bin") or top.endswith(".pth"):
            continue
        yield top, str(Path(str(dist.locate_file(top))))


def fingerprint() -> str:
    """Of what the overlay is: versions and places."""
    dists = closure()
    return ";".join(f"{name}={dists[name].version}" for name in sorted(dists)) + f";{links()['fray']}"


def create(directory: Path) -> None:
    """Make the overlay, whole, where it is not yet."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, target in links().items():
        link = directory / name
        if not link.is_symlink():
            link.symlink_to(target)


def site_packages(venv: Path, python: str) -> Path:
    """Of a virtual environment for ``python`` (``3.11``)."""
    return venv / "lib" / f"python{python}" / "site-packages"


def add_path(venv: Path, python: str, overlay: Path) -> None:
    (site_packages(venv, python) / PTH).write_text(f"{overlay}\n")


def is_installed(venv: Path, python: str, name: str) -> bool:
    """Whether a distribution of this name is among the environment's own."""
    own = metadata.distributions(path=[str(site_packages(venv, python))])
    return any(_canonical(dist.name or "") == name for dist in own)


@cache
def base() -> BaseEnvironment:
    """What environments of this node begin with. It reads the metadata of what is installed: 20 ms, once."""
    return BaseEnvironment(
        fray=fingerprint(),
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        interpreter=_base_interpreter(),
        platform=f"{sys.platform}-{os.uname().machine}",
    )


def _base_interpreter() -> str:
    """Of the Python this runs in: an environment must not hang on another one that may be removed."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
