"""Script that the comparison harness starts for each system: its ``measure.py``, with Fray's adapters as peers."""

import os
import runpy
import sys

HARNESS = os.environ["FRAY_BENCH_HARNESS"]
ADAPTERS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "peers")

if __name__ == "__main__":
    sys.path[0] = HARNESS
    import peers  # type: ignore[import-not-found]

    peers.__path__.append(ADAPTERS)
    runpy.run_path(os.path.join(HARNESS, "measure.py"), run_name="__main__")
