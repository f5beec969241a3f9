"""``fray run``: a program as a job, with its output in this terminal; and ``fray what-if``.

The command is a driver, and owns the job: Ctrl-C, a closed terminal or the end of this process ends the job too. With
``--detach`` it is a tool: the cluster owns the job.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import warnings
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import trio

from fray.api.cluster import Cluster
from fray.api.jobs.job import Job
from fray.api.open import reports_waits
from fray.cli.formatting import GAP, span_of, wrapped
from fray.cli.jobs import exit_code
from fray.cli.main import INTERRUPTED
from fray.cli.output import note, say, say_json, width
from fray.cli.reservations import find_reservation
from fray.cli.target import open_target, spec_of
from fray.errors import DeadlineExceeded, InvalidRequest
from fray.model import job_text
from fray.model.environment import EnvironmentConfig, Secret
from fray.model.ids import check_name, mint_name
from fray.model.log_records import LogLine
from fray.model.messages.client import Role
from fray.model.monitoring.health import HealthCheck, OnStall
from fray.model.requests import Entrypoint, JobRequest
from fray.model.resources import CpuConfig, GpuConfig, ResourceConfig, TpuConfig
from fray.model.specs import ExitRule, JobInfo, JobState, TerminationPolicy
from fray.runtime.controller_client import pending_jobs

WAITS_S = 3.0
"""Seconds of waiting after which the user is notified of it."""
ACCEPTED_WITHIN_S = 60.0
"""Seconds within which the controller must accept the job, unless a workspace is uploaded first."""


async def run(options: argparse.Namespace) -> int:
    """Run ``fray run``."""
    # A warning about the job is a message of this command, without a line of Fray's code in front.
    warnings.showwarning = lambda message, *_, **__: note(f"warning: {message}")
    request = request_of(options)
    if options.detach:
        async with open_target(options, launches=True) as cluster:
            return await _detach(cluster, request, options)
    interrupts, waits = InterruptHandler(), WaitReporter()
    controller = f"the controller at {spec_of(options).address.partition(':')[2]}"
    info = None
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
        async with trio.open_nursery() as nursery:  # from the start: its first line may arrive before `launch` returns
            nursery.start_soon(interrupts.handle, signals, nursery.cancel_scope)
            nursery.start_soon(waits.run)
            waits.begin(f"{controller} to answer")
            async with open_target(
                options, role=Role.DRIVER, launches=True, on_log=OutputPrinter(request.name)
            ) as cluster:
                upload = "the upload of the workspace, and for " if request.environment.workspace else ""
                waits.begin(f"{upload}{controller} to accept the job")
                job = interrupts.job = await _launched(cluster, request, options, controller)
                waits.end()
                info = await _followed(cluster, job)
                waits.begin(f"{controller} to end this session")
            nursery.cancel_scope.cancel()
    if info is None:
        return INTERRUPTED
    if options.json:
        say_json(info)
    if info.state is not JobState.SUCCEEDED:
        note(f"{job.id} {job_text.state_text(info)}: {_short_reason(info)}")
    return exit_code(info)


async def _launched(cluster: Cluster, request: JobRequest, options: argparse.Namespace, controller: str) -> Job:
    """Return the accepted job. Raises DeadlineExceeded instead of waiting for ever for a controller that is away."""
    within_s = float("inf") if request.environment.workspace else ACCEPTED_WITHIN_S
    with trio.move_on_after(within_s):
        return await cluster.launch(request, reservation_id=await reservation_of(cluster, options))
    raise DeadlineExceeded(
        f"{controller} has not accepted the job within {within_s:g} s, and the job was withdrawn: see the log of "
        "fray-controller",
        timeout_s=within_s,
    )


async def reservation_of(cluster: Cluster, options: argparse.Namespace) -> str | None:
    """Return the id of the reservation that ``--reservation`` names; None without the option."""
    if options.reservation is None:
        return None
    return (await find_reservation(cluster, options.reservation, options)).reservation_id


def _short_reason(info: JobInfo) -> str:
    """Return the first line of the error, without the output that has been printed already."""
    text = info.error_message or str(info.cause)
    return text.splitlines()[0].partition("; last lines of stderr")[0]


async def _detach(cluster: Cluster, request: JobRequest, options: argparse.Namespace) -> int:
    job = await cluster.launch(request, reservation_id=await reservation_of(cluster, options))
    if options.json:
        say_json(job.info)
    else:
        say([job.id])
    return 0


async def what_if(cluster: Cluster, options: argparse.Namespace) -> int:
    """Run ``fray what-if``."""
    found = await cluster.what_if(request_of(options))
    if options.json:
        say_json(found)
    else:
        say(part for line in found.text.splitlines() for part in wrapped(line, width(), len(GAP)))
    return 0


async def _followed(cluster: Cluster, job: Job) -> JobInfo:
    async with trio.open_nursery() as nursery:
        if reports_waits(None):
            nursery.start_soon(pending_jobs.report_pending, cluster._runtime.client.jobs)
        info = await job.wait_ended()
        nursery.cancel_scope.cancel()
    return info


class WaitReporter:
    """Reports on standard error what this command waits for, once for each wait of more than `WAITS_S`."""

    def __init__(self) -> None:
        self._what = ""
        self._changed = trio.Event()

    def begin(self, what: str) -> None:
        """Begin a wait; a wait before it has ended."""
        self._what = what
        self._changed.set()
        self._changed = trio.Event()

    def end(self) -> None:
        """End the wait."""
        self.begin("")

    async def run(self) -> None:
        """Report waits until cancelled."""
        while True:
            changed = self._changed
            with trio.move_on_after(WAITS_S):
                await changed.wait()
            if not changed.is_set() and self._what:
                note(f"waits for {self._what}")
            await changed.wait()


class InterruptHandler:
    """Handler of signals: the first requests the end of the job, the second exits at once; before the launch, the first
    exits.
    """

    def __init__(self) -> None:
        self.job: Job | None = None

    async def handle(self, signals: AsyncIterator[int], scope: trio.CancelScope) -> None:
        is_requested = False
        async for number in signals:
            if self.job is None:
                scope.cancel()
                return
            if is_requested:
                _exit_now(self.job)
            is_requested = True
            note(f"stopping {self.job.id}; press Ctrl-C again to exit without waiting")
            await self.job.terminate(f"{signal.Signals(number).name} at `fray run`")


def _exit_now(job: Job) -> None:
    """Exit at once. The end of the job has been requested, and the end of this session ends it in any case."""
    note(f"exiting; the cluster stops {job.id}")
    sys.stdout.flush()
    os._exit(INTERRUPTED)


class OutputPrinter:
    """Prints output unchanged, on the stream on which it was printed; that of child jobs prefixed with their names."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, lines: Sequence[LogLine]) -> None:
        for line in lines:
            prefix = "" if line.name == self.name else f"({line.name}) "
            (sys.stdout if line.stream == "out" else sys.stderr).write(f"{prefix}{line.text}\n")
        sys.stdout.flush()


