"""Upload of a workspace to Ray: sent once, by content, and named by its URI.

Ray uploads the directory of ``ray.init`` itself; for a task it accepts a URI only, and the function that makes one is
not public.
"""

from __future__ import annotations

import inspect
import tempfile
from typing import Any

from ray._private.runtime_env import working_dir


def with_uploaded_workspace(made: dict[str, Any]) -> dict[str, Any]:
    """Return the runtime_env with a ``working_dir`` that every machine of the cluster can fetch.

    Raises:
        ValueError: the workspace cannot be sent: it is not a directory, or has more than 512 MiB.
    """
    if "working_dir" not in made:
        return made
    upload: Any = working_dir.upload_working_dir_if_needed
    more = {"include_gitignore": True} if "include_gitignore" in inspect.signature(upload).parameters else {}
    with tempfile.TemporaryDirectory(prefix="fray-ray-") as scratch:
        try:
            sent: dict[str, Any] = upload(dict(made), scratch_dir=scratch, **more)
        except Exception as error:
            raise ValueError(f"workspace {made['working_dir']} cannot be sent to Ray: {error}") from error
    sent.pop("excludes", None)
    return sent
