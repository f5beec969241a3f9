"""``fray tinker key create``, ``list``, ``revoke``."""

from __future__ import annotations

import argparse
from urllib.parse import quote

from fray.cli.formatting import fields, table
from fray.cli.output import clock, note, say, say_json, width
from fray.cli.tinker.connection import open_service


def create(options: argparse.Namespace) -> int:
    """Run ``fray tinker key create``."""
    with open_service(options) as service:
        made = service.ask("POST", "/fray/keys", {"name": options.name, "is_admin": options.admin})
    if options.json:
        say_json(made)
        return 0
    say(fields([("OpenTinker", made["api_key"]), ("Tinker SDK", made["tinker_api_key"])]))
    what = "administrator" if made["is_admin"] else "user"
    note(f"two spellings of the key of {what} {made['name']}; it is shown once, and kept as a hash")
    return 0


def list_keys(options: argparse.Namespace) -> int:
    """Run ``fray tinker key list``."""
    with open_service(options) as service:
        keys = service.ask("GET", "/fray/keys")["keys"]
    if options.json:
        say_json(keys)
        return 0
    rows = [
        [
            key["name"],
            key["user_id"],
            "administrator" if key["is_admin"] else "user",
            "revoked" if key["is_revoked"] else "valid",
            clock(key["created_at"]),
        ]
        for key in keys
    ]
    say(table(["NAME", "ID", "KIND", "KEY", "CREATED"], rows, width()))
    return 0


def revoke(options: argparse.Namespace) -> int:
    """Run ``fray tinker key revoke``."""
    with open_service(options) as service:
        revoked = service.ask("DELETE", f"/fray/keys/{quote(options.name, safe='')}")
    if options.json:
        say_json(revoked)
    else:
        note(f"revoked the key of {revoked['name']}; its jobs stay: fray tinker cancel ends one")
    return 0
