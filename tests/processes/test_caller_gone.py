"""A caller whose process is killed: what it has asked for ends with it, at once."""

from __future__ import annotations

import os
import signal
import time

import pytest
import trio

from fray.blocking import ActorConfig, ActorHandle, open_cluster


class Callee:
    def __init__(self) -> None:
        self.state = "no caller"

    async def hold(self) -> None:
        self.state = "held"
        try:
            await trio.sleep_forever()
        finally:
            self.state = "let go"

    async def seen(self) -> str:
        return self.state


class Caller:
    def call(self, callee: ActorHandle) -> None:
        callee.hold()

    def pid(self) -> int:
        return os.getpid()


def wait_seen(callee: ActorHandle, state: str) -> None:
    give_up_at = time.monotonic() + 15  # a lost connection alone would be waited for a minute
    while callee.seen() != state:
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


@pytest.mark.timed
def test_a_call_of_a_process_that_was_killed_ends_with_it() -> None:
    with open_cluster("machine?nodes=1&cpu=4") as cluster:
        callee, caller = (
            cluster.create_actor(Callee),
            cluster.create_actor(Caller, actor_config=ActorConfig(max_concurrency=2)),
        )
        pid = caller.pid()
        caller.call.remote(callee)
        wait_seen(callee, "held")
        os.kill(pid, signal.SIGKILL)
        wait_seen(callee, "let go")
