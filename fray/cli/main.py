"""``fray``: from the words of a command line to a verb, and from whatever comes of it to an exit code.

Nothing but argparse is imported before a verb is known: ``fray --help`` is for people who wait.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

from fray.cli.options import parser_of

FAILED = 1
USAGE = 2
TIMED_OUT = 124
INTERRUPTED = 128 + signal.SIGINT
PIPE_CLOSED = 128 + signal.SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code: 0 done, 1 failed or unreachable, 2 wrong usage, 124 out of time,
    130 Ctrl-C, 141 nobody reads the output. ``fray run`` and ``fray wait`` return that of the job.
    """
    try:
        options = parser_of().parse_args(argv)
        return _obeyed(options)
    except SystemExit as left:  # argparse has said what is wrong, or has helped
        return left.code if isinstance(left.code, int) else USAGE
    except BrokenPipeError:
        _forget_output()
        return PIPE_CLOSED
    except KeyboardInterrupt:
        return INTERRUPTED


def _obeyed(options: argparse.Namespace) -> int:
    from fray.errors import FrayError

    try:
        code = _run(options)
        sys.stdout.flush()
    except FrayError as error:
        return print_error(error)
    except BaseExceptionGroup as group:
        if group.split(KeyboardInterrupt)[0] is not None:  # what else broke then is of no interest
            return INTERRUPTED
        only = _only_error(group)
        if isinstance(only, FrayError):
            return print_error(only)
        raise only or group from None
    return code


def _run(options: argparse.Namespace) -> int:
    import trio

    from fray.cli.target import open_place
    from fray.runtime.scope.interrupts import defer_sigint_in_fray_code

    module, _, verb = options.verb.partition(":")
    obey = getattr(import_module(f"fray.cli.{module}"), verb)
    if options.opens == "itself":
        return int(trio.run(obey, options))

    async def within() -> int:
        with defer_sigint_in_fray_code():
            async with open_place(options) as cluster:
                return int(await obey(cluster, options))

    return trio.run(within)


def _only_error(group: BaseExceptionGroup[BaseException]) -> BaseException | None:
    """What a group comes to, if it is one error."""
    if len(group.exceptions) != 1:
        return None
    (error,) = group.exceptions
    return _only_error(error) if isinstance(error, BaseExceptionGroup) else error


def print_error(error: Exception) -> int:
    """Say on standard error what is wrong; the exit code for it."""
    from fray.errors import DeadlineExceeded, InvalidRequest

    print(f"fray: {error}", file=sys.stderr)
    if isinstance(error, DeadlineExceeded):
        return TIMED_OUT
    return USAGE if isinstance(error, InvalidRequest) else FAILED


def _forget_output() -> None:
    """Nobody reads us any more: the interpreter shall not complain of it when it flushes at its end."""
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), sys.stdout.fileno())
