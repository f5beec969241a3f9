"""The contract suite on `RayClient`, and each of its mappings, on one real Ray of this machine."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from v2_contract import *  # noqa: F403
from v2_contract import Capabilities

from fray.v2.ray_backend.backend import RayClient

pytestmark = pytest.mark.xdist_group("ray")


@pytest.fixture(scope="module")
def ray_here() -> Iterator[RayClient]:
    """A small Ray that says it has TPUs. Its directory is short: names of Unix sockets have 107 letters at most."""
    directory = Path(tempfile.mkdtemp(prefix="fr-", dir="/tmp"))
    token = directory / "token"
    token.write_text("0123456789abcdef" * 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2]), str(Path(__file__).parent)]))
        client = RayClient(
            "local",
            num_cpus=4,
            resources={"TPU": 16, "TPU-v5litepod-16-head": 2},
            object_store_memory=100 * 1024 * 1024,
            logging_level="ERROR",
            _temp_dir=str(directory),
        )
        try:
            yield client
        finally:
            client.shutdown(wait=False)
            shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def client(ray_here: RayClient) -> RayClient:
    return ray_here


@pytest.fixture
def make_client(ray_here: RayClient) -> Callable[[], RayClient]:
    return RayClient


@pytest.fixture
def capabilities() -> Capabilities:
    return Capabilities()
