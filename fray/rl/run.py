"""`Run`: a reinforcement learning run, from its settings to its end."""

from __future__ import annotations

import inspect
import math
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar, get_args

import trio
from attrs import define, evolve, field, fields

from fray.api.cluster import Cluster
from fray.api.jobs.job import Job
from fray.api.open import open_cluster
from fray.errors import FrayError, InvalidRequest
from fray.model.resources import ResourceConfig
from fray.model.text import near_text
from fray.rl.checkpoint import check_resumable
from fray.rl.controller import RunController
from fray.rl.core.failures import OnError
from fray.rl.core.run_record import RunPlan, StalePolicy
from fray.rl.core.tasks import TaskOrder
from fray.rl.core.validation import ValidationPlan
from fray.rl.core.versions import SyncMode
from fray.rl.data import Data, fingerprint_of, load_rows
from fray.rl.http_access.access import check_host
from fray.rl.inference.client import sampling_of
from fray.rl.inference.decoding import InterruptMode
from fray.rl.inference.http_settings import HttpPort
from fray.rl.messages import RunStatus
from fray.rl.model_spec import ModelSpec, check_model
from fray.rl.nexrl.experiment_posts import ExperimentPost
from fray.rl.nexrl_types import DEFAULT_MODEL_TAG
from fray.rl.recipe.typed import check_arguments
from fray.rl.records.console_lines import is_validation
from fray.rl.records.run_files import begin_output, read_rows, read_state
from fray.rl.records.run_log import LINE_PREFIX, RunResult, StepLog
from fray.rl.records.run_owner import OutputLock
from fray.rl.records.trackers import check_trackers
from fray.rl.rollout.groups import check_groups
from fray.rl.rollout.process import Episode, EpisodePlan
from fray.rl.rollout_worker import BaseRolloutWorker, WorkerEpisode
from fray.rl.run_cluster import check_model_of_cluster, check_model_of_spec, spec_of_run
from fray.rl.run_job import acquire, digest, follow_living, submit, texts_of
from fray.rl.run_output import check_shared, check_url, is_url, output_of
from fray.rl.run_parts import DEVICES, RunParts, check_resources, device_of
from fray.rl.tokenizers import check_lengths
from fray.rl.train.batch_advantages import needed_keys
from fray.rl.train.checks import names_similar_arguments
from fray.rl.train.settings import GRPO
from fray.rl.trainer.base_trainer import BaseTrainer
from fray.rl.trainer_gang import check_ranks, check_reference
from fray.rl.weights.published import WeightSync
from fray.tracebacks import single_errors

E = TypeVar("E", bound=Enum)
COLLECTED_ROWS = 16
"""Rows whose samples are collected together, where nothing is trained."""
WORKERS_PER_PROCESS = 64
SLOTS = 512
"""Completions that a server decodes at once."""
STOP_S = 5.0
"""Seconds that the update under way, and its checkpoint, have after Ctrl-C; then processes have as long to end."""
NOT_COMPARED = ("on_step", "on_validation", "on_post", "on_end", "progress", "env_vars")
"""Arguments of `Run` that may differ when a run is started again while it lives."""


