"""Command line and configuration of the node daemon, ``fray-node``."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import socket
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import trio
from attrs import evolve

from fray.errors import FrayError, InvalidRequest
from fray.model.ids import check_name
from fray.model.join_tokens import split_pins, split_tokens
from fray.model.messages.session import VERSION
from fray.model.resources import Capacity, Device, PortRange, parse_bytes
from fray.model.specs import JobAccount
from fray.net import daemon_logging
from fray.net.cluster_token import TOKEN_FILE_VARIABLE, read_token_file
from fray.net.codec import from_json
from fray.net.controller_address import controller_address, is_elsewhere
from fray.net.memory_protection import forbid_inspection
from fray.net.switch_interval import shorten_switch_interval
from fray.node.accounts.switch import check_enterable, check_readable, interpreter_paths
from fray.node.accounts.uid_range import EXAMPLE as EXAMPLE_UIDS
from fray.node.accounts.uid_range import check_uids, parse_uids
from fray.node.accounts.uid_range import holding as holding_uids
from fray.node.attempts.replacement import OPTION, describe
from fray.node.config import (
    JOIN_VARIABLE,
    LEASE_MIN_S,
    EnvironmentLimits,
    MemoryLimitMode,
    NodeConfig,
    PidNamespaceMode,
)
from fray.node.daemon import serve_daemon
from fray.node.handover.process import take_state
from fray.node.handover.state import NodeHandover
from fray.node.inventory import read_capacity
from fray.node.joining import with_machine_attribute
from fray.node.logs.options import FILE_KEYS, add_log_options, log_rules
from fray.node.ports import OFFERED, PortClaim, claim_ports, find_ports, parse_ports
from fray.node.run import run_node
from fray.node.secrets import check_directory

__all__ = ["NodeConfig", "main", "run_node"]

DEFAULT_PORT = 7421
UIDS_VARIABLE, NO_UIDS = "FRAY_JOB_UIDS", "none"
NOT_CHOSEN = (
    "fray-node runs as root, and so would all jobs, which could read the token and all that is on this machine: give "
    f"the jobs of each user an account by --job-uids {EXAMPLE_UIDS} (what it needs: docs/security.md), or start "
    f"fray-node under an account of its own. If jobs are to run as root, write --job-uids {NO_UIDS}, or set "
    f"{UIDS_VARIABLE}={NO_UIDS}"
)
"""Refusal of a node whose jobs, those of users of other machines, would have root's account by default."""
_WORDS: dict[str, type[StrEnum]] = {"pid_namespace": PidNamespaceMode, "memory_limit": MemoryLimitMode}
_FILE_KEYS = {
    "controller": str,
    "name": str,
    "state_dir": str,
    "cache_dir": str,
    "token_file": str,
    "join_token_file": str,
    "advertise": str,
    "insecure": bool,
    "lease_s": (int, float),
    "drain_s": (int, float),
    "parent_pid": int,
    "pid_namespace": str,
    "memory_limit": str,
    "cpu": (int, float),
    "memory": (int, str),
    "disk": (int, str),
    "gpus": (int, list),
    "tpus": (int, list),
    "attributes": dict,
    "ports": str,
    "job_uids": str,
    "secrets": str,
    "environments": dict,
    **FILE_KEYS,
}


_OPTIONS = (
    *(
        "controller",
        "name",
        "state_dir",
        "cache_dir",
        "token_file",
        "join_token_file",
        "advertise",
        "insecure",
        "lease_s",
        "drain_s",
    ),
    *("cpu", "memory", "disk", "gpus", "tpus", "pid_namespace", "memory_limit", "ports", "job_uids", "secrets"),
    *FILE_KEYS,
)
"""Keys of the file that are command-line options, too; the command line takes precedence."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``fray-node``. Exit status: 0 after SIGTERM or SIGINT, 1 if the cluster rejects the node, 2 for bad usage."""
    shorten_switch_interval()
    state = take_state()
    try:
        adopted = from_json(NodeHandover, state.decode()) if state is not None else None
        options = parse(argv)
        config = make_config(options, _take_environ(), continues=adopted is not None or options.print_handover)
        if options.print_handover:
            print(json.dumps(describe(config)))
            return 0
        if adopted is not None:
            # The controller knows these, and attempts use them.
            config = evolve(config, capacity=evolve(config.capacity, ports=adopted.ports))
        daemon_logging.configure(options.json_lines, options.log_file, quiet=options.quiet)
        forbid_inspection()
        # As long as the node runs, so that no other node of this machine offers the same ports.
        with _claim(config.capacity.ports) as claim, _hold_accounts(config):
            trio.run(serve_daemon, evolve(config, capacity=evolve(config.capacity, ports=claim.ports)), None, adopted)
    except (FrayError, OSError) as error:
        print(f"fray-node: {error}", file=sys.stderr)
        return 2 if isinstance(error, InvalidRequest) else 1
    return 0


