"""Images and containers of one node: pulling an image before an attempt, removing leftover containers."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence

import trio
from attrs import define, field

from fray.node.containers.engine import (
    ContainerEngine,
    container_name,
    list_command,
    remove_command,
)
from fray.node.linux.process_wait import wait_process_end
from fray.node.prepare import NotPrepared

LAST_LINES = 10


@define
class Images:
    """Runs the container engine for one node.

    Attributes:
        limit_s: seconds after which a pull is given up.
    """

    environ: Mapping[str, str]
    limit_s: float
    pids: set[int] = field(factory=set)

    async def ensure(self, engine: ContainerEngine, image: str, say: Callable[[str], None]) -> None:
        """Return once the image is on this machine.

        Raises:
            NotPrepared: it cannot be pulled.
        """
        # A pull would ask the registry even if the image is here, and fail without a network.
        code, _ = await self._run([engine.program, "image", "inspect", "--format", "{{.Id}}", image])
        if code == 0:
            return
        say(f"$ {engine.kind} pull {image}")
        with trio.move_on_after(self.limit_s) as patience:
            code, lines = await self._run([engine.program, "pull", image], say)
        if patience.cancelled_caught:
            raise NotPrepared(f"pulling image {image} timed out after {self.limit_s:g} s")
        if code:
            output = "\n".join(lines[-LAST_LINES:])
            raise NotPrepared(f"{engine.kind} pull {image} failed (exit code {code}):\n{output}")

    async def remove(self, engine: str, attempt_id: str) -> None:
        """Remove the container of an attempt, if it still exists."""
        await self._run(remove_command(engine, [container_name(attempt_id)]))

    async def sweep(self, engine: str, label: str) -> int:
        """Remove containers that an earlier run of this node has left; return how many there were."""
        code, names = await self._run(list_command(engine, label))
        if code == 0 and names:
            await self._run(remove_command(engine, names))
        return len(names) if code == 0 else 0

    async def _run(
        self, command: Sequence[str], say: Callable[[str], None] = lambda line: None
    ) -> tuple[int, list[str]]:
        """Run a command; return exit code and lines."""
        process = _start(command, self.environ)
        self.pids.add(process.pid)
        try:
            return await _read_output(process, say)
        finally:
            if process.poll() is None:
                # The group: the client starts helpers, for credentials for example.
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            self.pids.discard(process.pid)


def _start(command: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


async def _read_output(process: subprocess.Popen[bytes], say: Callable[[str], None]) -> tuple[int, list[str]]:
    assert process.stdout is not None
    lines, rest = list[str](), b""
    with process.stdout as stdout:
        async with trio.lowlevel.FdStream(os.dup(stdout.fileno())) as stream:
            async for data in stream:
                *whole, rest = (rest + data).split(b"\n")
                for line in whole:
                    lines.append(line.decode(errors="replace").rstrip())
                    say(f"  {lines[-1]}")
    await wait_process_end(process.pid)
    return process.wait(), lines
