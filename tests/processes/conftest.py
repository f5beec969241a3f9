"""Fixtures of the tests with real processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes.lab import Lab


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    """Laboratory of one test; nothing runs in it yet."""
    lab = Lab(tmp_path)
    try:
        yield lab
    finally:
        lab.close()
