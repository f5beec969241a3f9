"""``fray backup``: copies the store of a controller of this machine into a file, and makes a store from one."""

from __future__ import annotations

import argparse
from pathlib import Path

import trio

from fray.cli.output import note, say_json
from fray.controller.backup import back_up, restore
from fray.errors import InvalidRequest
from fray.model.text import byte_size_text


async def backup(options: argparse.Namespace) -> int:
    """Run ``fray backup``."""
    store, file = Path(options.store), Path(options.file)
    try:
        if options.restore:
            await trio.to_thread.run_sync(restore, file, store)
            note(f"restored {store}; start fray-controller --store {store}")
        else:
            size_bytes = await trio.to_thread.run_sync(back_up, store, file)
            note(f"wrote {file} ({byte_size_text(size_bytes)}); it contains the keys of the cluster: keep it private")
    except OSError as error:
        raise InvalidRequest(f"{error.filename or file}: {error.strerror or error}") from None
    if options.json:
        say_json({"file": str(file), "store": str(store), "restored": options.restore})
    return 0
