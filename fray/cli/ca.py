"""Verb ``fray ca``: the certificate authority in the store of a controller, on the controller's machine."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from fray.cli.output import say, say_json
from fray.controller import certificate_authority
from fray.controller.certificate_authority import Authority
from fray.errors import InvalidRequest
from fray.model.ids import check_name
from fray.net.atomic_file import write_atomically
from fray.net.tls import certificates


async def init(options: argparse.Namespace) -> int:
    """Run ``fray ca init``."""
    # As fray-controller would at its first start.
    options.store.expanduser().mkdir(mode=0o700, parents=True, exist_ok=True)
    _show(certificate_authority.create(_store(options), time.time()), options)
    return 0


async def show(options: argparse.Namespace) -> int:
    """Run ``fray ca show``."""
    _show(certificate_authority.show(_store(options), time.time()), options)
    return 0


async def rotate(options: argparse.Namespace) -> int:
    """Run ``fray ca rotate``."""
    store, now = _store(options), time.time()
    if options.finish:
        certificate_authority.forget_previous(store)
    else:
        certificate_authority.rotate(store, now)
    _show(certificate_authority.show(store, now), options)
    return 0


async def issue(options: argparse.Namespace) -> int:
    """Run ``fray ca issue``."""
    node, now = check_name(options.node, "a node"), time.time()
    authority = certificate_authority.load(_store(options), now)
    key = certificates.make_key()
    signed = certificates.issue_node(authority.current, node, certificates.make_request(key), now)
    write_atomically(options.out, key + signed)
    info = certificates.read_certificate(signed)
    if options.json:
        say_json({"node": node, "file": str(options.out), "until": info.not_after_s})
    else:
        say([f"{options.out}: certificate of node {node} until {_date(info.not_after_s)}, with its key"])
    return 0


def _store(options: argparse.Namespace) -> Path:
    store: Path = options.store.expanduser()
    if not store.is_dir():
        raise InvalidRequest(f"{store} is not a directory: --store names the store of fray-controller")
    return store


def _show(authority: Authority, options: argparse.Namespace) -> None:
    infos = [certificates.read_certificate(each) for each in authority.certificates]
    if options.json:
        say_json(
            [{"fingerprint": info.fingerprint, "subject": info.subject, "until": info.not_after_s} for info in infos]
        )
        return
    for what, info in zip(("authority", "previous "), infos, strict=False):
        say([f"{what}  {info.fingerprint}  until {_date(info.not_after_s)}  {info.subject}"])


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(seconds))
