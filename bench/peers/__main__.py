"""Make ``.venv-peers``, with the systems Fray is compared with: ``python -m bench.peers``.

Ray, xoscar, Dask and what Fray itself needs, pinned and checked by hash (``bench/peers.txt``). About 500 MB; made once.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PINS = ROOT / "bench" / "peers.txt"
PLACE = ROOT / ".venv-peers"
PYTHON = PLACE / "bin" / "python"
PIP_SETTINGS = {
    "PIP_USER": "0",
    "PIP_REQUIRE_VIRTUALENV": "0",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PIP_NO_INPUT": "1",
}


class CannotMake(Exception):
    """The environment of peers cannot be made; the text says why."""


def make() -> Path:
    """Return the interpreter of the environment of peers, made if it does not exist or its pins have changed.

    Raises:
        CannotMake: the packages could not be installed; pip has printed the reason.
    """
    mark = PLACE / f"fray-{hashlib.sha256(PINS.read_bytes()).hexdigest()[:16]}"
    if mark.exists() and PYTHON.exists():
        return PYTHON
    shutil.rmtree(PLACE, ignore_errors=True)
    base = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    interpreter = str(base) if base.exists() else sys.executable
    say(f"making {PLACE.name} with {interpreter}: about 500 MB of pinned packages")
    if importlib.util.find_spec("ensurepip"):
        _run([interpreter, "-m", "venv", str(PLACE)], "the environment cannot be made")
        pip = [str(PYTHON), "-m", "pip"]
    else:  # on Debian: the interpreter's own pip installs from outside
        _run([interpreter, "-m", "venv", "--without-pip", str(PLACE)], "the environment cannot be made")
        pip = [interpreter, "-m", "pip", "--python", str(PYTHON)]
    _run(
        [*pip, "install", "--quiet", "--require-hashes", "--only-binary", ":all:", "-r", str(PINS)],
        "the packages cannot be installed (see above). Is the package index within reach? "
        "Fray itself needs none of them: only --peer and bench.compare with other systems do",
    )
    mark.touch()
    return PYTHON


def _run(command: list[str], or_else: str) -> None:
    if subprocess.run(command, env={**os.environ, **PIP_SETTINGS}, check=False).returncode:
        raise CannotMake(or_else)


def say(text: str) -> None:
    print(f"fray: {text}", file=sys.stderr, flush=True)


def main() -> None:
    try:
        print(make())
    except CannotMake as error:
        say(str(error))
        sys.exit(1)


if __name__ == "__main__":
    main()
