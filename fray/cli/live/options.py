"""Options of verbs that hold the terminal. Only argparse is imported here."""

from __future__ import annotations

from fray.cli.parsing import Verbs, verb

SORTS = ("cpu", "memory", "devices", "time", "id")


def add_top(verbs: Verbs) -> None:
    text = "show live what a cluster does: what is in use, jobs by what they use, machines"
    example = (
        "  fray top\n  fray top --sort memory\n  fray top --json | jq '.jobs[0]'     # once, also without a terminal"
    )
    parser = verb(verbs, "top", "live.top:top", text, example)
    parser.add_argument(
        "--sort", choices=SORTS, default="cpu", help="order of the jobs, the largest first (default: %(default)s)"
    )
