"""Warnings about a line of the user's program."""

from __future__ import annotations

import os
import sys
import warnings
from types import FrameType

import trio

import fray.errors

_INTERNAL = tuple(os.path.dirname(module.__file__ or "") + os.sep for module in (fray.errors, trio))


def warn_user(text: str, category: type[Warning] = RuntimeWarning) -> None:
    """Issue a warning that shows the innermost line outside Fray and Trio; without one, that of the caller."""
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_code.co_filename.startswith(_INTERNAL):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level if frame is not None else 2)
