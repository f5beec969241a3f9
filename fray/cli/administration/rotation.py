"""Verb ``fray key rotate-token``: replaces the cluster's token in the file of a controller."""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from fray.cli.output import note, say, say_json
from fray.controller import accepted_tokens


async def rotate_token(options: argparse.Namespace) -> int:
    """Run ``fray key rotate-token``."""
    file: Path = (options.token_file or options.store / "token").expanduser()
    within_s = accepted_tokens.CHECK_S
    if options.finish:
        accepted_tokens.drop_previous_token(file)
        if options.json:
            say_json({"file": str(file), "finished": True, "within_s": within_s})
        else:
            say([f"{file}: the previous token is dropped; the controller refuses it within {within_s:g} s"])
        return 0
    accepted_tokens.rotate_token(file, random.SystemRandom())
    if options.json:
        say_json({"file": str(file), "finished": False, "within_s": within_s})
        return 0
    say([f"{file}: a new token, and the previous one; the controller accepts both within {within_s:g} s"])
    note("copy the file to nodes and drivers in place of their token file: it is read again, nothing is restarted")
    note("`fray key list` names what still uses the previous token; then: fray key rotate-token --finish")
    return 0
