"""Entry point of ``fray``: runs a verb, and maps errors to exit codes.

Only argparse is imported before the verb is known, so that ``fray --help`` is fast.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from importlib import import_module

from fray.cli.options import parser_of

FAILED = 1
USAGE = 2
TIMED_OUT = 124
INTERRUPTED = 128 + signal.SIGINT
PIPE_CLOSED = 128 + signal.SIGPIPE
WATCH_S = 2.0
"""Pause of ``--watch``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code: 0 success, 1 failed or unreachable, 2 wrong usage, 124 timeout, 130
    Ctrl-C, 141 output closed. ``fray run`` and ``fray wait`` return that of the job.
    """
    try:
        options = parser_of().parse_args(argv)
        return _run_and_report(options)
    except SystemExit as exit_request:  # argparse has printed an error or the help
        return exit_request.code if isinstance(exit_request.code, int) else USAGE
    except BrokenPipeError:
        _discard_output()
        return PIPE_CLOSED
    except KeyboardInterrupt:
        return INTERRUPTED


def _run_and_report(options: argparse.Namespace) -> int:
    from fray.errors import FrayError
    from fray.tracebacks import innermost

    try:
        code = _run(options)
        sys.stdout.flush()
    except FrayError as error:
        return print_error(error)
    except BaseExceptionGroup as group:
        if group.split(KeyboardInterrupt)[0] is not None:  # errors caused by the interrupt are not reported
            return INTERRUPTED
        only = innermost(group)
        if isinstance(only, FrayError):
            return print_error(only)
        raise (group if isinstance(only, BaseExceptionGroup) else only) from None
    return code


def _run(options: argparse.Namespace) -> int:
    import trio

    from fray.cli.output import choose_colors, screen
    from fray.cli.target import open_target
    from fray.runtime.scope.interrupts import defer_sigint_in_fray_code

    choose_colors(options.color or "auto")
    watches = getattr(options, "watch", False)
    module, _, verb = options.verb.partition(":")
    run_verb = getattr(import_module(f"fray.cli.{module}"), verb)
    if options.opens == "a loop":
        while watches:
            with screen():
                run_verb(options)
            time.sleep(WATCH_S)
        return int(run_verb(options))

    async def run_or_watch(*arguments: object) -> int:
        while watches:
            with screen():
                await run_verb(*arguments)
            await trio.sleep(WATCH_S)
        return int(await run_verb(*arguments))

    if options.opens == "itself":
        return int(trio.run(run_or_watch, options))

    async def within() -> int:
        with defer_sigint_in_fray_code():
            async with open_target(options) as cluster:
                return await run_or_watch(cluster, options)

    return trio.run(within)


def print_error(error: Exception) -> int:
    """Print the error on standard error; return the exit code for it."""
    from fray.cli.output import safe_text
    from fray.errors import DeadlineExceeded, InvalidRequest

    print(f"fray: {safe_text(str(error), sys.stderr)}", file=sys.stderr)
    if isinstance(error, DeadlineExceeded):
        return TIMED_OUT
    return USAGE if isinstance(error, InvalidRequest) else FAILED


def _discard_output() -> None:
    """Redirect standard output to /dev/null, so that the interpreter does not report the closed pipe when it
    flushes.
    """
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), sys.stdout.fileno())
