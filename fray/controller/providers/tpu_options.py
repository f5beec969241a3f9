"""Options of TPU groups, the start-up script of their hosts, and the configuration of their nodes.

The script and the configuration are metadata of the instance. Neither contains a secret; the join token is a third
entry, which the script copies into a file that only root can read, without ever naming it in a command line. Which
command installs Fray is the operator's decision (option ``install``): a default would be a guess, run as root.
"""

from __future__ import annotations

import difflib
import ipaddress
import json
import re

from attrs import Factory, fields, frozen

from fray.controller.providers.base import MachineRequest
from fray.errors import InvalidRequest
from fray.model.join_tokens import split_pins
from fray.model.policy.machine_groups import GroupConfig

LABEL_CLUSTER, LABEL_GROUP, LABEL_MACHINE = "fray-cluster", "fray-group", "fray-machine"
KEY_SCRIPT, KEY_TOKEN, KEY_NODE = "startup-script", "fray-join-token", "fray-node"
WORKER = "@WORKER@"
"""Placeholder in the configuration for the number of the host, which only the host knows."""
HOST_DIRECTORY = "/var/lib/fray"
RUN_DIRECTORY = "/run/fray"
CLOUD_SCOPE = "https://www.googleapis.com/auth/cloud-platform"
_LABEL = re.compile(r"[a-z0-9_-]{0,63}\Z")
_UIDS = re.compile(r"(none|[0-9]+-[0-9]+)\Z")
_UNIT = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?\Z")


@frozen(kw_only=True)
class TpuOptions:
    """Options (``[group.options]``) of a group of provider ``tpu``.

    Attributes:
        project: of Google Cloud, by its id.
        runtime_version: the image of the VMs, such as ``v2-alpha-tpuv5-lite``.
        install: lines of shell that install Fray on a bare host, so that ``fray_node`` exists afterwards.
        fray_node: the program to start. Default ``/opt/fray/bin/fray-node``.
        queued: use queued resources, which wait for capacity. Default False.
        reservation: of Google's, by name, to take the machines from. Default none.
        preemptible: spot machines are of the older kind that lives at most 24 hours. Default False.
        network, subnetwork: default the project's.
        external_ips: hosts have public addresses. Default False.
        job_uids: accounts of jobs, as `fray-node --job-uids`. Default ``none``: jobs run as root, which has access to
            the chips.
        service_account, scopes: permissions of the hosts at Google. Default: the project's account, with all of its
            own.
        tags, labels, metadata: of the VMs, in addition to Fray's own.
        endpoint: of a substitute for Google's API on this machine, ``127.0.0.1:PORT``, for tests.
    """

    project: str
    runtime_version: str
    install: str
    fray_node: str = "/opt/fray/bin/fray-node"
    queued: bool = False
    reservation: str = ""
    preemptible: bool = False
    network: str = ""
    subnetwork: str = ""
    external_ips: bool = False
    job_uids: str = "none"
    service_account: str = ""
    scopes: tuple[str, ...] = (CLOUD_SCOPE,)
    tags: tuple[str, ...] = ()
    labels: dict[str, str] = Factory(dict)
    metadata: dict[str, str] = Factory(dict)
    endpoint: str = ""


_TYPES: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys((one.name for one in fields(TpuOptions)), str),
    **dict.fromkeys(("queued", "preemptible", "external_ips"), bool),
    **dict.fromkeys(("scopes", "tags"), (list, tuple)),
    **dict.fromkeys(("labels", "metadata"), dict),
}
_NEEDED = ("project", "runtime_version", "install")


def read_options(group: GroupConfig) -> TpuOptions:
    """Parse the options of a group.

    Raises:
        InvalidRequest: an option is unknown, missing or invalid, or the group has no TPU type or no zone; the message
            names the group, the option and what to write.
    """
    where = f"[[group]] {group.name!r} (provider tpu)"
    settings = dict(group.options)
    for key, value in settings.items():
        _check_option(where, key, value)
    for key in _NEEDED:
        if not settings.get(key):
            raise InvalidRequest(f"{where}: [group.options] needs {key}; see docs/tpu.md")
    if not group.tpu:
        raise InvalidRequest(f"{where}: no TPU type: write, for example, tpu = 'v5litepod-16'")
    if not all(group.zones):
        raise InvalidRequest(f"{where}: no zones: write, for example, zones = ['us-west4-a']")
    for key in ("scopes", "tags"):
        if key in settings:
            settings[key] = tuple(settings[key])
    options = TpuOptions(**settings)
    _check(where, group, options)
    return options


def _check_option(where: str, key: str, value: object) -> None:
    if key not in _TYPES:
        near = difflib.get_close_matches(key, _TYPES, 2)
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(_TYPES)}"
        raise InvalidRequest(f"{where}: unknown option {key!r}; {hint}")
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    if not isinstance(value, _TYPES[key]) or not all(isinstance(one, str) for one in inner):
        kind = _TYPES[key]
        name = "a list" if isinstance(kind, tuple) else {str: "a string", bool: "true or false", dict: "a table"}[kind]
        of = " of strings" if name in ("a list", "a table") else ""
        raise InvalidRequest(f"{where}: option {key}={value!r} must be {name}{of}")


