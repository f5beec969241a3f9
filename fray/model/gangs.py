"""Gangs: ports of each member, and what a member derives from its rank and its peers.

Everything follows from rank and peers, so two members never disagree.
"""

from __future__ import annotations

from fray.model.ids import split_attempt
from fray.model.job_groups import JobRole
from fray.model.resources import Demand
from fray.model.specs import AttemptSpec, GangMember, JobSpec
from fray.model.topology import find_topology

COORDINATOR = "coordinator"
"""Port name that every member of a gang has; the members meet at the port of the first one."""
MEGASCALE = "megascale"
"""Port name of the same purpose for TPU gangs of several slices."""


def is_gang(spec: JobSpec) -> bool:
    """Return whether members of this job receive rank, size, coordinator and peers."""
    return spec.gang or spec.members > 1


def hosts_of(demand: Demand) -> int:
    """Return the number of members on one TPU slice; 0 without TPUs."""
    topology = find_topology(demand.device_variant) if demand.device_kind == "tpu" else None
    return topology.hosts if topology else 0


def slice_hosts(spec: JobSpec) -> int:
    """Return the number of members on one TPU slice; 0 for a job without TPUs."""
    return hosts_of(spec.demand)


def slices(spec: JobSpec) -> int:
    """Return the number of TPU slices of the gang; 0 for a job without TPUs."""
    hosts = slice_hosts(spec)
    return spec.members // hosts if hosts else 0


def port_names(spec: JobSpec) -> tuple[str, ...]:
    """Return the port names of each member of the job, without repetition, for any of its alternative devices."""
    several = any(0 < hosts_of(demand) < spec.members for demand in (spec.demand, *spec.alternatives))
    names = [*spec.ports, *([COORDINATOR] if is_gang(spec) else []), *([MEGASCALE] if several else [])]
    return tuple(dict.fromkeys(names))


# Job groups ----------------------------------------------------------------------------------------------------------


def role_of(spec: JobSpec) -> JobRole:
    """Return the job's role in its job group."""
    return spec.role or JobRole(spec.name)


def group_name(spec: JobSpec) -> str:
    """Return the name of the job's group (its id is the name, a dash and a token); empty without a group."""
    return spec.job_group.rpartition("-")[0]


# Position of a member in its gang ------------------------------------------------------------------------------------


def rank_of(attempt: AttemptSpec) -> int:
    return split_attempt(attempt.attempt_id)[2]


def local_ranks(attempt: AttemptSpec) -> list[int]:
    """Return the ranks of the members on this machine, including this member's own."""
    rank = rank_of(attempt)
    if not attempt.members:
        return [rank]
    host = attempt.members[rank].host
    return [other for other, peer in enumerate(attempt.members) if peer.host == host]


def coordinator_of(members: tuple[GangMember, ...]) -> str:
    """Return ``host:port`` where a gang meets; empty without a coordinator port."""
    return members[0].address(COORDINATOR) if members and COORDINATOR in members[0].ports else ""
