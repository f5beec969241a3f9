"""``fray rl scale`` and ``stop``: changes of a run that is running."""

from __future__ import annotations

import argparse

from fray.cli.output import say, say_json
from fray.errors import InvalidRequest
from fray.model.text import near_text


async def scale(options: argparse.Namespace) -> int:
    """Run ``fray rl scale``."""
    return await _change(options, _servers_of(options.settings))


async def stop(options: argparse.Namespace) -> int:
    """Run ``fray rl stop``."""
    return await _change(options, None)


async def _change(options: argparse.Namespace, servers: int | None) -> int:
    from fray.rl.records.run_files import find_output
    from fray.rl.records.run_requests import RunRequest, ask_run

    changed = await ask_run(find_output(options.run), RunRequest(servers))
    if options.json:
        say_json({"run": options.run, "changed": changed})
    else:
        say([changed])
    return 0


def _servers_of(setting: str) -> int:
    """Return the number of ``servers=4``. Raises InvalidRequest."""
    key, _, value = setting.partition("=")
    if key != "servers":
        raise InvalidRequest(f"unknown setting {key!r}; expected servers=4{near_text(key, ['servers'])}")
    if not value.isdecimal():
        raise InvalidRequest(f"invalid {setting!r}: expected a whole number, such as servers=4")
    return int(value)
