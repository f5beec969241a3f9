"""A wheel of the Fray that runs here, made from its files: no build tool and no network is needed.

Equal files give equal wheels, so the digest of a wheel says whether a host has this Fray.
"""

from __future__ import annotations

import base64
import hashlib
import io
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from attrs import frozen

import fray
from fray.errors import InvalidRequest

EPOCH = (1980, 1, 1, 0, 0, 0)
"""Time of all files in a wheel: the earliest of a zip file."""


@frozen
class OwnWheel:
    """A wheel: name of its file, and content."""

    name: str
    content: bytes

    @property
    def digest(self) -> str:
        """First 12 digits of its SHA-256."""
        return hashlib.sha256(self.content).hexdigest()[:12]


def make_own_wheel() -> OwnWheel:
    """Return a wheel of this installation. Raises InvalidRequest: it is neither installed nor a checkout."""
    package = Path(fray.__file__).parent
    info = f"fray-{fray.__version__}.dist-info"
    files = {f"fray/{path.relative_to(package).as_posix()}": path.read_bytes() for path in _files(package)}
    files |= {f"{info}/{name}": text.encode() for name, text in _metadata(package.parent).items()}
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: fray\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    record = [f"{name},sha256={_digest(content)},{len(content)}\n" for name, content in files.items()]
    files[f"{info}/RECORD"] = "".join([*record, f"{info}/RECORD,,\n"]).encode()
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name, EPOCH)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, content, zipfile.ZIP_DEFLATED)
    return OwnWheel(f"fray-{fray.__version__}-py3-none-any.whl", out.getvalue())


def _files(package: Path) -> Iterator[Path]:
    for path in sorted(package.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")


def _metadata(root: Path) -> Mapping[str, str]:
    """Return METADATA and entry_points.txt: of the checkout, else of the installed distribution."""
    try:
        project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
        if project["name"] == "fray":
            return {"METADATA": _core_metadata(project), "entry_points.txt": _entry_points(project["scripts"])}
    except (OSError, ValueError, KeyError):
        pass  # installed
    try:
        installed = metadata.distribution("fray")
        found = {name: installed.read_text(name) for name in ("METADATA", "entry_points.txt")}
    except metadata.PackageNotFoundError:
        found = {}
    kept = {name: text for name, text in found.items() if text}
    if len(kept) < 2:
        raise InvalidRequest(
            f"the Fray in {root} is neither installed nor a checkout: name what hosts install, package = "
            f"'fray=={fray.__version__}'"
        )
    return kept


def _core_metadata(project: Mapping[str, Any]) -> str:
    lines = ["Metadata-Version: 2.1", "Name: fray", f"Version: {fray.__version__}"]
    lines += [f"Requires-Python: {project['requires-python']}"]
    lines += [f"Requires-Dist: {each}" for each in project["dependencies"]]
    for extra, needs in project["optional-dependencies"].items():
        lines += [f"Provides-Extra: {extra}", *(f'Requires-Dist: {each}; extra == "{extra}"' for each in needs)]
    return "".join(f"{line}\n" for line in lines)


def _entry_points(scripts: Mapping[str, str]) -> str:
    return "[console_scripts]\n" + "".join(f"{name} = {target}\n" for name, target in scripts.items())
