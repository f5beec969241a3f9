"""Command line of ``fray-controller``: addresses, times, limits and the cluster's token."""

from __future__ import annotations

import argparse
import logging
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from attrs import define, evolve, field

from fray.controller.connections.validation import GRACE_LIMIT_S
from fray.controller.history.tables import HISTORY_LIMIT
from fray.controller.workspaces.bundles import BundleRetention
from fray.errors import InvalidRequest
from fray.model.environment import check_variable
from fray.model.ids import mint
from fray.model.join_tokens import split_tokens, with_pins_of_all
from fray.model.messages.session import VERSION
from fray.model.resources import parse_bytes
from fray.net import daemon_logging
from fray.net.atomic_file import write_atomically
from fray.net.cluster_token import read_token_file
from fray.net.controller_address import check_private, is_loopback, warn_insecure
from fray.scheduler.state.rows import SchedulerConfig

DEFAULT_LISTEN = "tcp:127.0.0.1:7421"

LEASE_LEAST_S = 240.0
"""Lower limit of the lease: within it a node must notice that the controller is silent, and end what it runs."""

KEEP_LIMIT_JOBS = 1_000_000
KEEP_LEAST_S = 60.0
KEEP_LEAST_GB = 0.01
"""More than one result of the largest size."""
HISTORY_MOST = 100_000_000

_log = logging.getLogger("fray.controller")


