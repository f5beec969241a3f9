"""The policy of a cluster as its operator wrote it: a TOML file, read at the start and again on SIGHUP."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from pathlib import Path

import trio

from fray.errors import InvalidRequest
from fray.model.policy import Policy

_log = logging.getLogger("fray.controller")


def read_policy_file(file: str | Path) -> Policy:
    """What the file says.

    Raises:
        InvalidRequest: it cannot be read, is no TOML, or something in it cannot be; the message names the file, the
            table and the key, and says what to write.
    """
    import tomllib  # only clusters with a policy pay for it

    from fray.controller.providers.options import check_options
    from fray.model.policy_words import read_policy

    try:
        text = Path(file).expanduser().read_text(encoding="utf-8")
        policy = read_policy(tomllib.loads(text))
        check_options(policy.groups)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the policy {file} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise InvalidRequest(f"the policy {file} is no TOML: {error}") from error
    except InvalidRequest as error:
        raise InvalidRequest(f"the policy {file}: {error}") from error
    return policy


async def read_again_on_hangup(
    file: Path, changed: Callable[[Policy], None], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Tell of each new policy until cancelled. A file that is wrong changes nothing, and the log says why."""
    with trio.open_signal_receiver(signal.SIGHUP) as signals:
        task_status.started()
        async for _ in signals:
            try:
                policy = read_policy_file(file)
            except InvalidRequest as error:
                _log.error("the old policy stays", extra={"why": str(error)})
            else:
                _log.info("the policy was read again", extra={"file": str(file)})
                changed(policy)
