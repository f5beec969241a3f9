"""Verbs of the command line, with their options and examples. Only argparse is imported here."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from fray import __version__
from fray.cli.history.options import add_capacity, add_cost, add_events, add_history, add_sql
from fray.cli.inspection.options import add_actor, add_actor_list, add_profile, add_report
from fray.cli.live.options import add_exec, add_top
from fray.cli.parsing import Parser, Verbs, add_common, add_watch, one_job, verb, verb_group
from fray.cli.rl.options import add_rl
from fray.cli.run_options import add_run, add_what_if
from fray.cli.tinker.options import add_tinker

STATES = ("pending", "running", "succeeded", "failed", "stopped")
ABOUT = """\
Start, inspect and stop jobs and actors on a Fray cluster."""
EPILOG = """\
cluster: --cluster fray://host:port, else FRAY_CLUSTER_SPEC, else that of the last `fray login`, else of `fray up`.
key: --token-file FILE, else FRAY_TOKEN, else that of `fray login`, else of `fray up`.
job: its id or its name, in full; of several that have ended, the newest.

exit codes: 0 success, 1 failed or unreachable, 2 wrong usage, 124 timeout, 130 Ctrl-C, 141 output closed;
`fray run` and `fray wait` exit with the code of the job.

examples:
  fray jobs --state running --tree
  fray run --name train --gpu h100:8 --workspace . -- python train.py --lr 3e-4
  fray logs -f train
  fray stop --prefix alice/rl/