@define
class Options:
    """Parsed command line."""

    listen: tuple[str, ...]
    store: Path
    token_file: Path | None
    insecure: bool
    rules: SchedulerConfig
    json_lines: bool | None
    log_file: Path | None = None
    quiet: bool = False
    env_vars: dict[str, str] = field(factory=dict)
    retention: BundleRetention = field(factory=BundleRetention)
    policy_file: Path | None = None
    names: tuple[str, ...] = ()
    """Names of this machine besides its own addresses: ``HOST`` or ``HOST:PORT``."""
    ca_cert: Path | None = None
    ca_key: Path | None = None
    history_limit: int = HISTORY_LIMIT


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of ``fray-controller``."""
    parser = argparse.ArgumentParser(prog="fray-controller", description="The controller of a Fray cluster.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {VERSION}")
    _add_location(parser)
    _add_times(parser)
    _add_retention(parser)
    parser.add_argument(
        "--env",
        action="append",
        metavar="KEY=VALUE",
        help="a variable of every job, which overrides that of its node; may be given several times",
    )
    parser.add_argument(
        "--policy",
        type=Path,
        metavar="FILE",
        help="shares, quotas, priorities and machine groups (TOML, see docs/policy.md); reloaded on SIGHUP",
    )
    daemon_logging.add_options(parser)
    return parser


def parse(argv: Sequence[str] | None) -> Options:
    """Parse the command line.

    Raises:
        InvalidRequest: an invalid address, time, amount or variable.
    """
    found = make_parser().parse_args(argv)
    # The default is loopback, so that a controller that is started without thought serves no other machine (P9).
    listen = tuple(check_address(address, found.insecure) for address in found.listen or [DEFAULT_LISTEN])
    rules = make_rules(found.suspect_s, found.lease_s, found.driver_grace_s)
    rules = with_quarantine_share(rules, found.quarantine_share)
    rules = with_retention(rules, found.keep_finished, found.keep_finished_s, found.keep_results_gb)
    return Options(
        listen,
        found.store.expanduser(),
        found.token_file,
        found.insecure,
        rules,
        found.json_lines,
        found.log_file,
        found.quiet,
        make_variables(found.env or ()),
        BundleRetention(limit_bytes=parse_bytes(found.workspaces, "--workspaces")),
        found.policy,
        tuple(map(check_name_of_machine, found.advertise or ())),
        *_given_authority(found.ca_cert, found.ca_key),
        history_limit=_checked_history(found.keep_history),
    )


def _checked_history(limit: int) -> int:
    """Return the limit of ``--keep-history``. Raises InvalidRequest."""
    if not 1 <= limit <= HISTORY_MOST:
        raise InvalidRequest(f"--keep-history {limit} must be 1 to {HISTORY_MOST}")
    return limit


def _add_location(parser: argparse.ArgumentParser) -> None:
    """Add the addresses, the store and the token."""
    state_home = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    parser.add_argument(
        "--listen",
        action="append",
        metavar="ADDRESS",
        help=f"HOST:PORT or unix:/path; may be given several times (default: {DEFAULT_LISTEN})",
    )
    parser.add_argument(
        "--advertise",
        action="append",
        metavar="HOST[:PORT]",
        help="an address at which drivers and nodes dial this controller although it is not one of its own: a router "
        "or a forwarded port is between (default port: that of --listen); may be given several times",
    )
    parser.add_argument(
        "--store",
        type=Path,
        default=Path(state_home) / "fray",
        metavar="DIR",
        help="where the cluster's decisions are kept (default: %(default)s)",
    )
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="the cluster's token (default: FRAY_TOKEN, else the file `token` in the store, created if missing)",
    )
    parser.add_argument(
        "--ca-cert",
        type=Path,
        metavar="FILE",
        help="certificate (PEM) of your own authority, in place of the one that is made in the store; with --ca-key",
    )
    parser.add_argument("--ca-key", type=Path, metavar="FILE", help="its key (PEM, ECDSA or Ed25519)")
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="for tests: listen beyond this machine without TLS; public addresses are refused",
    )


def _add_times(parser: argparse.ArgumentParser) -> None:
    """Add the times for which silence is tolerated, and the limit of quarantine."""
    rules = SchedulerConfig()
    parser.add_argument(
        "--suspect-s",
        type=float,
        default=rules.suspect_s,
        metavar="S",
        help="seconds of silence after which a node is suspect: callers of its actors get an error, and actors that "
        "may overlap are restarted elsewhere (default: %(default)g)",
    )
    parser.add_argument(
        "--lease-s",
        type=float,
        default=rules.lease_s,
        metavar="S",
        help="seconds of silence after which all other attempts of a node are restarted elsewhere; nodes need the same "
        f"--lease-s, or a shorter one; at least {LEASE_LEAST_S:g} (default: %(default)g)",
    )
    parser.add_argument(
        "--driver-grace-s",
        type=float,
        default=rules.driver_grace_s,
        metavar="S",
        help="seconds a driver that was lost without a goodbye may stay away before all it owns ends, unless it asks "
        "for another time with open_cluster(grace_s=...) (default: %(default)g)",
    )
    parser.add_argument(
        "--quarantine-share",
        type=float,
        default=rules.quarantine_share,
        metavar="SHARE",
        help="share of the machines that may be in quarantine at a time, but at least one machine; 0 disables "
        "quarantine (default: %(default).2g)",
    )


def _add_retention(parser: argparse.ArgumentParser) -> None:
    """Add what is kept of ended jobs and of workspaces."""
    rules = SchedulerConfig()
    parser.add_argument(
        "--keep-finished",
        type=int,
        default=rules.finished_limit,
        metavar="N",
        help="ended jobs that are kept with their attempts and results; of 50,000 before them only how they ended "
        "(default: %(default)d)",
    )
    parser.add_argument(
        "--keep-finished-s",
        type=float,
        default=rules.finished_keep_s,
        metavar="S",
        help="seconds for which they are kept at most (default: %(default)g, a week)",
    )
    parser.add_argument(
        "--keep-results-gb",
        type=float,
        default=rules.results_limit_bytes / 1000**3,
        metavar="GB",
        help="gigabytes of results that are kept; those of the oldest jobs are dropped first (default: %(default)g)",
    )
    parser.add_argument(
        "--keep-history",
        type=int,
        default=HISTORY_LIMIT,
        metavar="N",
        help="ended attempts and reservations, machines that are gone, and rows of capacity that stay on record for "
        "fray history, fray nodes --all and fray capacity (default: %(default)d of each)",
    )
    parser.add_argument(
        "--workspaces",
        default="20GB",
        metavar="SIZE",
        help="size of the workspaces that are kept although no living job needs them (default: %(default)s)",
    )


def make_variables(texts: Sequence[str]) -> dict[str, str]:
    """Parse ``--env``.

    Raises:
        InvalidRequest: one is not written as KEY=VALUE, or is reserved by Fray.
    """
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise InvalidRequest(f"--env {text!r}: write KEY=VALUE")
        check_variable(name, value)
        found[name] = value
    return found


def with_retention(rules: SchedulerConfig, finished: int, finished_s: float, results_gb: float) -> SchedulerConfig:
    """Return the rules with limits of what is kept of ended jobs.

    Raises:
        InvalidRequest: fewer jobs or less time than drivers that wait for results need.
    """
    if not 1 <= finished <= KEEP_LIMIT_JOBS:
        raise InvalidRequest(f"--keep-finished {finished} must be 1 to {KEEP_LIMIT_JOBS}")
    # `not >=` and not `<`: it also refuses NaN, which argparse's float accepts.
    if not finished_s >= KEEP_LEAST_S:
        raise InvalidRequest(
            f"--keep-finished-s {finished_s:g} must be {KEEP_LEAST_S:g} or more: drivers that were away ask for results"
        )
    if not KEEP_LEAST_GB <= results_gb < float("inf"):
        raise InvalidRequest(f"--keep-results-gb {results_gb:g} must be {KEEP_LEAST_GB:g} or more")
    results_bytes = round(results_gb * 1000**3)
    return evolve(rules, finished_limit=finished, finished_keep_s=finished_s, results_limit_bytes=results_bytes)


def make_rules(
    suspect_s: float, lease_s: float, driver_grace_s: float = SchedulerConfig().driver_grace_s
) -> SchedulerConfig:
    """Return rules with these times.

    Raises:
        InvalidRequest: times that contradict one another or are out of range.
    """
    if not lease_s >= LEASE_LEAST_S:
        raise InvalidRequest(
            f"--lease-s {lease_s:g} must be {LEASE_LEAST_S:g} seconds or more, and nodes need the same"
        )
    # Suspicion comes before the lease ends: in the other order callers of its actors would wait for a machine that is
    # lost.
    if not 1 <= suspect_s < lease_s:
        raise InvalidRequest(f"--suspect-s {suspect_s:g} must be 1 or more, and less than --lease-s")
    if not 0 <= driver_grace_s <= GRACE_LIMIT_S:
        raise InvalidRequest(f"--driver-grace-s {driver_grace_s:g} must be 0 to {GRACE_LIMIT_S:.0f} seconds (a week)")
    return SchedulerConfig(suspect_s=suspect_s, lease_s=lease_s, driver_grace_s=driver_grace_s)


def with_quarantine_share(rules: SchedulerConfig, quarantine_share: float) -> SchedulerConfig:
    """Return the rules with this limit of quarantine.

    Raises:
        InvalidRequest: the share is not between 0 and 1.
    """
    if not 0 <= quarantine_share <= 1:
        raise InvalidRequest(f"--quarantine-share {quarantine_share:g} must be 0 to 1: 0.5 is half of the machines")
    return evolve(rules, quarantine_share=quarantine_share)


def _given_authority(certificate: Path | None, key: Path | None) -> tuple[Path | None, Path | None]:
    if (certificate is None) != (key is None):
        raise InvalidRequest("--ca-cert and --ca-key belong together: give both files, or none")
    return certificate, key


def check_address(text: str, insecure: bool) -> str:
    """Return an address as ``tcp:HOST:PORT`` on this machine, ``tls:HOST:PORT`` beyond it, or ``unix:/path``.

    Raises:
        InvalidRequest: the address is invalid, or a public one with ``insecure``.
    """
    if text.startswith("unix:"):
        if not text.startswith("unix:/"):
            raise InvalidRequest(f"--listen {text!r}: write an absolute path, unix:/run/fray.sock")
        return text
    with_tls = text.startswith("tls:")
    host, colon, port = text.removeprefix("tcp:").removeprefix("tls:").rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise InvalidRequest(f"invalid --listen {text!r}; expected HOST:PORT (port 0 takes a free one) or unix:/path")
    if with_tls or (not insecure and not is_loopback(host)):
        return f"tls:{host}:{port}"
    if not is_loopback(host):
        check_private(host, f"--listen {text}")
        warn_insecure(f"--listen {text}")
    return f"tcp:{host}:{port}"


def check_name_of_machine(text: str) -> str:
    """Return a value of ``--advertise``.

    Raises:
        InvalidRequest: it is not ``HOST`` or ``HOST:PORT``.
    """
    host, colon, port = text.rpartition(":")
    # An address of version 6 without brackets ends with a colon and digits, too, but has more colons.
    has_port = bool(colon) and (":" not in host or host.endswith("]"))
    if not text or "/" in text or (has_port and not (host and port.isdecimal() and 0 < int(port) < 65536)):
        raise InvalidRequest(f"invalid --advertise {text!r}; expected HOST or HOST:PORT, as drivers dial it")
    return text


def make_token_reader(options: Options) -> Callable[[], tuple[str, ...]]:
    """Return a function that reads the tokens that count (`AcceptedTokens`): those given, or those in the store's
    directory, where the first one is made.

    Raises:
        InvalidRequest: the token is empty.
        OSError: its file cannot be read or written.
    """
    file = options.token_file
    # Set but empty is mostly a failed substitution in a script, and must not silently become another token.
    if file is None and "FRAY_TOKEN" in os.environ:
        tokens, _ = split_tokens(os.environ["FRAY_TOKEN"])
        if not tokens:
            raise InvalidRequest("FRAY_TOKEN is set but empty: give a token, or unset it to have one created")
        return lambda: tokens
    if file is None:
        file = own_token_file(options)
        if not file.exists():
            _make_token(file)
        _log.info("using the token in a file; nodes and drivers need it as FRAY_TOKEN", extra={"file": str(file)})
    path = str(file)
    read_token_file(path)
    # A warning and not an error: secret managers mount files with modes that the operator cannot choose.
    if file.stat().st_mode & 0o077:
        _log.warning("the token file is readable by other users: chmod 600 it", extra={"file": path})
    return lambda: read_token_file(path)[0]


def own_token_file(options: Options) -> Path:
    """Return the file of a token that the controller has made."""
    return options.store / "token"


def write_pins(options: Options, pins: Sequence[str]) -> None:
    """Write the fingerprints of the authority into the token that the controller has made: nodes and drivers that are
    given this text recognize the controller. A token that the operator has chosen is left alone.

    Raises:
        OSError: the file cannot be written.
    """
    file = own_token_file(options)
    if options.token_file is None and "FRAY_TOKEN" not in os.environ and file.exists():
        before = file.read_text()
        if with_pins_of_all(before, pins) != before:
            write_atomically(file, with_pins_of_all(before, pins).encode())


def _make_token(file: Path) -> None:
    # O_EXCL with the final mode: the file is never readable by others, not even before it is written.
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w") as out:
        out.write(mint(random.SystemRandom(), 40) + "\n")
