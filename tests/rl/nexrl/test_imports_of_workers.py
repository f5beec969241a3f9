"""Rollout workers and drivers load no torch: a process of many workers would be large, and slow to start."""

from __future__ import annotations

import subprocess
import sys


def test_workers_and_controller_load_no_torch() -> None:
    program = """
import sys
import fray.rl.rollout.process, fray.rl.rollout_worker, fray.rl.nexrl.controller
print({"torch", "transformers", "safetensors", "ray"} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
