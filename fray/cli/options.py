"""The words of the command line: every verb with its options and examples. Only argparse here."""

from __future__ import annotations

import argparse

from fray.cli.parsing import Parser, Verbs, one_job, verb
from fray.cli.run_options import add_run, add_what_if

STATES = ("pending", "running", "succeeded", "failed", "stopped")
ABOUT = """\
Look at, start and end what runs on a Fray cluster."""
EPILOG = """\
which cluster: --cluster fray://host:port, else FRAY_CLUSTER_SPEC. The token: --token-file FILE, else FRAY_TOKEN.
which job: its id, its exact name, or the beginning of either if only one living job fits.

exit codes: 0 done, 1 failed or unreachable, 2 wrong usage, 124 out of time, 130 Ctrl-C, 141 nobody reads the output;
of `fray run` and `fray wait`, that of the job.

examples:
  fray jobs --state running --tree
  fray run --name train --gpu h100:8 --workspace . -- python train.py --lr 3e-4
  fray logs -f train
  fray stop --prefix alice/rl/
"""


def parser_of() -> Parser:
    """The parser of the whole command."""
    parser = Parser(prog="fray", description=ABOUT, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(metavar="VERB", required=True, parser_class=Parser)
    about_jobs = (
        _jobs,
        _groups,
        _show,
        _events,
        _explain,
        _logs,
        add_run,
        add_what_if,
        _wait,
        _stop,
        _stacks,
        _forward,
    )
    about_shares = (_queue, _usage)
    about_machines = (_nodes, _node, _machine_groups, _scale, _cordon, _uncordon, _drain, _reservations, _reservation)
    for add in (*about_jobs, *about_shares, *about_machines, _token, _actors):
        add(verbs)
    return parser


def _jobs(verbs: Verbs) -> None:
    parser = verb(
        verbs,
        "jobs",
        "jobs:jobs",
        "list jobs, newest last",
        "  fray jobs\n  fray jobs --tree --state running\n  fray jobs --prefix alice/ --json | jq '.[].job_id'",
    )
    parser.add_argument("--all-namespaces", "-A", action="store_true", help="also where FRAY_NAMESPACE says otherwise")
    parser.add_argument(
        "--state", action="append", choices=STATES, default=[], help="only those; may be given several times"
    )
    parser.add_argument("--prefix", default="", help="only those whose names (or ids) begin so")
    parser.add_argument("--group", default="", metavar="NAME", help="only those of this job group (name or id)")
    parser.add_argument("--tree", action="store_true", help="children below their parents")
    parser.add_argument("--limit", type=int, default=200, metavar="N", help="the newest N (default: 200; 0: all)")


def _groups(verbs: Verbs) -> None:
    parser = verb(
        verbs,
        "groups",
        "groups:groups",
        "list job groups, newest last",
        "  fray groups\n  fray groups rl\n  fray groups --json | jq '.[].members[].job_id'",
    )
    parser.add_argument("group", nargs="?", default="", metavar="GROUP", help="its name or id: with its members")


def _show(verbs: Verbs) -> None:
    one_job(
        verb(
            verbs,
            "show",
            "jobs:show",
            "everything on record of a job: attempts, causes, costs, ports, progress",
            "  fray show train\n  fray show train-k3x9 --json",
        )
    )


def _events(verbs: Verbs) -> None:
    one_job(verb(verbs, "events", "jobs:events", "what happened to a job, in order", "  fray events train"))


def _explain(verbs: Verbs) -> None:
    text = "why a job is in its state: what it waits for, or what ended it"
    one_job(verb(verbs, "explain", "jobs:explain", text, "  fray explain train"))


def _logs(verbs: Verbs) -> None:
    parser = verb(
        verbs,
        "logs",
        "logs:logs",
        "what a job has printed",
        "  fray logs train --tail 100\n  fray logs -f --tree train\n  fray logs --since 10m train | grep loss",
    )
    parser.add_argument("-f", "--follow", action="store_true", help="go on with what it prints, until it has ended")
    parser.add_argument("--tree", action="store_true", help="also of all jobs below it, each line behind a name")
    parser.add_argument("--tail", type=int, metavar="N", help="only the last N lines there are now")
    parser.add_argument("--since", metavar="SPAN", help="only those of the last 30s, 10m, 2h, 1d")
    parser.add_argument("--attempt", type=int, metavar="N", help="only of this attempt: 0 is the first, -1 the last")
    parser.add_argument("--stream", choices=("out", "err", "sys"), help="only this one (sys: what Fray says of it)")
    parser.add_argument("--grep", default="", metavar="TEXT", help="only lines with this in them")
    parser.add_argument("--times", action="store_true", help="each line behind its time")
    one_job(parser)


def _stop(verbs: Verbs) -> None:
    parser = verb(
        verbs,
        "stop",
        "jobs:stop",
        "end jobs and everything below them, and wait until they have ended",
        "  fray stop train\n  fray stop --prefix alice/rl/ --reason 'wrong learning rate'",
    )
    one_job(parser, many=True)
    parser.add_argument("--prefix", help="all living jobs whose names begin so")
    parser.add_argument("--group", metavar="NAME", help="all jobs of the living job group of this name (or id)")
    parser.add_argument("--reason", default="", help="goes into the record, behind who asked")
    parser.add_argument("--tree", action="store_true", help="also the detached jobs that they have launched")
    parser.add_argument("--no-wait", action="store_true", help="return when the cluster has noted it")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help="longest wait (default: 60)")


