"""Options of verbs that look into what runs. Only argparse is imported here."""

from __future__ import annotations

from pathlib import Path

from fray.cli.parsing import Verbs, one_job, verb, verb_group


def add_actor(verbs: Verbs) -> None:
    below = verb_group(verbs, "actor", "list actors, call their methods, show their stacks: `fray actor ls`")
    add_actor_list(below, "ls", "  fray actor ls --prefix policy/")
    text = "call a method of an actor with JSON arguments, and print the result as JSON"
    example = (
        "  fray actor call counter add 3\n"
        """  fray actor call policy/server update '{"lr": 0.001}' --keywords '{"wait": true}' --timeout 30"""
    )
    call = verb(below, "call", "inspection.actor:call", text, example)
    call.add_argument("actor", metavar="ACTOR", help="id or name")
    call.add_argument("method", metavar="METHOD")
    call.add_argument("arguments", nargs="*", metavar="JSON", help="an argument: 3, '\"text\"', '[1, 2]', null")
    call.add_argument("--keywords", metavar="JSON", default="{}", help="an object with arguments by name")
    call.add_argument("--timeout", type=float, metavar="S", help="seconds to wait; then exit with code 124")
    text = "print the stacks of all threads of the process of an actor"
    stack = verb(below, "stack", "inspection.actor:stack", text, "  fray actor stack counter")
    stack.add_argument("actor", metavar="ACTOR", help="id or name")


def add_actor_list(verbs: Verbs, name: str, example: str) -> None:
    """Add a verb of this name that lists actors."""
    parser = verb(verbs, name, "nodes:actors", "list living actors", example)
    parser.add_argument("--prefix", default="", help="only actors whose names start with this")
    parser.add_argument(
        "--all-namespaces", "-A", action="store_true", help="all namespaces, whatever FRAY_NAMESPACE is"
    )


def add_profile(verbs: Verbs) -> None:
    text = "sample the stacks of a running job, and write a file for https://www.speedscope.app"
    example = "  fray profile train --seconds 60 --output train.json\n  fray profile train --native"
    parser = verb(verbs, "profile", "inspection.profile:profile", text, example)
    one_job(parser)
    parser.add_argument("--seconds", type=float, default=30.0, metavar="S", help="how long (default: %(default)g)")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="(default: the name of the job with .speedscope.json)"
    )
    parser.add_argument(
        "--native", action="store_true", help="100 samples a second, with frames of C and C++, by py-spy on its machine"
    )


def add_report(verbs: Verbs) -> None:
    text = "write what the cluster knows of a job into one archive: record, events, reasons, logs, stacks, machines"
    example = "  fray report train\n  fray report train --output train.tar.gz --lines 100000"
    parser = verb(verbs, "report", "inspection.report:report", text, example)
    one_job(parser)
    parser.add_argument("--output", type=Path, metavar="FILE", help="(default: the id of the job with .tar.gz)")
    parser.add_argument(
        "--lines", type=int, default=10_000, metavar="N", help="the last N lines of output (default: %(default)s)"
    )