def _take_environ() -> Mapping[str, str]:
    """Return the environment variables, and remove the join token from them, so that no child process inherits it."""
    environ = dict(os.environ)
    os.environ.pop(JOIN_VARIABLE, None)
    return environ


def _claim(ports: PortRange) -> PortClaim:
    return claim_ports(ports) if ports.first else find_ports(ports.count, random.SystemRandom())


@contextlib.contextmanager
def _hold_accounts(config: NodeConfig) -> Iterator[None]:
    """Hold the range of ``--job-uids``, if one is given, while the node runs.

    Raises:
        InvalidRequest: the range cannot be used on this machine.
    """
    if not config.job_uids:
        yield
        return
    uids = parse_uids(config.job_uids)
    check_uids(uids)
    # Its parents, too: an account has to reach its own directories below it.
    state_dir = Path(config.state_dir)
    state_dir.mkdir(mode=0o711, parents=True, exist_ok=True)
    state_dir.chmod(0o711)
    with holding_uids(uids):
        # While there is one thread.
        check_enterable(state_dir)
        check_readable(JobAccount(uid=uids.first, gid=uids.first, name="", directory=""), interpreter_paths())
        yield


# The command line ----------------------------------------------------------------------------------------------------


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of ``fray-node``."""
    parser = argparse.ArgumentParser(prog="fray-node", description="Offers this machine to a Fray cluster.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {VERSION}")
    parser.add_argument(
        "--controller",
        metavar="ADDRESS",
        help=f"fray://HOST:PORT#FINGERPRINT (default port {DEFAULT_PORT}; fingerprint: that of the token)",
    )
    parser.add_argument("--name", help="of this node; unique in the cluster (default: the host's name)")
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="TOML: the same options, with [attributes] and [environments]",
    )
    parser.add_argument("--state-dir", metavar="DIR", help="this node's own directory (default: in ~/.local/state)")
    parser.add_argument(
        "--cache-dir", metavar="DIR", help="shared by all nodes of this machine (default: ~/.cache/fray)"
    )
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help="the cluster's token, read again when it is replaced (default: FRAY_TOKEN, else FRAY_TOKEN_FILE)",
    )
    parser.add_argument(
        "--join-token-file",
        metavar="FILE",
        help=f"one-time token for this machine, in place of the cluster's (default: {JOIN_VARIABLE})",
    )
    _add_capacity(parser)
    _add_rules(parser)
    parser.add_argument(
        "--attribute",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="attribute that jobs may require: zone=eu-a; may be given several times",
    )
    parser.add_argument("--advertise", metavar="HOST", help="address of this machine for peers (default: detected)")
    parser.add_argument(
        "--insecure",
        action="store_true",
        default=None,
        help="for tests: talk to other machines without TLS; public addresses are refused",
    )
    parser.add_argument(OPTION, action="store_true", help=argparse.SUPPRESS)
    add_log_options(parser)
    daemon_logging.add_options(parser)
    return parser


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    return make_parser().parse_args(argv)


def _add_capacity(parser: argparse.ArgumentParser) -> None:
    """Add the options in place of what is detected."""
    parser.add_argument("--cpu", type=float, metavar="N", help="CPUs for jobs, such as 2 or 0.5 (default: all)")
    parser.add_argument("--memory", metavar="SIZE", help="memory for jobs, such as 60GB (default: all)")
    parser.add_argument("--disk", metavar="SIZE", help="disk space for jobs (default: what is free)")
    parser.add_argument("--gpus", type=int, metavar="N", help="number of GPUs for jobs (default: all)")
    parser.add_argument("--tpus", type=int, metavar="N", help="number of TPU chips for jobs (default: all)")


def _add_rules(parser: argparse.ArgumentParser) -> None:
    """Add the options that limit jobs."""
    parser.add_argument(
        "--lease-s",
        type=float,
        metavar="S",
        help="at most the controller's --lease-s: seconds after which the controller gives up a silent node; at least "
        f"{LEASE_MIN_S:g} (default: 600)",
    )
    parser.add_argument(
        "--drain-s",
        type=float,
        metavar="S",
        help="on SIGTERM, seconds for the jobs that can finish to do so; the others move to other nodes at once "
        "(default: 0, all move)",
    )
    parser.add_argument(
        "--pid-namespace",
        choices=[str(mode) for mode in PidNamespaceMode],
        help="auto (default): programs get one of their own if the system allows it; on: every job; off: none",
    )
    parser.add_argument(
        "--ports",
        metavar="FIRST-LAST",
        help=f"ports for jobs, or none (default: {OFFERED} chosen by the node)",
    )
    parser.add_argument(
        "--memory-limit",
        choices=[str(limiter) for limiter in MemoryLimitMode],
        help="auto (default): control groups if the node may create them, else watch: the node samples the memory of "
        "jobs; off: jobs may use more than they requested",
    )
    parser.add_argument(
        "--job-uids",
        metavar="FIRST-LAST|none",
        help="as root: run the jobs of each user under a uid of this range that is the user's alone, such as "
        f"{EXAMPLE_UIDS}; {NO_UIDS}: run all jobs under the account of fray-node (default: {UIDS_VARIABLE}, else "
        f"{NO_UIDS}; root has to choose where the controller is another machine)",
    )
    parser.add_argument(
        "--secrets",
        metavar="DIR",
        help="directory with a file (mode 600) for each secret that jobs may request, by its name",
    )


def make_config(
    options: argparse.Namespace, environ: Mapping[str, str] | None = None, *, continues: bool = False
) -> NodeConfig:
    """Return the configuration from command line, file and variables, in this order of precedence.

    Args:
        continues: the attempts of a running node, with the accounts that they have.

    Raises:
        InvalidRequest: an option is missing or invalid; the message says what to write.
        OSError: a file cannot be read.
    """
    environ = os.environ if environ is None else environ
    settings = _read_file(options.config) if options.config is not None else {}
    for key in _OPTIONS:
        if getattr(options, key) is not None:
            settings[key] = getattr(options, key)
    settings["attributes"] = {**settings.get("attributes", {}), **attributes_of(options.attribute)}
    if "controller" not in settings:
        raise InvalidRequest("no controller given: use --controller fray://HOST:PORT")
    join_token = _join_token(settings, environ)
    # A machine that joins has a key of its own, and never the cluster's.
    token_file = "" if join_token else _token_file(settings.get("token_file"), environ)
    tokens, token_pins = ((), split_pins(join_token)[1]) if join_token else _tokens(token_file, environ)
    insecure = bool(settings.get("insecure"))
    controller = parse_controller(settings["controller"], environ, token_pins, insecure=insecure)
    name = check_name(settings.get("name") or socket.gethostname(), "a node")
    networked = is_elsewhere(controller)
    lease_s = float(settings.get("lease_s", 600.0))
    if lease_s < LEASE_MIN_S:
        raise InvalidRequest(f"lease_s={lease_s:g} must be {LEASE_MIN_S:g} seconds or more")
    chosen_uids = settings.get("job_uids", environ.get(UIDS_VARIABLE, "")).strip()
    if networked and not chosen_uids and not continues and os.geteuid() == 0:
        raise InvalidRequest(NOT_CHOSEN)
    job_uids = "" if chosen_uids in ("", NO_UIDS) else _job_uids(chosen_uids, settings, controller)
    state_dir = _state_dir(settings.get("state_dir"), name, environ, shared=bool(job_uids))
    detected = read_capacity()
    capacity = override(detected, settings)
    config = NodeConfig(
        name=name,
        controller=controller,
        token=tokens[0] if tokens else "",
        previous_token=tokens[1] if len(tokens) > 1 else "",
        token_file=token_file,
        join_token=join_token,
        capacity=capacity,
        detected_devices=_detected_devices(detected, capacity),
        state_dir=state_dir,
        cache_dir=settings.get("cache_dir", ""),
        advertise=settings.get("advertise") or _local_address(controller),
        finds_address=networked and not settings.get("advertise"),
        networked=networked,
        lease_s=lease_s,
        parent_pid=settings.get("parent_pid"),
        drain_s=_drain_s(settings.get("drain_s", 0.0)),
        job_uids=job_uids,
        secrets_dir=check_directory(settings["secrets"]) if "secrets" in settings else "",
        logs=log_rules(settings),
        environments=_environment_limits(settings.get("environments", {})),
        **{name: _one_of(words, settings.get(name, "auto"), name) for name, words in _WORDS.items()},
    )
    return with_machine_attribute(config) if join_token else config


def attributes_of(given: Sequence[str]) -> dict[str, str]:
    """Parse the ``KEY=VALUE`` of ``--attribute``. Raises InvalidRequest."""
    pairs = [text.partition("=") for text in given]
    for key, equals, value in pairs:
        if not (key and equals and value):
            raise InvalidRequest(f"--attribute {key + equals + value!r}: expected KEY=VALUE, such as zone=eu-a")
    return {key: value for key, _, value in pairs}


def _detected_devices(detected: Capacity, offered: Capacity) -> tuple[str, ...]:
    ids = {device.id for device in detected.devices}
    return tuple(device.id for device in offered.devices if device.id in ids)


def _drain_s(settings: float) -> float:
    if not 0 <= settings < float("inf"):
        raise InvalidRequest(f"drain_s={settings:g} must be 0 or more seconds")
    return float(settings)


def _environment_limits(settings: Mapping[str, Any]) -> EnvironmentLimits:
    known = {"size_bytes": (int, str), "keep_s": (int, float), "build_s": (int, float)}
    for key, value in settings.items():
        # bool is a subclass of int.
        if key not in known or isinstance(value, bool) or not isinstance(value, known[key]):
            raise InvalidRequest(f"[environments] {key} = {value!r}: expected size_bytes, keep_s or build_s, a number")
    size = (
        {"size_bytes": parse_bytes(settings["size_bytes"], "[environments] size_bytes")}
        if "size_bytes" in settings
        else {}
    )
    return EnvironmentLimits(**{**settings, **size})


def _one_of(words: type[StrEnum], settings: str, name: str) -> Any:
    try:
        return words(settings)
    except ValueError:
        raise InvalidRequest(f"{name} = {settings!r} must be one of {', '.join(words)}") from None


def _read_file(path: Path) -> dict[str, Any]:
    try:
        settings = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise InvalidRequest(f"{path}: {error}") from None
    # Unknown keys are errors: a misspelled limit must not be ignored silently.
    for key, value in settings.items():
        if key not in _FILE_KEYS:
            raise InvalidRequest(f"{path}: unknown key {key!r}; expected one of {', '.join(sorted(_FILE_KEYS))}")
        if not isinstance(value, _FILE_KEYS[key]):
            raise InvalidRequest(f"{path}: {key} = {value!r} has the wrong type")
    return settings


def parse_controller(
    text: str, environ: Mapping[str, str] | None = None, token_pins: Sequence[str] = (), *, insecure: bool = False
) -> str:
    """Return the address of the controller (`fray.net.controller_address`) for ``fray://HOST[:PORT][#FINGERPRINT]``, or
    ``unix:/path`` for ``fray+unix:///path``.

    Raises:
        InvalidRequest: the URL is neither, or another machine's without a fingerprint.
    """
    url = urlsplit(text)
    port = None
    try:
        if url.scheme == "fray" and url.hostname and not url.path.strip("/"):
            port = url.port or DEFAULT_PORT
    except ValueError:
        pass  # invalid port
    if port is not None and url.hostname:
        written = text.partition("#")[0]
        return controller_address(
            url.hostname, port, written, url.fragment, environ or {}, token_pins, insecure=insecure
        )
    if url.scheme == "fray+unix" and url.path:
        return f"unix:{url.path}"
    raise InvalidRequest(f"invalid controller {text!r}: expected fray://HOST:{DEFAULT_PORT} or fray+unix:///path")


def _host(controller: str) -> str | None:
    scheme, _, place = controller.partition(":")
    return place.rpartition(":")[0].strip("[]") if scheme in ("tcp", "tls") else None


def _local_address(controller: str) -> str:
    """Return the address of this machine on its route to the controller. Sends nothing."""
    host = _host(controller)
    if host is None or not is_elsewhere(controller):
        return "127.0.0.1"
    try:
        family = socket.getaddrinfo(host, DEFAULT_PORT, type=socket.SOCK_DGRAM)[0][0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # A datagram socket: connecting it only chooses the route.
            probe.connect((host, DEFAULT_PORT))
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()


def _job_uids(text: str, settings: Mapping[str, Any], controller: str) -> str:
    """Return the range of uids for jobs, checked together with the rest of the configuration."""
    uids = parse_uids(text)
    if controller.startswith("unix:"):
        # Its socket admits the account of the controller alone.
        raise InvalidRequest(
            f"--job-uids {uids}: jobs under other accounts cannot connect to {controller}; let fray-controller "
            f"--listen 127.0.0.1:{DEFAULT_PORT}, and write --controller fray://127.0.0.1:{DEFAULT_PORT}"
        )
    for key in ("token_file", "join_token_file"):
        file = settings.get(key)
        if file and Path(file).expanduser().stat().st_mode & 0o077:
            raise InvalidRequest(f"--job-uids {uids}: jobs could read {file}: chmod 600 {file}")
    return str(uids)


def _state_dir(settings: str | None, name: str, environ: Mapping[str, str], *, shared: bool) -> str:
    if shared and not settings:
        return f"/var/lib/fray/node-{name}"  # root's home directory is closed to the accounts of jobs
    home = environ.get("XDG_STATE_HOME") or "~/.local/state"
    return str(Path(settings or f"{home}/fray/node-{name}").expanduser().absolute())


def _token_file(given: str | None, environ: Mapping[str, str]) -> str:
    """Return the file of the token; empty: it is in ``FRAY_TOKEN``."""
    file = given or ("" if environ.get("FRAY_TOKEN", "").strip() else environ.get(TOKEN_FILE_VARIABLE, ""))
    # Absolute, since it is read again.
    return str(Path(file).expanduser().absolute()) if file else ""


def _tokens(file: str, environ: Mapping[str, str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the cluster's tokens and the fingerprints that came with them. Raises InvalidRequest."""
    if file:
        return read_token_file(file)
    tokens, pins = split_tokens(environ.get("FRAY_TOKEN", ""))
    if not tokens:
        raise InvalidRequest(
            "no token given: set FRAY_TOKEN or use --token-file (fray-controller prints its token's path)"
        )
    return tokens, pins