def _wait(verbs: Verbs) -> None:
    parser = verb(
        verbs,
        "wait",
        "jobs:wait",
        "wait for the end of jobs; the exit code is that of the first that failed",
        "  fray wait train && fray run --name evaluate -- python evaluate.py",
    )
    one_job(parser, many=True)
    parser.add_argument("--timeout", type=float, metavar="S", help="give up after so long with exit code 124")


def _stacks(verbs: Verbs) -> None:
    text = "the stacks of all threads of a running job, now"
    one_job(verb(verbs, "stacks", "jobs:stacks", text, "  fray stacks train"))


def _forward(verbs: Verbs) -> None:
    parser = verb(
        verbs,
        "forward",
        "forward:forward",
        "a port of a job as a port of this machine, until Ctrl-C or the job's end",
        "  fray forward serve http          # says its address here\n  fray forward serve http 8080",
    )
    one_job(parser)
    parser.add_argument("port", metavar="PORT", help="name of a port the job asked for")
    parser.add_argument("local", nargs="?", type=int, default=0, metavar="LOCAL", help="here (default: any free one)")
    parser.add_argument("--member", type=int, default=0, metavar="N", help="of a gang: whose (default: 0)")
    parser.add_argument("--host", default="127.0.0.1", help="listen there; beyond loopback others may come in, unasked")


def _queue(verbs: Verbs) -> None:
    text = "what waits for machines, in the order in which it is tried, and why"
    parser = verb(verbs, "queue", "queue:queue", text, "  fray queue\n  fray queue --user alice --limit 20")
    parser.add_argument("--user", help="only what is this user's")
    parser.add_argument("--limit", type=int, default=50, metavar="N", help="the first N (default: 50; at most 1000)")


def _usage(verbs: Verbs) -> None:
    text = "who has how much of the cluster: shares now and over time, weights, quotas"
    parser = verb(verbs, "usage", "queue:usage", text, "  fray usage\n  fray usage --plot shares.svg")
    parser.add_argument(
        "--plot", metavar="FILE", help="draw utilisation and shares since the controller's start: .svg, .png or .pdf"
    )


def _nodes(verbs: Verbs) -> None:
    verb(verbs, "nodes", "nodes:nodes", "list the machines: what they have, and what is free", "  fray nodes")


def _node(verbs: Verbs) -> None:
    group = verbs.add_parser("node", help="one machine: `fray node show NAME`")
    below = group.add_subparsers(metavar="VERB", required=True, parser_class=Parser)
    text = "everything that is known of a machine: devices, isolation in force, what runs there"
    parser = verb(below, "show", "nodes:show", text, "  fray node show alpha")
    parser.add_argument("node", metavar="NAME")


def _machine_groups(verbs: Verbs) -> None:
    text = "machines that can be had: what is wanted, asked for, seen and joined, what rests and why, what it costs"
    parser = verb(verbs, "machines", "machines:machines", text, "  fray machines\n  fray machines v5e-spot --json")
    parser.add_argument("group", nargs="?", metavar="GROUP", help="this one alone")


def _scale(verbs: Verbs) -> None:
    text = "set what a group of machines has at least and at most, over its policy; without either: as in the policy"
    parser = verb(
        verbs, "scale", "machines:scale", text, "  fray scale v5e-spot --max 0   # drain it\n  fray scale v5e-spot"
    )
    parser.add_argument("group", metavar="GROUP")
    parser.add_argument("--min", type=int, metavar="N", help="units that are kept")
    parser.add_argument("--max", type=int, metavar="N", help="units there may be; those beyond go when they are empty")


