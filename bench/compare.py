"""Comparison of Fray with other systems: ``python -m bench.compare fray,ray,xoscar --rounds 3``.

The systems are measured in turn, each in a fresh process.

The work, the timing and the table are those of the comparison harness, a directory outside this project: ``--harness``,
else ``FRAY_BENCH_HARNESS``, else ``../shared/bench``. All its options work here (``--metrics``, ``--against``,
``--json``, ``--resume``, ...). Fray's systems: ``fray`` (native), ``fray_thread`` (native, all-sync actors) and
``fray_blocking``. Every system runs in ``.venv-peers`` (``python -m bench.peers`` makes it) where there is one, else in
this environment; ``BENCH_PYTHON_<SYSTEM>`` names another.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.peers.__main__ import PYTHON, CannotMake, make

ROOT = Path(__file__).resolve().parent.parent
OURS = "fray", "fray_blocking"
PEERS = "ray", "xoscar", "dask"


def find_harness(named: str | None = None) -> Path | None:
    """Return the directory of the comparison harness; None if it is not found."""
    places = [named or os.environ.get("FRAY_BENCH_HARNESS"), ROOT.parent / "shared" / "bench"]
    places.append(ROOT.parent.parent / "shared" / "bench")  # a worktree one level further down
    for place in places:
        if place and (Path(place) / "compare.py").is_file() and (Path(place) / "peers").is_dir():
            return Path(place).resolve()
    return None


def compare(harness: Path, arguments: Sequence[str]) -> int:
    """Run the harness's ``compare.py`` with Fray's adapters among its peers; return its exit status."""
    command = [sys.executable, "-m", "bench.compare", "--inside", *arguments]
    path = os.pathsep.join([str(ROOT), str(harness), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "FRAY_BENCH_HARNESS": str(harness), "PYTHONPATH": path}
    environment.pop(
        "PYTHONDONTWRITEBYTECODE", None
    )  # the peers are installed, thus compiled; this checkout is as it runs
    if PYTHON.exists():
        for system in (*OURS, "fray_thread", *PEERS):
            environment.setdefault(f"BENCH_PYTHON_{system.upper()}", str(PYTHON))
    return subprocess.run(command, env=environment, check=False).returncode


def run_inside(arguments: Sequence[str]) -> None:
    """Act as the harness's ``compare.py``, in the process with the harness on its path; start our ``measure.py``."""
    import compare as harness  # type: ignore[import-not-found]

    harness.HERE = str(ROOT / "bench" / "harness")
    sys.argv = ["bench.compare", *arguments]
    harness.main()


# For the other benchmarks: ``--peer`` --------------------------------------------------------------------------------


def add_peer_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--peer ray`` (may be repeated), which also measures the named systems and Fray in turn."""
    parser.add_argument(
        "--peer",
        action="append",
        choices=PEERS,
        default=[],
        help="measure this system and Fray in turn by the comparison harness; may be repeated (needs bench.peers)",
    )
    parser.add_argument("--peer-rounds", type=int, default=3, help="rounds of that comparison (default 3)")
    parser.add_argument("--peer-json", type=Path, metavar="FILE", help="write the comparison to FILE")
    parser.add_argument("--harness", metavar="DIRECTORY", help="of the comparison harness; default: ../shared/bench")


def run_peers(options: argparse.Namespace, metrics: str) -> None:
    """Run the comparison if ``--peer`` requests it, after a benchmark's own figures. Exits if it is impossible."""
    if not options.peer:
        return
    harness = find_harness(options.harness)
    if harness is None:
        sys.exit("--peer needs the comparison harness: pass its directory with --harness")
    try:
        make()
    except CannotMake as error:
        sys.exit(f"--peer needs the environment of peers: {error}")
    systems = ",".join((*OURS, *options.peer))
    more = ["--json", str(options.peer_json.resolve())] if options.peer_json else []
    rounds, base = str(options.peer_rounds), options.peer[0]
    sys.exit(compare(harness, [systems, "--rounds", rounds, "--metrics", metrics, "--against", base, *more]))


def main() -> None:
    if sys.argv[1:2] == ["--inside"]:
        run_inside(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(
        prog="python -m bench.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--harness", metavar="DIRECTORY", help="of the comparison harness; default: ../shared/bench")
    options, rest = parser.parse_known_args()
    harness = find_harness(options.harness)
    if harness is None:
        sys.exit("the comparison harness is not at ../shared/bench: pass its directory with --harness")
    sys.exit(compare(harness, rest))


if __name__ == "__main__":
    main()