# From the options to a request ---------------------------------------------------------------------------------------


def request_of(options: argparse.Namespace) -> JobRequest:
    """Return the request of the options. Raises InvalidRequest."""
    program, *arguments = options.command or ["what-if"]
    return JobRequest(
        name=options.name or generated_name(program),
        entrypoint=Entrypoint.from_binary(program, arguments),
        resources=resources_of(options),
        environment=EnvironmentConfig.create(
            extras=options.extra,
            pip_packages=options.pip,
            env_vars={**variables(options.env), **secrets(options.secret)},
            workspace=options.workspace,
            docker_image=options.image,
        ),
        ports=ports_of(options),
        max_retries_failure=options.max_retries,
        max_retries_preemption=options.max_retries_preemption,
        max_retries_machine_loss=options.max_retries_machine_loss,
        max_retries_out_of_memory=options.max_retries_out_of_memory,
        exit_codes=exit_codes(options.exit_code),
        backoff_s=options.backoff_s,
        backoff_max_s=options.backoff_max_s,
        health=health_of(options),
        stall_s=options.stall_s,
        on_stall=OnStall(options.on_stall),
        termination=TerminationPolicy(term_s=options.term_s),
        preemption_notice_s=options.notice_s,
        detached=options.detach,
        priority=options.priority,
        time_limit_s=span_of(options.time_limit, "--time-limit"),
        wait_limit_s=span_of(options.wait_limit, "--wait-limit"),
    )


