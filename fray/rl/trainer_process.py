"""Trainer process: an actor that updates a policy with the batches of the coordinator, and publishes its weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import trio
from attrs import frozen

from fray.api.actors.current_actor import current_actor
from fray.api.actors.handle import ActorHandle
from fray.api.objects import allocate, put
from fray.errors import ActorDied, FrayError, InvalidRequest
from fray.net.controller_address import is_insecure
from fray.rl.checkpoint_store import Location, directory_to_read, directory_to_write
from fray.rl.core.versions import VersionName
from fray.rl.inference.http_settings import WeightAddress
from fray.rl.messages import NOT_FINITE, NOTHING_TO_LEARN, TrainingBatch
from fray.rl.model_spec import ModelSpec
from fray.rl.nexrl.activity_tracker import ActivityTracker, ActivityTrackerProxy
from fray.rl.nexrl.experiment_posts import NO_POSTS, FetchedPosts, PostQueue
from fray.rl.nexrl_types import Trajectory
from fray.rl.process_start import loading, wait_for_preemption
from fray.rl.processes.actor_tasks import ActorTask, ActorTasks
from fray.rl.train.errors import RankLost
from fray.rl.train.settings import GRPO
from fray.rl.trainer.base_trainer import BaseTrainer, mean_reward
from fray.rl.trainer.self_hosted import SelfHostedTrainer
from fray.rl.weights.published import PublishedWeights, WeightFile
from fray.rl.weights_table import WeightTable
from fray.runtime.actors.lifecycle import has_own_process
from fray.runtime.process.current_job import current_job
from fray.runtime.runtime import current
from fray.runtime.serialization.pickling import loads
from fray.tracebacks import first_error

T = TypeVar("T")
CONNECT_S = 300.0
"""Seconds within which the ranks of a trainer connect, or the run ends."""
REFERENCE_S = 1200.0
"""Seconds within which a reference in a process of its own answers, its restarts included, or the run ends. Less than
the ranks of a trainer wait for one another."""
SAME_ERROR_S = 5.0
"""Seconds for which the error of a rank waits for that of the first one."""


@frozen
class TrainedStep:
    """Result of an update."""

    number: int
    """Number of the update, from 1."""
    line: int
    """Incarnation of the trainer."""
    serial: int
    """Number of this result among those of its incarnation, from 1; batches that are skipped have one, too."""
    metrics: dict[str, float]
    skipped: str = ""
    """Reason why no update was done: the batch is dropped; empty: it was done."""
    without_effect: str = ""
    """Reason why the weights are as before the update that was done; empty: they are new."""
    posts: FetchedPosts = NO_POSTS
    """Posts of the user's trainer to the trackers of the run."""


@frozen
class TrainerStanding:
    """State of a trainer, for a controller that takes it over."""

    line: int | None
    """Incarnation, as in the names of its versions; None: it has not been started."""
    members: tuple[str, ...]
    """Incarnations of the processes that train together."""
    published: dict[VersionName, PublishedWeights | None]
    """Weights that servers may load."""


@frozen
class RankPlace:
    """Place at which a rank of a trainer runs."""

    host: str
    """Address of its machine, as other machines reach it."""
    is_encrypted: bool
    """True if the cluster encrypts what its processes on several machines send each other."""


@frozen
class RankGroup:
    """The ranks of a trainer, as the first of them sees the others."""

    others: tuple[ActorHandle, ...]
    hosts: tuple[str, ...]
    """Address of the machine of each rank, the first one included."""
    lives: tuple[str, ...]
    """Incarnation of each rank, the first one included."""


