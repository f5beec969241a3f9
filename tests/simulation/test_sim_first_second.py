"""The first second of a session: each of its messages is lost or delayed, and it costs no more than that; warnings."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest
import trio
import trio.testing
from attrs import define, field

from fray import Cluster, Entrypoint, JobRequest, ResourceConfig
from fray.model.messages.client import Role
from fray.model.resources import Capacity
from fray.net.transport import Credential
from fray.net.transports.memory import InFlightMessage, MessageFault
from fray.runtime.open import RuntimeConfig, open_runtime
from fray.scheduler.state.rows import SchedulerConfig
from fray.testing.fakes import SimNetwork
from fray.testing.ground_truth import GroundTruth
from fray.testing.seed import Seed, Trace, steady
from fray.testing.sim_cluster import (
    ADDRESS,
    CONTROLLER,
    TOKEN,
    DriverProcess,
    MachineSpec,
    SimCluster,
    open_sim_cluster,
)
from tests.simulation.workloads import SMALL

T = TypeVar("T")
DRIVER = "driver"
GB = 2**30
LOSS_COSTS_S = 0.5
"""Longest time that the loss of a message with its connection costs: another dial."""


def seven() -> int:
    return 7


@define
class Sabotage:
    """Loss or delay of the messages between driver and controller with these numbers, from 1."""

    fault: MessageFault = MessageFault.DELIVER
    delay_s: float = 0.0
    numbers: frozenset[int] = frozenset()
    network: SimNetwork = field(init=False)
    seen: int = 0

    def on_message(self, message: InFlightMessage) -> MessageFault:
        self.network.slow.pop(DRIVER, None)
        ends = {self.network.machine_of(message.source), self.network.machine_of(message.target)}
        if ends != {DRIVER, CONTROLLER}:
            return MessageFault.DELIVER
        self.seen += 1
        if self.seen not in self.numbers:
            return MessageFault.DELIVER
        if self.delay_s:
            self.network.slow[DRIVER] = self.delay_s
        return self.fault


async def first_session(sim: SimCluster) -> float:
    """Open a session, run one job in it and leave; return the seconds that this took."""
    request = JobRequest("seven", entrypoint=Entrypoint.from_callable(seven), resources=SMALL)

    async def body(cluster: Cluster) -> None:
        assert await (await cluster.launch(request)).wait() == 7

    began = trio.current_time()
    await DriverProcess(sim, DRIVER).run(body, namespace=None, grace_s=30.0)
    return trio.current_time() - began


def simulate(seed_number: int, body: Callable[[SimCluster], Awaitable[T]]) -> T:
    """Run ``body`` with a cluster of one machine, on a virtual clock."""

    async def main() -> T:
        seed = Seed(seed_number)
        network, truth = SimNetwork(seed.stream("network"), Trace()), GroundTruth(trio.current_time)
        machine = MachineSpec("m1", Capacity(cpu_milli=8000, memory_bytes=16 * GB, disk_bytes=GB))
        async with open_sim_cluster(seed, network, truth, [machine], rules=SchedulerConfig()) as sim:
            await trio.sleep(2)  # virtual: the machine has joined
            return await body(sim)

    with steady(Seed(seed_number)):
        return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def session_under(sabotage: Sabotage, seed_number: int) -> float:
    async def body(sim: SimCluster) -> float:
        sabotage.network, sim.network.on_message_sent = sim.network, sabotage.on_message
        return await first_session(sim)

    return simulate(seed_number, body)


@pytest.mark.parametrize("seed", range(3))
def test_a_lost_message_of_a_new_session_costs_one_more_dial(seed: int) -> None:
    undisturbed = Sabotage()
    usual_s = session_under(undisturbed, seed)
    assert undisturbed.seen > 6
    for number in range(1, undisturbed.seen + 1):
        for fault in (MessageFault.LOSE, MessageFault.LAST):
            # Alone, and together with the next one: that of the next dial.
            for numbers in ({number}, {number, number + 1}):
                sabotage = Sabotage(fault, numbers=frozenset(numbers))
                took_s = session_under(sabotage, seed)
                assert took_s < usual_s + len(numbers) * LOSS_COSTS_S, (fault, numbers, took_s)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("delay_s", [0.3, 4.0])
def test_a_delayed_message_of_a_new_session_costs_its_delay(delay_s: float, seed: int) -> None:
    undisturbed = Sabotage()
    usual_s = session_under(undisturbed, seed)
    for number in range(1, undisturbed.seen + 1):
        took_s = session_under(Sabotage(delay_s=delay_s, numbers=frozenset({number})), seed)
        assert took_s < usual_s + delay_s + LOSS_COSTS_S, (number, took_s)


def test_a_driver_that_prints_output_follows_it_before_it_can_launch() -> None:
    """Otherwise the output of a job that ends sooner than the subscription arrives would come after its end."""

    async def body(sim: SimCluster) -> None:
        async with open_runtime(
            sim.network.process(DRIVER, DRIVER),
            [ADDRESS],
            Credential("cluster", TOKEN),
            RuntimeConfig(role=Role.DRIVER),
            rng=sim.seed.stream(DRIVER),
            on_log=lambda lines: None,
        ) as runtime:
            assert sim.controller.running is not None
            assert runtime.session in sim.controller.running.gateway._log_feed.followers.by_key

    simulate(1, body)


def test_a_driver_is_warned_at_the_line_that_launches_what_no_machine_of_its_cluster_has() -> None:
    request = JobRequest("train", ResourceConfig.with_gpu(), Entrypoint.from_callable(seven))

    async def launch(cluster: Cluster) -> None:
        with pytest.warns(RuntimeWarning, match="job 'train' fits no machine .* no machine has a gpu") as caught:
            job = await cluster.launch(request)
        assert caught[0].filename == __file__
        await job.terminate()

    async def body(sim: SimCluster) -> None:
        await DriverProcess(sim, DRIVER).run(launch, namespace=None, grace_s=30.0)

    simulate(1, body)
