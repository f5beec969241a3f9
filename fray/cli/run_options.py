"""The words of ``fray run`` and ``fray what-if``: all that a request says of a program. Only argparse here."""

from __future__ import annotations

from fray.cli.parsing import Parser, Verbs, verb

AGAIN = "may be given several times"
BANDS = ("system", "production", "interactive", "batch")


def add_run(verbs: Verbs) -> None:
    parser = verb(
        verbs,
        "run",
        "run:run",
        "launch a program as a job, show what it prints, and end it on Ctrl-C",
        "  fray run -- python train.py\n"
        "  fray run --name train --cpu 4 --gpu h100:8 --workspace . --env LR=3e-4 -- python train.py\n"
        "  fray run --max-retries 3 --exit-code 75=retry --exit-code 2=fail --backoff-s 5 -- ./sync.sh\n"
        "  fray run --priority batch --time-limit 2h --gpu 1 -- python sweep.py\n"
        "  fray run --detach --name serve --port http --health /healthz -- python serve.py",
        opens="itself",
    )
    parser.usage = "fray run [options] -- COMMAND [ARGUMENT ...]"
    parser.add_argument("--name", help="of the job (default: the program's name and a token)")
    parser.add_argument(
        "--detach", action="store_true", help="return when it is accepted; it is the cluster's, and ends by itself"
    )
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="the program and its arguments, behind --")
    for add in (_run_where, _run_what, _run_retries, _run_health):
        add(parser)


def add_what_if(verbs: Verbs) -> None:
    parser = verb(
        verbs,
        "what-if",
        "run:what_if",
        "say what would become of a job with these options now; nothing is launched",
        "  fray what-if --gpu h100:8 --replicas 4\n  fray what-if --tpu v5litepod-16 --json | jq .expected_s",
    )
    parser.usage = "fray what-if [options] [-- COMMAND [ARGUMENT ...]]"
    parser.add_argument("--name", help="of the job (default: made up)")
    parser.add_argument("--detach", action="store_true", help="as of `fray run`; makes no difference here")
    parser.add_argument("command", nargs="*", metavar="COMMAND", help="makes no difference here")
    for add in (_run_where, _run_what, _run_retries, _run_health):
        add(parser)


def _run_where(parser: Parser) -> None:
    group = parser.add_argument_group("where it runs, and what each replica gets")
    group.add_argument("--cpu", type=float, default=1.0, metavar="N", help="CPUs (default: 1)")
    group.add_argument("--pin-cpus", action="store_true", help="CPUs of its own; whole ones")
    group.add_argument(
        "--memory", metavar="SIZE", help="and no more than that: 16GB (default: 2GB reserved, 16GB with GPUs; no limit)"
    )
    group.add_argument("--disk", default=0, metavar="SIZE", help="scratch disk (default: none)")
    device = group.add_mutually_exclusive_group()
    device.add_argument("--gpu", metavar="[TYPE:]N", help="GPUs: 1, h100:8; any of several types: h100,a100:8")
    device.add_argument("--tpu", metavar="TYPE", help="a TPU slice: v5litepod-16; any of several: v5litepod-16,v6e-16")
    group.add_argument(
        "--no-preemptible",
        dest="preemptible",
        action="store_false",
        help="not on machines that can be taken away, and never ended for the sake of others",
    )
    group.add_argument(
        "--priority",
        choices=BANDS,
        help="its band (default: interactive, or the nearest that the policy lets you have)",
    )
    group.add_argument(
        "--time-limit", metavar="SPAN", help="end it (time_limit) when it has had its machines so long: 10m"
    )
    group.add_argument(
        "--wait-limit", metavar="SPAN", help="fail (unschedulable) after waiting so long for machines: 2h"
    )
    group.add_argument("--reservation", metavar="ID", help="on the machines of a reservation, and no others")
    group.add_argument("--replicas", type=int, default=1, metavar="N", help="a gang: all or none (default: 1)")
    group.add_argument("--region", action="append", default=[], metavar="R", help=f"only there; {AGAIN}")
    group.add_argument("--zone", action="append", default=[], metavar="Z", help=f"only there; {AGAIN}")
    group.add_argument(
        "--constraint",
        action="append",
        default=[],
        metavar="C",
        help=f"what the machine's attributes must be: 'pool == a', 'disk in ssd,nvme', 'nvlink exists'; {AGAIN}",
    )


def _run_what(parser: Parser) -> None:
    group = parser.add_argument_group("what it is made of")
    group.add_argument("--workspace", metavar="DIR", help="directory whose files travel along: .")
    group.add_argument("--pip", action="append", default=[], metavar="REQ", help=f"a package: 'polars>=1'; {AGAIN}")
    group.add_argument("--extra", action="append", default=[], metavar="NAME", help="an extra of the project there")
    group.add_argument("--image", metavar="IMAGE", help="run in a container of this image")
    group.add_argument(
        "--env", action="append", default=[], metavar="K=V", help=f"a variable; K alone: as it is here; {AGAIN}"
    )
    group.add_argument(
        "--secret", action="append", default=[], metavar="K[=NAME]", help="a variable whose value is a secret's"
    )
    group.add_argument(
        "--port", action="append", default=[], metavar="NAME", help="a port: FRAY_PORT_NAME, `fray forward JOB NAME`"
    )


def _run_retries(parser: Parser) -> None:
    group = parser.add_argument_group("when it fails, or loses its machine (-1: any number of times)")
    group.add_argument(
        *("--max-retries", "--retries"), type=int, default=0, metavar="N", help="after a failure (default: 0)"
    )
    group.add_argument(
        "--max-retries-preemption",
        type=int,
        default=100,
        metavar="N",
        help="after preemption and lost machines (default: 100)",
    )
    group.add_argument(
        "--max-retries-machine-loss", type=int, metavar="N", help="a budget of its own for lost machines"
    )
    group.add_argument(
        "--max-retries-out-of-memory", type=int, metavar="N", help="a budget of its own for lack of memory"
    )
    group.add_argument(
        "--exit-code",
        action="append",
        default=[],
        metavar="CODE=RULE",
        help=f"what a code means: retry, fail or ignore (as good as 0), as 75=retry; {AGAIN}",
    )
    group.add_argument(
        "--backoff-s",
        type=float,
        default=0.0,
        metavar="S",
        help="wait before it begins again, doubled each time (default: 0)",
    )
    group.add_argument("--backoff-max-s", type=float, default=30.0, metavar="S", help="longest such wait (default: 30)")


def _run_health(parser: Parser) -> None:
    group = parser.add_argument_group("whether it is well, and how it ends")
    group.add_argument(
        "--health", metavar="PATH", help="ask for this over HTTP; three bad answers in a row are a failure: /healthz"
    )
    group.add_argument(
        "--health-port", default="http", metavar="NAME", help="at this port of its, which it gets (default: http)"
    )
    group.add_argument("--health-period-s", type=float, default=10.0, metavar="S", help="so often (default: 10)")
    group.add_argument(
        "--stall-s", type=float, metavar="S", help="without progress for so long its stacks go into its record"
    )
    group.add_argument(
        "--on-stall", choices=("capture", "restart"), default="capture", help="restart: that, and it has failed"
    )
    group.add_argument(
        "--notice-s",
        type=float,
        default=0.0,
        metavar="S",
        help="SIGTERM so long before SIGKILL (beside --term-s) when its place is taken (default: 0)",
    )
    group.add_argument(
        "--term-s", type=float, default=2.0, metavar="S", help="from SIGTERM to SIGKILL when it is ended (default: 2)"
    )
