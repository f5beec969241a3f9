"""The policy of a cluster as its operator wrote it: a TOML file, read at the start and again on SIGHUP."""

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
"""More of an error is not read: it repeats what the file says."""


def read_policy_file(file: str | Path) -> Policy:
    """What the file says.

    Raises:
        InvalidRequest: it cannot be read, is no TOML, or something in it cannot be; the message names the file, the
            table and the key, and says what to write.
    """
    from fray.controller.providers.options import check_options
    from fray.model.policy.parser import read_policy

    try:
        policy = read_policy(_tables(Path(file).expanduser()))
        check_options(policy.groups)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the policy {file} cannot be read: {error}") from error
    except InvalidRequest as error:
        raise InvalidRequest(f"the policy {file}: {error}"[:ERROR_LIMIT_CHARS]) from error
    return policy


def _tables(file: Path) -> dict[str, Any]:
    """Raises OSError, UnicodeDecodeError; InvalidRequest: it is too large, no file, or no TOML."""
    import tomllib  # only clusters with a policy pay for it

    with open(file, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as opened:
        if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            raise InvalidRequest("it is no file")  # what comes out of a pipe or a device may never end
        data = opened.read(FILE_LIMIT_BYTES + 1)
    if len(data) > FILE_LIMIT_BYTES:
        raise InvalidRequest(f"it has more than {FILE_LIMIT_BYTES} bytes")
    try:
        return tomllib.loads(data.decode("utf-8").replace("\r\n", "\n"))
    except UnicodeDecodeError:
        raise
    except RecursionError as error:
        raise InvalidRequest("it is no TOML that can be read: values are nested too deeply") from error
    except ValueError as error:  # TOMLDecodeError, and numbers of thousands of digits
        raise InvalidRequest(f"it is no TOML: {error}") from error


async def reload_on_hangup(
    file: Path, on_policy: Callable[[Policy], None], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Tell of each new policy until cancelled. A file that is wrong changes nothing, and the log says why.

    It is read in a thread: a disk may hang, and a large file takes a second to take apart.
    """
    with trio.open_signal_receiver(signal.SIGHUP) as signals:
        task_status.started()
        async for _ in signals:
            try:
                policy = await trio.to_thread.run_sync(read_policy_file, file, abandon_on_cancel=True)
            except InvalidRequest as error:
                _log.error("the old policy stays", extra={"why": str(error)})
            except Exception as error:  # noqa: BLE001 - a mistake of ours in reading must not end the controller
                _log.exception("the old policy stays", extra={"why": f"reading it failed: {error!r}"})
            else:
                _log.info("the policy was read again", extra={"file": str(file)})
                on_policy(policy)
