"""Cluster specs such as ``machine?nodes=2`` or ``fray://host:port``. Pure."""

from __future__ import annotations

from urllib.parse import parse_qsl, urlsplit

from attrs import frozen

from fray.errors import UnknownClusterSpec

DEFAULT_PORT = 7421


@frozen
class Spec:
    """Parsed cluster spec."""

    kind: str
    """``local``, ``machine`` or ``fray``."""
    address: str = ""
    """Address of a ``fray://`` controller, in the notation of `fray.net`."""
    nodes: int = 1
    cpu: float | None = None
    """CPUs of each node; None: its share of the machine's."""
    memory: str | None = None
    """Memory of each node; None: its share of the machine's."""
    pid_namespace: str = "auto"
    preload: tuple[str, ...] = ()
    """Modules that processes of jobs have imported when they start."""
    policy: str | None = None
    """Path of a policy file."""


def parse_spec(spec: str) -> Spec:
    """Parse ``local``, ``machine``, ``machine?nodes=2&cpu=4&memory=8GB``, ``fray://host:port[#fingerprint]`` or
    ``fray+unix:///path``.

    ``machine`` is one node with all of this machine; ``nodes=N`` divides it. The first two may have ``policy=FILE``
    among their options.

    Raises:
        UnknownClusterSpec: anything else.
    """
    url = urlsplit(spec)
    if url.path == "local" and not url.scheme:
        return _local_spec(spec, dict(parse_qsl(url.query, keep_blank_values=True)))
    if url.path == "machine" and not url.scheme:
        return _machine_spec(spec, dict(parse_qsl(url.query, keep_blank_values=True)))
    if url.scheme == "fray+unix" and url.path:
        return Spec("fray", address=f"unix:{url.path}")
    if url.scheme == "fray" and url.hostname and not url.path.strip("/"):
        place = f"{url.hostname}:{_port(url.netloc, spec)}"
        return Spec("fray", address=f"tls:{place}#{url.fragment}" if url.fragment else f"tcp:{place}")
    raise UnknownClusterSpec(
        f"invalid cluster spec {spec!r}; expected 'local', 'machine', 'machine?nodes=2&cpu=4' or 'fray://host:port' "
        "(as the argument of open_cluster or in FRAY_CLUSTER_SPEC)",
        spec=spec,
    )


def spec_text(address: str) -> str:
    """Return the spec of the controller at an address (in the notation of `fray.net`), without fingerprints."""
    kind, _, rest = address.partition("#")[0].partition(":")
    return f"fray+unix://{rest}" if kind == "unix" else f"fray://{rest}"


def _port(netloc: str, spec: str) -> int:
    _, _, port = netloc.rpartition(":") if ":" in netloc else ("", "", str(DEFAULT_PORT))
    # Parsed here: `urlsplit(...).port` raises a ValueError without the spec in it.
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise UnknownClusterSpec(f"{spec!r} has no valid port: write fray://host:{DEFAULT_PORT}", spec=spec)
    return int(port)


def _local_spec(spec: str, options: dict[str, str]) -> Spec:
    unknown = sorted(options.keys() - {"policy"})
    if unknown:
        raise UnknownClusterSpec(
            f"{spec!r}: unknown option {unknown[0]!r}; write 'local' or 'local?policy=FILE'", spec=spec
        )
    return Spec("local", policy=options.get("policy"))


def _machine_spec(spec: str, options: dict[str, str]) -> Spec:
    unknown = sorted(options.keys() - {"nodes", "cpu", "memory", "pid_namespace", "policy", "preload"})
    try:
        if unknown:
            raise ValueError(f"unknown option {unknown[0]!r}")
        nodes, cpu = int(options.get("nodes", 1)), options.get("cpu")
        minimum = 0 if "policy" in options else 1  # its machine groups may provide all nodes
        if not minimum <= nodes <= 64 or (cpu is not None and float(cpu) <= 0):
            raise ValueError("nodes must be 1 to 64 (0 if a policy has machine groups), and cpu more than 0")
        if options.get("pid_namespace", "auto") not in ("auto", "on", "off"):
            raise ValueError("pid_namespace must be auto, on or off")
        preload = tuple(filter(None, options.get("preload", "").split(",")))
        if wrong := [name for name in preload if not all(map(str.isidentifier, name.split(".")))]:
            raise ValueError(f"preload names modules, such as numpy,pyarrow: not {wrong[0]!r}")
    except ValueError as error:
        raise UnknownClusterSpec(
            f"{spec!r}: {error}; write for example 'machine?nodes=2&cpu=4&memory=8GB'", spec=spec
        ) from None
    return Spec(
        "machine",
        nodes=nodes,
        cpu=None if cpu is None else float(cpu),
        memory=options.get("memory"),
        pid_namespace=options.get("pid_namespace", "auto"),
        preload=preload,
        policy=options.get("policy"),
    )
