"""Functions that run in environments made for tests; they import only what is installed there."""

from __future__ import annotations

import sys


def which_alpha() -> tuple[str, str]:
    import alpha

    return alpha.version, sys.prefix


class Uses:
    def where(self) -> tuple[str, bool]:
        return where()

    def alpha(self) -> tuple[str, str]:
        return which_alpha()


def editions() -> tuple[str, int]:
    import alpha
    import beta  # noqa: F401
    import mine

    return alpha.version, mine.edition


def where() -> tuple[str, bool]:
    import os

    return os.environ["GREETING"], any(path.endswith("/containers/library") for path in sys.path)
