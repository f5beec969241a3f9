"""One build per environment, however many attempts of this node wait for it.

Invariants: a build runs only while an attempt waits for it. All waiting attempts get every line of output from the
beginning and share the outcome; when the last of them gives up, the processes of the build are ended, which frees the
lock. When another node of the machine builds the same environment, the builder process waits for it, at the lock.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import trio
from attrs import define, field

from fray.model.specs import JobAccount
from fray.node.environments.cache import Cache, Environment, EnvironmentLock
from fray.node.environments.recipe import BuildPlan, Recipe
from fray.node.linux.process_wait import wait_process_end
from fray.node.prepare import NotPrepared, Say

END_S = 3.0
"""Seconds that a builder has to end its child processes."""
TRIES = 3
"""Runs of a builder in all, if it is killed."""
LINES = 2000
"""Lines of a build that attempts joining later still get."""

log = logging.getLogger("fray.node")


@define(eq=False)
class _Build:
    recipe: Recipe
    workspace: str | None
    scope: trio.CancelScope = field(factory=trio.CancelScope)
    waiting: int = 0
    lines: list[str] = field(factory=list)
    listeners: list[Say] = field(factory=list)
    done: trio.Event = field(factory=trio.Event)
    failed: str | None = None

    @property
    def lost_files(self) -> bool:
        """Return whether the attempt from whose files it was made has ended; the other attempts have the same files."""
        return self.workspace is not None and not os.path.isdir(self.workspace)

    def say(self, line: str) -> None:
        if len(self.lines) < LINES:
            self.lines.append(line)
        for listener in self.listeners:
            listener(line)


@define
class BuildManager:
    """Build environments of one node, one at a time for each key.

    Attributes:
        environ: environment variables of the builders and of uv.
        nursery: owner of the builds; they end when it is cancelled.
        limit_s: seconds after which a build is abandoned, including the wait for another node's build.
        account: account that runs the builders; None: that of this process.
    """

    cache: Cache
    environ: Mapping[str, str]
    limit_s: float
    nursery: trio.Nursery
    account: JobAccount | None = None
    pids: set[int] = field(factory=set)
    """Process ids of the builders, so that the node does not reap them as orphans."""
    _builds: dict[str, _Build] = field(factory=dict)

    async def acquire(self, recipe: Recipe, workspace: str | None, say: Say) -> tuple[Environment, EnvironmentLock]:
        """Return the environment with a shared lock on it, and build it first if necessary. Close the lock after use.

        Raises:
            NotPrepared: the build failed; the message is the resolver's own.
        """
        # Again if it was evicted between its build and the shared lock, or if the attempt whose files it needed has
        # ended.
        for _ in range(TRIES):
            try:
                found = self.cache.acquire(recipe.key)
            except OSError as error:
                raise NotPrepared(f"cannot use the environment cache {self.cache.root}: {error}") from None
            if found is not None:
                return found
            await self._wait_built(recipe, workspace, say)
        raise NotPrepared(
            f"environment {recipe.key} was built and evicted {TRIES} times: the cache is too small for it"
        )

    async def _wait_built(self, recipe: Recipe, workspace: str | None, say: Say) -> None:
        build = self._builds.get(recipe.key) or self._start(recipe, workspace)
        # Those who join later see the same output from its beginning.
        for line in build.lines:
            say(line)
        build.listeners.append(say)
        build.waiting += 1
        try:
            await build.done.wait()
        finally:
            build.waiting -= 1
            build.listeners.remove(say)
            # The last one has given up: a build that no attempt waits for only takes CPU, disk and the lock.
            if not build.waiting and not build.done.is_set():
                self._abandon(build)
        if build.failed is not None and not build.lost_files:
            raise NotPrepared(build.failed)

    def _abandon(self, build: _Build) -> None:
        """Cancel a build without waiting attempts. A later request starts its own, which waits at the lock until this
        one has ended."""
        self._remove(build)
        build.scope.cancel()

    def _remove(self, build: _Build) -> None:
        if self._builds.get(build.recipe.key) is build:
            del self._builds[build.recipe.key]

    def _start(self, recipe: Recipe, workspace: str | None) -> _Build:
        build = self._builds[recipe.key] = _Build(recipe, workspace)
        self.nursery.start_soon(self._build, build)
        return build

    async def _build(self, build: _Build) -> None:
        key = build.recipe.key
        # Set in advance: a cancelled build does not get to set it.
        build.failed = f"the build of environment {key} was cancelled"
        try:
            with build.scope, trio.move_on_after(self.limit_s) as patience:
                build.say(f"environment {key}: {build.recipe.describe()}")
                build.failed = await self._try_often(build)
            if patience.cancelled_caught:
                build.failed = f"environment {key} was not ready after {self.limit_s:g} s; last lines of the build:\n"
                build.failed += "\n".join(build.lines[-10:])
        finally:
            self._remove(build)
            build.done.set()

    async def _try_often(self, build: _Build) -> str | None:
        """Run the builder until it is not killed. Return the error, None if the environment is ready."""
        for _ in range(TRIES):
            code, result = await self._run_builder(build)
            # A failed step would fail again. A kill (the OOM killer) says nothing about the environment, so it is built
            # again.
            if code >= 0 and "killed" not in result:
                failed = result.get("failed", f"its builder exited with code {code}; see the node's log")
                return None if "ready" in result else f"environment {build.recipe.key}: {failed}"
            build.say(f"{result.get('killed', 'the builder')} was killed{f' by signal {-code}' if code < 0 else ''}")
        return f"environment {build.recipe.key}: its builder was killed {TRIES} times (out of memory?)"

    async def _run_builder(self, build: _Build) -> tuple[int, dict[str, str]]:
        """Run a builder once. Return its exit code (negative: the signal that killed it) and its last message."""
        plan = BuildPlan(
            recipe=build.recipe, root=str(self.cache.root), workspace=build.workspace, node_pid=os.getpid()
        )
        process = _spawn_builder(plan, self.environ, self.account)
        self.pids.add(process.pid)
        result: dict[str, str] = {}
        try:
            result = await _read_messages(process, build.say)
            return await _wait_end(process), result
        finally:
            with trio.CancelScope(shield=True):
                # Shielded: the builder has to end uv and what uv started, also when the node ends.
                await _end_builder(process)
            self.pids.discard(process.pid)


def _spawn_builder(plan: BuildPlan, environ: Mapping[str, str], account: JobAccount | None) -> subprocess.Popen[bytes]:
    """Start a builder. Call it in the event loop's thread: the kernel's parent-death signal follows the thread that
    made the child, so a worker thread that ends would kill the builder."""
    # By a file in memory: requirements may contain credentials, and every user can read a command line.
    plan_fd = os.memfd_create("plan")
    with open(plan_fd, "wb+", buffering=0) as file:
        file.write(plan.to_json().encode())
        file.seek(0)
        command = [sys.executable, "-m", "fray.node.environments.builder"]
        # Building a package runs its code.
        identity: dict[str, Any] = (
            {"user": account.uid, "group": account.gid, "extra_groups": (), "umask": 0o077, "cwd": account.home}
            if account is not None
            else {}
        )
        return subprocess.Popen(
            command, stdin=file, stdout=subprocess.PIPE, env=dict(environ), start_new_session=True, **identity
        )


async def _read_messages(process: subprocess.Popen[bytes], say: Say) -> dict[str, str]:
    """Pass on the builder's lines until it closes its output. Return its last message."""
    assert process.stdout is not None
    result, rest = dict[str, str](), b""
    async with trio.lowlevel.FdStream(os.dup(process.stdout.fileno())) as stream:
        async for data in stream:
            *lines, rest = (rest + data).split(b"\n")
            for message in map(json.loads, lines):
                if "say" in message:
                    say(f"  {message['say']}")
                else:
                    result = message
    return result


async def _wait_end(process: subprocess.Popen[bytes]) -> int:
    await wait_process_end(process.pid)
    return process.wait()


async def _end_builder(process: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM, on which a builder ends its descendants; then SIGKILL."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with trio.move_on_after(END_S):
            await _wait_end(process)
        process.kill()
        process.wait()
    assert process.stdout is not None
    process.stdout.close()
