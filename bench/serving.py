"""Process beside the measuring one: a benchmark's own ``--serve``, which prints the addresses that it serves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import trio


@asynccontextmanager
async def other_process(
    benchmark: str, *arguments: str, before: Sequence[str] = (), **environ: str
) -> AsyncIterator[dict[str, Any]]:
    """Run ``python -m bench.NAME --serve DIRECTORY`` and yield the JSON of its first line; it ends with its standard
    input.

    Args:
        arguments: after the directory.
        before: command that runs it, such as ``ip netns exec NAME``.
        environ: environment variables besides those of this process.
    """
    with tempfile.TemporaryDirectory(prefix="fray-bench-") as directory:
        process = subprocess.Popen(  # noqa: ASYNC220 - brief
            [*before, sys.executable, "-m", f"bench.{benchmark}", "--serve", directory, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **environ},
        )
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            yield json.loads(await trio.to_thread.run_sync(process.stdout.readline))
        finally:
            process.stdin.close()
            process.wait(10)