"""


def parser_of() -> Parser:
    """Return the parser of the whole command."""
    parser = Parser(prog="fray", description=ABOUT, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common(parser)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    verbs = parser.add_subparsers(metavar="VERB", required=True, parser_class=Parser)
    about_jobs = (
        _jobs,
        _groups,
        _show,
        add_events,
        _explain,
        _logs,
        add_run,
        add_what_if,
        _wait,
        _stop,
        _requeue,
        _stacks,
        add_profile,
        add_report,
        add_exec,
        _forward,
    )
    about_shares = (_queue, _usage, add_capacity, add_history, add_cost, add_sql)
    about_machines = (_nodes, _node, _machine_groups, _scale, _cordon, _uncordon, _drain, _reservations, _reservation)
    about_people = (_login, _logout, _user, _key, _namespace, _audit)
    about_cluster = (
        _up,
        _down,
        _status,
        add_top,
        _token,
        _ca,
        _actors,
        add_actor,
        _doctor,
        _backup,
        _metrics,
        _dashboard,
        _completion,
        _man,
    )
    for add in (*about_jobs, *about_shares, *about_machines, add_rl, add_tinker, *about_cluster, *about_people):
        add(verbs)
    return parser


def _jobs(verbs: Verbs) -> None:
    parser = verb(
        verbs,
        "jobs",
        "jobs:jobs",
        "list jobs, newest last",
        "  fray jobs\n  fray jobs --tree --state running\n  fray jobs --failed --user alice --since 1d\n"
        "  fray jobs --prefix alice/ --json | jq '.[].job_id'",
    )
    parser.add_argument(
        "--all-namespaces", "-A", action="store_true", help="all namespaces, whatever FRAY_NAMESPACE is"
    )
    parser.add_argument(
        "--state", action="append", choices=STATES, default=[], help="only jobs in this state; may be repeated"
    )
    parser.add_argument("--prefix", default="", help="only jobs whose names (or ids) start with this")
    parser.add_argument("--user", help="only jobs of this user")
    parser.add_argument("--node", metavar="NAME", help="only jobs of which an attempt runs or ran on this machine")
    parser.add_argument("--failed", action="store_true", help="only jobs that have failed: --state failed")
    parser.add_argument("--since", metavar="SPAN", help="only jobs that ran or waited in the last 30s, 10m, 2h, 1d")
    parser.add_argument("--until", metavar="SPAN", help="only jobs that were launched before that")
    parser.add_argument("--group", default="", metavar="NAME", help="only jobs of this job group (name or id)")
    parser.add_argument("--tree", action="store_true", help="show children below their parents")
    parser.add_argument("--limit", type=int, default=200, metavar="N", help="show the newest N (default: 200; 0: all)")


def _groups(verbs: Verbs) -> None:
    parser = verb(
        verbs,
        "groups",
        "groups:groups",
        "list job groups, newest last",
        "  fray groups\n  fray groups rl\n  fray groups --json | jq '.[].members[].job_id'",
    )
    parser.add_argument("group", nargs="?", default="", metavar="GROUP", help="name or id; shows its members too")


def _show(verbs: Verbs) -> None:
    one_job(
        verb(
            verbs,
            "show",
            "jobs:show",
            "show one job: attempts, reasons, resource usage, ports, progress",
            "  fray show train\n  fray show train-k3x9 --json",
        )
    )


def _explain(verbs: Verbs) -> None:
    text = "explain the state of a job: what it waits for, or what ended it"
    one_job(verb(verbs, "explain", "jobs:explain", text, "  fray explain train"))


def _logs(verbs: Verbs) -> None:
    parser = verb(
        verbs,
        "logs",
        "logs:logs",
        "print the output of a job",
        "  fray logs train --tail 100\n  fray logs -f --tree train\n  fray logs --since 10m train | grep loss",
    )
    parser.add_argument("-f", "--follow", action="store_true", help="print new output until the job has ended")
    parser.add_argument("--tree", action="store_true", help="also output of all jobs below it, prefixed with names")
    parser.add_argument("--tail", type=int, metavar="N", help="only the last N lines at present")
    parser.add_argument("--since", metavar="SPAN", help="only output of the last 30s, 10m, 2h, 1d")
    parser.add_argument("--attempt", type=int, metavar="N", help="only this attempt: 0 is the first, -1 the latest")
    parser.add_argument("--stream", choices=("out", "err", "sys"), help="only this stream (sys: messages of Fray)")
    parser.add_argument("--grep", default="", metavar="TEXT", help="only lines that contain this")
    parser.add_argument("--times", action="store_true", help="prefix each line with its time")
    parser.add_argument(
        "--raw", action="store_true", help="print control characters as they are, also on a terminal (default: ^[ …)"
    )
    one_job(parser)


def _stop(verbs: Verbs) -> None:
    parser = verb(
        verbs,
        "stop",
        "jobs:stop",
        "stop jobs and everything below them, and wait until they have ended",
        "  fray stop train\n  fray stop --prefix alice/rl/ --reason 'wrong learning rate'",
    )
    one_job(parser, many=True)
    _chosen_together(parser)
    parser.add_argument("--reason", default="", help="reason, recorded with the jobs")
    parser.add_argument("--tree", action="store_true", help="also detached jobs below them")
    parser.add_argument("--yes", "-y", action="store_true", help="do not ask before several jobs are stopped")
    parser.add_argument("--no-wait", action="store_true", help="do not wait until they have ended")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help="seconds to wait (default: 60)")


def _requeue(verbs: Verbs) -> None:
    parser = verb(
        verbs,
        "requeue",
        "jobs:requeue",
        "end the attempts of running jobs, which wait for machines again; it costs none of their retries",
        "  fray requeue train\n  fray requeue --prefix nightly/ --reason 'room for the demo'",
    )
    one_job(parser, many=True)
    parser.add_argument("--prefix", help="all running jobs whose names start with this")
    parser.add_argument("--group", metavar="NAME", help="all running jobs of the job group of this name (or id)")
    parser.add_argument("--reason", default="", help="reason, shown by fray events and fray explain")
    parser.add_argument("--yes", "-y", action="store_true", help="do not ask before several jobs are requeued")


def _chosen_together(parser: Parser) -> None:
    parser.add_argument("--prefix", help="all living jobs whose names start with this")
    parser.add_argument("--group", metavar="NAME", help="all jobs of the living job group of this name (or id)")


def _wait(verbs: Verbs) -> None:
    parser = verb(
        verbs,
        "wait",
        "jobs:wait",
        "wait for the end of jobs; the exit code is that of the first that failed",
        "  fray wait train && fray run --name evaluate -- python evaluate.py\n  fray wait --prefix nightly/",
    )
    one_job(parser, many=True)
    _chosen_together(parser)
    parser.add_argument("--timeout", type=float, metavar="S", help="seconds to wait; then exit with code 124")


def _stacks(verbs: Verbs) -> None:
    text = "print the stacks of all threads of a running job"
    one_job(verb(verbs, "stacks", "jobs:stacks", text, "  fray stacks train"))


def _forward(verbs: Verbs) -> None:
    parser = verb(
        verbs,
        "forward",
        "forward:forward",
        "forward a port of a job to this machine, until Ctrl-C or the job's end",
        "  fray forward serve http          # prints the local address\n  fray forward serve http 8080",
    )
    one_job(parser)
    parser.add_argument("port", metavar="PORT", help="name of a port that the job has requested")
    parser.add_argument(
        "local", nargs="?", type=int, default=0, metavar="LOCAL", help="local port (default: any free one)"
    )
    parser.add_argument("--member", type=int, default=0, metavar="N", help="member of a gang (default: 0)")
    parser.add_argument(
        "--host", default="127.0.0.1", help="local address; others than loopback are open to other machines"
    )


def _queue(verbs: Verbs) -> None:
    text = "list what waits for machines, in scheduling order, with reasons"
    parser = verb(verbs, "queue", "queue:queue", text, "  fray queue\n  fray queue --user alice --limit 20")
    parser.add_argument("--user", help="only jobs of this user")
    parser.add_argument(
        "--limit", type=int, default=50, metavar="N", help="show the first N (default: 50; at most 1000)"
    )


def _usage(verbs: Verbs) -> None:
    text = "show usage by user and namespace: shares now and over time, weights, quotas"
    parser = verb(verbs, "usage", "queue:usage", text, "  fray usage\n  fray usage --plot shares.svg")
    add_watch(parser)
    parser.add_argument(
        "--plot", metavar="FILE", help="plot utilisation and shares since the controller's start: .svg, .png or .pdf"
    )


def _nodes(verbs: Verbs) -> None:
    text = "list machines with their total and free resources"
    parser = verb(verbs, "nodes", "nodes:nodes", text, "  fray nodes\n  fray nodes --all")
    parser.add_argument("--all", action="store_true", help="also machines that are gone: since when, and why")


def _node(verbs: Verbs) -> None:
    below = verb_group(verbs, "node", "show one machine: `fray node show NAME`")
    text = "show one machine: devices, isolation, what runs there"
    parser = verb(below, "show", "nodes:show", text, "  fray node show alpha")
    parser.add_argument("node", metavar="NAME")


def _machine_groups(verbs: Verbs) -> None:
    text = "list machine groups: units wanted, requested, seen and joined, back-off and cost"
    parser = verb(verbs, "machines", "machines:machines", text, "  fray machines\n  fray machines v5e-spot --json")
    parser.add_argument("group", nargs="?", metavar="GROUP", help="only this group")


def _scale(verbs: Verbs) -> None:
    text = "set minimum and maximum of a machine group in place of its policy; without options: back to the policy"
    parser = verb(
        verbs, "scale", "machines:scale", text, "  fray scale v5e-spot --max 0   # drain it\n  fray scale v5e-spot"
    )
    parser.add_argument("group", metavar="GROUP")
    parser.add_argument("--min", type=int, metavar="N", help="minimum number of units")
    parser.add_argument(
        "--max", type=int, metavar="N", help="maximum number of units; others are removed when they are empty"
    )


def _token(verbs: Verbs) -> None:
    text = "create a token with which a machine can join the cluster, once"
    example = "  fray token --for-machine gpu-7 > join && scp join gpu-7:  # then: fray-node --join-token-file join ..."
    parser = verb(verbs, "token", "nodes:token", text, example)
    parser.add_argument(
        "--for-machine", required=True, metavar="NAME", help="name of the machine; it gets the attribute machine=NAME"
    )
    parser.add_argument(
        "--hosts",
        type=int,
        default=1,
        metavar="N",
        help="hosts of a TPU slice; each may use the token once (default: 1)",
    )
    parser.add_argument(
        "--life-s", type=float, default=3600.0, metavar="S", help="seconds until it expires (default: %(default)g)"
    )


def _add_store(parser: argparse.ArgumentParser) -> None:
    default = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state") / "fray"
    parser.add_argument("--store", type=Path, default=default, metavar="DIR", help="of fray-controller (%(default)s)")


def _ca(verbs: Verbs) -> None:
    text = "create, show or replace the certificate authority of a controller, on its machine"
    authority = verbs.add_parser("ca", help=text, description=f"{text[0].upper()}{text[1:]}.")
    actions = authority.add_subparsers(metavar="ACTION", required=True, parser_class=Parser)
    known = (
        ("init", "create the authority; fray-controller does so by itself when it first listens for other machines"),
        ("show", "print its fingerprint, which nodes and drivers need, and how long it is valid"),
        ("rotate", "replace it without a restart: the previous one is accepted, too, until the next replacement"),
        ("issue", "issue a certificate for a node, valid for a day; nodes request theirs themselves"),
    )
    for name, what in known:
        parser = actions.add_parser(
            name,
            help=what,
            description=f"{what[0].upper()}{what[1:]}.",
            epilog=f"examples:\n  fray ca {name} --store ./fray-state" + (" alpha" if name == "issue" else ""),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.set_defaults(verb=f"ca:{name}", opens="itself", parser=parser)
        _add_store(parser)
        parser.add_argument(
            "--json", action="store_true", default=argparse.SUPPRESS, help="print JSON with stable keys"
        )
        if name == "rotate":
            parser.add_argument("--finish", action="store_true", help="accept the previous one no longer")
        if name == "issue":
            parser.add_argument("node", metavar="NODE", help="name of the node")
            parser.add_argument(
                "--out", default="node-certificate.pem", metavar="FILE", help="for its --state-dir (%(default)s)"
            )


def _cordon(verbs: Verbs) -> None:
    text = "place nothing new on machines; what runs there continues"
    parser = verb(verbs, "cordon", "drain:cordon", text, "  fray cordon alpha beta --reason 'new driver'")
    _add_node_arguments(parser)
    parser.add_argument("--reason", default="", help="reason, shown by fray nodes and fray explain")


def _uncordon(verbs: Verbs) -> None:
    text = "use cordoned, drained or quarantined machines again"
    _add_node_arguments(verb(verbs, "uncordon", "drain:uncordon", text, "  fray uncordon alpha beta"))


def _drain(verbs: Verbs) -> None:
    parser = verb(
        verbs,
        "drain",
        "drain:drain",
        "cordon machines, and move what runs there to others",
        "  fray drain alpha --reason 'new kernel' --wait\n  fray drain alpha beta --deadline 2h --wait --timeout 3h",
    )
    _add_node_arguments(parser)
    parser.add_argument("--reason", default="", help="reason, shown by fray nodes and fray explain")
    parser.add_argument(
        "--let-finish", action="store_true", help="let jobs that end by themselves finish, for up to an hour"
    )
    parser.add_argument("--deadline", metavar="SPAN", help="time they have to finish: 10m, 2h; 0: none")
    parser.add_argument("--wait", action="store_true", help="return when nothing runs there any more")
    parser.add_argument(
        "--timeout", type=float, metavar="S", help="with --wait: seconds to wait; then exit with code 124"
    )


def _add_node_arguments(parser: Parser) -> None:
    parser.add_argument(
        "nodes", nargs="+", metavar="NODE", help="machine; a host of a TPU slice selects the whole slice"
    )


def _reservations(verbs: Verbs) -> None:
    _add_reservation_list(verbs, "reservations")


def _add_reservation_list(verbs: Verbs, name: str, group: str = "") -> None:
    """Add a verb of this name that lists reservations."""
    words = f"fray {group}{name}"
    example = f"  {words}\n  {words} --ended --json | jq '.[].reservation_id'"
    parser = verb(verbs, name, "reservations:reservations", "list reservations, oldest first", example)
    parser.add_argument("--ended", action="store_true", help="include ended ones")
    parser.add_argument("--all", action="store_true", help="and all that are gone: since when, why, their machines")
    parser.add_argument(
        "--all-namespaces", "-A", action="store_true", help="all namespaces, whatever FRAY_NAMESPACE is"
    )


def _reservation(verbs: Verbs) -> None:
    below = verb_group(verbs, "reservation", "list, show, renew or release reservations: `fray reservation show ID`")
    _add_reservation_list(below, "ls", "reservation ")
    text = "show one reservation: units, jobs, events; one that is gone: when, machines, who ended it and why"
    show = verb(below, "show", "reservations:show", text, "  fray reservation show train-k3x9")
    show.add_argument("reservation", metavar="ID")
    text = "restart the time to live of a reservation"
    renew = verb(below, "renew", "reservations:renew", text, "  fray reservation renew train-k3x9 --ttl 12h")
    renew.add_argument("reservation", metavar="ID")
    renew.add_argument("--ttl", metavar="SPAN", help="new time to live: 3600, 90m, 12h (default: as before)")
    text = "release reservations; what runs in them is stopped"
    release = verb(below, "release", "reservations:release", text, "  fray reservation release train-k3x9")
    release.add_argument("reservations", nargs="+", metavar="ID")
    release.add_argument("--reason", default="released by an operator", help="reason, shown to the owner and the jobs")


def _actors(verbs: Verbs) -> None:
    add_actor_list(verbs, "actors", "  fray actors\n  fray actors --prefix policy/")


def _up(verbs: Verbs) -> None:
    text = "start a cluster of this machine, or of the hosts of a file, if it is not up; its daemons live on"
    example = (
        "  fray up --cpu 4 --memory 8GB\n"
        '  eval "$(fray up)" && python train.py       # prints the variables of drivers\n'
        "  fray up --ssh hosts.toml                   # installs and starts nodes over SSH (docs/operating.md)"
    )
    parser = verb(verbs, "up", "administration.machine_cluster:up", text, example, opens="itself")
    _add_ssh(parser, "install and start fray-node over SSH on the hosts of this TOML file")
    _add_directory(parser)
    parser.add_argument("--port", type=int, help="port of the controller (default: 7421, or a free one)")
    parser.add_argument("--policy", type=Path, metavar="FILE", help="shares, quotas, machine groups (docs/policy.md)")
    parser.add_argument("--cpu", type=float, metavar="N", help="CPUs for jobs (default: all)")
    parser.add_argument("--memory", metavar="SIZE", help="memory for jobs, such as 60GB (default: all)")
    parser.add_argument("--gpus", type=int, metavar="N", help="number of GPUs for jobs (default: all)")


def _down(verbs: Verbs) -> None:
    text = "end the cluster that `fray up` has started, with all that runs there"
    example = "  fray down\n  fray down --yes --remove\n  fray down --ssh hosts.toml"
    parser = verb(verbs, "down", "administration.machine_cluster:down", text, example, opens="itself")
    _add_ssh(parser, "end the daemons that `fray up --ssh` has started on the hosts of this file")
    _add_directory(parser)
    parser.add_argument("--remove", action="store_true", help="also remove jobs, results and logs")
    parser.add_argument("--yes", "-y", action="store_true", help="do not ask while jobs are running")


def _add_ssh(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--ssh", type=Path, metavar="FILE", help=text)


def _add_directory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--directory",
        type=Path,
        metavar="DIR",
        help="state and logs of controller and node (default: ~/.local/state/fray/up)",
    )


def _status(verbs: Verbs) -> None:
    text = "show how a cluster stands: machines, what is in use, jobs"
    example = "  fray status\n  fray status --ssh hosts.toml"
    parser = verb(verbs, "status", "administration.machine_cluster:status", text, example, opens="itself")
    add_watch(parser)
    _add_ssh(parser, "show what runs on the hosts of this file (see fray up --ssh)")


def _doctor(verbs: Verbs) -> None:
    text = "check this machine and its way to the cluster: what is wrong, and what to do"
    example = "  fray doctor\n  fray doctor --cluster fray://lab:7421 --json | jq '.[] | select(.result == \"failed\")'"
    parser = verb(verbs, "doctor", "administration.doctor:doctor", text, example, opens="itself")
    parser.add_argument(
        "--directory",
        action="append",
        default=[],
        metavar="DIR",
        help="also check the space for this directory (--store, --state-dir), and the uids of a node there; may be "
        "repeated",
    )
    parser.add_argument(
        "--job-uids", metavar="FIRST-LAST", help="also check whether fray-node can use this range of uids for jobs"
    )
    parser.add_argument(
        "--ports",
        metavar="FIRST-LAST",
        help="check these for a fray-node to offer to jobs (default: what a node would choose)",
    )


def _metrics(verbs: Verbs) -> None:
    text = "serve the numbers of a cluster to Prometheus: /metrics, /healthz, /readyz"
    example = (
        "  fray metrics\n"
        "  fray metrics --listen 0.0.0.0:9464 --scrape-token scrape.key --tls-cert cert.pem --tls-key key.pem"
    )
    parser = verb(verbs, "metrics", "administration.metrics:metrics", text, example, opens="itself")
    _add_serving(parser, "127.0.0.1:9464")
    parser.add_argument(
        "--scrape-token",
        type=Path,
        metavar="FILE",
        help="file of mode 0600; /metrics requires its content as a bearer token",
    )
    parser.add_argument("--insecure", action="store_true", help="serve other machines without token and TLS")


def _dashboard(verbs: Verbs) -> None:
    text = "serve the page of a cluster: jobs, machines, logs, live; and actions, with the role of your key"
    example = (
        "  fray dashboard\n  fray dashboard --listen 0.0.0.0:8265 --key page.key --tls-cert cert.pem --tls-key key.pem"
    )
    parser = verb(verbs, "dashboard", "administration.dashboard:dashboard", text, example, opens="itself")
    _add_serving(parser, "127.0.0.1:8265")
    parser.add_argument(
        "--key",
        type=Path,
        metavar="FILE",
        help="file of mode 0600 whose content opens the page (default: a new key, in the printed address)",
    )


def _add_serving(parser: argparse.ArgumentParser, address: str) -> None:
    parser.add_argument(
        "--listen", default=address, metavar="HOST:PORT", help=f"address to serve at (default: {address})"
    )
    parser.add_argument("--tls-cert", type=Path, metavar="FILE", help="serve HTTPS with this certificate (PEM)")
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="key of the certificate (PEM)")


def _completion(verbs: Verbs) -> None:
    text = "print the script with which a shell completes verbs, options, jobs and machines"
    example = (
        "  fray completion bash > ~/.local/share/bash-completion/completions/fray\n"
        '  fray completion zsh > "${fpath[1]}/_fray"\n'
        "  fray completion fish > ~/.config/fish/completions/fray.fish"
    )
    parser = verb(verbs, "completion", "administration.completion:completion", text, example, opens="a loop")
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))
    parser.add_argument("--words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def _man(verbs: Verbs) -> None:
    text = "install the manual pages of all commands and of both daemons"
    example = "  fray man && man fray-run\n  fray man build/man/man1"
    parser = verb(verbs, "man", "administration.man:man", text, example, opens="a loop")
    parser.add_argument(
        "directory",
        nargs="?",
        type=Path,
        metavar="DIR",
        help="made if it is not there (default: share/man/man1 beside the bin of the fray in PATH, where man looks)",
    )


def _backup(verbs: Verbs) -> None:
    text = "copy the store of a controller into one file, also while it runs; or restore one"
    example = (
        "  fray backup --store /var/lib/fray /backup/fray.tar\n"
        "  fray backup --store /var/lib/fray --restore /backup/fray.tar   # into an empty or new directory"
    )
    parser = verb(verbs, "backup", "administration.backup:backup", text, example, opens="itself")
    parser.add_argument("file", metavar="FILE", help="the backup, a tar file of mode 0600: it contains all keys")
    parser.add_argument("--store", required=True, metavar="DIR", help="its directory (fray-controller --store)")
    parser.add_argument("--restore", action="store_true", help="make the store from the file")


def _login(verbs: Verbs) -> None:
    text = "make a key for a cluster with an invitation, which is read from standard input"
    parser = verb(
        verbs, "login", "administration.people:login", text, "  fray login fray://lab.example:7421", opens="itself"
    )
    parser.add_argument("spec", metavar="SPEC", help="fray://host:port or fray+unix:///path")


def _logout(verbs: Verbs) -> None:
    text = "remove the key of `fray login` from this machine"
    parser = verb(verbs, "logout", "administration.people:logout", text, "  fray logout --revoke", opens="itself")
    parser.add_argument(
        "spec", nargs="?", default="", metavar="SPEC", help="fray://host:port (default: that of the last login)"
    )
    parser.add_argument(
        "--revoke", action="store_true", help="revoke the key as well; its connections end, wherever it was copied to"
    )


def _user(verbs: Verbs) -> None:
    below = verb_group(verbs, "user", "add, list or remove users: `fray user add ada --role user`")
    text = "add a user, or change the role of one, and print an invitation for `fray login`"
    add = verb(below, "add", "administration.people:add_user", text, "  fray user add ada --role user")
    add.add_argument("user", metavar="NAME")
    add.add_argument("--role", required=True, choices=("viewer", "user", "operator", "admin"))
    add.add_argument("--life", default="1d", metavar="SPAN", help="until the invitation expires (default: 1d)")
    add.add_argument("--key-life", default="30d", metavar="SPAN", help="until its key expires (default: 30d)")
    verb(below, "list", "administration.people:list_users", "list users with their roles", "  fray user list")
    text = "remove a user with all keys; its detached jobs continue"
    remove = verb(below, "remove", "administration.people:remove_user", text, "  fray user remove ada")
    remove.add_argument("user", metavar="NAME")


def _key(verbs: Verbs) -> None:
    below = verb_group(verbs, "key", "list or revoke keys: `fray key list`")
    text = "list valid keys and open invitations: one's own, or (an admin) all"
    listing = verb(below, "list", "administration.people:list_keys", text, "  fray key list --user ada")
    listing.add_argument("--user", default="", help="only those of this user")
    text = "revoke keys or invitations; their connections end at once"
    revoke = verb(below, "revoke", "administration.people:revoke_keys", text, "  fray key revoke user:k3x9m2p4q5r6")
    revoke.add_argument("keys", nargs="*", metavar="KEY")
    revoke.add_argument("--user", default="", help="also all keys of this user")
    text = "replace the cluster's token, on the controller's machine; the previous one counts until --finish"
    example = "  fray key rotate-token --store ./fray-state\n  fray key rotate-token --store ./fray-state --finish"
    rotate = below.add_parser(
        "rotate-token",
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=f"examples:\n{example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    rotate.set_defaults(verb="administration.rotation:rotate_token", opens="itself", parser=rotate)
    _add_store(rotate)
    rotate.add_argument(
        "--token-file", type=Path, metavar="FILE", help="of fray-controller, if it was started with one"
    )
    rotate.add_argument("--finish", action="store_true", help="drop the previous token: what still uses it is cut off")
    rotate.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON with stable keys")


def _namespace(verbs: Verbs) -> None:
    below = verb_group(verbs, "namespace", "list or share namespaces: `fray namespace share lab --with bob`")
    text = "list the namespaces that users have"
    verb(below, "list", "administration.people:list_namespaces", text, "  fray namespace list")
    for name, text, on in (
        ("share", "let users use a namespace", True),
        ("unshare", "stop sharing a namespace with users", False),
    ):
        parser = verb(
            below, name, "administration.people:share_namespace", text, f"  fray namespace {name} lab --with bob"
        )
        parser.add_argument("name", metavar="NAMESPACE")
        parser.add_argument(
            "--with", dest="users", action="append", required=True, metavar="USER", help="may be repeated; '*': all"
        )
        parser.set_defaults(on=on)


def _audit(verbs: Verbs) -> None:
    text = "print the audit log: who did what to whom, from where, with what outcome"
    parser = verb(
        verbs,
        "audit",
        "administration.people:audit",
        text,
        "  fray audit --since 1h\n  fray audit --json --limit 10000",
    )
    add_watch(parser)
    parser.add_argument("--since", metavar="SPAN", help="only the last 10m, 2h, 1d")
    parser.add_argument("--limit", type=int, default=200, metavar="N", help="the newest N (default: 200)")