def _check(where: str, group: GroupConfig, options: TpuOptions) -> None:
    for key, value in options.labels.items():
        if not key or not _LABEL.match(key) or not _LABEL.match(value) or key.startswith("fray-"):
            raise InvalidRequest(
                f"{where}: label {key}={value!r}: up to 63 lower-case letters, digits, - and _; "
                "those that begin with fray- are reserved"
            )
    for key in (KEY_SCRIPT, KEY_TOKEN, KEY_NODE):
        if key in options.metadata:
            raise InvalidRequest(
                f"{where}: metadata {key!r} is reserved for Fray; use the option install for lines at the start"
            )
    if not _UIDS.match(options.job_uids):
        raise InvalidRequest(
            f"{where}: job_uids={options.job_uids!r}: expected FIRST-LAST, such as 200000-200999, or none"
        )
    if options.reservation and group.spot:
        raise InvalidRequest(f"{where}: spot machines cannot come from a reservation: remove one of the two")
    if options.preemptible and not (group.spot and not options.queued):
        raise InvalidRequest(f"{where}: preemptible = true is for spot groups that are not queued")
    # The channel to a substitute is not encrypted and has no credentials, so it must not leave the machine.
    if options.endpoint and not _is_loopback(options.endpoint):
        raise InvalidRequest(f"{where}: endpoint={options.endpoint!r} is not on this machine; expected 127.0.0.1:PORT")


def _is_loopback(endpoint: str) -> bool:
    try:
        return ipaddress.ip_address(endpoint.rpartition(":")[0].strip("[]")).is_loopback
    except ValueError:
        return False


# One unit ------------------------------------------------------------------------------------------------------------


def check_unit(name: str) -> str:
    """Return a name of a TPU VM if it is valid.

    Raises:
        InvalidRequest: it is not.
    """
    if not _UNIT.match(name):
        raise InvalidRequest(
            f"invalid name of a TPU VM: {name!r}; expected up to 63 lower-case letters, digits and -, a letter first"
        )
    return name


def labels(cluster_id: str, request: MachineRequest, options: TpuOptions) -> dict[str, str]:
    """Return the labels by which the unit is found again."""
    own_labels = {LABEL_CLUSTER: cluster_id, LABEL_GROUP: request.group.name, LABEL_MACHINE: request.name}
    # Fray's own win: by them machines are found again and deleted.
    return {**options.labels, **own_labels}


def metadata(request: MachineRequest, options: TpuOptions) -> dict[str, str]:
    """Return what the hosts find at their metadata server."""
    return {
        **options.metadata,
        KEY_SCRIPT: startup_script(request.group.hosts, options),
        KEY_NODE: node_file(request),
        KEY_TOKEN: request.join.token,
    }


def node_file(request: MachineRequest) -> str:
    """Return the configuration of ``fray-node``, with a placeholder for the number of the host."""
    lines = [
        f"controller = {json.dumps(request.join.address)}",
        f"name = {json.dumps(f'{request.name}-{WORKER}')}",
        f'state_dir = "{HOST_DIRECTORY}/{request.name}"',
        f'cache_dir = "{HOST_DIRECTORY}/cache"',
        f'join_token_file = "{RUN_DIRECTORY}/join"',
        # A controller without TLS gives tokens without fingerprints.
        *([] if split_pins(request.join.token)[1] else ["insecure = true"]),
        "",
        "[attributes]",
    ]
    attributes = request.group.node_attributes(request.zone, request.name) | {"tpu_worker": WORKER}
    lines += [f"{json.dumps(key)} = {json.dumps(value, ensure_ascii=False)}" for key, value in attributes.items()]
    return "\n".join(lines) + "\n"


def startup_script(hosts: int, options: TpuOptions) -> str:
    """Return the script that is run as root on every host at every boot: installs Fray and starts ``fray-node`` as a
    service."""
    worker = "$(ask agent-worker-number)" if hosts > 1 else "0"
    return _SCRIPT.format(
        worker=worker,
        key_token=KEY_TOKEN,
        key_node=KEY_NODE,
        mark=WORKER,
        run=RUN_DIRECTORY,
        home=HOST_DIRECTORY,
        install=options.install.strip(),
        fray_node=options.fray_node,
        job_uids=options.job_uids,
    )


_SCRIPT = """\
#!/bin/bash
# Written by Fray: makes this host a node of a cluster. Look with: journalctl -u google-startup-scripts -u fray-node
set -euo pipefail
umask 077
root="${{FRAY_ROOT:-}}"
ask() {{
  curl -sf --retry 20 --retry-delay 1 --retry-connrefused -H 'Metadata-Flavor: Google' \\
    "http://metadata.google.internal/computeMetadata/v1/instance/attributes/$1"
}}
worker={worker}
mkdir -p "$root{run}" "$root{home}"
chmod 711 "$root{home}"
ask {key_token} > "$root{run}/join"
ask {key_node} | sed "s/{mark}/$worker/g" > "$root{run}/node.toml"
(
umask 022
{install}
)
systemctl reset-failed fray-node 2>/dev/null || true
exec systemd-run --unit=fray-node --property=Restart=on-failure --property=RestartSec=10 --property=KillMode=mixed \\
  --property=Delegate=yes --property=LimitNOFILE=1048576 --setenv=FRAY_JOB_UIDS={job_uids} \\
  "$root{fray_node}" --config "$root{run}/node.toml" --log-json
"""
