"""``python -m fray.cli``: the same as ``fray``."""

import sys

from fray.cli.main import main

sys.exit(main())
