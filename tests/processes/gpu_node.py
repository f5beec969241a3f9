"""``fray-node`` on a machine that has two GPUs by its own account: plain files, in the directory FRAY_TEST_DEVICES."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from fray.node.main import main
from fray.node.resources import allocator, device_holders


def pretend(root: Path = device_holders.ROOT) -> dict[str, str]:
    return {f"gpu-{number}": f"{os.environ['FRAY_TEST_DEVICES']}/nvidia{number}" for number in range(2)}


if __name__ == "__main__":
    device_holders.device_files = pretend
    allocator.FREE_S = 0.1
    sys.exit(main())
