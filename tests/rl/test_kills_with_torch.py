"""Ten random kills in runs on three nodes: no promise is broken. ``python -m bench.faults.rl_kills`` has more."""

from __future__ import annotations

import importlib.util
import os

import pytest

from bench.faults.rl_kills import campaign

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch: make test-rl"),
    pytest.mark.within(400),
]


def test_ten_random_kills_break_no_promise() -> None:
    variables = dict(os.environ)
    report = campaign(10, seed=2, steps=30, pause_s=(0.2, 1.5), frozen_share=0.0)
    assert report["broken"] == []
    assert report["kills"] == 10
    assert dict(os.environ) == variables
