"""Seeds that no other commit runs: derived from the commit, so that a campaign finds what fixed seeds no longer can."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.simulation.code_version import code_version

BLOCK = 1_000
"""Distance of the first seeds of two commits."""
COMMIT_CHARS = 9
"""Digits of a commit that decide its block: seeds stay below 10^14."""


def first_fresh_seed() -> tuple[int, str]:
    """Return the first seed of the commit that is checked out, and what it was derived from.

    Without git, or outside of a repository, it is derived from the code itself (`code_version`).
    """
    commit = _commit()
    if commit:
        return int(commit[:COMMIT_CHARS], 16) * BLOCK, f"commit {commit[:COMMIT_CHARS]}"
    version = code_version()
    return int(version.partition("+")[2][:COMMIT_CHARS], 16) * BLOCK, f"the code {version}"


def _commit() -> str:
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return found.stdout.strip() if found.returncode == 0 else ""
