"""The warm-up of a zygote runs to its end, and leaves nothing behind."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import trio

from fray.runtime.process import warmup
from fray.runtime.runtime import current_or_none


def test_the_dummy_actor_answers_every_call_and_nothing_remains(tmp_path: Path) -> None:
    # Idle threads of earlier tests may end meanwhile: only new ones count.
    gc.collect()
    descriptors, threads = set(os.listdir("/proc/self/fd")), set(threading.enumerate())
    answers = trio.run(warmup.run_dummy_actor, str(tmp_path))
    assert answers == list(range(warmup.CALLS))
    assert set(os.listdir("/proc/self/fd")) <= descriptors
    assert set(threading.enumerate()) <= threads
    assert list(tmp_path.iterdir()) == []
    assert current_or_none() is None


def test_without_a_directory_the_warm_up_is_skipped(tmp_path: Path) -> None:
    blocked = tmp_path / "no directory"
    blocked.touch()
    warmup.warm_up(str(blocked))
