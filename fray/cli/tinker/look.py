"""``fray tinker ls``, ``top``, ``show``, ``explain`` and ``cancel``: jobs of a service that runs."""

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
        jobs = service.ask("GET", "/fray/status")["jobs"]
    if not options.all:
        jobs = [job for job in jobs if job["completed_at"] is None]
    if options.json:
        say_json(jobs)
    else:
        say(_job_lines(jobs))
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
                lines = [*_user_lines(status["users"]), "", *_job_lines(jobs)]
                (say if options.once else say_screen)(lines)
            sys.stdout.flush()
            if options.once:
                return 0
            time.sleep(PERIOD_S)


def show(options: argparse.Namespace) -> int:
    """Run ``fray tinker show``."""
    with open_service(options) as service:
        job = _job(service, options)
    if options.json:
        say_json(job)
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
        job = _job(service, options)
    if options.json:
        say_json({name: job[name] for name in ("job_id", "status", "explanation")})
    else:
        say([f"{job['job_id']} is {job['status']}: {job['explanation']}"])
    return 0


def cancel(options: argparse.Namespace) -> int:
    """Run ``fray tinker cancel``."""
    with open_service(options) as service:
        job = _job(service, options)
        ended = service.ask("DELETE", f"/cancel_job/{job['job_id']}")
    if options.json:
        say_json(ended)
    else:
        note(f"{ended['job_id']} is {ended['status']}: {ended['message']}")
    return 0


def _job(service: ServiceConnection, options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = service.ask("GET", f"/fray/jobs/{quote(options.job, safe='')}")
    return found


def _user_lines(users: Sequence[dict[str, Any]]) -> list[str]:
    rows = [
        [user["user"], f"{user['tokens_per_s']:.1f}", f"{user['share']:.0%}", span(user["busy_s"])]
        for user in sorted(users, key=lambda user: -user["share"])
    ]
    return table(["USER", "TOKENS/S", "SHARE", "ENGINE TIME"], rows, width()) if rows else ["no use in the last minute"]


def _job_lines(jobs: Sequence[dict[str, Any]]) -> list[str]:
    rows = [
        [
            job["job_id"],
            job["status"],
            job["user"],
            str(job["gpus"]),
            "" if job["global_steps"] is None else str(job["global_steps"]),
            clock(job["created_at"]),
            job["activity"] if job["status"] == "RUNNING" else job["message"],
        ]
        for job in jobs
    ]
    return table(["JOB", "STATE", "USER", "GPUS", "STEPS", "CREATED", "WHY"], rows, width())
