"""Command line of the simulator: ``python -m tests.simulation --seed 7``."""

import sys

from tests.simulation.commands import main

if __name__ == "__main__":
    sys.exit(main())
