"""The elastic example on a running cluster; on nodes of its own it is in tests/test_elastic_slices.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.processes.lab import TOKEN, open_lab

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "elastic_slices.py"


def test_on_a_running_cluster_it_trains_on_the_slices_there_are(tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": os.getcwd(), "FRAY_TOKEN": TOKEN}
    with open_lab(tmp_path, "alpha") as lab:
        asked = [sys.executable, str(EXAMPLE), lab.spec, "--steps", "100", "--check", "--json"]
        done = subprocess.run(asked, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["check"] == "the same"
    assert {2, 3} <= {size for size, _ in report["phases"]}