def ports_of(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the ports to request; that of a health check is included."""
    health_port = [options.health_port] if options.health is not None else []
    return tuple(dict.fromkeys([*options.port, *health_port]))


def health_of(options: argparse.Namespace) -> HealthCheck | None:
    if options.health is None:
        return None
    return HealthCheck(path=options.health, port=options.health_port, period_s=options.health_period_s)


def exit_codes(texts: list[str]) -> dict[int, ExitRule]:
    """Return the rules of ``75=retry`` options, each code once. Raises InvalidRequest."""
    found: dict[int, ExitRule] = {}
    for text in texts:
        code, _, rule = text.partition("=")
        if not code.isdecimal() or not 1 <= int(code) <= 255 or rule not in list(ExitRule):
            raise InvalidRequest(
                f"invalid --exit-code {text!r}; expected a code from 1 to 255 and retry, fail or ignore: 2=fail"
            )
        if int(code) in found:
            raise InvalidRequest(f"--exit-code {code} is given twice")
        found[int(code)] = ExitRule(rule)
    return found


def generated_name(program: str) -> str:
    """Return a name for the job of a program: ``python-k3x9ab``."""
    plain = "".join(letter for letter in Path(program).stem if letter.isalnum() or letter in "_-") or "job"
    return check_name(mint_name(plain.lstrip("-"), random.SystemRandom()), "a job")


def resources_of(options: argparse.Namespace) -> ResourceConfig:
    device: CpuConfig | GpuConfig | TpuConfig = CpuConfig()
    others: list[str] = []
    if options.gpu:
        kind, _, count = options.gpu.rpartition(":")
        if not count.isdigit():
            raise InvalidRequest(f"invalid --gpu {options.gpu!r}; expected a number, or a type and a number: 1, h100:8")
        kind, *others = kind.split(",")
        device = GpuConfig(variant=kind or "auto", count=int(count))
    elif options.tpu:
        kind, *others = options.tpu.split(",")
        device = TpuConfig(variant=kind)
    return ResourceConfig(
        device=device,
        cpu=options.cpu,
        memory=options.memory,
        disk=options.disk,
        replicas=options.replicas,
        regions=options.region,
        zones=options.zone,
        preemptible=options.preemptible,
        pin_cpus=options.pin_cpus,
        device_alternatives=others,
        constraints=options.constraint,
    )


def variables(texts: list[str]) -> dict[str, str]:
    """Return the variables of ``K=V`` options; ``K`` alone has its value here."""
    found = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals and key not in os.environ:
            raise InvalidRequest(f"--env {key}: not set in this environment; write --env {key}=VALUE")
        found[_variable(key, "--env")] = value if equals else os.environ[key]
    return found


def secrets(texts: list[str]) -> dict[str, Secret]:
    """Return the secrets of ``K=NAME`` options; ``K`` alone is the secret of the same name."""
    pairs = [text.partition("=") for text in texts]
    return {_variable(key, "--secret"): Secret(name or key) for key, _, name in pairs}


def _variable(key: str, option: str) -> str:
    if not key.isidentifier() or not key.isascii():
        raise InvalidRequest(f"{option} {key!r} is not a valid variable name: write {option} NAME=VALUE")
    return key
