"""Options of the verbs about the past. Only argparse is imported here."""

from __future__ import annotations

from fray.cli.parsing import Parser, Verbs, add_watch, verb

KEYS = ("user", "namespace", "machine", "node", "job", "cause")


def add_events(verbs: Verbs) -> None:
    parser = verb(
        verbs,
        "events",
        "history.events:events",
        "list the events of a job, or of jobs and machines, in order",
        "  fray events train\n  fray events --node gpu-7 --since 1d\n  fray events --user alice --since 2h --json\n"
        "  fray events --reservation night",
    )
    parser.add_argument("job", nargs="?", metavar="JOB", help="id or name of a job or reservation (default: of all)")
    parser.add_argument("--job", dest="of_job", metavar="JOB", help="the same")
    parser.add_argument(
        "--reservation",
        metavar="NAME",
        help="events of reservations of this name or id, also of those that are gone",
    )
    parser.add_argument("--node", default="", metavar="NAME", help="only events that name this machine")
    parser.add_argument("--user", default="", help="only events of jobs and reservations of this user")
    parser.add_argument("--since", metavar="SPAN", help="only events of the last 30s, 10m, 2h, 1d")
    parser.add_argument("--limit", type=int, default=1_000, metavar="N", help="the newest N (default: 1000; 0: all)")


def add_history(verbs: Verbs) -> None:
    text = "show CPU-, memory- and chip-hours of the past, and what was done again or not used"
    example = "  fray history --since 7d\n  fray history --user alice --by job --since 1d\n  fray history --by machine"
    _add_sums(verb(verbs, "history", "history.sums:history", text, example))


def add_cost(verbs: Verbs) -> None:
    text = "show the cost of the past, by the prices of the cluster's policy"
    _add_sums(
        verb(verbs, "cost", "history.sums:costs", text, "  fray cost --since 30d\n  fray cost --user alice --by job")
    )


def _add_sums(parser: Parser) -> None:
    add_watch(parser)
    parser.add_argument(
        "--by", choices=KEYS, default="user", help="one line for each (default: user; machine: by kind of machine)"
    )
    parser.add_argument("--user", default="", help="only attempts of this user")
    parser.add_argument("--node", default="", metavar="NAME", help="only attempts on this machine")
    parser.add_argument("--job", default="", metavar="JOB", help="only attempts of jobs of this id or name")
    parser.add_argument("--since", default="7d", metavar="SPAN", help="from so long ago: 12h, 7d (default: 7d)")
    parser.add_argument("--until", default="0s", metavar="SPAN", help="until so long ago (default: now)")


def add_capacity(verbs: Verbs) -> None:
    parser = verb(
        verbs,
        "capacity",
        "history.capacity:capacity",
        "show the capacity by kind and zone: used, reserved, idle, quarantined, closed; now, or over time",
        "  fray capacity\n  fray capacity --since 1d --kind gpu\n  fray capacity --since 2h --every 10m --json",
    )
    add_watch(parser)
    parser.add_argument("--since", metavar="SPAN", help="means over time since so long ago: 2h, 1d (default: of now)")
    parser.add_argument("--every", metavar="SPAN", help="length of a period, 1m or more (default: a 24th of --since)")
    parser.add_argument("--kind", default="", help="only this kind: cpu, memory, gpu, gpu:h100")
    parser.add_argument("--zone", help="only machines of this zone; '': those without one")


def add_sql(verbs: Verbs) -> None:
    parser = verb(
        verbs,
        "sql",
        "history.sql:sql",
        "query jobs, attempts, nodes, events, usage, users, actors, capacity and reservations in SQL, only reading",
        "  fray sql --tables\n"
        "  fray sql \"select user, sum(chip_hours) from usage where day >= date('now', '-7 days') group by user\"\n"
        "  fray sql 'select node, count(*) from attempts where cause = \"machine_lost\" group by node' --json\n"
        "  fray sql 'select * from attempts' --since 90d --output s3://bucket/attempts.parquet",
    )
    parser.add_argument("query", nargs="?", metavar="QUERY", help="one SELECT, as SQLite understands it")
    parser.add_argument("--tables", action="store_true", help="show the tables and their columns")
    parser.add_argument("--since", default="30d", metavar="SPAN", help="rows of the last 12h, 7d (default: 30d)")
    parser.add_argument("--limit", type=int, metavar="N", help="rows (default: 1000, with --output all; 0: all)")
    parser.add_argument("--output", metavar="URL", help="write Parquet to a file, or s3://…, gs://… (fsspec)")
    parser.add_argument("--timeout", type=float, default=30.0, metavar="S", help="seconds of the query (default: 30)")
