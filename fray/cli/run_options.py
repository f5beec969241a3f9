"""Options of ``fray run`` and ``fray what-if``.

They cover everything that a job request says of a program. Only argparse is imported here.
"""

from __future__ import annotations

from fray.cli.parsing import Parser, Verbs, verb

REPEATABLE = "may be repeated"
BANDS = ("system", "production", "interactive", "batch")


def add_run(verbs: Verbs) -> None:
    parser = verb(
        verbs,
        "run",
        "run:run",
        "run a program as a job, print its output, and stop it on Ctrl-C",
        "  fray run -- python train.py\n"
        "  fray run --name train --cpu 4 --gpu h100:8 --workspace . --env LR=3e-4 -- python train.py\n"
        "  fray run --max-retries 3 --exit-code 75=retry --exit-code 2=fail --backoff-s 5 -- ./sync.sh\n"
        "  fray run --priority batch --time-limit 2h --gpu 1 -- python sweep.py\n"
        "  fray run --detach --name serve --port http --health /healthz -- python serve.py",
        opens="itself",
    )
    parser.usage = "fray run [options] -- COMMAND [ARGUMENT ...]"
    parser.add_argument("--name", help="name of the job (default: the program's name and a random suffix)")
    parser.add_argument(
        "--detach", action="store_true", help="return once the job is accepted; it is owned by the cluster"
    )
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="the program and its arguments, after --")
    for add in (_run_where, _run_what, _run_retries, _run_health):
        add(parser)


def add_what_if(verbs: Verbs) -> None:
    parser = verb(
        verbs,
        "what-if",
        "run:what_if",
        "forecast whether a job with these options would start now; nothing is launched",
        "  fray what-if --gpu h100:8 --replicas 4\n  fray what-if --tpu v5litepod-16 --json | jq .expected_s",
    )
    parser.usage = "fray what-if [options] [-- COMMAND [ARGUMENT ...]]"
    parser.add_argument("--name", help="name of the job (default: generated)")
    parser.add_argument("--detach", action="store_true", help="as for `fray run`; no effect on the forecast")
    parser.add_argument("command", nargs="*", metavar="COMMAND", help="no effect on the forecast")
    for add in (_run_where, _run_what, _run_retries, _run_health):
        add(parser)


def _run_where(parser: Parser) -> None:
    group = parser.add_argument_group("resources of each replica, and placement")
    group.add_argument("--cpu", type=float, default=1.0, metavar="N", help="CPUs (default: 1)")
    group.add_argument("--pin-cpus", action="store_true", help="exclusive CPUs; whole numbers only")
    group.add_argument(
        "--memory",
        metavar="SIZE",
        help="memory, reserved and limit: 16GB (default: 2GB reserved, 16GB with GPUs; no limit)",
    )
    group.add_argument("--disk", default=0, metavar="SIZE", help="scratch disk (default: none)")
    device = group.add_mutually_exclusive_group()
    device.add_argument("--gpu", metavar="[TYPE:]N", help="GPUs: 1, h100:8; any of several types: h100,a100:8")
    device.add_argument("--tpu", metavar="TYPE", help="a TPU slice: v5litepod-16; any of several: v5litepod-16,v6e-16")
    group.add_argument(
        "--no-preemptible",
        dest="preemptible",
        action="store_false",
        help="neither on preemptible machines, nor preempted by other jobs",
    )
    group.add_argument(
        "--priority",
        choices=BANDS,
        help="priority band (default: interactive, or the closest that the policy allows)",
    )
    group.add_argument("--time-limit", metavar="SPAN", help="stop the job (time_limit) after it has run this long: 10m")
    group.add_argument(
        "--wait-limit", metavar="SPAN", help="fail (unschedulable) after waiting this long for machines: 2h"
    )
    group.add_argument("--reservation", metavar="ID", help="run on the machines of this reservation only")
    group.add_argument(
        "--replicas", type=int, default=1, metavar="N", help="members of a gang, placed all or none (default: 1)"
    )
    group.add_argument("--region", action="append", default=[], metavar="R", help=f"only in this region; {REPEATABLE}")
    group.add_argument("--zone", action="append", default=[], metavar="Z", help=f"only in this zone; {REPEATABLE}")
    group.add_argument(
        "--constraint",
        action="append",
        default=[],
        metavar="C",
        help=f"required attributes of the machine: 'pool == a', 'disk in ssd,nvme', 'nvlink exists'; {REPEATABLE}",
    )


