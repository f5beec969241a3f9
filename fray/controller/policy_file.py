"""Policy of a cluster as a TOML file, read at the start and again on SIGHUP."""

from __future__ import annotations

import logging
import os
import signal
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trio

from fray.errors import InvalidRequest
from fray.model.policy.policy import Policy

_log = logging.getLogger("fray.controller")


FILE_LIMIT_BYTES = 1024 * 1024
ERROR_LIMIT_CHARS = 2_000
"""Longest part of an error that is kept: the rest only repeats the file."""


def read_policy_file(file: str | Path) -> Policy:
    """Return the policy in a file.

    Raises:
        InvalidRequest: the file cannot be read, is not valid TOML, or has an invalid value; the message names the file,
            the table and the key, and says what to write.
    """
    from fray.controller.providers.options import check_options
    from fray.model.policy.parser import read_policy

    try:
        policy = read_policy(_tables(Path(file).expanduser()))
        check_options(policy.groups)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cannot read policy {file}: {error}") from error
    except InvalidRequest as error:
        raise InvalidRequest(f"policy {file}: {error}"[:ERROR_LIMIT_CHARS]) from error
    return policy


def _tables(file: Path) -> dict[str, Any]:
    """Parse the file.

    Raises:
        OSError, UnicodeDecodeError: the file cannot be read.
        InvalidRequest: the file is too large, not a regular file, or not valid TOML.
    """
    import tomllib  # only clusters with a policy need it

    # O_NONBLOCK, since to open a named pipe without a writer would wait for ever.
    with open(file, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as opened:
        if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            raise InvalidRequest("not a regular file")  # reading from a pipe or a device may never end
        data = opened.read(FILE_LIMIT_BYTES + 1)
    if len(data) > FILE_LIMIT_BYTES:
        raise InvalidRequest(f"it has more than {FILE_LIMIT_BYTES} bytes")
    try:
        return tomllib.loads(data.decode("utf-8").replace("\r\n", "\n"))
    except UnicodeDecodeError:
        raise
    except RecursionError as error:
        raise InvalidRequest("invalid TOML: values are nested too deeply") from error
    except ValueError as error:  # TOMLDecodeError, and numbers of thousands of digits
        raise InvalidRequest(f"invalid TOML: {error}") from error


async def reload_on_hangup(
    file: Path, on_policy: Callable[[Policy], None], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Call ``on_policy`` with the new policy after each SIGHUP, until cancelled. An invalid file changes nothing and is
    logged.

    The file is read in a thread: a disk may hang, and a large file takes a second to parse.
    """
    with trio.open_signal_receiver(signal.SIGHUP) as signals:
        task_status.started()
        async for _ in signals:
            try:
                # `abandon_on_cancel`: a hung disk must not keep the controller from ending.
                policy = await trio.to_thread.run_sync(read_policy_file, file, abandon_on_cancel=True)
            except InvalidRequest as error:
                _log.error("policy reload failed; keeping the previous policy: %s", error)
            except Exception as error:  # noqa: BLE001 - a bug in reading must not end the controller
                _log.exception("policy reload failed; keeping the previous policy: %r", error)
            else:
                _log.info("policy reloaded", extra={"file": str(file)})
                on_policy(policy)
