"""Segments and their directories when the file system refuses them: nothing is left behind."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fray.net.buffers import segment_directories
from fray.net.buffers.shared_memory import SegmentPool


def refuse(*arguments: Any, **options: Any) -> Any:
    raise OSError("no")


def open_files() -> int:
    gc.collect()  # files of earlier tests
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(("module", "call"), [(os, "ftruncate"), (mmap, "mmap")])
def test_a_segment_that_cannot_be_made_leaves_no_file_and_no_descriptor(
    module: Any, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = SegmentPool(1 << 30, (str(tmp_path),))
    before, names = open_files(), os.listdir(pool.directory)
    with monkeypatch.context() as patch:
        patch.setattr(module, call, refuse)
        assert pool.store(memoryview(b"x" * 4096)) is None
    assert (open_files(), os.listdir(pool.directory)) == (before, names)
    assert pool.held_bytes == 0
    assert pool.store(memoryview(b"x" * 4096)) is not None
    pool.close()


@pytest.mark.parametrize(("module", "call"), [(os, "open"), (fcntl, "flock"), (os, "rename")])
def test_a_directory_that_cannot_be_made_leaves_nothing(
    module: Any, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, own = open_files(), set(segment_directories.own_directories)
    real: Callable[..., Any] = getattr(module, call)
    calls: list[object] = []

    def refuse_first(*arguments: Any, **options: Any) -> Any:
        calls.append(call)
        return refuse() if len(calls) == 1 else real(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(module, call, refuse_first)
        with pytest.raises(OSError, match="no"):
            segment_directories.make((str(tmp_path),))
    assert os.listdir(tmp_path) == []
    assert (open_files(), segment_directories.own_directories) == (before, own)