def _join_token(settings: Mapping[str, Any], environ: Mapping[str, str]) -> str:
    file = settings.get("join_token_file")
    if file and settings.get("token_file"):
        raise InvalidRequest("use --token-file or --join-token-file, not both: a machine that joins has its own key")
    if not file:
        return environ.get(JOIN_VARIABLE, "").strip()
    token = Path(file).expanduser().read_text().strip()
    if not token:
        raise InvalidRequest(f"the join token file {file} is empty")
    return token


def override(detected: Capacity, settings: Mapping[str, Any]) -> Capacity:
    """Return the capacity with the operator's settings in place of the detected values."""
    devices = [device for kind in ("gpu", "tpu") for device in _devices(kind, detected, settings.get(f"{kind}s"))]
    return evolve(
        detected,
        cpu_milli=_cpu_milli(settings["cpu"]) if "cpu" in settings else detected.cpu_milli,
        memory_bytes=parse_bytes(settings["memory"], "memory") if "memory" in settings else detected.memory_bytes,
        disk_bytes=parse_bytes(settings["disk"], "disk") if "disk" in settings else detected.disk_bytes,
        devices=tuple(devices),
        attributes={
            **detected.attributes,
            **{key: str(value) for key, value in settings.get("attributes", {}).items()},
        },
        ports=parse_ports(settings["ports"]) if "ports" in settings else PortRange(0, OFFERED),
    )


def _cpu_milli(cpu: float) -> int:
    # Not (cpu > 0) is also true of nan.
    if not 0 < cpu < float("inf"):
        raise InvalidRequest(f"cpu={cpu:g} must be a number of CPUs above 0")
    return round(cpu * 1000)


def _devices(kind: str, detected: Capacity, settings: int | list[str] | None) -> Sequence[Device]:
    """Return the devices of a kind. ``settings``: the number of devices, or a list of their variants."""
    found = [device for device in detected.devices if device.kind == kind]
    if settings is None:
        return found
    if isinstance(settings, int):
        if settings < 0:
            raise InvalidRequest(f"{kind}s={settings} must be 0 or more")
        return [*found, *(Device(f"{kind}-{index}", kind, "unknown") for index in range(len(found), settings))][
            :settings
        ]
    return [Device(f"{kind}-{index}", kind, variant) for index, variant in enumerate(settings)]


if __name__ == "__main__":
    sys.exit(main())
