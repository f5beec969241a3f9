"""Uploaded reward functions: a child process for each, with limits, started again when it was lost."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from fray.tinker.rewards import child

MEMORY_BYTES = 4 << 30
"""Address space of the child process."""
START_S = 30.0
"""Seconds in which the source has to be executed."""
SOURCE_LIMIT = 1 << 20
"""Characters of a source."""
ANSWER_LIMIT_BYTES = 64 << 20

RewardCall: TypeAlias = "tuple[Any, str, Any, Any]"
"""Arguments of a reward function: data_source, solution_str, ground_truth, extra_info; JSON values."""


class RewardError(Exception):
    """Reward that could not be computed; the message says for which sample and why.

    Attributes:
        traceback: of the uploaded code; empty if it is not its error.
    """

    def __init__(self, message: str, traceback: str = "") -> None:
        super().__init__(message)
        self.traceback = traceback


def check_upload(name: Any, source: Any) -> None:
    """Check the form of an uploaded function, without executing anything.

    Raises:
        ValueError: the name is not one that a function can have, or the source is too long.
    """
    if not isinstance(name, str) or not name.isidentifier() or name.startswith("__"):
        raise ValueError(f"function_name: expected the name of a function such as compute_score, not {name!r:.100}")
    if not isinstance(source, str):
        raise ValueError("source_code: expected a text")
    if len(source) > SOURCE_LIMIT:
        raise ValueError(f"source_code: {len(source)} characters; the limit is {SOURCE_LIMIT}")


class UploadedReward:
    """Reward function in a child process. Sync; one call at a time.

    Args:
        name: of the function.
        source: Python that defines it.
        directory: working directory of the process.
        timeout_s: for the rewards of one batch; then the process is killed.

    Raises:
        RewardError: the source cannot be executed, or does not define the function.
    """

    def __init__(self, name: str, source: str, directory: Path, timeout_s: float = 60.0) -> None:
        self._begin = {"name": name, "source": source, "memory_bytes": MEMORY_BYTES}
        self._name, self._directory, self.timeout_s = name, directory, timeout_s
        self._process = self._start()

    def scores(self, calls: Sequence[RewardCall]) -> list[float]:
        """Return the score of each call.

        Raises:
            RewardError: the function raised, returned no number, ended its process, or took too long.
        """
        if self._process.poll() is not None:
            self._process = self._start()
        answer = self._ask(list(calls), self.timeout_s)
        if "error" in answer:
            at = f" for sample {answer['at']}" if isinstance(answer.get("at"), int) else ""
            raise RewardError(
                f"reward function {self._name!r}{at}: {answer['error']}", str(answer.get("traceback", ""))
            )
        scores = answer.get("scores")
        if not isinstance(scores, list) or len(scores) != len(calls):
            raise RewardError(f"reward function {self._name!r}: its process answered {answer!s:.200}")
        return [float(score) for score in scores]

    def close(self) -> None:
        """End the process, and those that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _start(self) -> subprocess.Popen[bytes]:
        self._directory.mkdir(parents=True, exist_ok=True)
        environ = {name: os.environ[name] for name in ("PATH", "LANG", "TZ") if name in os.environ}
        # -I: neither the working directory nor variables choose what is imported.
        self._process = subprocess.Popen(
            [sys.executable, "-I", child.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=self._directory,
            env={**environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        answer = self._ask(self._begin, START_S)
        if "error" in answer:
            self.close()
            raise RewardError(f"reward function {self._name!r}: {answer['error']}", str(answer.get("traceback", "")))
        return self._process

    def _ask(self, message: Any, timeout_s: float) -> dict[str, Any]:
        """Send a message and return the answer; a process that ends or takes too long is killed."""
        process, deadline = self._process, time.monotonic() + timeout_s
        assert process.stdin is not None
        assert process.stdout is not None
        out, into = process.stdin.fileno(), process.stdout.fileno()
        os.set_blocking(out, False)
        unsent = memoryview(json.dumps(message).encode() + b"\n")
        got = bytearray()
        while not got.endswith(b"\n"):
            left = deadline - time.monotonic()
            readable, writable, _ = select.select([into], [out] if unsent else [], [], max(left, 0))
            if left <= 0 or len(got) > ANSWER_LIMIT_BYTES:
                self.close()
                why = f"no answer after {timeout_s:g} s" if left <= 0 else "its answer is too long"
                raise RewardError(f"reward function {self._name!r}: {why}; its process was killed")
            if writable:
                with contextlib.suppress(BlockingIOError, BrokenPipeError):
                    unsent = unsent[os.write(out, unsent[:65536]) :]
            if readable:
                part = os.read(into, 1 << 16)
                if not part:
                    self.close()
                    status = process.returncode
                    raise RewardError(f"reward function {self._name!r}: its process ended with status {status}")
                got += part
        try:
            answer = json.loads(got)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise RewardError(f"reward function {self._name!r}: its process answered {bytes(got[:200])!r}")
        return answer
