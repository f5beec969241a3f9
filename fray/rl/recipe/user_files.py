"""Functions and classes of users, by ``file.py:name`` or ``module:name``."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from typing import Any

from fray.errors import InvalidRequest
from fray.model.text import near_text

_LOADED: dict[str, Any] = {}
"""Modules of files that were loaded, by name."""


def load_object(reference: str, directory: Path) -> Any:
    """Return what ``reference`` names.

    A file is loaded once; what it defines is pickled by value, so that other processes need neither the file nor its
    name. Its directory is added to `sys.path`, for the modules beside it.

    Args:
        reference: ``path/to/file.py:name`` or ``package.module:name``.
        directory: to which a relative path refers.

    Raises:
        InvalidRequest: there is no such file, module or name, or loading it raised; the message has the exception with
            its file and line.
    """
    path, colon, name = reference.rpartition(":")
    if not colon or not path or not name:
        raise InvalidRequest(f"found {reference!r}; expected file.py:name or module:name")
    module = _load_file(directory / path) if path.endswith(".py") else _load_module(path)
    found = getattr(module, name, None)
    if found is None:
        names = [each for each in vars(module) if not each.startswith("_")]
        raise InvalidRequest(f"{path} has no {name!r}{near_text(name, names)}")
    return found


def _load_file(path: Path) -> Any:
    path = path.resolve()
    if not path.is_file():
        raise InvalidRequest(f"there is no such file: {path}")
    # Two files of one name are two modules.
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    name = f"fray_recipe_{path.stem}_{digest}"
    if name in _LOADED:
        return _LOADED[name]
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look for their module while it is executed. Later it must not be found: what a module that can be
    # imported defines is pickled by name, and other processes cannot import this one.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InvalidRequest(f"{path} raised {_with_line(error, str(path))}") from error
    finally:
        del sys.modules[name]
    _LOADED[name] = module
    return module


def _load_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise InvalidRequest(f"importing {name} raised {_with_line(error)}") from error


def _with_line(error: BaseException, file: str = "") -> str:
    """Return the error and where it was raised: in ``file``, else in the last frame that is not of imports."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):
        return text
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith("<frozen")]
    own = [one for one in frames if one.filename == file]
    last = next(reversed(own or frames), None)
    return f"{text} (line {last.lineno} of {last.filename}: {last.line})" if last is not None else text
