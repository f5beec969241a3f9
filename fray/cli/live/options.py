"""Options of verbs that hold the terminal. Only argparse is imported here."""

from __future__ import annotations

from fray.cli.parsing import Verbs, one_job, verb

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


def add_exec(verbs: Verbs) -> None:
    text = "run a command in the environment of a running job: its machine, directory, variables, account and limits"
    example = (
        "  fray exec train -- bash\n  fray exec train -- nvidia-smi\n"
        "  fray exec train --member 3 -- tail -n 20 out.log\n  tar c configs | fray exec train -- tar x"
    )
    parser = verb(verbs, "exec", "live.exec:run_command", text, example)
    parser.usage = "fray exec [options] JOB -- COMMAND [ARGUMENT ...]"
    one_job(parser)
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="the program and its arguments, after --")
    parser.add_argument("--member", type=int, default=0, metavar="N", help="member of a gang (default: 0)")
    parser.add_argument(
        "--no-terminal",
        "-T",
        action="store_true",
        help="without a terminal of its own, also where standard input and output are one",
    )
