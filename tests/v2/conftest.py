"""Asserts of the contract suite say what they saw, as those of test files do."""

from __future__ import annotations

import os

import pytest

pytest.register_assert_rewrite("v2_contract")

for name in ("FRAY_CLIENT_SPEC", "IRIS_JOB_ID"):
    os.environ.pop(name, None)
