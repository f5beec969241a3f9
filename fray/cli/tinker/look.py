"""``fray tinker ls``, ``top``, ``usage``, ``show``, ``explain`` and ``cancel``: jobs of a service that runs."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from fray.cli.formatting import fields, span, table
from fray.cli.output import clock, note, say, say_json, say_screen, width
from fray.cli.tinker.connection import ServiceConnection, open_service

PERIOD_S = 1.0


def ls(options: argparse.Namespace) -> int:
    """Run ``fray tinker ls``."""
    with open_service(options) as service:
        status = service.ask("GET", "/fray/status")
    if not options.all:
        status["jobs"] = [job for job in status["jobs"] if job["completed_at"] is None]
    if options.json:
        say_json({name: status[name] for name in ("jobs", "models", "samplers", "checkpoints")})
    else:
        say([*_job_lines(status["jobs"]), *_run_lines(status), *_checkpoint_lines(status["checkpoints"])])
    return 0


def top(options: argparse.Namespace) -> int:
    """Run ``fray tinker top``."""
    with open_service(options) as service:
        while True:
            status = service.ask("GET", "/fray/status")
            jobs = [job for job in status["jobs"] if job["completed_at"] is None]
            if options.json:
                say_json({**status, "jobs": jobs})
            else:
                lines = [*_user_lines(status["users"]), *_engine_lines(status), "", *_job_lines(jobs)]
                lines += _run_lines(status)
                (say if options.once else say_screen)(lines)
            sys.stdout.flush()
            if options.once:
                return 0
            time.sleep(PERIOD_S)


def usage(options: argparse.Namespace) -> int:
    """Run ``fray tinker usage``."""
    with open_service(options) as service:
        found = service.ask("GET", f"/fray/usage?days={options.days}")
    if options.json:
        say_json(found)
        return 0
    rows = [[each["day"], each["user"], str(each["tokens"]), span(each["busy_s"])] for each in found["usage"]]
    say(table(["DAY", "USER", "TOKENS", "ENGINE TIME"], rows, width()) if rows else ["no use in these days"])
    return 0


def show(options: argparse.Namespace) -> int:
    """Run ``fray tinker show``."""
    with open_service(options) as service:
        job = _run(service, options) if ":" in options.job else _job(service, options)
    if options.json:
        say_json(job)
        return 0
    if ":" in options.job:
        say(fields(_run_pairs(job)))
        return 0
    requests = "" if job["requests"] is None else f"{job['requests']} received, {job['executed']} executed"
    checkpoints = [f"{each['path']}  step {each['step']}, {each['bytes'] / 1e6:.1f} MB" for each in job["checkpoints"]]
    pairs = [
        ("job", f"{job['job_id']}, {job['status']}"),
        ("user", job["user"]),
        ("why", job["explanation"]),
        ("GPUs", ", ".join(map(str, job["gpu_ids"])) or str(job["gpus"])),
        ("created", clock(job["created_at"])),
        ("started", clock(job["started_at"])),
        ("ended", clock(job["completed_at"])),
        ("steps", "" if job["global_steps"] is None else str(job["global_steps"])),
        ("requests", requests),
        ("config", json.dumps(job["config"]) if job["config"] else ""),
        ("checkpoints", "\n".join(checkpoints)),
    ]
    say(fields(pairs))
    return 0


def explain(options: argparse.Namespace) -> int:
    """Run ``fray tinker explain``."""
    with open_service(options) as service:
        if ":" in options.job:
            run = _run(service, options)
            say_json({"explanation": run["activity"]}) if options.json else say([f"{options.job}: {run['activity']}"])
            return 0
        job = _job(service, options)
    if options.json:
        say_json({name: job[name] for name in ("job_id", "status", "explanation")})
    else:
        say([f"{job['job_id']} is {job['status']}: {job['explanation']}"])
    return 0


def cancel(options: argparse.Namespace) -> int:
    """Run ``fray tinker cancel``."""
    with open_service(options) as service:
        if ":" in options.job:
            ended = service.ask("DELETE", f"/fray/runs/{quote(options.job, safe='')}")
        else:
            ended = service.ask("DELETE", f"/cancel_job/{_job(service, options)['job_id']}")
    if options.json:
        say_json(ended)
    else:
        note(f"{options.job} is {ended['status']}: {ended['message']}")
    return 0


def _job(service: ServiceConnection, options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = service.ask("GET", f"/fray/jobs/{quote(options.job, safe='')}")
    return found


def _run(service: ServiceConnection, options: argparse.Namespace) -> dict[str, Any]:
    """Return a model or sampler of the Tinker API: ids of both have colons."""
    found: dict[str, Any] = service.ask("GET", f"/fray/runs/{quote(options.job, safe='')}")
    return found


def _run_pairs(run: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what ``fray tinker show`` says about a model or sampler."""
    requests = "" if run.get("requests") is None else f"{run['requests']} received, {run['executed']} executed"
    lora = run.get("lora") or {}
    return [
        ("model", run.get("model_id", "")),
        ("sampler", run.get("sampler_id", "")),
        ("user", run["user"]),
        ("why", run["activity"]),
        ("base model", run["base_model"]),
        ("weights", run.get("weights") or ""),
        ("adapter", ", ".join(f"{name} {value}" for name, value in lora.items())),
        ("place", run["place"]),
        ("requests", requests),
        ("checkpoints", "\n".join(_checkpoint_lines(run.get("checkpoints", []))[1:])),
    ]


