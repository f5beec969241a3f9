"""Hooks that run once the program has imported a module of another library.

Some libraries take plug-ins by a call only, and importing one for that would take longer than importing Fray.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


def after_import(name: str, hook: Callable[[Any], object]) -> None:
    """Call ``hook(module)`` for the module ``name``: now if it has been imported, else as soon as it is.

    A module waits for one hook: if another one is set already, this does nothing.
    """
    if name in sys.modules:
        hook(sys.modules[name])
    elif not any(isinstance(finder, _Finder) and finder.name == name for finder in sys.meta_path):
        # First in the path, before the finder that would import the module without this hook.
        sys.meta_path.insert(0, _Finder(name, hook))


class _Finder:
    """Import hook that calls a function after the import of one module."""

    def __init__(self, name: str, hook: Callable[[Any], object]) -> None:
        self.name, self._hook = name, hook

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        # Asked directly: `importlib.util.find_spec` would call this finder again.
        spec = PathFinder.find_spec(name, path) if name == self.name else None
        if spec is None or spec.loader is None:
            return None
        # Needed once; every further import would pay for it.
        sys.meta_path.remove(self)
        loader: Any = spec.loader
        exec_original = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            exec_original(module)
            self._hook(module)

        loader.exec_module = exec_module
        return spec