@names_similar_arguments
@define(kw_only=True)
class Run:
    """A run: rollouts of tasks by a model, and training of that model with their rewards.

    Args:
        model: a name or directory of Hugging Face, or `TinyLlama`.
        data: a ``.jsonl`` or ``.parquet`` file, or an iterable of dicts: one task each.
        rollout: ``async def solve(task, llm)``: rolls out one episode and returns `fray.rl.score`; with
            ``episode="group"`` a list of ``group_size`` of them. Or a class of `BaseRolloutWorker`; with its
            configuration: ``WorkerEpisode(MyWorker, config)``.
        trainer: settings; a `BaseTrainer` of yours, or its class, which is called with `GRPO()`; None: samples are only
            collected, each row once.
        trainer_ranks: processes of the trainer, each of which computes a share of every batch. Default 1.
        unencrypted_ranks: whether they may be on several machines of a cluster with TLS, although what they send each
            other is not encrypted. Default False: the run ends before it trains.
        reference: where the frozen model of a KL penalty is: ``"trainer"`` (default): in each process of the trainer;
            ``"server"``: in a process of its own.
        rollout_workers: episodes at once. Default 64.
        rollout_processes: processes among which they are spread. Default: one for each 64.
        inference_servers: number of servers. Default 1.
        inference_port: HTTP port of the first server, with OpenAI's API; the next ones have the ports after it. Default
            None: they have none. See docs/rl-agents.md.
        inference_key: key for the routes that pause servers and load weights. Default None: they are off.
        http_host: where those ports and `agent_url` are reached. Default ``"127.0.0.1"``: on the same machine.
            ``"auto"``: at the address of each machine, with TLS and a key, which are in ``output/http``; a name or
            address of this machine: as that.
        max_length: tokens of a prompt and its response together that servers allow. Default None: those of the model.
        max_prompt_length: tokens of the first prompt of an episode; a task with a longer one is dropped, and counted.
            Default None: as many as leave room for a response.
        sync: ``"sync"`` (default), ``"batch-async"`` or ``"fully-async"``: see docs/rl-internals.md.
        staleness_threshold: updates by which a token may be behind when it is trained. Default 1; not used in ``sync``.
        stale: what happens to groups that are older: ``"requeue"`` (default), ``"drop"``, or ``"keep"``.
        episode: ``"sample"`` (default) or ``"group"``.
        samples_per_row: rollouts of each row. Default: the size of a group; 1 where nothing is trained. With a trainer,
            another number needs ``group_keys``.
        group_keys: keys of trajectories, or of their rows, by which samples are grouped and compared, such as
            ``["user", "session"]``. Default none: those of a row are a group.
        model_tag: of the trained model. Trajectories with another ``model_tag`` are left out, and counted. Default
            ``"default"``.
        rollout_timeout_s: limit of one episode. Default 600.
        max_attempts: attempts of an episode that raises or does not end. Default 3.
        dynamic_sampling: drop groups with equal rewards, which have nothing to learn from, and roll out others in their
            place. Default False.
        max_replaced_groups: most groups that are dropped so before an update; more are trained as they are. Default 64.
        on_error: what ends the run: ``"stop_on_critical"`` (default): what it cannot repair, such as a whole batch of
            which every episode failed; ``"stop_on_error"``: the first episode that is out of attempts, too;
            ``"continue"``: neither.
        weight_sync: ``"memory"`` (default): the trainer publishes weights in shared memory; ``"disk"``: as files in
            ``output``; ``"network"``: it posts safetensors to servers over HTTP; ``"none"``: servers keep those of the
            model, for ``sync="fully-async", stale="keep"``.
        interrupt: what happens to requests in flight when a server loads weights: ``"keep"`` (default): they continue
            with them; ``"wait"``: they finish first, and new ones wait; ``"abort"``: they begin again with them.
        freeze_for_weight_sync: whether new requests wait for servers that have the newest weights, once those are
            published. Default False: they are answered by what a server has.
        transfer_s: seconds within which a server has to load weights; later it gets no requests until it has. With
            ``interrupt="wait"`` the requests that finish first count. Default 120.
        keep_batch_order: roll out nothing beyond the loaded batch until the next weights are in place.
        seed: of the order of the data and of sampling. Default 0.
        shuffle: whether the rows are shuffled, in another order in each epoch. Default True.
        output: directory for metrics, rollouts and checkpoints, which all machines of the run can write, or a URL of a
            storage (``"s3://bucket/run"``, with ``pip install 'fray[storage]'``). A run whose output has a checkpoint
            continues from it. Default None: nothing is written, and a run that loses its
            trainer begins again.
        save_every: updates between two checkpoints; the last update is saved, too. Default 50.
        keep_checkpoints: keep all checkpoints. Default False: the last one.
        validation_data: as ``data``; its rows are validated with, and never trained. Default None: no validation.
        validate_freq: updates between two validations. Default None: none after the first.
        validate_before: validate the model before the first update. Default False.
        validation_samples_per_row: default 1; with ``episode="group"`` the size of a group.
        validation_sampling: replaces what episodes ask for in their requests while they validate. Default
            ``{"temperature": 0.0}``, the most probable tokens.
        threads: of torch in each server and in the trainer. Default: 1 for a `TinyLlama`, else as torch takes.
        device: on which servers and trainer compute: ``"cpu"`` or ``"cuda"``, the first GPU that a process sees.
            Default: ``"cuda"`` in processes that reserve GPUs, else ``"cpu"``. docs/rl.md has one GPU that they share.
        deterministic: whether a run in ``sync`` that is interrupted and continues has, bit for bit, the weights of one
            that is not: each completion is decoded alone, and torch has one thread. Slow. Default False.
        liveness_s: seconds without an answer after which a process (server, trainer, rollouts, data) is taken for
            frozen, ended and started again; a server gets no requests after a quarter of it, at most 5 s. Code that
            blocks the loop of a rollout process for longer is taken for frozen, too. The start of a process, in which a
            model is loaded, may take ten times as long. Default 60.
        min_servers: inference servers that must answer; with fewer, no task is given out. Default 1.
        name: by which `fray rl top` finds the run. Default: that of the output directory.
        env_vars: variables of the environment of all its processes. Default none beside those that they have anyway.
        trackers: ``"tensorboard"`` (in the output directory), ``"wandb"``, ``"trackio"``, ``"mlflow"``: packages that
            get the metrics of each update, beside the console and ``metrics.jsonl``. Default none.
        resources: what each ``"trainer"``, ``"server"`` and ``"rollout"`` process reserves, the ``"reference"`` that is
            a server, and the ``"controller"`` of a run that is a job of its own. Default nothing.
        on_step: called with the metrics of each update, in this process or in that of the run's job.
        on_validation: called there with the metrics of each validation.
        on_post: called there with each post of a worker or trainer (`ActivityTracker.experiment_logger_post`), which is
            then not for ``trackers``.
        on_end: called there when the run has ended, also by an error, and when its job is about to be started again.
        progress: whether a line for each update is printed to standard error. Default True.

    Raises:
        InvalidRequest: a setting is invalid; nothing was started.
        TypeError: there is no argument of a name; the message has the nearest ones.
    """

    model: ModelSpec
    data: Data
    rollout: Episode | type[BaseRolloutWorker]
    trainer: GRPO | BaseTrainer | type[BaseTrainer] | None
    trainer_ranks: int = 1
    unencrypted_ranks: bool = False
    reference: str = "trainer"
    rollout_workers: int = 64
    rollout_processes: int | None = None
    inference_servers: int = 1
    inference_port: int | None = None
    inference_key: str | None = field(default=None, repr=False)
    http_host: str = "127.0.0.1"
    max_length: int | None = None
    max_prompt_length: int | None = None
    sync: str = "sync"
    staleness_threshold: int = 1
    stale: str = "requeue"
    episode: str = "sample"
    samples_per_row: int | None = None
    group_keys: Sequence[str] = ()
    model_tag: str = DEFAULT_MODEL_TAG
    rollout_timeout_s: float = 600.0
    max_attempts: int = 3
    dynamic_sampling: bool = False
    max_replaced_groups: int = 64
    on_error: str = "stop_on_critical"
    weight_sync: str = "memory"
    interrupt: str = "keep"
    freeze_for_weight_sync: bool = False
    transfer_s: float = 120.0
    keep_batch_order: bool = False
    seed: int = 0
    shuffle: bool = True
    output: str | os.PathLike[str] | None = None
    save_every: int = 50
    keep_checkpoints: bool = False
    validation_data: Data | None = None
    validate_freq: int | None = None
    validate_before: bool = False
    validation_samples_per_row: int | None = None
    validation_sampling: Mapping[str, Any] = field(factory=lambda: {"temperature": 0.0})
    threads: int | None = None
    device: str | None = None
    deterministic: bool = False
    liveness_s: float = 60.0
    min_servers: int = 1
    name: str | None = None
    env_vars: Mapping[str, str] = field(factory=dict, repr=False)
    trackers: Sequence[str] = ()
    resources: Mapping[str, ResourceConfig] = field(factory=dict)
    on_step: Callable[[dict[str, float]], object] | None = None
    on_validation: Callable[[dict[str, float]], object] | None = None
    on_post: Callable[[ExperimentPost], object] | None = None
    on_end: Callable[[], object] | None = None
    progress: bool = True
    parts: RunParts = field(init=False)
    _controller: RunController | None = field(init=False, default=None, repr=False, eq=False)
    _ended: RunStatus | None = field(init=False, default=None, repr=False, eq=False)

    def __attrs_post_init__(self) -> None:
        self.parts = _parts_of(self)

    async def main(self) -> RunResult:
        """Run on the cluster of ``FRAY_CLUSTER_SPEC`` or ``fray login``; default: processes of this machine.

        Ctrl-C and SIGTERM end it after the update under way, which is saved, within 10 s; the second one ends it at
        once. If the run of this output lives already, as a job or in another process, that one is followed to its end;
        Ctrl-C leaves it running.

        Raises:
            InvalidRequest: the run that lives already has other settings; or the cluster is made on this machine, and
                the directory of the model is missing.
            KeyboardInterrupt: it was ended by Ctrl-C.
            SystemExit: by SIGTERM.
            BaseException: as `run_on`.
            FrayError: the run that was followed has failed.
        """
        spec = spec_of_run()
        check_model_of_spec(self.parts.model, spec)
        async with open_cluster(spec) as cluster:
            with OutputLock(self.parts.output) as lock:
                if await follow_living(cluster, self.parts, lock, self._say):
                    return self._result_of_other()
                result = RunResult()
                log = StepLog(result, self)
                with log:
                    await self._run_to_end(cluster, log, result, handle_signals=True)
                return result

    async def submit(self, cluster: Cluster) -> Job[RunStatus]:
        """Launch the run as a job of its own, which outlives this driver, and whose name is that of the run.

        The cluster starts the job again when its process or machine is lost, and it continues from the last checkpoint.
        If a job of this run lives already, it is returned; ``fray rl stop`` ends it.

        Args:
            cluster: with machines that have the output directory.

        Returns:
            the job; its result is the last status of the run.

        Raises:
            InvalidRequest: there is no output, its checkpoint is of other data or another model, or the run lives with
                other settings, or outside of jobs; or another job has the name.
        """
        check_shared(self.parts.url)
        self._check_output()
        await check_model_of_cluster(self.parts.model, cluster)
        return await submit(self, cluster)

    def _say(self, text: str) -> None:
        if self.progress:
            print(text if text.startswith(LINE_PREFIX) else f"{LINE_PREFIX}{text}", file=sys.stderr, flush=True)

    def _result_of_other(self) -> RunResult:
        """Return the result of a run that was followed, from its files. Raises FrayError if it failed."""
        assert self.parts.output is not None
        status = read_state(self.parts.output)
        if status["state"] == "failed":
            raise FrayError(f"run {self.parts.name} failed: {status['error']}")
        result = RunResult()
        for row in read_rows(self.parts.output):
            (result.validations if is_validation(row) else result.steps).append(row)
        return result

    async def status(self) -> RunStatus | None:
        """Return what the run does, with the one line about what it waits for: ``waits_for``.

        After its end it is the last status; None if it has not begun in this process: ``fray rl top`` shows a run of
        another one, such as that of its job.
        """
        return self._ended if self._controller is None else await self._controller.status()

    async def add_item(self, item: Mapping[str, Any]) -> None:
        """Add a row to the data of a run that is going in this process, behind what is waiting now.

        It is rolled out once a group, before rows that are not loaded yet. A run that is started again, by its cluster
        or by you, has it if a checkpoint or journal in ``output`` has.

        Raises:
            InvalidRequest: it is not a dict, lacks a key that the workers need, the run does not work in this process,
                or no further update will be done.
        """
        await self._add(item, in_front=False)

    async def add_item_back(self, item: Mapping[str, Any]) -> None:
        """Add a row as `add_item`."""
        await self._add(item, in_front=False)

    async def add_item_front(self, item: Mapping[str, Any]) -> None:
        """Add a row as `add_item`, in front of what is waiting; rows that are added so keep their order."""
        await self._add(item, in_front=True)

    async def _add(self, item: Mapping[str, Any], in_front: bool) -> None:
        if self._controller is None:
            raise InvalidRequest(f"no row can be added: run {self.parts.name} does not work in this process")
        rows = load_rows([item], "item")
        if isinstance(rollout := self.parts.episodes.rollout, WorkerEpisode):
            rollout.check_rows(rows, "item")
        await self._controller.add_rows(rows, in_front)

    async def run_on(self, cluster: Cluster, *, handle_signals: bool = False, job: str = "") -> RunResult:
        """Run on an open cluster. All that it starts ends with this call.

        Args:
            handle_signals: end at Ctrl-C and SIGTERM as `main` does. Default False: they are the program's.
            job: id of the job of this process: it owns what the run starts, which works on when this process is lost,
                and the same call in the next one takes it over. Default: all belongs to this call.

        Raises:
            KeyboardInterrupt, SystemExit: with ``handle_signals``, as `main`.
            InvalidRequest: the output has a checkpoint of other data, another model, or groups of another size; it is
                the output of a run that lives; or all machines are this one, and the model's directory is missing.
            BaseException: the error of the trainer, or of a constructor.
            EpisodesFailed: episodes failed in a way at which ``on_error`` ends the run.
            ActorDied: a part of the run failed more often than it may be restarted.
        """
        with OutputLock(self.parts.output) as lock:
            await acquire(lock, self.parts, self._say)
            result = RunResult()
            with StepLog(result, self) as log:
                await self._run_to_end(cluster, log, result, handle_signals, job)
            return result

    async def _run_to_end(
        self, cluster: Cluster, log: StepLog, result: RunResult, handle_signals: bool, job: str = ""
    ) -> None:
        controller = await self._make_controller(cluster, log, job)
        self._controller = controller
        try:
            work = _run_until_signal(controller, log) if handle_signals else controller.run()
            result.status = self._ended = await work
        finally:
            self._controller = None

    def _check_output(self) -> bool:
        """Return whether the output has a checkpoint. Raises InvalidRequest if the run cannot continue from it."""
        store = self.parts.checkpoints
        checkpoint = None if store is None else store.latest()
        if checkpoint is not None:
            check_resumable(checkpoint, self.parts.facts)
        return checkpoint is not None

    async def _make_controller(self, cluster: Cluster, log: StepLog, job: str) -> RunController:
        """Return the controller, once model and output have been checked."""
        await check_model_of_cluster(self.parts.model, cluster)
        parts, store = self.parts, self.parts.checkpoints
        if store is not None:
            for path in await trio.to_thread.run_sync(store.unfinished):
                log.note(f"ignores {path}: it was not finished")
            continues = await trio.to_thread.run_sync(self._check_output)
            await trio.to_thread.run_sync(begin_output, parts.output, parts.url, continues)
        return RunController(cluster, self.parts, log, job)


