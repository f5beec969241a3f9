"""Modules of the public names, found in the source of `fray.public_names` without importing what it imports.

The imports there are written out for type checkers; read as text they say as well which module to import for one name,
so that no second table has to repeat them.
"""

from __future__ import annotations

import ast
import functools
import pkgutil


@functools.cache
def modules_of_names() -> dict[str, str]:
    """Return the module of each name that ``fray`` exports."""
    source = pkgutil.get_data("fray", "public_names.py")
    assert source is not None  # a loader without the data of packages: not one that can have imported this one
    modules: dict[str, str] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("fray."):
            modules.update({alias.name: node.module for alias in node.names})
    return modules
