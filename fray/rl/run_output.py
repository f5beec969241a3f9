"""Output of a run, as its user gives it: a directory, or a URL of a storage."""

from __future__ import annotations

import os
from pathlib import Path

from fray.errors import InvalidRequest
from fray.net import storage
from fray.rl.records.run_files import work_directory


def is_url(output: object) -> bool:
    """Return whether an output is at a URL."""
    return isinstance(output, str) and "://" in output


def check_url(url: str, *, is_training: bool, weight_sync: str) -> None:
    """Check the output of a run at a URL.

    Raises:
        InvalidRequest: such a run needs a directory, or a package of the storage is missing.
    """
    if not is_training:
        raise InvalidRequest(f"invalid output {url!r} without a trainer: expected a directory")
    if weight_sync == "disk":
        raise InvalidRequest(f"weight_sync='disk' with output {url!r}: expected a directory that all machines have")
    if url.startswith("memory:"):
        raise InvalidRequest(f"invalid output {url!r}: each process of a run has a memory of its own")
    storage.check(url)


def check_shared(url: str | None) -> None:
    """Raise InvalidRequest if the output of a run that is a job is at a URL: this machine looks at it, too."""
    if url is not None:
        raise InvalidRequest(f"invalid output {url!r} of a run that is a job: expected a directory that machines share")


def output_of(given: str | os.PathLike[str] | None, name: str | None) -> tuple[Path | None, str | None, str]:
    """Return the directory of an output, its URL, if it has one, and the name of the run.

    Raises:
        InvalidRequest: a file is at its path.
    """
    if given is None:
        return None, None, name or "rl"
    if is_url(given):
        url = str(given).rstrip("/")
        name = name or url.rpartition("/")[2]
        return work_directory(name, url), url, name
    output = Path(given).absolute()
    if output.exists() and not output.is_dir():
        raise InvalidRequest(f"invalid output {str(given)!r}: it is a file; expected a directory")
    return output, None, name or output.name
