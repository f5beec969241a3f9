"""Job groups: jobs that are placed together, and what the end of one means to the others.

Roles, stages and the two kinds of members are those of Kubernetes' JobSet (``dependsOn``, ``successPolicy``), Volcano
(tasks of one job) and TorchX (``Role``).
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar

from attrs import Factory, field

from fray.errors import InvalidRequest
from fray.model.frozen import frozen
from fray.model.ids import JobId, Namespace, check_name

STAGE_LIMIT = 100
"""The highest stage: each one more waits for all before it."""


class Success(StrEnum):
    """When a group has succeeded. What still runs is ended in order then."""

    PRIMARY = "primary"
    """All primary members have."""
    ALL = "all"
    """All members have, the auxiliary ones too."""
    ANY = "any"
    """One primary member has. Then failures of primary members matter only once none is left."""


class Restart(StrEnum):
    """Who begins anew with a member that failed and may be retried."""

    MEMBER = "member"
    """It alone, in the same region or zone as the others."""
    GROUP = "group"
    """All that have not succeeded, together, once all have ended; it costs the others nothing."""


class AuxiliaryFailure(StrEnum):
    """What an auxiliary member that failed for good does to its group."""

    ESCALATE = "escalate"
    """It fails the group."""
    ABSORB = "absorb"
    """The group goes on without it."""


W = TypeVar("W", bound=StrEnum)


def _success(word: str) -> Success:
    return _parse(Success, "success", word)


def _restart(word: str) -> Restart:
    return _parse(Restart, "restart", word)


def _failure(word: str) -> AuxiliaryFailure:
    return _parse(AuxiliaryFailure, "auxiliary_failure", word)


def _parse(words: type[W], name: str, word: str) -> W:
    try:
        return words(word)
    except ValueError:
        known = ", ".join(repr(each.value) for each in words)
        raise InvalidRequest(f"JobGroupConfig({name}={word!r}) must be one of {known}") from None


@frozen
class JobRole:
    """What a job is in its group.

    Attributes:
        name: of the role; several jobs may have it. In the process: ``FRAY_ROLE``.
        stage: jobs of a later stage begin when all of the earlier ones run (or have ended in order). Their machines are
            theirs from the start. Default 0: at once.
        auxiliary: it serves the others: the group may succeed without it, and it is ended then. Default False: primary.

    Raises:
        InvalidRequest: an impossible name or stage.
    """

    name: str
    stage: int = 0
    auxiliary: bool = False

    def __attrs_post_init__(self) -> None:
        check_name(self.name, "a role")
        stage = self.stage
        if isinstance(stage, bool) or not isinstance(stage, int) or not 0 <= stage <= STAGE_LIMIT:
            raise InvalidRequest(f"role {self.name!r}: stage={stage!r} must be a number from 0 to {STAGE_LIMIT}")


def as_role(role: JobRole | str | None) -> JobRole | None:
    """Raises InvalidRequest: neither a role nor the name of one."""
    if role is None or isinstance(role, JobRole):
        return role
    if isinstance(role, str):
        return JobRole(role)
    raise InvalidRequest(f"role={role!r} must be a name or a JobRole, as JobRole('trainer', stage=1)")


@frozen
class JobGroupConfig:
    """Jobs that are placed together: all or none, in one decision, near each other. The first four are seed 000's.

    Attributes:
        name: of the group; unique among the living groups of the namespace. Default: one is made up.
        namespace: of all its jobs. Default: that of whoever launches it.
        same_region: all machines are of one region. Those that name none count as one. Default True.
        same_zone: and of one zone. Default False.
        success: when it has succeeded: ``"primary"`` (default): all its primary members have; ``"all"``: all members;
            ``"any"``: one primary member.
        auxiliary_failure: what an auxiliary member that fails for good does: ``"escalate"`` (default): it fails the
            group; ``"absorb"``: the group goes on without it.
        restart: who begins anew with a member that failed and may be retried: ``"member"`` (default): it alone, where
            the others are; ``"group"``: all that have not succeeded, together.

    Raises:
        InvalidRequest: an impossible name or word, or two that contradict each other.
    """

    name: str = ""
    namespace: Namespace | None = None
    same_region: bool = True
    same_zone: bool = False
    success: Success = field(default=Success.PRIMARY, converter=_success)
    auxiliary_failure: AuxiliaryFailure = field(default=AuxiliaryFailure.ESCALATE, converter=_failure)
    restart: Restart = field(default=Restart.MEMBER, converter=_restart)

    def __attrs_post_init__(self) -> None:
        if self.name:
            check_name(self.name, "a job group")
        if self.namespace is not None:
            check_name(self.namespace, "a namespace")
        if self.success is Success.ALL and self.auxiliary_failure is AuxiliaryFailure.ABSORB:
            raise InvalidRequest(
                f"job group {self.name!r}: success='all' needs every member, so auxiliary_failure='absorb' cannot be: "
                "write success='primary'"
            )

    @property
    def same(self) -> str:
        """The attribute of machines that its members share; empty: none."""
        return "zone" if self.same_zone else "region" if self.same_region else ""


@frozen(kw_only=True)
class JobGroupSpec:
    """A group as it travels beside its jobs (`Launch`)."""

    group_id: str
    config: JobGroupConfig


@frozen(kw_only=True)
class MemberInfo:
    """One job of a group."""

    job_id: JobId
    name: str
    role: str
    stage: int
    auxiliary: bool
    state: str
    """As in `JobState`."""
    absorbed: bool = False
    """It failed, and the group went on without it."""


@frozen(kw_only=True)
class JobGroupInfo:
    """A group's state; times are seconds since the epoch.

    Attributes:
        group_id, name, namespace: of the group.
        state: as of a job (`JobState`): pending until all members are placed, running until it is decided how it ended
            and the last member has ended.
        error_message: the first cause, of one that has failed or was stopped.
        decided_by: the job whose end was the group's.
        place: the region or zone where it is now, by ``same``; empty where it is not placed, or the machines name none.
        same: ``"region"``, ``"zone"`` or empty.
        reason: why it waits, while it waits.
        members: its jobs that are on record, in the order of the request.
    """

    group_id: str
    name: str
    namespace: Namespace
    state: str
    error_message: str | None = None
    decided_by: JobId = ""
    place: str = ""
    same: str = ""
    launch_time: float | None = None
    start_time: float | None = None
    """When all its members first had machines."""
    end_time: float | None = None
    reason: str = ""
    members: tuple[MemberInfo, ...] = Factory(tuple)
