"""Names of `fray`: all resolve, and are imported when the first of them is used."""

from __future__ import annotations

import subprocess
import sys

import fray
from fray import public_names
from fray.name_modules import modules_of_names


def test_all_public_names_resolve_to_those_of_public_names() -> None:
    assert sorted(public_names.__all__) == sorted(modules_of_names()) == sorted(fray.__all__)
    for name in public_names.__all__:
        assert getattr(fray, name) is getattr(public_names, name)


def test_import_fray_imports_the_module_of_a_name_when_it_is_used() -> None:
    program = """
import sys, fray
assert [name for name in sys.modules if name.startswith("fray.")] == ["fray.import_hooks"]
assert "trio" not in sys.modules and "attrs" not in sys.modules
fray.Entrypoint, fray.open_cluster
assert "fray.runtime.runtime" not in sys.modules and "fray.net.codec" not in sys.modules
fray.Job
assert "fray.api.pools.worker_pool" not in sys.modules
fray.WorkerPool
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)
