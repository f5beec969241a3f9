"""Entry point of ``python -m fray.node``, the same as ``fray-node``."""

import sys

from fray.node.main import main

sys.exit(main())