def _engine_lines(status: dict[str, Any]) -> list[str]:
    # Those whose number is fixed are all listed.
    groups = [
        f"engines of {each['base_model']}: {each['count']} of {each['least']} to {each['most']}"
        + (f"; {each['explanation']}" if each["explanation"] else "")
        for each in status["engine_groups"]
        if each["least"] < each["most"]
    ]
    return groups + [
        f"engine{f' {number}' if (number := each['number']) else ''} of {each['base_model']}: "
        + (
            f"{each['resident']} adapters resident, {each['offloaded']} offloaded, {each['queued']:.1f} requests queued"
            if each["is_up"]
            else each["error"] or each["starting"]
        )
        for each in status["engines"]
    ]


def _run_lines(status: dict[str, Any]) -> list[str]:
    """Return the tables of models and samplers of the Tinker API; those that are empty are left out."""
    models = [
        [
            *(each["model_id"], each["user"], each["base_model"], str(each["lora"]["rank"]), each["place"]),
            *(f"{each['executed']}/{each['requests']}", each["activity"]),
        ]
        for each in status["models"]
    ]
    samplers = [
        [each["sampler_id"], each["user"], each["weights"] or each["base_model"], each["place"], each["activity"]]
        for each in status["samplers"]
    ]
    heads = ["MODEL", "USER", "BASE", "RANK", "PLACE", "DONE", "WHY"]
    optional = ["RANK", "DONE", "PLACE", "BASE", "USER", "WHY"]
    lines = ["", *table(heads, models, width(), optional=optional)] if models else []
    heads, optional = ["SAMPLER", "USER", "WEIGHTS", "PLACE", "WHY"], ["PLACE", "USER", "WHY", "WEIGHTS"]
    return lines + (["", *table(heads, samplers, width(), optional=optional)] if samplers else [])


def _checkpoint_lines(checkpoints: Sequence[dict[str, Any]]) -> list[str]:
    rows = [
        [
            *(each["path"], each["user"], f"{each['bytes'] / 1e6:.1f} MB", clock(each["created_at"])),
            "never" if each["expires_at"] is None else clock(each["expires_at"]),
        ]
        for each in checkpoints
    ]
    heads, optional = ["CHECKPOINT", "USER", "SIZE", "CREATED", "EXPIRES"], ("CREATED", "USER", "SIZE", "EXPIRES")
    return ["", *table(heads, rows, width(), optional=optional)] if rows else []


def _user_lines(users: Sequence[dict[str, Any]]) -> list[str]:
    rows = [
        [
            *(user["user"], f"{user['tokens_per_s']:.1f}", f"{user['share']:.0%}", span(user["busy_s"])),
            str(user["waiting_samples"]),
        ]
        for user in sorted(users, key=lambda user: -user["share"])
    ]
    heads = ["USER", "TOKENS/S", "SHARE", "ENGINE TIME", "WAITING"]
    return table(heads, rows, width()) if rows else ["no use in the last minute"]


def _job_lines(jobs: Sequence[dict[str, Any]]) -> list[str]:
    rows = [
        [
            job["job_id"],
            job["kind"],
            job["status"],
            job["user"],
            str(job["gpus"]),
            "" if job["global_steps"] is None else str(job["global_steps"]),
            clock(job["created_at"]),
            job["activity"] if job["status"] == "RUNNING" else job["message"],
        ]
        for job in jobs
    ]
    heads = ["JOB", "KIND", "STATE", "USER", "GPUS", "STEPS", "CREATED", "WHY"]
    return table(heads, rows, width(), optional=("GPUS", "CREATED", "KIND", "STEPS", "USER"))