async def _run_until_signal(controller: RunController, log: StepLog) -> RunStatus | None:
    """Run; at SIGINT or SIGTERM end after the update under way. Raises as `Run.main`."""
    if threading.current_thread() is not threading.main_thread():
        return await controller.run()
    received: list[int] = []

    async def end_at_signal(signals: AsyncIterator[int], scope: trio.CancelScope) -> None:
        received.append(await anext(signals))
        log.note(f"ends after the update under way (at most {STOP_S:g} s); once more: ends at once")
        with trio.move_on_after(STOP_S):
            async with trio.open_nursery() as stopping:
                stopping.start_soon(controller.stop)
                await anext(signals)
                stopping.cancel_scope.cancel()
        log.note("ends at once; the next start continues from the last checkpoint")
        scope.cancel()

    status: RunStatus | None = None
    # The handlers stay until the actors have ended: a signal must not interrupt that.
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals, single_errors():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(end_at_signal, signals, nursery.cancel_scope)
            status = await controller.run()
            nursery.cancel_scope.cancel()
    if signal.SIGTERM in received:
        raise SystemExit(128 + signal.SIGTERM)
    if received:
        raise KeyboardInterrupt
    return status


def _check_settings(run: Run) -> None:
    """Check what no other part of a run checks. Raises InvalidRequest."""
    check_arguments(run, "rl.Run")
    check_model(run.model)
    if not _is_worker(run.rollout) and not inspect.iscoroutinefunction(run.rollout):
        raise InvalidRequest(
            f"invalid rollout {run.rollout!r}: expected an async function, async def solve(task, llm), "
            "or a class of BaseRolloutWorker"
        )
    if _is_worker(run.rollout) and run.episode == "group":
        raise InvalidRequest("episode='group' with rollout workers: a step is one sample; expected episode='sample'")
    counts = ("rollout_workers", "inference_servers", "min_servers", "samples_per_row", "max_attempts", "save_every")
    for name in (*counts, "threads"):
        if (value := getattr(run, name)) is not None and not value >= 1:
            raise InvalidRequest(f"invalid {name} {value!r}: expected 1 or more")
    if run.staleness_threshold < 0:
        raise InvalidRequest(f"invalid staleness_threshold {run.staleness_threshold}: expected 0 or more")
    if run.rollout_processes is not None and not 1 <= run.rollout_processes <= run.rollout_workers:
        text = f"expected 1 to rollout_workers ({run.rollout_workers})"
        raise InvalidRequest(f"invalid rollout_processes {run.rollout_processes!r}: {text}")
    if is_url(run.output):
        check_url(str(run.output), is_training=run.trainer is not None, weight_sync=run.weight_sync)
    if run.deterministic and (run.sync != "sync" or run.threads not in (None, 1)):
        raise InvalidRequest("invalid deterministic True: expected sync='sync' and threads=1 with it")
    if run.device is not None:
        _choice("device", run.device, DEVICES)
    if run.min_servers > run.inference_servers:
        text = f"expected 1 to inference_servers ({run.inference_servers})"
        raise InvalidRequest(f"invalid min_servers {run.min_servers!r}: {text}")
    for name in ("liveness_s", "transfer_s", "rollout_timeout_s"):
        if not getattr(run, name) > 0:
            raise InvalidRequest(f"invalid {name} {getattr(run, name)!r}: expected seconds above 0")
    _choice("interrupt", run.interrupt, get_args(InterruptMode))
    port = run.inference_port
    if port is not None and not 1 <= port <= 65_536 - run.inference_servers:
        text = f"expected the first of {run.inference_servers} ports, such as 8000, or None"
        raise InvalidRequest(f"invalid inference_port {port!r}: {text}")
    if run.inference_key is not None and port is None:
        raise InvalidRequest("inference_key is for the HTTP ports of servers: expected inference_port=8000, too")
    check_host("http_host", run.http_host)
    check_resources(run.resources)
    check_lengths(run.model, run.max_length, run.max_prompt_length, run.validation_sampling)
    check_trackers(run.trackers, run.output)
    _choice("episode", run.episode, ("sample", "group"))
    way = _member(WeightSync, "weight_sync", run.weight_sync)
    if way is WeightSync.DISK and run.output is None:
        raise InvalidRequest("weight_sync='disk' needs a directory that trainer and servers have: write output='./out'")
    if way is WeightSync.NONE and (run.sync, run.stale) != ("fully-async", "keep"):
        text = "weight_sync='none' never gives servers newer weights, so rollouts become too old"
        raise InvalidRequest(f"{text}: write sync='fully-async', stale='keep'")
    _check_validation(run)


