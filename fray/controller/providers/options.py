"""Check of the providers' options in a policy file, before the policy is accepted."""

from __future__ import annotations

from collections.abc import Iterable

from fray.errors import InvalidRequest
from fray.model.policy.machine_groups import GroupConfig


def check_options(groups: Iterable[GroupConfig]) -> None:
    """Check the options of all groups.

    Raises:
        InvalidRequest: an option is invalid; the message names the group and the option.
    """
    for group in groups:
        match group.provider:
            case "command":
                from fray.controller.providers.command import read_options as read_command

                read_command(group)
            case "process":
                from fray.controller.providers.process import read_options as read_process

                read_process(group)
            case "tpu":
                from fray.controller.providers.tpu_options import read_options as read_tpu

                read_tpu(group)
            case _:
                unknown = sorted(group.options.keys() - {"machines"})
                if unknown:
                    raise InvalidRequest(f"[[group]] {group.name!r}: unknown option {unknown[0]!r}; there is machines")
