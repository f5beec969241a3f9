"""Job requests as users write them: `JobRequest` with its `Entrypoint`."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar, TypeVarTuple, overload

from attrs import Factory, field

from fray.errors import InvalidRequest
from fray.model.environment import EnvironmentConfig
from fray.model.frozen import frozen
from fray.model.ids import check_name
from fray.model.job_groups import JobRole, as_role
from fray.model.monitoring.health import HealthCheck, OnStall
from fray.model.policy.priority import Band, parse_band
from fray.model.resources import ResourceConfig, short_repr
from fray.model.specs import ExitRule, TerminationPolicy
from fray.tracebacks import short_tracebacks
from fray.type_variables import T_co

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
_PORT = re.compile(r"[A-Za-z0-9_-]{1,40}\Z")


def _args(args: Sequence[Any]) -> tuple[Any, ...]:
    # Without the check, a string would become one argument for each of its characters.
    if isinstance(args, str | bytes | bytearray | Mapping) or not isinstance(args, Iterable):
        raise InvalidRequest(
            f"args={short_repr(args)} must be a tuple or a list: write args=({short_repr(args)},) for one argument"
        )
    return tuple(args)


def _kwargs(kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise InvalidRequest(f"kwargs={short_repr(kwargs)} must be a dict of arguments by name, as {{'path': 'x'}}")
    return dict(kwargs or {})


@short_tracebacks
@frozen
class Entrypoint(Generic[T_co]):
    """Code of a job: a Python callable (sync or async) with arguments, or a program; ``T_co`` is what the job returns.

    Make one with `from_callable` or `from_binary`.
    """

    callable: Callable[..., Any] | None = None
    args: tuple[Any, ...] = field(default=(), converter=_args)
    kwargs: dict[str, Any] = field(factory=dict, converter=_kwargs)
    argv: tuple[str, ...] = ()

    # Type checkers check arguments that are a tuple; of a list, and of a dict, they know neither length nor names.
    @overload
    @classmethod
    def from_callable(cls, fn: Callable[[*Ts], Coroutine[Any, Any, T]], args: tuple[*Ts]) -> Entrypoint[T]: ...
    @overload
    @classmethod
    def from_callable(cls, fn: Callable[[*Ts], T], args: tuple[*Ts]) -> Entrypoint[T]: ...
    @overload
    @classmethod
    def from_callable(cls, fn: Callable[[], Coroutine[Any, Any, T]]) -> Entrypoint[T]: ...
    @overload
    @classmethod
    def from_callable(cls, fn: Callable[[], T]) -> Entrypoint[T]: ...
    @overload
    @classmethod
    def from_callable(cls, fn: Callable[..., Coroutine[Any, Any, T]], args: list[Any]) -> Entrypoint[T]: ...
    @overload
    @classmethod
    def from_callable(cls, fn: Callable[..., T], args: list[Any]) -> Entrypoint[T]: ...
    @overload
    @classmethod
    def from_callable(
        cls, fn: Callable[..., Coroutine[Any, Any, T]], args: Sequence[Any] = ..., *, kwargs: Mapping[str, Any]
    ) -> Entrypoint[T]: ...
    @overload
    @classmethod
    def from_callable(
        cls, fn: Callable[..., T], args: Sequence[Any] = ..., *, kwargs: Mapping[str, Any]
    ) -> Entrypoint[T]: ...
    @overload
    @classmethod
    def from_callable(
        cls, fn: Callable[..., Coroutine[Any, Any, T]], args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> Entrypoint[T]: ...
    @overload
    @classmethod
    def from_callable(
        cls, fn: Callable[..., T], args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> Entrypoint[T]: ...

    @classmethod
    def from_callable(
        cls, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Entrypoint:
        """Run ``fn(*args, **kwargs)``; all must be picklable. An ``async def`` runs under Trio.

        Raises:
            InvalidRequest: ``fn`` is not callable, ``args`` not a tuple or a list, or ``kwargs`` not a mapping.
        """
        if not callable(fn):
            raise InvalidRequest(f"Entrypoint.from_callable needs a callable, not {short_repr(fn)}")
        return Entrypoint(callable=fn, args=args, kwargs=kwargs)

    @classmethod
    def from_binary(cls, command: str, args: Sequence[str] = ()) -> Entrypoint[None]:
        """Run the program ``command`` with ``args``, without a shell. A non-zero exit code is a failure.

        Raises:
            InvalidRequest: the command is empty or an argument is not a string.
        """
        argv = (command, *_args(args))
        if not command or not all(isinstance(part, str) and "\0" not in part for part in argv):
            raise InvalidRequest(f"Entrypoint.from_binary needs a program and string arguments, not {argv!r}")
        return Entrypoint(argv=argv)


def _entrypoint(value: Entrypoint[T] | Callable[[], T] | None) -> Entrypoint[T] | None:
    # What is neither is refused in `__attrs_post_init__`, where the name of the job is known.
    return Entrypoint.from_callable(value) if callable(value) else value


def _environment(value: EnvironmentConfig | None) -> EnvironmentConfig:
    return value or EnvironmentConfig()


def _ports(names: Sequence[str]) -> tuple[str, ...]:
    if isinstance(names, str) or not all(isinstance(name, str) and _PORT.match(name) for name in names):
        raise InvalidRequest(f"ports={names!r} must be a list of names of letters, digits, _ and -, as ['http']")
    if len(set(names)) != len(names):
        raise InvalidRequest(f"ports={names!r} names one port twice")
    return tuple(names)


def _rules(rules: Mapping[int, str]) -> dict[int, ExitRule]:
    try:
        found = {code: ExitRule(rule) for code, rule in rules.items()}
    except (ValueError, TypeError, AttributeError):
        found = {-1: ExitRule.FAIL}
    if not all(isinstance(code, int) and 1 <= code <= 255 for code in found):
        words = ", ".join(repr(rule.value) for rule in ExitRule)
        raise InvalidRequest(f"exit_codes={rules!r} must map codes from 1 to 255 to one of {words}")
    return found


def _on_stall(word: str) -> OnStall:
    try:
        return OnStall(word)
    except ValueError:
        raise InvalidRequest(f"on_stall={word!r} must be 'capture' or 'restart'") from None


def _band(word: str | None) -> Band | None:
    return None if word is None else parse_band(word, "a job")


def check_stall(what: str, stall_s: float | None) -> None:
    """Raise InvalidRequest unless ``stall_s`` is a positive number or None; ``what`` names the job in the message."""
    if stall_s is not None and not 0 < stall_s < float("inf"):
        raise InvalidRequest(f"{what}: stall_s={stall_s} must be more than 0 seconds; leave it out for never")


_MAY_BE_NONE = ("max_retries_machine_loss", "max_retries_out_of_memory")
_BUDGETS = ("max_retries_failure", "max_retries_preemption", *_MAY_BE_NONE)


@short_tracebacks
@frozen
class JobRequest(Generic[T_co]):
    """A job to launch; ``T_co`` is what it returns.

    Attributes:
        name: name without blanks; unique among the living jobs of the namespace.
        resources: resources of each replica. Default 1 CPU and 2 GB.
        entrypoint: code to run; a function without arguments may be given as it is.
        environment: packages, files and variables of the process.
        replicas: gang size; default ``resources.replicas``.
        max_retries_failure: restarts after a failure, a kill or out-of-memory; -1: unlimited. Default 0.
        max_retries_preemption: restarts after preemption or loss of a machine; -1: unlimited. Default 100.
        max_retries_machine_loss: separate budget for lost machines. Default None: the preemption budget is used.
        max_retries_out_of_memory: separate budget for out-of-memory. Default None: the failure budget is used.
        exit_codes: meaning of exit codes: ``{75: "retry", 2: "fail", 143: "ignore"}``. Other codes except 0 are
            failures. Applies to programs, ``sys.exit`` and ``os._exit``, not to exceptions. 128 + n also stands for a
            death by signal n.
        backoff_s: wait before the first restart after a failure; doubled with each further failure, and shortened by up
            to a quarter. Default 0; a job that fails within 10 s of its start three times in a row waits nevertheless.
        backoff_max_s: longest such wait; 0: no wait at all. Default 30.
        ports: names of ports to allocate on its machine; the process finds ``http`` in ``FRAY_PORT_HTTP``.
        health: health check. Default None: healthy while it runs.
        stall_s: seconds without `fray.progress` after which the job counts as stalled. Default None: never.
        on_stall: ``"capture"`` (default): save its stacks in its record; ``"restart"``: also fail the attempt.
        termination: termination policy: cancelled, then SIGTERM after ``cancel_s`` (3), then SIGKILL after ``term_s``
            (2) more.
        result_storage: fsspec address of a directory (``file:///shared/results``, ``gs://bucket/results``) for a
            result or an error over 8 MiB; Fray never deletes these files. Default None: the controller stores the
            result, and such an error is shortened.
        detached: owned by the cluster, not by the scope or driver that launched it. Default False.
        priority: priority band: ``"system"``, ``"production"``, ``"interactive"`` or ``"batch"``. Default None: the
            band of the job that launches it, else interactive.
        time_limit_s: seconds of run time after which it fails; jobs with a limit can be backfilled. Default None: no
            limit.
        role: role in its job group (`Cluster.launch_group`): a name, or a `JobRole`. Default None: a primary member of
            the first stage, in a role named like the job.
        preemption_notice_s: seconds between the notice of a preemption (`CurrentJob.preempted`; programs get SIGTERM)
            and the start of the termination, limited by the cluster's policy (600). Default 0: it begins at once.
        wait_limit_s: seconds of waiting for machines after which it fails as ``unschedulable``. Default None: never.
        on_behalf_of: user of the job, whose quota, share and bands count; refused unless the cluster's policy grants it
            (``launches_for``). Default None: the user of who launches it.

    Raises:
        InvalidRequest: a value of another type, an impossible name or amount.
    """

    name: str
    resources: ResourceConfig = Factory(ResourceConfig)
    entrypoint: Entrypoint[T_co] | None = field(default=None, converter=_entrypoint)
    environment: EnvironmentConfig = field(default=None, converter=_environment)
    replicas: int | None = None
    max_retries_failure: int = 0
    max_retries_preemption: int = 100
    detached: bool = False
    max_retries_machine_loss: int | None = None
    max_retries_out_of_memory: int | None = None
    exit_codes: dict[int, ExitRule] = field(factory=dict, converter=_rules)
    backoff_s: float = 0.0
    backoff_max_s: float = 30.0
    ports: tuple[str, ...] = field(default=(), converter=_ports)
    health: HealthCheck | None = None
    stall_s: float | None = None
    on_stall: OnStall = field(default=OnStall.CAPTURE, converter=_on_stall)
    termination: TerminationPolicy = Factory(TerminationPolicy)
    result_storage: str | None = None
    priority: Band | None = field(default=None, converter=_band)
    time_limit_s: float | None = None
    preemption_notice_s: float = 0.0
    wait_limit_s: float | None = None
    role: JobRole | None = field(default=None, converter=as_role)
    on_behalf_of: str | None = None

    def __attrs_post_init__(self) -> None:
        check_name(self.name, "a job")
        self._check_types()
        where = self.result_storage
        if where is not None and not (isinstance(where, str) and ("://" in where or where.startswith("/"))):
            raise InvalidRequest(
                f"job {self.name!r}: result_storage={where!r} must be an address that is valid on every machine: "
                "'file:///shared/results', 'gs://bucket/results'"
            )
        for name in _BUDGETS:
            amount = getattr(self, name)
            if not (isinstance(amount, int) and amount >= -1) and not (amount is None and name in _MAY_BE_NONE):
                none = "; None uses the general budget" if name in _MAY_BE_NONE else ""
                raise InvalidRequest(
                    f"job {self.name!r}: {name}={amount!r} must be 0 or more, or -1 for any number{none}"
                )
        check_stall(f"job {self.name!r}", self.stall_s)
        for name in ("time_limit_s", "wait_limit_s"):
            amount = getattr(self, name)
            if amount is not None and not 0 < amount < float("inf"):
                raise InvalidRequest(
                    f"job {self.name!r}: {name}={amount} must be more than 0 seconds; leave it out for no limit"
                )
        for name in ("backoff_s", "backoff_max_s", "preemption_notice_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise InvalidRequest(f"job {self.name!r}: {name}={getattr(self, name)} must be 0 or more seconds")
        if self.health is not None and self.health.path is not None and self.health.port not in self.ports:
            raise InvalidRequest(
                f"job {self.name!r}: its health check uses port {self.health.port!r}: "
                f"write ports=[{self.health.port!r}], or set another port= in HealthCheck"
            )

    def _check_types(self) -> None:
        # The second argument of `fray.v2.JobRequest` is the entrypoint: the two are easily swapped.
        entry, resources = self.entrypoint, self.resources
        if not isinstance(resources, ResourceConfig):
            line = "resources=ResourceConfig(cpu=1, memory='2GB')"
            if isinstance(resources, Entrypoint) or callable(resources):
                line = f"JobRequest({self.name!r}, entrypoint=...)"
            raise InvalidRequest(
                f"job {self.name!r}: resources={short_repr(resources)} must be a ResourceConfig: write {line}"
            )
        if entry is not None and not isinstance(entry, Entrypoint):
            line = "Entrypoint.from_callable(fn, args=(...))"
            if isinstance(entry, ResourceConfig):
                line = f"JobRequest({self.name!r}, resources=..., entrypoint=...)"
            elif isinstance(entry, str):
                program, *args = entry.split() or ["program"]
                line = f"Entrypoint.from_binary({program!r}, {args!r})"
            raise InvalidRequest(
                f"job {self.name!r}: entrypoint={short_repr(entry)} must be an Entrypoint or a function: write {line}"
            )

        if self.on_behalf_of is not None and not (isinstance(self.on_behalf_of, str) and self.on_behalf_of):
            raise InvalidRequest(
                f"job {self.name!r}: on_behalf_of={short_repr(self.on_behalf_of)} must be a user's name"
            )

    def members(self) -> int:
        """Return the number of processes of the gang: replicas times the hosts of one replica.

        Raises:
            InvalidRequest: fewer than one replica.
        """
        return self.resources.members(self.replicas, f"job {self.name!r}")
