"""``fray tinker game``: environment servers of a class with the rules of a game."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

import trio

from fray.cli.output import explained_missing, note, say_json
from fray.errors import InvalidRequest

RESTART_S = 1.0
"""Pause before a server that was killed is started again."""


async def game(options: argparse.Namespace) -> int:
    """Run ``fray tinker game``."""
    with explained_missing("fray tinker", "tinker"):
        from fray.rl.recipe.user_files import load_object
        from fray.tinker import game as games
    if options.count < 1 or not 0 < options.port <= 65_536 - options.count:
        raise InvalidRequest(f"--port {options.port} --count {options.count}: expected ports from 1 to 65535")
    # As of `python -m`: `fray` itself is started in another directory.
    sys.path.insert(0, str(Path.cwd()))
    rules = load_object(options.game, Path.cwd())
    if options.count == 1:
        async with games.serve(rules, host=options.host, port=options.port) as server:
            _say(options, server.urls)
            if not options.until_stdin_ends:
                await trio.sleep_forever()
            async with trio.lowlevel.FdStream(os.dup(sys.stdin.fileno())) as lifeline:
                await lifeline.receive_some()
        return 0
    # SIGTERM ends the processes with this one; so does SIGKILL, as nothing else has the other end of their standard
    # input. A signal of the kernel at the parent's end would come with the end of the thread that started them.
    reading, writing = os.pipe()
    try:
        with trio.open_signal_receiver(signal.SIGTERM) as signals:
            async with trio.open_nursery() as nursery:
                for port in range(options.port, options.port + options.count):
                    nursery.start_soon(_keep_serving, options, port, reading)
                await anext(signals)
                nursery.cancel_scope.cancel()
    finally:
        os.close(reading)
        os.close(writing)
    return 128 + signal.SIGTERM


async def _keep_serving(options: argparse.Namespace, port: int, stdin: int) -> None:
    """Run the server of one port as a process, again when it was killed. Raises InvalidRequest if it ends itself."""
    command = ["tinker", "game", options.game, "--host", options.host, "--port", str(port), "--until-stdin-ends"]
    while True:
        done = await trio.run_process(
            [sys.executable, "-m", "fray.cli", *(["--json"] if options.json else []), *command],
            stdin=stdin,
            check=False,
        )
        if done.returncode >= 0:
            raise InvalidRequest(f"the server at port {port} has ended with status {done.returncode}")
        note(f"the server at port {port} was killed by signal {-done.returncode}: it is started again")
        await trio.sleep(RESTART_S)


def _say(options: argparse.Namespace, urls: tuple[str, ...]) -> None:
    if options.json:
        say_json({"urls": list(urls)})
    else:
        note(f"serving {options.game} at {urls[0]}")
