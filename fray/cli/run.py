"""``fray run``: a program as a job, from this terminal.

It is a driver, and owns the job: Ctrl-C, a closed terminal or the end of this process ends the job too. With
``--detach`` it is a tool: the job is the cluster's.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import trio

from fray.api.cluster import Cluster
from fray.api.jobs.job import Job
from fray.cli.formatting import parse_span
from fray.cli.jobs import exit_code
from fray.cli.main import INTERRUPTED
from fray.cli.output import note, say, say_json
from fray.cli.reservations import find_reservation
from fray.cli.target import open_place
from fray.errors import InvalidRequest
from fray.model import job_text
from fray.model.environment import EnvironmentConfig, Secret
from fray.model.exit_rules import ExitRule
from fray.model.ids import check_name, mint_name
from fray.model.log_records import LogLine
from fray.model.messages.client import Role
from fray.model.monitoring.health import HealthCheck, OnStall
from fray.model.requests import Entrypoint, JobRequest
from fray.model.resources import CpuConfig, GpuConfig, ResourceConfig, TpuConfig
from fray.model.specs import JobInfo, JobState, TerminationPolicy

WAITS_S = 3.0
"""A job that has waited for so long is said to."""


async def run(options: argparse.Namespace) -> int:
    """``fray run``"""
    request = request_of(options)
    if options.detach:
        async with open_place(options) as cluster:
            return await _detach(cluster, request, options)
    interrupts = InterruptHandler()
    info = None
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
        async with trio.open_nursery() as nursery:  # from the start: its first line may be here before `launch` returns
            nursery.start_soon(interrupts.obey, signals, nursery.cancel_scope)
            async with open_place(options, role=Role.DRIVER, on_log=OutputPrinter(request.name)) as cluster:
                inside = await reservation_of(cluster, options)
                job = interrupts.job = await cluster.launch(request, reservation_id=inside)
                info = await _followed(cluster, job)
            nursery.cancel_scope.cancel()
    if info is None:
        return INTERRUPTED
    if options.json:
        say_json(info)
    if info.state is not JobState.SUCCEEDED:
        note(f"{job.id} {job_text.state_text(info)}: {_in_short(info)}")
    return exit_code(info)


async def reservation_of(cluster: Cluster, options: argparse.Namespace) -> str | None:
    """The id of the reservation that ``--reservation`` means."""
    if options.reservation is None:
        return None
    return (await find_reservation(cluster, options.reservation, options)).reservation_id


def _in_short(info: JobInfo) -> str:
    """Its last words on standard error have been seen already."""
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
    """``fray what-if``"""
    found = await cluster.what_if(request_of(options))
    if options.json:
        say_json(found)
    else:
        say(found.text.splitlines())
    return 0


async def _followed(cluster: Cluster, job: Job) -> JobInfo:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_tell_waits, cluster, job)
        info = await job.wait_ended()
        nursery.cancel_scope.cancel()
    return info


async def _tell_waits(cluster: Cluster, job: Job) -> None:
    """Once each time that it waits for longer than a moment: for what."""
    told = False
    while True:
        await trio.sleep(WAITS_S)
        info = await cluster.poll(job)
        waits = info.state is JobState.PENDING and not info.members and bool(info.reason)
        if waits and not told:
            note(f"{job.id} waits: {info.reason}")
        told = waits


class InterruptHandler:
    """A first Ctrl-C asks for the end of the job, a second leaves at once; before there is a job, the first leaves."""

    def __init__(self) -> None:
        self.job: Job | None = None

    async def obey(self, signals: AsyncIterator[int], everything: trio.CancelScope) -> None:
        asked = False
        async for number in signals:
            if self.job is None:
                everything.cancel()
                return
            if asked:
                _leave_now(self.job)
            asked = True
            note(f"ending {self.job.id}; once more: without waiting for it")
            await self.job.terminate(f"{signal.Signals(number).name} at `fray run`")


def _leave_now(job: Job) -> None:
    """Its end has been asked for, and the end of this process is one more reason: the cluster sees to it."""
    note(f"left; the cluster ends {job.id}")
    sys.stdout.flush()
    os._exit(INTERRUPTED)


class OutputPrinter:
    """What the job prints, as it is, on the stream it was printed on; what its children print, behind their names."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, lines: Sequence[LogLine]) -> None:
        for line in lines:
            before = "" if line.name == self.name else f"({line.name}) "
            (sys.stdout if line.stream == "out" else sys.stderr).write(f"{before}{line.text}\n")
        sys.stdout.flush()


# From the options to a request ---------------------------------------------------------------------------------------


def request_of(options: argparse.Namespace) -> JobRequest:
    """Raises InvalidRequest: something in it cannot be."""
    program, *arguments = options.command or ["what-if"]
    return JobRequest(
        name=options.name or made_up_name(program),
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


def span_of(text: str | None, option: str) -> float | None:
    """Seconds. Raises InvalidRequest."""
    if text is None:
        return None
    try:
        return parse_span(text)
    except ValueError:
        raise InvalidRequest(f"{option} {text!r} is no span of time: write 30s, 10m, 2h, 1d") from None


def ports_of(options: argparse.Namespace) -> tuple[str, ...]:
    """That where its health is asked for comes by itself."""
    asked = [options.health_port] if options.health is not None else []
    return tuple(dict.fromkeys([*options.port, *asked]))


def health_of(options: argparse.Namespace) -> HealthCheck | None:
    if options.health is None:
        return None
    return HealthCheck(path=options.health, port=options.health_port, period_s=options.health_period_s)


def exit_codes(given: list[str]) -> dict[int, ExitRule]:
    """``75=retry``, each code once. Raises InvalidRequest."""
    found: dict[int, ExitRule] = {}
    for text in given:
        code, _, rule = text.partition("=")
        if not code.isdecimal() or not 1 <= int(code) <= 255 or rule not in list(ExitRule):
            raise InvalidRequest(f"--exit-code {text!r}: write a code from 1 to 255 and retry, fail or ignore: 2=fail")
        if int(code) in found:
            raise InvalidRequest(f"--exit-code {code} is there twice")
        found[int(code)] = ExitRule(rule)
    return found


def made_up_name(program: str) -> str:
    """``python-k3x9ab``."""
    plain = "".join(letter for letter in Path(program).stem if letter.isalnum() or letter in "_-") or "job"
    return check_name(mint_name(plain.lstrip("-"), random.SystemRandom()), "a job")


def resources_of(options: argparse.Namespace) -> ResourceConfig:
    device: CpuConfig | GpuConfig | TpuConfig = CpuConfig()
    others: list[str] = []
    if options.gpu:
        kind, _, count = options.gpu.rpartition(":")
        if not count.isdigit():
            raise InvalidRequest(f"--gpu {options.gpu!r}: write a number, or a type and a number: 1, h100:8")
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


def variables(given: list[str]) -> dict[str, str]:
    """``K=V``, or ``K`` for what it is here."""
    found = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals and key not in os.environ:
            raise InvalidRequest(f"--env {key}: it is not set here; write --env {key}=VALUE")
        found[_variable(key, "--env")] = value if equals else os.environ[key]
    return found


def secrets(given: list[str]) -> dict[str, Secret]:
    """``K=NAME``, or ``K`` for the secret of the same name."""
    pairs = [text.partition("=") for text in given]
    return {_variable(key, "--secret"): Secret(name or key) for key, _, name in pairs}


def _variable(key: str, option: str) -> str:
    if not key.isidentifier() or not key.isascii():
        raise InvalidRequest(f"{option} {key!r} is no name of a variable: write {option} NAME=VALUE")
    return key
