"""Environment variables that describe the ports and the gang of an attempt. Pure, from its attempt spec alone.

``FRAY_*`` are Fray's own. The others are what frameworks read unaided: torch (``RANK``, ``WORLD_SIZE``,
``MASTER_ADDR``, …), JAX (``JAX_*``; the number and index of processes are set by
`fray.runtime.process.jax_distributed`), libtpu.
"""

from __future__ import annotations

from fray.model.gangs import (
    COORDINATOR,
    MEGASCALE,
    coordinator_of,
    group_name,
    is_gang,
    local_ranks,
    rank_of,
    role_of,
    slice_hosts,
    slices,
)
from fray.model.specs import AttemptSpec

PEERS_LIMIT_CHARS = 100_000
"""Length beyond which a list of members is left out: the kernel accepts no variable over 128 KiB. `fray.current_job`
has it."""
LOOPBACK = ("127.", "::1", "localhost")


def own_variables(attempt_spec: AttemptSpec) -> dict[str, str]:
    """Return ``FRAY_PORT_*``, rank and size; for a gang also its local rank, coordinator and members."""
    variables = {f"FRAY_PORT_{_upper(name)}": str(port) for name, port in attempt_spec.ports.items()}
    rank = rank_of(attempt_spec)
    variables |= group_variables(attempt_spec)
    variables |= {
        "FRAY_HOST": attempt_spec.advertise,
        "FRAY_RANK": str(rank),
        "FRAY_WORLD_SIZE": str(attempt_spec.spec.members),
    }
    if not attempt_spec.members:
        return variables
    local = local_ranks(attempt_spec)
    variables |= {"FRAY_LOCAL_RANK": str(local.index(rank)), "FRAY_LOCAL_WORLD_SIZE": str(len(local))}
    if coordinator_of(attempt_spec.members):
        variables["FRAY_COORDINATOR_ADDRESS"] = coordinator_of(attempt_spec.members)
    return variables | dict(_peer_lists(attempt_spec))


def group_variables(attempt_spec: AttemptSpec) -> dict[str, str]:
    """Return the group, role and ``FRAY_GROUP_{ROLE}_{PORT}`` (addresses by role) of a job group's member."""
    if not attempt_spec.spec.job_group:
        return {}
    variables = {
        "FRAY_GROUP": group_name(attempt_spec.spec),
        "FRAY_GROUP_ID": attempt_spec.spec.job_group,
        "FRAY_ROLE": role_of(attempt_spec.spec).name,
    }
    for role, peers in attempt_spec.group_members.items():
        for port in peers[0].ports:
            text = ",".join(peer.address(port) for peer in peers)
            if len(text) <= PEERS_LIMIT_CHARS:
                variables[f"FRAY_GROUP_{_variable(role)}_{_upper(port)}"] = text
    return variables


def framework_variables(attempt_spec: AttemptSpec) -> dict[str, str]:
    """Return what torch, JAX and libtpu look for in a gang."""
    coordinator = coordinator_of(attempt_spec.members)
    # A job of one process gets none of these: frameworks take them as the sign of a distributed run.
    if not is_gang(attempt_spec.spec) or not coordinator:
        return {}
    host, _, port = coordinator.rpartition(":")
    rank, local = rank_of(attempt_spec), local_ranks(attempt_spec)
    alone = any(
        device.startswith("gpu") for device in attempt_spec.devices
    )  # it sees only its own GPUs, so its first is cuda:0
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(attempt_spec.spec.members),
        # Frameworks use it as the index of a GPU (``cuda:LOCAL_RANK``).
        "LOCAL_RANK": "0" if alone else str(local.index(rank)),
        "LOCAL_WORLD_SIZE": "1" if alone else str(len(local)),
        "MASTER_ADDR": host.strip("[]"),
        "MASTER_PORT": port,
        "JAX_COORDINATOR_ADDRESS": coordinator,
        "JAX_NUM_PROCESSES": str(attempt_spec.spec.members),
        "JAX_PROCESS_ID": str(rank),
    }
    if all(peer.host.startswith(LOOPBACK) for peer in attempt_spec.members):
        variables |= {
            "GLOO_SOCKET_IFNAME": "lo",
            "JAX_COORDINATOR_BIND_ADDRESS": coordinator,
        }  # listen on loopback only
    return variables | _tpu_variables(attempt_spec, rank)


def _tpu_variables(attempt_spec: AttemptSpec, rank: int) -> dict[str, str]:
    """Return libtpu's variables. Ranks go slice by slice, and within one by its hosts' own numbers
    (`fray.scheduler.jobs.transitions`)."""
    hosts = slice_hosts(attempt_spec.spec)
    if not hosts:
        return {}
    own, worker = divmod(rank, hosts)
    slice_members = attempt_spec.members[own * hosts : (own + 1) * hosts]
    variables = {
        "TPU_WORKER_ID": str(worker),
        "TPU_WORKER_HOSTNAMES": ",".join(peer.host for peer in slice_members),
        "TPU_ACCELERATOR_TYPE": attempt_spec.spec.demand.device_variant,
    }
    first = attempt_spec.members[0]
    if slices(attempt_spec.spec) > 1 and MEGASCALE in first.ports:
        variables |= {
            "MEGASCALE_COORDINATOR_ADDRESS": first.host,
            "MEGASCALE_PORT": str(first.ports[MEGASCALE]),
            "MEGASCALE_NUM_SLICES": str(slices(attempt_spec.spec)),
            "MEGASCALE_SLICE_ID": str(own),
        }
    return variables


def _peer_lists(attempt_spec: AttemptSpec) -> list[tuple[str, str]]:
    """Return ``FRAY_PEERS``, the addresses of all members by rank, and the same for each named port."""
    names = attempt_spec.members[0].ports if attempt_spec.members else {}
    lists = [
        (
            "FRAY_PEERS" if name == COORDINATOR else f"FRAY_PEERS_{_upper(name)}",
            [peer.address(name) for peer in attempt_spec.members],
        )
        for name in names
    ]
    return [(variable, text) for variable, peers in lists if len(text := ",".join(peers)) <= PEERS_LIMIT_CHARS]


def _upper(name: str) -> str:
    return name.upper().replace("-", "_")


def _variable(name: str) -> str:
    """Return a role's name as part of the name of a variable."""
    return "".join(c if c.isalnum() else "_" for c in name).upper()
