"""Options of ``fray tinker``. Only argparse is imported here."""

from __future__ import annotations

import argparse
from pathlib import Path

from fray.cli.parsing import Parser, Verbs, verb, verb_group


def add_tinker(verbs: Verbs) -> None:
    """Add ``fray tinker`` and its verbs."""
    below = verb_group(verbs, "tinker", "serve training over HTTP, look at its jobs, give keys")
    text = "serve training until Ctrl-C, on this machine or on the cluster of FRAY_CLUSTER_SPEC"
    example = "  fray tinker serve --base-model Qwen/Qwen3-0.6B"
    parser = verb(below, "serve", "tinker.serve:serve", text, example, opens="itself")
    parser.add_argument(
        "--base-model",
        action="append",
        required=True,
        metavar="MODEL",
        help="name, or directory, whose last part is its name; may be repeated",
    )
    parser.add_argument(
        "--directory",
        metavar="DIR",
        help="store, snapshots and checkpoints; it continues with them (default: ~/.local/state/fray/tinker)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address, or auto: the machine's (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8765, metavar="N", help="(default: %(default)s; 0: any free one)")
    parser.add_argument("--auth", action="store_true", help="require keys on loopback, too")
    parser.add_argument("--open-registration", action="store_true", help="POST /register makes users beyond loopback")
    parser.add_argument(
        "--engines",
        default="1",
        metavar="N|MIN..MAX",
        help="processes with each base model, for the Tinker SDK; 1..4: as the load needs (default: %(default)s)",
    )
    parser.add_argument(
        "--engine-queue",
        default="10s",
        metavar="SPAN",
        help="requests that have queued for so long start another engine, up to MAX (default: %(default)s)",
    )
    parser.add_argument(
        "--engine-idle",
        default="5m",
        metavar="SPAN",
        help="an engine without requests for so long ends, down to MIN (default: %(default)s)",
    )
    parser.add_argument(
        "--engine-cpu", type=float, default=0.0, metavar="N", help="CPUs that each engine reserves (default: none)"
    )
    parser.add_argument(
        "--engine-memory", default="0", metavar="SIZE", help="memory that each engine reserves: 4GB (default: none)"
    )
    parser.add_argument(
        "--virtual-gpus", type=int, default=0, metavar="N", help="CPU engines that count as GPUs, for some clients"
    )
    parser.add_argument(
        "--create-key",
        action="append",
        default=[],
        metavar="NAME",
        help="create an administrator and print the key, once",
    )
    parser.add_argument(
        "--limit",
        action="append",
        default=[],
        metavar="NAME=N",
        help="of each user: batch_prompts=1024; may be repeated",
    )
    parser.add_argument(
        "--client-grace",
        default="1h",
        metavar="SPAN",
        help="a job without requests for so long ends: 10m, 2h (default: 1h; 0: never)",
    )
    parser.add_argument("--tls-cert", metavar="FILE", help="certificate (PEM; default: by an own authority)")
    parser.add_argument("--tls-key", metavar="FILE", help="its key (PEM)")
    parser.add_argument("--insecure", action="store_true", help="for tests: no TLS beyond loopback")
    text = "serve a game as an environment for training, until Ctrl-C: --count processes on consecutive ports"
    example = "  fray tinker game games.py:Copy --port 8082 --count 4"
    parser = verb(below, "game", "tinker.game:game", text, example, opens="itself")
    parser.add_argument("game", metavar="GAME", help="file.py:Class or module:Class with reset and step")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8082, metavar="N", help="of the first (default: %(default)s)")
    parser.add_argument("--count", type=int, default=1, metavar="N", help="servers (default: %(default)s)")
    parser.add_argument("--until-stdin-ends", action="store_true", help=argparse.SUPPRESS)  # how --count starts one
    _add_look(below)
    _add_keys(below)


def _add_look(below: Verbs) -> None:
    for name, text, example in (
        ("ls", "list jobs, models, samplers and checkpoints: what each waits for", "ls"),
        ("top", "show each second who uses the engines, and what the jobs do", "top --once"),
        ("usage", "show tokens and engine time by day and user, also of engines that are shared", "usage --days 30"),
        (
            "show",
            "show a job, model or sampler: requests, steps, checkpoints",
            "show 3f9c0d5e71a2 --url http://host:8765",
        ),
        (
            "explain",
            "explain the state of a job: what it waits for, or what ended it",
            "explain 3f9c0d5e71a2",
        ),
        ("cancel", "cancel a job, or end a model or sampler", "cancel 3f9c0d5e71a2"),
    ):
        parser = _looking(below, name, f"look:{name}", text, example)
        if name == "ls":
            parser.add_argument("--all", action="store_true", help="those that have ended, too")
        elif name == "top":
            parser.add_argument("--once", action="store_true", help="print it once")
        elif name == "usage":
            text = "the last N days (UTC), with today, up to 400 (default: %(default)s)"
            parser.add_argument("--days", type=int, default=7, metavar="N", help=text)
        else:
            parser.add_argument("job", metavar="JOB", help="its id, whole")


def _add_keys(below: Verbs) -> None:
    text = "create, list and revoke keys of a service's users"
    keys = verb_group(below, "key", text, "  fray tinker key create ada")
    text = "create a user and print the key, once, in both spellings: otk_… for OpenTinker, tml-… for the Tinker SDK"
    parser = _looking(keys, "create", "keys:create", text, "key create ada")
    parser.add_argument("name", metavar="NAME", help="of the user; one whose key was revoked gets a new key")
    parser.add_argument(
        "--admin", action="store_true", help="an administrator: sees all jobs, creates and revokes keys"
    )
    _looking(keys, "list", "keys:list_keys", "list users and whether their keys are valid", "key list")
    parser = _looking(keys, "revoke", "keys:revoke", "revoke the key of a user", "key revoke ada")
    parser.add_argument("name", metavar="NAME", help="of the user")


def _looking(below: Verbs, name: str, runs: str, text: str, example: str) -> Parser:
    """Return the parser of a verb that asks a service that runs."""
    parser = verb(below, name, f"tinker.{runs}", text, f"  fray tinker {example}", opens="a loop")
    where = parser.add_argument_group("service")
    where.add_argument("--url", metavar="URL", help="address of the service")
    where.add_argument(
        "--directory",
        type=Path,
        metavar="DIR",
        help="that of fray tinker serve, with the address and an administrator's key (default: that of a service here)",
    )
    where.add_argument("--key-file", type=Path, metavar="FILE", help="file with the key (default: FRAY_TINKER_KEY)")
    where.add_argument("--ca-file", type=Path, metavar="FILE", help="certificates that the service's is signed by")
    return parser
