"""Options of the verbs about the past. Only argparse is imported here."""

from __future__ import annotations

from fray.cli.parsing import Verbs, verb


def add_events(verbs: Verbs) -> None:
    parser = verb(
        verbs,
        "events",
        "history.events:events",
        "list the events of a job, or of jobs and machines, in order",
        "  fray events train\n  fray events --node gpu-7 --since 1d\n  fray events --user alice --since 2h --json",
    )
    parser.add_argument("job", nargs="?", metavar="JOB", help="id or name of a job or reservation (default: of all)")
    parser.add_argument("--job", dest="of_job", metavar="JOB", help="the same")
    parser.add_argument("--node", default="", metavar="NAME", help="only events that name this machine")
    parser.add_argument("--user", default="", help="only events of jobs of this user")
    parser.add_argument("--since", metavar="SPAN", help="only events of the last 30s, 10m, 2h, 1d")
    parser.add_argument("--limit", type=int, default=1_000, metavar="N", help="the newest N (default: 1000; 0: all)")
