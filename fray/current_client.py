"""The client of the running code as Marin imports it. See docs/marin.md."""

from typing import TYPE_CHECKING

from fray.v2.client import _current_client_var, set_current_client
from fray.v2.marin.clients import current_client
from fray.v2.marin.version import unknown_name

__all__ = [
    "_current_client_var",
    "current_client",
    "set_current_client",
]

if not TYPE_CHECKING:  # with it, type checkers would accept any name
    __getattr__ = unknown_name(__name__, __all__)