class TrainerRank:
    """Actor with a model, an optimizer and a share of each batch; all ranks of a trainer do the same updates.

    Args:
        model: whose weights it begins with.
        settings: of the trainer.
        threads: of the computation; None: as many as torch takes.
        dump_directory: for a batch with which updates fail; None: a new directory for temporary files.
        own: the user's trainer, which takes the place of the one of the settings; None: there is none.
        ranks: processes of the trainer.
        device: ``cpu`` or ``cuda``.
        reference: the `ReferenceProcess`; None: the reference is here.
    """

    def __init__(
        self,
        model: ModelSpec,
        settings: GRPO,
        threads: int | None = None,
        dump_directory: Path | None = None,
        own: BaseTrainer | None = None,
        ranks: int = 1,
        device: str = "cpu",
        reference: ActorHandle | None = None,
    ) -> None:
        self._ranks, self._is_connected, self._device = ranks, False, device
        self._reference: Any = reference
        self._tracker, self._posts = ActivityTracker(), PostQueue()
        self._at_work = trio.Lock()
        """Held by the one thread that uses the trainer: a call whose caller was lost may not have ended."""
        # The thresholds stay: garbage of an update may have tensors of the size of the model.
        with loading(thresholds=None):
            self._trainer = self._load(model, settings, threads, dump_directory, own)

    def _load(
        self,
        model: ModelSpec,
        settings: GRPO,
        threads: int | None,
        dump_directory: Path | None,
        own: BaseTrainer | None,
    ) -> Any:
        # Torch is loaded here, in the trainer's process, and not where this actor is created.
        from fray.rl.tensors.kl import remote_reference
        from fray.rl.tensors.language_model import hide_progress, load_model, set_threads
        from fray.rl.tensors.policy_trainer import PolicyTrainer
        from fray.rl.tensors.ranks import Ranks

        hide_progress()
        if threads is not None:
            set_threads(threads)
        ranks = Ranks() if self._ranks > 1 else None

        def policy(settings: GRPO) -> PolicyTrainer:
            # In float32, whatever type the forward pass has: an update of a weight in bfloat16 is lost in its rounding.
            return PolicyTrainer(
                load_model(model, device=self._device),
                settings,
                ranks=ranks,
                dump_directory=dump_directory,
                reference=None if self._reference is None else remote_reference(self._ask_reference),
            )

        if own is None:
            return policy(settings)
        own.set_policy(policy)
        self._tracker.experiment_logger.elsewhere = self._posts.post
        own.set_activity_tracker(ActivityTrackerProxy(self._tracker))
        if isinstance(own, SelfHostedTrainer):
            own.world_size = self._ranks
        own.initialize_workers()
        return _OwnTrainer(own)

    async def ping(self) -> None:
        """Return: the process answers, whatever its training thread does. For health checks."""

    async def place(self) -> RankPlace:
        """Return where it runs.

        Raises:
            InvalidRequest: other ranks run in this process, too.
        """
        if not has_own_process():
            raise InvalidRequest(
                "trainer_ranks above 1 need a process each, and this cluster runs all in one; expected 'machine', or "
                "a controller with nodes"
            )
        return RankPlace(current_job().host, not is_insecure(current().address))

    async def wait_for_preemption(self) -> None:
        """Return when the cluster has given notice that it ends this process, such as with its machine."""
        await wait_for_preemption()

    async def replace(self, incarnation: str, reason: str) -> None:
        """End the process, so that it is started again, unless it is another incarnation already."""
        if current_actor().incarnation == incarnation:
            current_actor().fail(RankLost(reason))

    async def join(self, meeting: Any, index: int, host: str) -> None:
        """Connect with the other ranks at the place that the first one opened.

        Args:
            meeting: `fray.rl.tensors.ranks.Meeting`, or its address.
            index: number of this rank.
            host: address of this machine.

        Raises:
            RankLost: the others did not come, or this rank belongs to others that were lost.
        """
        from fray.rl.tensors.ranks import connect

        if self._is_connected:
            raise RankLost(f"rank {index} of the trainer belongs to ranks that were replaced")
        self._is_connected = True
        await self._in_thread(connect, meeting, index, self._ranks, host, self._device)

    async def resume(self, directory: Location | None) -> None:
        """Begin with the weights of the model, or continue from a checkpoint, as all ranks do."""
        await self._in_thread(self._continue_from, directory)

    async def update(self, batch: TrainingBatch) -> None:
        """Do the share of this rank in an update."""
        self._tracker.set_training_step(batch.number)
        await self._in_thread(self._trainer.update, _trajectories_of(batch))
        self._posts.fetch()  # the first rank has the same

    def _continue_from(self, location: Location | None) -> None:
        if location is not None:
            with directory_to_read(location) as directory:
                self._trainer.load(directory)
        self._trainer.check_ranks()

    def _ask_reference(self, ids: Any, mask: Any) -> Any:
        """Return logprobs by the reference; on the thread of an update, which waits while the reference is restarted.

        Raises:
            DeadlineExceeded: it has not answered within `REFERENCE_S`.
        """
        ask = self._reference.logprobs.options(idempotent=True, timeout_s=REFERENCE_S)
        return trio.from_thread.run(ask, ids, mask)

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        async with self._at_work:
            # With ranks, the thread may wait for one that has ended: the end of this process must not wait for it.
            return await trio.to_thread.run_sync(work, *arguments, abandon_on_cancel=self._ranks > 1)