def _check_validation(run: Run) -> None:
    """Check the settings of validations. Raises InvalidRequest."""
    for name in ("validate_freq", "validation_samples_per_row"):
        value = getattr(run, name)
        if value is not None and not value >= 1:
            raise InvalidRequest(f"invalid {name} {value!r}: expected 1 or more, or None")
    is_any = run.validate_freq is not None or run.validate_before
    if run.validation_data is None and is_any:
        name = "validate_before" if run.validate_freq is None else "validate_freq"
        raise InvalidRequest(
            f"{name} without validation_data: expected validation_data=, a file or an iterable of rows"
        )
    if run.validation_data is not None and not is_any:
        raise InvalidRequest("validation_data is never used: expected validate_freq=50, or validate_before=True")
    if run.validation_data is not None and run.trainer is None:
        raise InvalidRequest("validation_data without a trainer: to score rows once, give them as data=")
    if "n" in run.validation_sampling:
        raise InvalidRequest("invalid validation_sampling: 'n' is the episode's; expected validation_samples_per_row=")
    try:
        sampling_of(run.validation_sampling)
    except ValueError as error:
        raise InvalidRequest(f"invalid validation_sampling: {error}") from None


def _validation_of(run: Run, rows: Sequence[Mapping[str, Any]], group_size: int) -> ValidationPlan | None:
    if not rows:
        return None
    is_group = run.episode == "group"
    samples = run.validation_samples_per_row or (group_size if is_group else 1)
    return ValidationPlan(len(rows), run.validate_freq, run.validate_before, samples, is_group)


