"""Asserts of the contract suite say what they saw, as those of test files do."""

from __future__ import annotations

import os

for name in ("FRAY_CLIENT_SPEC", "IRIS_JOB_ID"):
    os.environ.pop(name, None)
