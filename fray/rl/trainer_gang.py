"""Processes of one trainer: created together, and replaced together when one of them is lost."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

import trio

from fray.api.actors.handle import ActorHandle
from fray.api.actors.monitor import Down, monitor
from fray.api.scope import Scope
from fray.errors import ActorDied, InvalidRequest
from fray.model.text import near_text
from fray.rl.process_start import NOTICE_S
from fray.rl.processes.run_processes import RunProcesses, raise_end
from fray.rl.run_parts import RunParts
from fray.rl.train.errors import RankLost
from fray.rl.train.settings import GRPO
from fray.rl.trainer.base_trainer import BaseTrainer
from fray.rl.trainer.reference_process import ReferenceProcess
from fray.rl.trainer.remote_api import RemoteApiTrainer
from fray.rl.trainer.self_hosted import SelfHostedTrainer
from fray.rl.trainer_process import RankGroup, RankPlace, TrainerProcess, TrainerRank

REFERENCE_PLACES = ("trainer", "server")
"""Places of the reference of a KL penalty: in each process of the trainer, or in a process of its own."""
REPLACE_S = 5.0
"""Seconds after which a rank that shall be replaced is asked again."""


class TrainerGang:
    """The processes of a trainer: `TrainerProcess`, and a `TrainerRank` for each further rank.

    Args:
        processes: creates them.
        scope: owns them, if no job does.
        parts: of the run.
        settings: of the trainer.
        coordinator: of the run.
        note: called with lines for the console.
    """

    def __init__(
        self,
        processes: RunProcesses,
        scope: Scope,
        parts: RunParts,
        settings: GRPO,
        coordinator: ActorHandle,
        note: Callable[[str], None],
    ) -> None:
        self._processes, self._scope, self._parts = processes, scope, parts
        self._settings, self._coordinator = settings, coordinator
        self._note = note
        self._handles: list[ActorHandle] = []
        self._reference: ActorHandle | None = None
        self._lives = [""] * parts.trainer_ranks
        """Incarnation of each rank; empty while it has none."""
        self._members: tuple[str, ...] = ()
        """Incarnations that train together; none is used again when they have lost one."""
        self._are_replaced = False
        self._preempted: set[str] = set()
        """Incarnations that have notice of their end."""
        self._changed = trio.Event()

    @property
    def members(self) -> tuple[str, ...]:
        """Return the incarnations that train together."""
        return self._members

    @property
    def is_preempted(self) -> bool:
        """Return whether one of the processes that train has notice of its end: save, and let all be replaced."""
        return not self._preempted.isdisjoint(self._members)

    async def keep(self, train: Callable[[Any, RankGroup | None], Awaitable[None]]) -> None:
        """Create the processes, and call ``train`` with the first whenever all are there, until it returns.

        When a process is lost, the others are replaced, too, and ``train`` raises the loss of the first one.

        Args:
            train: called with the first rank, and all of them; without the latter if there is only one.

        Raises:
            ActorDied: one was lost more often than it may be restarted.
            InvalidRequest: they must not talk to each other from where they are.
            BaseException: what a constructor, or ``train``, raises else.
        """
        if self._parts.reference == "server":
            self._reference = await self._create_reference()
        for rank in range(self._parts.trainer_ranks):
            self._handles.append(await self._create(rank))
        async with trio.open_nursery() as nursery:
            if self._reference is not None:
                nursery.start_soon(self._follow_reference, self._reference)
            for rank in range(len(self._handles)):
                nursery.start_soon(self._follow, nursery, rank)
            while True:
                lost = self._members
                while not all(self._lives) or not set(self._lives).isdisjoint(lost):
                    await self._changed.wait()
                self._members, self._are_replaced = tuple(self._lives), False
                try:
                    await train(self._handles[0], await self._group())
                    break
                except (ActorDied, RankLost) as error:
                    self._replace(nursery, str(error))
            nursery.cancel_scope.cancel()

    async def _create(self, rank: int) -> ActorHandle:
        parts = self._parts
        dumps = None if parts.output is None else parts.output / "failed_batch"
        needs: Any = (parts.model, self._settings, parts.threads, dumps, parts.own_trainer, parts.trainer_ranks)
        needs += (parts.trainer_device, self._reference)
        handle: ActorHandle = await self._processes.create(
            self._scope,
            TrainerRank if rank else TrainerProcess,
            str(rank),
            *(needs if rank else (self._coordinator, *needs)),
            resources=parts.resources.get("trainer"),
            # Without a checkpoint there is nothing to do in that time.
            actor_config=parts.process_settings(notice_s=0.0 if parts.checkpoints is None else NOTICE_S),
        )
        return handle

    async def _create_reference(self) -> ActorHandle:
        parts = self._parts
        reference: ActorHandle = await self._processes.create(
            self._scope,
            ReferenceProcess,
            "0",
            parts.model,
            self._settings.dtype,
            parts.threads,
            parts.reference_device,
            resources=parts.resources.get("reference"),
            actor_config=parts.process_settings(),
        )
        return reference

    async def _follow_reference(self, reference: ActorHandle) -> None:
        async with monitor(reference) as events:
            async for event in events:
                if isinstance(event, Down):
                    await raise_end(reference, event)
                    self._note("the reference was lost: the trainer waits until it is started again")

    async def _follow(self, nursery: trio.Nursery, rank: int) -> None:
        """Follow the incarnations of a rank."""
        async with monitor(self._handles[rank]) as events:
            async for event in events:
                if isinstance(event, Down):
                    await raise_end(self._handles[rank], event)
                    self._lives[rank] = ""
                    if event.incarnation in self._members:
                        self._replace(nursery, f"rank {rank} was lost")
                else:
                    self._lives[rank] = event.incarnation
                    nursery.start_soon(self._note_preemption, rank, event.incarnation)
                self._wake()

    async def _note_preemption(self, rank: int, life: str) -> None:
        handle: Any = self._handles[rank]
        try:
            await handle.wait_for_preemption()
        except (ActorDied, RankLost):
            return  # its monitor reports it
        self._preempted.add(life)

    def _replace(self, nursery: trio.Nursery, reason: str) -> None:
        """Let all that train together end and start again."""
        if self._are_replaced:
            return
        self._are_replaced = True
        if len(self._lives) > 1:
            self._note(f"the trainer lost one of its {len(self._lives)} ranks: all are replaced")
        for rank, life in enumerate(self._lives):
            if life in self._members:
                nursery.start_soon(self._replace_rank, rank, life, reason)

    async def _replace_rank(self, rank: int, life: str, reason: str) -> None:
        handle: Any = self._handles[rank]
        while self._lives[rank] == life:
            changed = self._changed
            with trio.move_on_after(REPLACE_S):
                try:
                    await handle.replace(life, reason)
                except (ActorDied, RankLost):
                    pass  # its monitor reports it
                await changed.wait()

    async def _group(self) -> RankGroup | None:
        if len(self._handles) == 1:
            return None
        handles: list[Any] = self._handles
        places = [await handle.place() for handle in handles]
        if not self._parts.unencrypted_ranks:
            check_places(places)
        return RankGroup(tuple(handles[1:]), tuple(place.host for place in places), self._members)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


def check_places(places: Sequence[RankPlace]) -> None:
    """Check that ranks on several machines may send each other what is not encrypted.

    Raises:
        InvalidRequest: the cluster encrypts all other traffic.
    """
    hosts = sorted({place.host for place in places})
    if len(hosts) > 1 and any(place.is_encrypted for place in places):
        raise InvalidRequest(
            f"the ranks of the trainer are on {len(hosts)} machines ({', '.join(hosts)}) of a cluster with TLS, and "
            "torch.distributed encrypts nothing: expected constraints in resources={'trainer': ...} that keep them on "
            "one machine, or, on a network that you trust, unencrypted_ranks=True"
        )


def check_ranks(ranks: int, settings: GRPO | None, own: BaseTrainer | None) -> None:
    """Check the number of ranks of a trainer.

    Args:
        settings: of the trainer; None: there is none.
        own: the user's trainer.

    Raises:
        InvalidRequest: such a trainer has not so many.
    """
    if ranks == 1:
        return
    most = 1 if settings is None else settings.batch_size
    if not 1 <= ranks <= most:
        why = "there is no trainer" if settings is None else "the samples of a batch"
        raise InvalidRequest(f"invalid trainer_ranks {ranks!r}: expected 1 to {most}, {why}")
    if _trains_elsewhere(own):
        raise InvalidRequest(f"trainer_ranks {ranks} with {type(own).__name__}: each rank would send what it trains")


def check_reference(place: str, settings: GRPO | None, own: BaseTrainer | None, reserved: Collection[str]) -> None:
    """Check where the reference of a trainer is.

    Args:
        place: ``trainer`` or ``server``.
        settings: of the trainer; None: there is none.
        own: the user's trainer.
        reserved: parts for which resources are reserved.

    Raises:
        InvalidRequest: the trainer has no reference that could be there.
    """
    if place not in REFERENCE_PLACES:
        names = " or ".join(map(repr, REFERENCE_PLACES))
        raise InvalidRequest(f"invalid reference {place!r}: expected {names}{near_text(str(place), REFERENCE_PLACES)}")
    if place == "trainer":
        if "reference" in reserved:
            raise InvalidRequest("resources has 'reference', but that is in the trainer: expected reference='server'")
        return
    if settings is None or settings.kl is None:
        raise InvalidRequest("reference='server' without a KL penalty: expected a trainer such as rl.GRPO(kl=0.001)")
    if settings.lora is not None:
        raise InvalidRequest(
            "reference='server' with lora: the reference is the trainer's model without the adapter, which costs no "
            "memory; expected reference='trainer'"
        )
    if _trains_elsewhere(own):
        raise InvalidRequest(f"reference='server' with {type(own).__name__}: it has no model here")


def _trains_elsewhere(own: BaseTrainer | None) -> bool:
    return isinstance(own, RemoteApiTrainer) or (isinstance(own, SelfHostedTrainer) and own.has_service)
