"""Clients and jobs as Marin imports them. See docs/marin.md."""

from typing import TYPE_CHECKING

from fray.v2.client import Client, JobAlreadyExists, JobFailed, JobHandle, wait_all
from fray.v2.marin.version import unknown_name

__all__ = [
    "Client",
    "JobAlreadyExists",
    "JobFailed",
    "JobHandle",
    "wait_all",
]

if not TYPE_CHECKING:  # with it, type checkers would accept any name
    __getattr__ = unknown_name(__name__, __all__)
