"""``fray-node`` on a machine that has two GPUs by its own account: plain files, in the directory FRAY_TEST_DEVICES."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from fray.node.grants import freeing, holdings
from fray.node.main import main


def pretend(root: Path = freeing.ROOT) -> dict[str, str]:
    return {f"gpu-{number}": f"{os.environ['FRAY_TEST_DEVICES']}/nvidia{number}" for number in range(2)}


if __name__ == "__main__":
    freeing.device_files = pretend
    holdings.FREE_S = 0.1
    sys.exit(main())
