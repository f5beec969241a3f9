"""Preparation of the zygote's heap."""

from __future__ import annotations

import os
import sys

import pytest

from fray.node.zygotes import copy_on_write


def test_stderr_is_restored_when_the_statistics_of_the_allocator_cannot_be_printed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> None:
        raise RuntimeError

    monkeypatch.setattr(sys, "_debugmallocstats", fail)
    before = os.fstat(2)
    with pytest.raises(RuntimeError):
        copy_on_write._free_blocks()
    assert os.path.samestat(os.fstat(2), before)