def _run_what(parser: Parser) -> None:
    group = parser.add_argument_group("environment")
    group.add_argument("--workspace", metavar="DIR", help="directory whose files are sent with the job: .")
    group.add_argument(
        "--pip", action="append", default=[], metavar="REQ", help=f"pip package: 'polars>=1'; {REPEATABLE}"
    )
    group.add_argument(
        "--extra", action="append", default=[], metavar="NAME", help="extra of the project in the workspace"
    )
    group.add_argument("--image", metavar="IMAGE", help="run in a container of this image")
    group.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="K=V",
        help=f"environment variable; K alone: its value here; {REPEATABLE}",
    )
    group.add_argument(
        "--secret",
        action="append",
        default=[],
        metavar="K[=NAME]",
        help="environment variable with the value of a secret",
    )
    group.add_argument(
        "--port",
        action="append",
        default=[],
        metavar="NAME",
        help="port: its number is in FRAY_PORT_NAME; see `fray forward`",
    )


def _run_retries(parser: Parser) -> None:
    group = parser.add_argument_group("retries (-1: no limit)")
    group.add_argument(
        *("--max-retries", "--retries"), type=int, default=0, metavar="N", help="after failures (default: 0)"
    )
    group.add_argument(
        "--max-retries-preemption",
        type=int,
        default=100,
        metavar="N",
        help="after preemptions and lost machines (default: 100)",
    )
    group.add_argument("--max-retries-machine-loss", type=int, metavar="N", help="separate limit for lost machines")
    group.add_argument("--max-retries-out-of-memory", type=int, metavar="N", help="separate limit for out of memory")
    group.add_argument(
        "--exit-code",
        action="append",
        default=[],
        metavar="CODE=RULE",
        help=f"rule for an exit code: retry, fail or ignore (treat as 0): 75=retry; {REPEATABLE}",
    )
    group.add_argument(
        "--backoff-s",
        type=float,
        default=0.0,
        metavar="S",
        help="seconds before a retry, doubled each time (default: 0)",
    )
    group.add_argument(
        "--backoff-max-s", type=float, default=30.0, metavar="S", help="longest back-off in seconds (default: 30)"
    )


def _run_health(parser: Parser) -> None:
    group = parser.add_argument_group("health and termination")
    group.add_argument(
        "--health", metavar="PATH", help="HTTP health check; three failures in a row fail the job: /healthz"
    )
    group.add_argument(
        "--health-port",
        default="http",
        metavar="NAME",
        help="port of the health check, requested for the job (default: http)",
    )
    group.add_argument(
        "--health-period-s", type=float, default=10.0, metavar="S", help="seconds between health checks (default: 10)"
    )
    group.add_argument(
        "--stall-s", type=float, metavar="S", help="record the stacks after this many seconds without progress"
    )
    group.add_argument(
        "--on-stall",
        choices=("capture", "restart"),
        default="capture",
        help="restart: record the stacks, and fail the attempt",
    )
    group.add_argument(
        "--notice-s",
        type=float,
        default=0.0,
        metavar="S",
        help="additional seconds from SIGTERM to SIGKILL on preemption (default: 0)",
    )
    group.add_argument(
        "--term-s",
        type=float,
        default=2.0,
        metavar="S",
        help="seconds from SIGTERM to SIGKILL when it is stopped (default: 2)",
    )