def _token(verbs: Verbs) -> None:
    text = "let a machine in: print a token with which it can join the cluster, once"
    example = (
        "  fray token --for-machine gpu-7 > join && scp join gpu-7:  # there: fray-node --join-token-file join ..."
    )
    parser = verb(verbs, "token", "nodes:token", text, example)
    parser.add_argument("--for-machine", required=True, metavar="NAME", help="it joins with the attribute machine=NAME")
    parser.add_argument("--hosts", type=int, default=1, metavar="N", help="of a TPU slice: each may use it once")
    parser.add_argument("--life-s", type=float, default=3600.0, metavar="S", help="how long (default: %(default)g)")


def _cordon(verbs: Verbs) -> None:
    text = "place nothing new on machines; what runs there goes on"
    parser = verb(verbs, "cordon", "drain:cordon", text, "  fray cordon alpha beta --reason 'new driver'")
    _machines(parser)
    parser.add_argument("--reason", default="", help="for those who wonder why")


def _uncordon(verbs: Verbs) -> None:
    text = "use machines again: cordoned ones, drained ones, those in quarantine"
    _machines(verb(verbs, "uncordon", "drain:uncordon", text, "  fray uncordon alpha beta"))


def _drain(verbs: Verbs) -> None:
    parser = verb(
        verbs,
        "drain",
        "drain:drain",
        "cordon machines, and have what runs there go elsewhere",
        "  fray drain alpha --reason 'new kernel' --wait\n  fray drain alpha beta --deadline 2h --wait --timeout 3h",
    )
    _machines(parser)
    parser.add_argument("--reason", default="", help="for those who wonder why")
    parser.add_argument(
        "--let-finish", action="store_true", help="leave jobs alone that end by themselves, for an hour"
    )
    parser.add_argument("--deadline", metavar="SPAN", help="leave them alone for so long: 10m, 2h; 0: not at all")
    parser.add_argument("--wait", action="store_true", help="return when nothing is left there")
    parser.add_argument(
        "--timeout", type=float, metavar="S", help="with --wait: give up after so long with exit code 124"
    )


def _machines(parser: Parser) -> None:
    parser.add_argument("nodes", nargs="+", metavar="NODE", help="a machine; a host of a TPU slice means all of them")


def _reservations(verbs: Verbs) -> None:
    text = "list reservations, oldest first: what they hold, and what they wait for"
    example = "  fray reservations\n  fray reservations --ended --json | jq '.[].reservation_id'"
    parser = verb(verbs, "reservations", "reservations:reservations", text, example)
    parser.add_argument("--ended", action="store_true", help="also those that have ended")
    parser.add_argument("--all-namespaces", "-A", action="store_true", help="also where FRAY_NAMESPACE says otherwise")


def _reservation(verbs: Verbs) -> None:
    group = verbs.add_parser("reservation", help="one reservation: `fray reservation show|renew|release ID`")
    below = group.add_subparsers(metavar="VERB", required=True, parser_class=Parser)
    text = "everything that is known of a reservation: its units, its jobs, what happened to it"
    show = verb(below, "show", "reservations:show", text, "  fray reservation show train-k3x9")
    show.add_argument("reservation", metavar="ID")
    text = "begin its time to live anew"
    renew = verb(below, "renew", "reservations:renew", text, "  fray reservation renew train-k3x9 --ttl 12h")
    renew.add_argument("reservation", metavar="ID")
    renew.add_argument("--ttl", metavar="SPAN", help="from now on: 3600, 90m, 12h (default: as before)")
    text = "give reservations back: what runs in them is ended"
    release = verb(below, "release", "reservations:release", text, "  fray reservation release train-k3x9")
    release.add_argument("reservations", nargs="+", metavar="ID")
    release.add_argument("--reason", default="released by an operator", help="told to its owner and its jobs")


def _actors(verbs: Verbs) -> None:
    parser = verb(
        verbs, "actors", "nodes:actors", "list living actors", "  fray actors\n  fray actors --prefix policy/"
    )
    parser.add_argument("--prefix", default="", help="only those whose names begin so")
    parser.add_argument("--all-namespaces", "-A", action="store_true", help="also where FRAY_NAMESPACE says otherwise")
