"""Command line of the fuzzers: ``python -m tests.fuzz``."""

import sys

from tests.fuzz.fuzzing import main

if __name__ == "__main__":
    sys.exit(main())