class TrainerProcess(TrainerRank):
    """Actor that trains a policy: the only rank of a trainer, or the first.

    Args:
        coordinator: of the run.
        rank: what `TrainerRank` takes.
    """

    def __init__(self, coordinator: ActorHandle, *rank: Any) -> None:
        super().__init__(*rank)
        self._coordinator, self._line = coordinator, 0
        self._is_started = False
        self._others: tuple[ActorHandle, ...] = ()
        self._members: tuple[str, ...] = (current_actor().incarnation,)
        self._tasks = ActorTasks()
        self._serial = 0
        self._update: ActorTask[TrainedStep | None] | None = None
        """The update under way, or the last one until the controller has its result."""
        self._published: dict[VersionName, PublishedWeights | None] = {}

    async def __fray_cleanup__(self) -> None:
        await self._tasks.aclose()

    async def standing(self) -> TrainerStanding:
        """Return what a controller needs to take over the trainer."""
        return TrainerStanding(self._line if self._is_started else None, self._members, dict(self._published))

    async def start(self, line: int, directory: Location | None, group: RankGroup | None = None) -> None:
        """Begin with the weights of the model, or continue from a checkpoint; an update under way is lost.

        Args:
            line: incarnation of the trainer, as in the names of the versions that it makes.
            directory: that `save` wrote.
            group: all ranks; None: this is the only one.

        Raises:
            RankLost, ActorDied: a rank has ended.
            FrayError: the ranks do not connect.
        """
        self._is_started, self._line = False, line
        if self._update is not None:
            await self._update.cancel()
        self._update, self._serial = None, 0
        await self._release(())
        if group is not None:
            self._others, self._members = group.others, group.lives
            with trio.move_on_after(CONNECT_S) as patience:
                await self._connect(group.hosts)
            if patience.cancelled_caught:
                raise FrayError(
                    f"the ranks of the trainer, on {', '.join(sorted(set(group.hosts)))}, did not connect within "
                    f"{CONNECT_S:g} s: each machine must reach the TCP ports of the others"
                )
        await self._with_others("resume", directory, partial(self._continue_from, directory))
        self._is_started = True

    async def _connect(self, hosts: Sequence[str]) -> None:
        from fray.rl.tensors.ranks import Meeting

        with TemporaryDirectory(prefix="fray-rl-") as scratch:
            is_one_machine = len(set(hosts)) == 1
            meeting = Meeting(Path(scratch), None if is_one_machine else hosts[0], self._ranks)
            with _one_error():
                async with trio.open_nursery() as nursery:
                    for index, (rank, host) in enumerate(zip(self._others, hosts[1:], strict=True), 1):
                        nursery.start_soon(rank.join, meeting.address, index, host)
                    await self.join(meeting, 0, hosts[0])

    def _check_started(self) -> None:
        """Check that this process is the trainer.

        Raises:
            RankLost: it was not started. A call that has not reached its predecessor before that was lost is delivered
                here, and would train, publish or save the model as it is without an update.
        """
        if not self._is_started:
            raise RankLost("the trainer was lost, and this process has not taken its place yet")

    async def _with_others(self, method: str, argument: Any, work: Callable[[], T]) -> T:
        """Call a method of the other ranks, and do the work of this one meanwhile; return its result.

        Raises:
            RankLost, ActorDied: a rank has ended.
            BaseException: the error of a rank; where all have it, that of this one.
        """

        async def call(rank: ActorHandle) -> None:
            try:
                await getattr(rank, method)(argument)
            except ActorDied:
                raise
            except Exception:
                # All ranks compute the same: this one is about to have the same error, and says more of it.
                await trio.sleep(SAME_ERROR_S)
                raise

        with _one_error():
            async with trio.open_nursery() as nursery:
                for rank in self._others:
                    nursery.start_soon(call, rank)
                found = await self._in_thread(work)
        return found

    async def train_next(self, handled: int | None = None) -> TrainedStep | None:
        """Do the next update; wait for its batch. None if there will be none.

        The update continues when this call is cancelled, and its result is returned to each call until it is handled:
        no further update changes the weights before.

        Args:
            handled: serial number of the last result that the caller has handled, 0 before the first. None: the caller
                has taken over from another one, and gets a result that it may not have handled.

        Raises:
            RankLost, ActorDied: a rank has ended, or this process was not started.
        """
        self._check_started()
        if self._update is None or handled == self._serial:
            self._serial += 1
            self._update = self._tasks.start(partial(self._train_next, self._serial))
        return await self._update.wait()

    async def _train_next(self, serial: int) -> TrainedStep | None:
        began = trio.current_time()
        batch: TrainingBatch | None = await self._coordinator.next_batch.options(idempotent=True)(self._line)
        wait_s = trio.current_time() - began
        if batch is None:
            return None
        trajectories = _trajectories_of(batch)
        self._tracker.set_training_step(batch.number)
        metrics = await self._with_others("update", batch, partial(self._trainer.update, trajectories))
        metrics |= {"wait_s": wait_s, **ages_of(trajectories, batch.number - 1)}
        # A batch without anything to learn from is an update all the same: a run that has learned all comes to its end.
        skipped = NOT_FINITE if metrics["not_finite"] else ""
        without_effect = NOTHING_TO_LEARN if metrics.get("skipped") else ""
        return TrainedStep(batch.number, self._line, serial, metrics, skipped, without_effect, self._posts.fetch())

    async def wait_for_last_validation(self) -> None:
        """Return when no further version is validated; servers may need the weights of this process until then.

        Raises:
            RankLost, ActorDied: a rank has ended, or this process was not started.
        """
        self._check_started()
        await self._coordinator.wait_for_last_validation.options(idempotent=True)()

    async def save(self, directory: Location) -> None:
        """Write the model, and what is needed to continue, into a directory. Raises RankLost: it was not started."""
        self._check_started()
        async with self._at_work:
            await trio.to_thread.run_sync(self._save, directory)

    def _save(self, location: Location) -> None:
        with directory_to_write(location) as directory:
            self._trainer.save(directory)

    async def publish(
        self, version: VersionName, path: Path | None = None, kept: Sequence[VersionName] = ()
    ) -> PublishedWeights | None:
        """Return the weights as they are now: a reference to shared memory of this process, or to a file.

        None if the trainer has no weights: servers keep those that they have.

        Args:
            version: their name; those of a version that was published already are returned again.
            path: file of safetensors to write. Default: shared memory, and where there is no room for it, memory of
                this process that readers copy.
            kept: versions that servers may load beside it; others are released.

        Raises:
            RankLost: it was not started.
        """
        self._check_started()
        if version not in self._published:
            async with self._at_work:
                self._published[version] = await self._publish(path)
        await self._release((version, *kept))
        return self._published[version]

    async def _release(self, kept: Sequence[VersionName]) -> None:
        """Release published weights, except for some versions."""
        for version in self._published.keys() - set(kept):
            weights = self._published.pop(version)
            if weights is not None:
                await weights.content.release()

    async def _publish(self, path: Path | None) -> PublishedWeights | None:
        # In a thread: that of a service is downloaded.
        table: WeightTable | None = await trio.to_thread.run_sync(lambda: self._trainer.table)
        if table is None:
            return None
        if path is not None:
            written = await trio.to_thread.run_sync(self._trainer.write_weight_file, path)
            return PublishedWeights(written, WeightFile(path))
        try:
            buffer = await allocate(table.total_bytes)
        except MemoryError:
            buffer = memoryview(bytearray(table.total_bytes))
        await trio.to_thread.run_sync(self._trainer.write_weights, buffer)
        return PublishedWeights(table, await put(buffer))

    async def send_weights(
        self, address: WeightAddress, version: VersionName, weights: PublishedWeights, mode: str = "keep"
    ) -> None:
        """Post weights that `publish` returned to a server; arguments as of `post_weights`.

        Raises:
            ObjectLost: they are gone: newer ones have replaced them.
            ConnectionError, ValueError: as `post_weights`.
        """
        # Here: the trainer of a run that needs it is the only one to load an HTTP client.
        from fray.rl.inference.weight_transfer import post_weights

        await post_weights(address, version, weights.table, await weights.content, mode)


