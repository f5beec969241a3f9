"""Assertion rewriting for the contract suite, so that its failures show values as in test files."""

from __future__ import annotations

import os

for name in ("FRAY_CLIENT_SPEC", "IRIS_JOB_ID"):
    os.environ.pop(name, None)
