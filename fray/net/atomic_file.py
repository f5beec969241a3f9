"""Files that are written completely or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

DRAFT_SUFFIX = ".new"


def write_atomically(
    file: str | Path,
    content: bytes | Iterable[bytes | memoryview],
    *,
    mode: int = 0o600,
    durable: bool = False,
    concurrent: bool = False,
    time_s: int | None = None,
) -> None:
    """Write a file under another name and rename it: readers see the old content or the whole new one.

    Args:
        content: content, whole or in parts; an error of the iterator leaves the old file.
        mode: permissions of the file, whatever the umask is.
        durable: flush the content to the disk before the rename, so that a power failure leaves no empty file.
        concurrent: other processes may write the same file at the same time.
        time_s: time of last access and modification; None: now.

    Raises:
        OSError: the file was not written, and nothing was left.
    """
    draft = f"{file}.{os.getpid()}{DRAFT_SUFFIX}" if concurrent else f"{file}{DRAFT_SUFFIX}"
    with suppress(FileNotFoundError):
        os.unlink(draft)  # of a process that was killed
    try:
        # O_EXCL: never through an existing file or link, since some directories belong to a job, which could aim a link
        # elsewhere.
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb", 0) as out:
            for part in [content] if isinstance(content, bytes) else content:
                view = memoryview(part)
                while view:
                    view = view[out.write(view) :]
            # After the content, and not by the mode of `open`, from which the umask is subtracted.
            os.fchmod(out.fileno(), mode)
            if time_s is not None:
                os.utime(out.fileno(), (time_s, time_s))
            if durable:
                os.fsync(out.fileno())
        os.rename(draft, file)
    except BaseException:
        with suppress(OSError):
            os.unlink(draft)
        raise
