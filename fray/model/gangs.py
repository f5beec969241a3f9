"""Gangs: the ports each member is given, and what it is told of itself and of its peers. Everything else follows from
rank and peers, so two members never disagree.
"""

from __future__ import annotations

from fray.model.ids import split_attempt
from fray.model.job_groups import JobRole
from fray.model.resources import Demand
from fray.model.specs import AttemptSpec, GangMember, JobSpec
from fray.model.topology import find_topology

COORDINATOR = "coordinator"
"""Every member of a gang has a port of this name; that of the first is where they meet."""
MEGASCALE = "megascale"
"""The same for TPU gangs of several slices."""


def is_gang(spec: JobSpec) -> bool:
    """Its members are told rank, size, coordinator and peers."""
    return spec.gang or spec.members > 1


def hosts_of(demand: Demand) -> int:
    """Members of one TPU slice; 0 without TPUs."""
    topology = find_topology(demand.device_variant) if demand.device_kind == "tpu" else None
    return topology.hosts if topology else 0


def slice_hosts(spec: JobSpec) -> int:
    """Members of one TPU slice; 0 for a job without TPUs."""
    return hosts_of(spec.demand)


def slices(spec: JobSpec) -> int:
    """TPU slices of the gang; 0 for a job without TPUs."""
    hosts = slice_hosts(spec)
    return spec.members // hosts if hosts else 0


def port_names(spec: JobSpec) -> tuple[str, ...]:
    """Names of the ports each member of the job is given, without repetition, whichever of its devices it gets."""
    several = any(0 < hosts_of(demand) < spec.members for demand in (spec.demand, *spec.alternatives))
    names = [*spec.ports, *([COORDINATOR] if is_gang(spec) else []), *([MEGASCALE] if several else [])]
    return tuple(dict.fromkeys(names))


# Job groups ------------------------------------------------------------------------------------------------------


def role_of(spec: JobSpec) -> JobRole:
    """Its role in its job group."""
    return spec.role or JobRole(spec.name)


def group_name(spec: JobSpec) -> str:
    """The name of its job group, whose id is the name, a dash and a token; empty: it is in none."""
    return spec.job_group.rpartition("-")[0]


# What a member knows of itself ------------------------------------------------------------------------------------


def rank_of(attempt: AttemptSpec) -> int:
    return split_attempt(attempt.attempt_id)[2]


def local_ranks(attempt: AttemptSpec) -> list[int]:
    """Ranks of the members on this machine, its own among them."""
    rank = rank_of(attempt)
    if not attempt.members:
        return [rank]
    host = attempt.members[rank].host
    return [other for other, peer in enumerate(attempt.members) if peer.host == host]


def coordinator_of(members: tuple[GangMember, ...]) -> str:
    """``host:port`` where a gang meets; empty without one."""
    return members[0].address(COORDINATOR) if members and COORDINATOR in members[0].ports else ""