@contextmanager
def _one_error() -> Iterator[None]:
    """Raise one error of a group: when a rank ends, it is lost to its caller and to the other ranks at once."""
    try:
        yield
    except ExceptionGroup as group:
        error = first_error(group)
        raise error from error.__cause__


def _trajectories_of(batch: TrainingBatch) -> list[Trajectory]:
    return [one for group in batch.groups for content in group for one in loads(content)]


class _OwnTrainer:
    """The user's trainer, with the methods of `PolicyTrainer`."""

    def __init__(self, trainer: BaseTrainer) -> None:
        self._trainer = trainer
        self.write_weights, self.write_weight_file = trainer.write_weights, trainer.write_weight_file
        self.save, self.load = trainer.save, trainer.load
        self.check_ranks = trainer.check_ranks

    @property
    def table(self) -> WeightTable | None:
        return self._trainer.weight_table

    def update(self, trajectories: list[Trajectory]) -> dict[str, float]:
        """Train; return metrics as numbers. Raises TypeError for metrics of another kind."""
        name = f"{type(self._trainer).__name__}.train"
        found = self._trainer.train(trajectories)
        if not isinstance(found, Mapping):
            raise TypeError(f"{name} returned {type(found).__name__}; expected a dict of metrics, numbers by name")
        metrics = {**mean_reward(trajectories), "not_finite": 0.0}
        for key, value in found.items():
            try:
                metrics[str(key)] = float(value)
            except (TypeError, ValueError):
                raise TypeError(f"{name} returned {key!r}: {value!r}; expected numbers") from None
        return metrics


def ages_of(trajectories: Iterable[Mapping[str, Any]], current: int) -> dict[str, float]:
    """Return the share of tokens by age: ``age/0`` are those of the current version, ``age/1`` of the one before it.

    Args:
        current: number of updates that the trainer's weights have.
    """
    counts: Counter[int] = Counter()
    for one in trajectories:
        for version, tokens in one.get("versions") or ():
            counts[current - version.number] += tokens
    total = counts.total()
    return {f"age/{age}": count / total for age, count in sorted(counts.items())}
