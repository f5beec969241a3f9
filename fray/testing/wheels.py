"""Wheels made on the spot, so that tests and benchmarks of environments need no network."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path


def make_wheel(
    directory: Path, name: str, version: str, *, requires: Sequence[str] = (), body: str = "", size_bytes: int = 0
) -> None:
    """Write a wheel of ``name.py`` with ``version`` and ``body``, and ``size_bytes`` of data beside it."""
    directory.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    needs = "".join(f"Requires-Dist: {line}\n" for line in requires)
    with zipfile.ZipFile(directory / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", f"version = {version!r}\n{body}\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
        tag = "Wheel-Version: 1.0\nGenerator: fray\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{info}/WHEEL", tag)
        wheel.writestr(f"{info}/RECORD", "")
        if size_bytes:
            wheel.writestr(f"{name}_data.bin", b"\0" * size_bytes)


def offline(directory: Path, cache: Path) -> dict[str, str]:
    """Return the variables with which uv finds only these wheels."""
    return {"UV_FIND_LINKS": str(directory), "UV_NO_INDEX": "1", "UV_OFFLINE": "1", "UV_CACHE_DIR": str(cache)}
