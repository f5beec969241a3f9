"""A cluster for all tests of this process, whose jobs are forked from a process that has imported torch.

In a cluster of its own, each process of a run imports torch and Transformers, which takes 4 s of a processor: most of
what a run of a few steps costs. Here they are imported once. Runs of their own clusters are in the examples that
tests run, in the campaigns of kills, and in each test that ends a driver.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from tests.processes.lab import TOKEN, Lab


@cache
def warm_lab() -> Lab:
    """Return the cluster of this process, started with the first call; it ends with the process."""
    directory = Path(tempfile.mkdtemp(prefix="fray-warm-"))
    lab = Lab(directory)
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    atexit.register(lab.close)
    lab.start_controller()
    # Also if this process is killed: the node has hundreds of megabytes.
    config = directory / "warm.toml"
    config.write_text(f"cpu = 4\nparent_pid = {os.getpid()}\n")
    lab.start_node("warm", "--config", str(config), module="tests.support.warm_node")
    lab.wait_serving()
    return lab


@contextmanager
def on_warm_cluster() -> Iterator[str]:
    """Make `warm_lab` the cluster of drivers in this process, and return its spec."""
    spec = warm_lab().spec
    before = {name: os.environ.get(name) for name in ("FRAY_CLUSTER_SPEC", "FRAY_TOKEN")}
    os.environ.update(FRAY_CLUSTER_SPEC=spec, FRAY_TOKEN=TOKEN)
    try:
        yield spec
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
