"""Version of the code that decides what a seed does: Fray's release, and a hash of all modules of Fray and of this
package."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import fray
from fray.model.messages.session import VERSION

HASH_CHARS = 10


@cache
def code_version() -> str:
    """Return it as ``0.1.0+1a2b3c4d5e``. The same seed runs the same scenario exactly if this is the same."""
    digest = hashlib.blake2b()
    for package in (Path(fray.__file__).parent, Path(__file__).parent):
        for file in sorted(package.rglob("*.py")):
            digest.update(f"{package.name}/{file.relative_to(package)}\0".encode())
            digest.update(file.read_bytes())
    return f"{VERSION}+{digest.hexdigest()[:HASH_CHARS]}"
