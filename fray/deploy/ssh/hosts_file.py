"""The TOML file of ``fray up --ssh``: hosts, where the controller is, and what is installed."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import field, frozen

from fray.deploy.cluster_spec import parse_spec
from fray.errors import FrayError, InvalidRequest
from fray.model.ids import check_name

SYSTEMD = "systemd"
SERVICES = ("background", SYSTEMD)
DESTINATION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@:%\[\]-]*\Z")
"""Hosts as they may be written after ``ssh``: never a leading dash, which would be an option."""
OWN_KEYS = ("controller", "name", "state_dir", "token_file", "join_token_file")
"""Keys of the configuration of a node that this file decides otherwise."""


@frozen(kw_only=True)
class Installation:
    """Installation of Fray on a host, and how its daemon runs there."""

    python: str = "python3"
    package: str = ""
    """Requirement for pip, such as ``fray==0.1.0``; empty: this installation of Fray, copied as a wheel."""
    extras: Sequence[str] = ()
    """Extras of the copied wheel."""
    pip_options: Sequence[str] = ()
    directory: str = "~/.local/share/fray"
    service: str = SERVICES[0]


@frozen(kw_only=True)
class SshHost:
    """One host on which a daemon shall run."""

    ssh: str
    name: str
    """Name of its node."""
    installation: Installation
    node: Mapping[str, Any] = field(factory=dict)
    """Configuration of ``fray-node``."""


@frozen(kw_only=True)
class ControllerPlace:
    """Place of the controller.

    Attributes:
        spec: cluster spec at which nodes and this machine reach it.
        token_file: file with its token; empty: as for other commands.
        host: where this file starts it; None: it runs already.
        listen: address at which that one listens.
        options: further ones of ``fray-controller``.
    """

    spec: str
    token_file: str = ""
    host: SshHost | None = None
    listen: str = ""
    options: Sequence[str] = ()


@frozen(kw_only=True)
class HostsFile:
    """Content of the file. Times are in seconds."""

    controller: ControllerPlace
    hosts: Sequence[SshHost]
    ssh_config: str = ""
    """Configuration file for ``ssh``, in place of that of the user; empty: that one."""
    parallel: int = 16
    connect_s: float = 20.0
    install_s: float = 600.0
    join_s: float = 60.0
    end_s: float = 60.0


def read_hosts_file(file: Path) -> HostsFile:
    """Read the file.

    Raises:
        InvalidRequest: it cannot be read, or a key is missing, unknown or invalid; the message says which.
    """
    try:
        content = tomllib.loads(file.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidRequest(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        return _parsed(content, file.absolute().parent)
    except InvalidRequest as error:
        raise InvalidRequest(f"{file}: {error}") from None


def _parsed(content: dict[str, Any], directory: Path) -> HostsFile:
    limits = {name: _taken(content, name, int | float) for name in ("connect_s", "install_s", "join_s", "end_s")}
    limits["parallel"] = _taken(content, "parallel", int)
    for name, value in limits.items():
        if value is not None and value <= 0:
            raise InvalidRequest(f"{name} = {value} must be above 0")
    ssh_config = _taken(content, "ssh_config", str) or ""
    defaults = _taken(content, "defaults", dict) or {}
    controller = _controller(_taken(content, "controller", dict) or {}, defaults, directory)
    hosts = [_host(entry, defaults) for entry in _taken(content, "hosts", list) or []]
    _refuse_rest(content, "")
    for what in ("name", "ssh"):
        seen = [getattr(host, what) for host in hosts]
        if twice := next((one for one in seen if seen.count(one) > 1), None):
            raise InvalidRequest(f"two hosts have the {what} {twice!r}")
    return HostsFile(
        controller=controller,
        hosts=hosts,
        ssh_config=str(_path(ssh_config, directory)) if ssh_config else "",
        **{name: value for name, value in limits.items() if value is not None},
    )


def _path(text: str, directory: Path) -> Path:
    """Return a path of this machine; relative ones begin at the file."""
    return directory / Path(text).expanduser()


def _controller(table: dict[str, Any], defaults: Mapping[str, Any], directory: Path) -> ControllerPlace:
    spec = _taken(table, "address", str)
    if not spec:
        raise InvalidRequest('[controller] needs its address: address = "fray://HOST:7421"')
    try:
        address = parse_spec(spec).address
    except FrayError as error:
        raise InvalidRequest(f"[controller] {error}") from None
    if not address:
        raise InvalidRequest(f"[controller] address = {spec!r}: expected fray://HOST:PORT")
    ssh, token_file = _taken(table, "ssh", str), _taken(table, "token_file", str) or ""
    if not ssh:
        _refuse_rest(table, "[controller] ")
        return ControllerPlace(spec=spec, token_file=str(_path(token_file, directory)) if token_file else "")
    if token_file:
        raise InvalidRequest("[controller] has ssh and token_file: a controller that is started here makes its token")
    port = address.partition("#")[0].rpartition(":")[2]
    listen = _taken(table, "listen", str) or f"0.0.0.0:{port}"
    options = _strings(table, "options")
    host = SshHost(ssh=_destination(ssh), name="controller", installation=_installation(table, defaults))
    _refuse_rest(table, "[controller] ")
    return ControllerPlace(spec=spec, host=host, listen=listen, options=options)


def _host(entry: object, defaults: Mapping[str, Any]) -> SshHost:
    if not isinstance(entry, dict):
        raise InvalidRequest('hosts are tables: [[hosts]] with ssh = "HOST"')
    table = dict(entry)
    ssh = _destination(_taken(table, "ssh", str) or "")
    name = check_name(_taken(table, "name", str) or ssh.rpartition("@")[2].partition(":")[0], "a node")
    if "/" in name:
        raise InvalidRequest(f"host {ssh!r}: the name {name!r} is also that of a directory, and has no slash")
    where = f"host {name!r}: "
    own, common = _taken(table, "node", dict) or {}, defaults.get("node", {})
    node = {**common, **own}
    if isinstance(common.get("attributes"), dict) or isinstance(own.get("attributes"), dict):
        node["attributes"] = {**common.get("attributes", {}), **own.get("attributes", {})}
    if wrong := [key for key in OWN_KEYS if key in node]:
        raise InvalidRequest(f"{where}[node] {wrong[0]} is decided by this file")
    installation = _installation(table, defaults)
    _refuse_rest(table, where)
    return SshHost(ssh=ssh, name=name, installation=installation, node=node)


def _destination(text: str) -> str:
    if not DESTINATION.match(text) or "@-" in text:
        raise InvalidRequest(f"ssh = {text!r}: expected a host as it is written after `ssh`, such as ada@gpu-7")
    return text


def _installation(table: dict[str, Any], defaults: Mapping[str, Any]) -> Installation:
    """Take what says how Fray is installed from a table, else from ``[defaults]``."""
    both = {**{key: value for key, value in defaults.items() if key != "node"}}
    both.update({key: table.pop(key) for key in (*_TEXTS, *_LISTS) if key in table})
    values: dict[str, Any] = {key: value for key in _TEXTS if (value := _taken(both, key, str)) is not None}
    values |= {key: _strings(both, key) for key in _LISTS}
    _refuse_rest(both, "[defaults] ")
    found = Installation(**values)
    if found.service not in SERVICES:
        raise InvalidRequest(f"service = {found.service!r} must be one of {', '.join(SERVICES)}")
    if found.package.startswith("-") or found.python.startswith("-"):
        raise InvalidRequest("package and python must not begin with a dash")
    if found.package and found.extras:
        raise InvalidRequest(f"extras belong into the package: package = 'fray[{','.join(found.extras)}]'")
    return found


_TEXTS = ("python", "package", "directory", "service")
_LISTS = ("extras", "pip_options")


def _taken(table: dict[str, Any], key: str, kind: Any) -> Any:
    value = table.pop(key, None)
    if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
        raise InvalidRequest(f"{key} = {value!r} has the wrong type")
    return value


def _strings(table: dict[str, Any], key: str) -> tuple[str, ...]:
    values = _taken(table, key, list) or []
    if not all(isinstance(value, str) for value in values):
        raise InvalidRequest(f"{key} = {values!r}: expected a list of strings")
    return tuple(values)


def _refuse_rest(table: Mapping[str, Any], where: str) -> None:
    # A misspelled limit must not be ignored silently.
    if table:
        raise InvalidRequest(f"{where}unknown key {next(iter(table))!r}")


def toml_text(table: Mapping[str, Any]) -> str:
    """Return the configuration of a node as TOML. Raises InvalidRequest: a value is of another kind."""
    plain = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    lines = [f"{_key(key)} = {_value(value)}" for key, value in plain.items()]
    for key, value in table.items():
        if key not in plain:
            lines += [f"[{_key(key)}]", *(f"{_key(name)} = {_value(each)}" for name, each in value.items())]
    return "".join(f"{line}\n" for line in lines)


def _key(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, str | bool | int | float):
        # JSON writes these as TOML does.
        return json.dumps(value, ensure_ascii=False)
    raise InvalidRequest(f"{value!r} cannot be a setting of a node")
