"""Opening a runtime: a driver connects to the controller at once, a job when it first needs it."""

from __future__ import annotations

import random

import pytest
import trio

from fray.errors import Unreachable
from fray.model.ids import attempt_id
from fray.model.messages.client import Role
from fray.net.transports.memory import MemoryNetwork
from fray.runtime.open import RuntimeConfig, open_runtime

ADDRESS = "memory:controller/main"


async def test_a_job_that_needs_nothing_of_the_controller_never_dials_it(autojump_clock: object) -> None:
    config = RuntimeConfig(role=Role.JOB, attempt_id=attempt_id("j-1", 0, 0), namespace="n")
    async with open_runtime(MemoryNetwork(random.Random(1)), [ADDRESS], None, config, rng=random.Random(1)) as runtime:
        await trio.sleep(3600)  # nothing listens at the address: a connection would have ended the session by now
        assert runtime.client.ended is None
        assert not runtime.client.ready.is_set()


async def test_a_driver_dials_at_once(autojump_clock: object) -> None:
    config = RuntimeConfig(role=Role.DRIVER)
    with pytest.raises(Unreachable):
        async with open_runtime(MemoryNetwork(random.Random(1)), [ADDRESS], None, config, rng=random.Random(1)):
            raise AssertionError("opened without a controller")
