"""Settings of Sphinx for the site that `tools/build_docs.py` builds from these pages and from the docstrings."""

from __future__ import annotations

import importlib
import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

project = "Fray"
author = "the authors of Fray"
copyright = author

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "Fray"
html_copy_source = False
html_show_sphinx = False

myst_heading_anchors = 4
"""Headings have the anchors that a browser of the repository gives them, so that links hold in both."""
suppress_warnings = ["misc.highlighting_failure", "ref.python"]
"""Blocks of shell sessions and of programs with `…` in them are shown without colours; an annotation without its module
(``Cluster``) is linked to the first class of that name."""

default_role = "py:obj"
"""`name` in a docstring is a link where the name is public, and code otherwise (see `show_as_code`)."""
autodoc_class_signature = "mixed"
autodoc_member_order = "bysource"
autodoc_mock_imports = ["iris", "ray"]
autodoc_typehints = "signature"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_maximum_signature_line_length = 100

nitpicky = True
nitpick_ignore_regex = [
    # Annotations of other projects: their inventories would have to be downloaded, and the site is built offline.
    (r"py:.*", r"(?!fray\b).*"),
    # Annotations of parts that a user does not import: the reference shows them as text.
    (
        r"py:(class|data)",
        r"fray\.\w+\..*",
    ),
]


def show_as_code(app: Sphinx, env: Any, node: nodes.Element, text: nodes.Element) -> nodes.Element | None:
    """Show a name in backticks as code where the reference lacks it; a name that begins with `fray.` must exist."""
    if node.get("reftype") != "obj":
        return None
    name = node["reftarget"].partition("(")[0]
    return text if not name.startswith("fray.") or exists(name) else None


def exists(name: str) -> bool:
    """Return whether ``name`` is a module or can be reached by attributes of one."""
    module, attributes = name, list[str]()
    while module:
        try:
            value = importlib.import_module(module)
        except ModuleNotFoundError:
            module, _, last = module.rpartition(".")
            attributes.insert(0, last)
            continue
        for attribute in attributes:
            if not hasattr(value, attribute):
                return attribute in getattr(value, "__annotations__", {})
            value = getattr(value, attribute)
        return True
    return False


def shorten_defaults(
    app: Sphinx, what: str, name: str, value: object, options: Any, signature: str | None, result: str | None
) -> tuple[str | None, str | None]:
    """Show defaults that attrs computes, and long ones, as ``...``."""
    if signature is not None:
        signature = re.sub(r"= (NOTHING|<[^<>]*>)", "= ...", signature)
    return signature, result


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-signature", shorten_defaults)
    app.connect("missing-reference", show_as_code)