def _is_worker(rollout: object) -> bool:
    is_class = isinstance(rollout, type) and issubclass(rollout, BaseRolloutWorker)
    return is_class or isinstance(rollout, WorkerEpisode)


def _episode_of(run: Run, rows: Sequence[dict[str, Any]], validation: Sequence[dict[str, Any]]) -> Episode:
    """Return the function of an episode; that of workers, with the keys that the trainer needs.

    Raises:
        InvalidRequest: workers cannot load what their configuration names, or rows lack keys that they need.
    """
    # A trainer of the user checks what it needs itself.
    needs = needed_keys(run.trainer) if isinstance(run.trainer, GRPO) else ()
    rollout = WorkerEpisode(run.rollout, {}) if isinstance(run.rollout, type) else run.rollout
    if not isinstance(rollout, WorkerEpisode):
        return rollout
    rollout.check(rows, validation)
    return rollout.needing(needs)


def _parts_of(run: Run) -> RunParts:
    _check_settings(run)
    mode = _member(SyncMode, "sync", run.sync)
    stale = _member(StalePolicy, "stale", run.stale)
    rows = load_rows(run.data)
    validation_rows = [] if run.validation_data is None else load_rows(run.validation_data, "validation_data")
    trainer, own = _trainer_of(run)
    check_ranks(run.trainer_ranks, trainer, own)
    check_reference(run.reference, trainer, own, run.resources)
    if trainer is None:
        groups, size, epochs = min(COLLECTED_ROWS, len(rows)), run.samples_per_row or 1, 1
    else:
        groups, size, epochs = trainer.groups, trainer.group_size, None
        trainer = _with_steps(trainer, len(rows) * (run.samples_per_row or size))
    keys = tuple(run.group_keys)
    check_groups(keys, run.episode, run.samples_per_row, None if trainer is None else size)
    repeats = run.samples_per_row or size
    order = TaskOrder(
        rows=len(rows),
        batch_rows=-(-groups * size // repeats),
        repeats=repeats,
        epochs=epochs,
        seed=run.seed if run.shuffle else None,
        whole_groups=run.episode == "group",
    )
    try:
        plan = RunPlan(
            order,
            batch_size=groups * size,
            mode=mode,
            threshold=run.staleness_threshold,
            keep_batch_order=run.keep_batch_order,
            stale=stale,
            max_attempts=run.max_attempts,
            drop_equal_rewards=run.dynamic_sampling,
            max_replaced_groups=run.max_replaced_groups,
            # An episode that is cancelled at its limit is delivered as failed: the lease is for processes that are
            # frozen or cut off.
            lease_s=run.rollout_timeout_s + 30.0,
            steps=None if trainer is None else trainer.steps,
            on_error=_member(OnError, "on_error", run.on_error),
            validation=_validation_of(run, validation_rows, size),
            keyed_group_size=size if keys else None,
        )
    except ValueError as error:
        raise InvalidRequest(str(error)) from None
    devices = {device_of(run.resources.get(part), run.device) for part in ("trainer", "reference", "server")}
    if run.deterministic and devices != {"cpu"}:
        raise InvalidRequest("invalid deterministic True: on GPUs sums have no fixed order; expected device='cpu'")
    output, url, name = output_of(run.output, run.name)
    processes = run.rollout_processes or -(-run.rollout_workers // WORKERS_PER_PROCESS)
    workers = -(-run.rollout_workers // processes)
    sampling = dict(run.validation_sampling)
    needs = None if trainer is None else needed_keys(trainer) if own is None else ()
    episodes = EpisodePlan(
        _episode_of(run, rows, validation_rows),
        *(run.model, workers, run.rollout_timeout_s, run.seed, sampling, needs, own is not None),
        max_prompt_length=run.max_prompt_length,
        model_tag=run.model_tag,
        group_keys=keys,
    )
    threads = run.threads or (None if isinstance(run.model, str) and not run.deterministic else 1)
    return RunParts(
        plan,
        rows,
        run.model,
        trainer,
        episodes,
        processes,
        run.inference_servers,
        http=None if run.inference_port is None else HttpPort(run.model, run.inference_port, key=run.inference_key),
        http_host=run.http_host,
        weight_sync=WeightSync(run.weight_sync),
        interrupt=run.interrupt,
        freezes=run.freeze_for_weight_sync,
        transfer_s=run.transfer_s,
        threads=threads,
        max_length=run.max_length,
        # What a row of a matrix product is rounded to depends on the number of rows: of those that decode together.
        slots=1 if run.deterministic else SLOTS,
        device=run.device,
        resources=dict(run.resources),
        output=output,
        url=url,
        name=name,
        env_vars=dict(run.env_vars),
        save_every=run.save_every,
        liveness_s=run.liveness_s,
        min_servers=run.min_servers,
        keep_checkpoints=run.keep_checkpoints,
        facts={
            "model": str(run.model),
            "data": fingerprint_of(rows),
            "rows": len(rows),
            "groups": groups,
            "group_size": size,
            # None as where older checkpoints have nothing.
            "group_keys": [*keys] or None,
            "samples_per_row": repeats if keys else None,
            "episode": run.episode,
            "seed": run.seed,
        },
        validation_rows=validation_rows,
        trainer_ranks=run.trainer_ranks,
        unencrypted_ranks=run.unencrypted_ranks,
        reference=run.reference,
        own_trainer=own,
        settings=_settings_of(run, rows, validation_rows),
    )


def _settings_of(run: Run, rows: Sequence[dict[str, Any]], validation: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return the settings as texts, without those in which a second start of the same run may differ."""
    given = {one.name: getattr(run, one.name) for one in fields(Run) if one.init and one.name not in NOT_COMPARED}
    key, trainer = run.inference_key, run.trainer
    settings = trainer.settings if isinstance(trainer, BaseTrainer) else trainer
    replaced: dict[str, Any] = {
        "data": f"{len(rows)} rows ({fingerprint_of(rows)})",
        "validation_data": f"{len(validation)} rows ({fingerprint_of(validation)})",
        "trainer": settings.as_dict() if isinstance(settings, GRPO) else settings,
        "output": run.output if run.output is None or is_url(run.output) else Path(run.output).absolute(),
        # Not the key itself: others may read the file.
        "inference_key": None if key is None else digest(key),
    }
    own = {"trainer_class": type(trainer)} if isinstance(trainer, BaseTrainer) else {}
    return texts_of(given | replaced | own)


def _trainer_of(run: Run) -> tuple[GRPO | None, BaseTrainer | None]:
    """Return the settings of the trainer, and the user's own, if there is one. Raises InvalidRequest."""
    trainer = run.trainer
    if trainer is None or isinstance(trainer, GRPO):
        return trainer, None
    if isinstance(trainer, type) and issubclass(trainer, BaseTrainer):
        trainer = trainer(GRPO())
    if not isinstance(trainer, BaseTrainer):
        expected = "rl.GRPO(...), a trainer that derives from fray.rl.trainer.BaseTrainer, or None"
        raise InvalidRequest(f"invalid trainer {trainer!r}: expected {expected}")
    return trainer.settings, trainer


def _with_steps(trainer: GRPO, samples: int) -> GRPO:
    """Return the settings with their steps: by default those in which each row is rolled out, the last batch whole."""
    try:
        return evolve(trainer, steps=trainer.steps or math.ceil(samples / trainer.batch_size))
    except ValueError as error:
        raise InvalidRequest(f"invalid trainer: {error}") from None


def _choice(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        names = ", ".join(map(repr, known))
        raise InvalidRequest(f"invalid {name} {value!r}; expected one of {names}{near_text(str(value), known)}")


def _member(kind: type[E], name: str, value: str) -> E:
    _choice(name, value, [one.value for one in kind])
    return kind(value)
