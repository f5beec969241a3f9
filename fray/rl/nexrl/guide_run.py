"""Run of a configuration of NexRL's guide: its keys as settings of `fray.rl.Run`."""

from __future__ import annotations

import inspect
import logging
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from attrs import evolve, fields

from fray.errors import InvalidRequest
from fray.rl.checkpoint import latest_checkpoint
from fray.rl.core.trajectory_store import ReadyRule
from fray.rl.data import lack_text
from fray.rl.model_spec import ModelSpec, TinyLlama
from fray.rl.nexrl.data_loader import BaseDataLoader, RowDataLoader
from fray.rl.nexrl_types import DEFAULT_MODEL_TAG
from fray.rl.recipe.guide_config import DataConfig, GuideConfig, least_prompt, length_problems
from fray.rl.recipe.run_recipe import resources_of
from fray.rl.recipe.typed import invalid
from fray.rl.rollout_worker import BaseRolloutWorker, WorkerEpisode
from fray.rl.run import Run
from fray.rl.tokenizers import load_limits
from fray.rl.train.settings import GRPO
from fray.rl.trainer import (
    BaseTrainer,
    MockTrainService,
    RemoteApiTrainer,
    SelfHostedGrpoTrainer,
    SelfHostedTrainer,
    TinkerServiceHolder,
)

logger = logging.getLogger("fray.rl")
NO_SAVE = 2**31
"""Updates between two checkpoints where only the last one is written."""
CHECKPOINTS = "checkpoints"
ROW_KEYS = (("group_id",), ("uid",))
"""Values of ``key_list`` that are the group of a row."""

LoaderClass = Callable[..., BaseDataLoader]


def run_of_guide(
    config: GuideConfig,
    worker_class: Callable[[Mapping[str, Any]], BaseRolloutWorker],
    loader_class: LoaderClass,
    validate_loader_class: LoaderClass | None,
    trainer_class: type[BaseTrainer],
    **options: Any,
) -> Run:
    """Return the run of a configuration.

    Args:
        worker_class, loader_class, validate_loader_class, trainer_class: classes of its modules.
        options: further arguments of `Run`.

    Raises:
        InvalidRequest: keys contradict one another, or ask for what a run cannot do; nothing was started.
    """
    trainer, weight, data = config.trainer, config.weight, config.data
    _check_supported(config)
    rows = _with_prompts(rows_of(loader_class(data), "data"), data, "data")
    episode = WorkerEpisode(worker_class, _worker_config(config))
    episode.check_rows(rows, "config: data")
    keys = _group_keys(config)
    settings = _training(config, is_keyed=bool(keys))
    output, _ = _output(config)
    validation: dict[str, Any] = {}
    if validate_loader_class is not None and (weight.validate_freq or config.validate.validate_before_train):
        assert config.validate.data is not None
        section = config.validate.data
        loaded = rows_of(validate_loader_class(section, is_validate=True), "validate.data")
        validation_rows = _with_prompts(loaded, section, "validate.data")
        episode.check_rows(validation_rows, "config: validate.data")
        validation = {
            "validation_data": validation_rows,
            "validate_freq": weight.validate_freq or None,
            "validate_before": config.validate.validate_before_train,
            "validation_samples_per_row": section.rollout_repeat_n,
        }
    if settings.steps is None:
        samples = len(rows) * (data.rollout_repeat_n or settings.group_size)
        updates = math.ceil(samples * data.epochs / settings.batch_size)
        settings = evolve(settings, steps=updates)
    monitor = config.runtime_monitor.exception_handling
    model = model_of(config)
    _check_context(config, model)
    run = Run(
        model=model,
        data=rows,
        rollout=episode,
        trainer=_trainer_of(config, trainer_class, settings),
        trainer_ranks=config.service.train_service.world_size,
        reference=config.service.train_service.reference,
        rollout_workers=config.rollout_worker.num_workers,
        rollout_processes=config.rollout_worker.processes,
        inference_servers=config.service.inference_service.servers,
        max_length=config.service.inference_service.max_length,
        max_prompt_length=least_prompt(config)[1],
        sync=weight.sync_mode,
        weight_sync=weight.sync_method,
        freeze_for_weight_sync=config.service.inference_service.freeze_for_weight_sync,
        staleness_threshold=weight.staleness_threshold,
        samples_per_row=data.rollout_repeat_n or settings.group_size,
        group_keys=keys,
        model_tag=model_tag_of(config),
        rollout_timeout_s=config.rollout_worker.rollout_timeout_s,
        max_attempts=config.rollout_worker.max_attempts,
        on_error=monitor.policy if monitor.enabled else "continue",
        keep_batch_order=data.keep_batch_order,
        seed=data.seed,
        shuffle=data.shuffle,
        output=output,
        save_every=trainer.save_freq or NO_SAVE,
        keep_checkpoints=not trainer.remove_previous_ckpt,
        deterministic=config.deterministic,
        name=f"{config.project_name}-{config.experiment_name}",
        resources=resources_of(config.resources, "config"),
        **validation,
        **options,
    )
    plan = run.parts.plan
    order = evolve(plan.order, skip_batches=data.skip_batches)
    rule = ReadyRule(config.trajectory_pool.check_batch_ready_function)
    run.parts = evolve(run.parts, plan=evolve(plan, order=order, rule=rule))
    return run


def copy_checkpoint(config: GuideConfig) -> None:
    """Copy the checkpoint of ``resume.mode: from_path`` to those of the run, unless it is there."""
    output, resumed = _output(config)
    if resumed is not None and output is not None:
        target = output / CHECKPOINTS / resumed.name
        if not target.exists():
            # Under another name until it is complete.
            unfinished = target.with_name(f"{target.name}.copy")
            shutil.rmtree(unfinished, ignore_errors=True)
            shutil.copytree(resumed, unfinished)
            unfinished.rename(target)


def _check_context(config: GuideConfig, model: ModelSpec) -> None:
    """Raise InvalidRequest for lengths above the context of the model, where it is known without a download."""
    limits = load_limits(model, downloads=False)
    if limits is not None:
        problems = list(length_problems(config, limits.max_length, "the context of the model"))
        allowed = config.service.inference_service.max_length
        if allowed is not None and allowed > limits.max_length:
            text = f"found {allowed}; the context of the model is {limits.max_length}"
            problems.append(("service.inference_service.max_length", text))
        if problems:
            raise invalid("config", problems)


def rows_of(loader: BaseDataLoader, key: str) -> list[dict[str, Any]]:
    """Return the rows of a loader, each once: a run repeats and orders them itself.

    Raises:
        InvalidRequest: a loader of the user has no item, or waits before its end.
    """
    if isinstance(loader, RowDataLoader):
        return loader.rows
    rows = list(_items(loader))
    if not rows or not loader.is_finished():
        problem = "it has no items" if not rows else f"it gives no item after {len(rows)}, and is not finished"
        raise InvalidRequest(f"{key}: {type(loader).__name__} cannot give its rows: {problem}")
    return rows


def _with_prompts(rows: list[dict[str, Any]], data: DataConfig, path: str) -> list[dict[str, Any]]:
    """Return rows whose ``prompt`` is what ``prompt_key`` names. Raises InvalidRequest if a row lacks it."""
    key = data.prompt_key
    if key == "prompt":
        return rows
    for number, row in enumerate(rows):
        if key not in row:
            raise InvalidRequest(f"{path}.prompt_key is {key!r}; row {number} {lack_text(row, (key,))}")
    return [{**row, "prompt": row[key]} for row in rows]


def _check_supported(config: GuideConfig) -> None:
    """Raise InvalidRequest if a run cannot do what a key asks for."""
    backend, method = config.service.inference_service.backend, config.weight.sync_method
    if backend not in ("fray", "mock"):
        raise InvalidRequest(
            f"service.inference_service.backend is {backend!r}, which a run does not train with; expected 'fray', its "
            "own servers"
        )
    if method == "vllm":
        raise InvalidRequest(
            "weight.sync_method is 'vllm', for servers that a run does not have; expected 'memory', 'disk', 'network' "
            "or 'none'"
        )
    for path in ("trajectory_pool.type", "weight.type", "validate.eval.type"):
        kind = attrgetter(path)(config)
        if kind != "default":
            raise InvalidRequest(f"{path} is {kind!r}, a class of yours that a run does not use; expected 'default'")


def _items(loader: BaseDataLoader) -> Iterator[dict[str, Any]]:
    while loader.can_return_item() and (item := loader.get_next_item()) is not None:
        yield item


def model_of(config: GuideConfig) -> ModelSpec:
    """Return the model of the services.

    Raises:
        InvalidRequest: neither service has one, or they have two.
    """
    services = {"train_service": config.service.train_service, "inference_service": config.service.inference_service}
    found = {name: service.model for name, service in services.items() if service.model is not None}
    if not found and services["train_service"].backend == "mock":
        return TinyLlama()
    if not found:
        raise InvalidRequest(
            "service.train_service.model is missing: expected a name or directory of Hugging Face, or the arguments of "
            "TinyLlama, such as {layers: 2, width: 64}"
        )
    if len(found) == 2 and found["train_service"] != found["inference_service"]:
        raise InvalidRequest(
            f"service.inference_service.model is {found['inference_service']!r}, but train_service.model "
            f"{found['train_service']!r}: a run serves what it trains; expected one of them alone"
        )
    model = next(iter(found.values()))
    if not isinstance(model, Mapping):
        local = config.directory / str(model)
        return str(local) if local.is_dir() else str(model)
    try:
        return TinyLlama(**model)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"service.{next(iter(found))}.model: {error}") from None


def _worker_config(config: GuideConfig) -> Any:
    """Return the configuration of workers, with the service that their clients use."""
    worker = config.rollout_worker
    service = config.service.inference_service
    extra = {
        # A mock worker asks no model.
        "inference_service": {**service, "backend": "fray", "model_tag": model_tag_of(config)},
        "directory": str(config.directory),
        "max_response_length": worker.max_response_length or config.trainer.max_response_length,
        "temperature": worker.temperature if worker.temperature is not None else service.temperature,
        "top_p": worker.top_p if worker.top_p is not None else service.top_p,
        "project_name": config.project_name,
        "experiment_name": config.experiment_name,
    }
    return WorkerSettings({**worker, **{key: value for key, value in extra.items() if value is not None}})


class WorkerSettings(dict[str, Any]):
    """Configuration of a worker: a dict whose keys are attributes, too, as those of a DictConfig."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the configuration of the worker has no key {name!r}") from None


def model_tag_of(config: GuideConfig) -> str:
    """Return the tag of the model, which one of the services may leave out.

    Raises:
        InvalidRequest: they have two.
    """
    services = {"train_service": config.service.train_service, "inference_service": config.service.inference_service}
    found = {name: one.model_tag for name, one in services.items() if one.model_tag != DEFAULT_MODEL_TAG}
    if len(set(found.values())) > 1:
        raise InvalidRequest(
            f"service.inference_service.model_tag is {found['inference_service']!r}, but train_service.model_tag "
            f"{found['train_service']!r}: a run serves what it trains; expected one of them alone"
        )
    return next(iter(found.values()), DEFAULT_MODEL_TAG)


def _group_keys(config: GuideConfig) -> tuple[str, ...]:
    """Return the keys by which samples are grouped; none where that is the group of a row."""
    keys = config.trajectory_pool.key_list
    return () if keys in ROW_KEYS else keys


def _training(config: GuideConfig, is_keyed: bool) -> GRPO:
    """Return the settings of training. Groups are the repeats of a row, unless they are made by keys."""
    pool, repeats = config.trajectory_pool, config.data.rollout_repeat_n
    size = pool.group_size if is_keyed else repeats or pool.group_size
    if pool.group_size not in (1, size):
        raise InvalidRequest(
            f"trajectory_pool.group_size is {pool.group_size}, but data.rollout_repeat_n {size}: expected one number"
        )
    batch = pool.batch_size or config.algorithm.batch_size or size
    if batch % size:
        raise InvalidRequest(
            f"trajectory_pool.batch_size is {batch}, which no whole number of groups of {size} fills: "
            f"expected a multiple of {size}"
        )
    return evolve(config.grpo(), groups=batch // size, group_size=size)


def _trainer_of(config: GuideConfig, trainer_class: type[BaseTrainer], settings: GRPO) -> GRPO | BaseTrainer:
    """Return the trainer: for GRPO with torch the run's own, which has the losses and corrections of `GRPO`.

    Raises:
        InvalidRequest: the class is abstract, or its constructor refuses the settings.
    """
    backend = config.service.train_service.backend
    is_mock = backend == "mock"
    if trainer_class is SelfHostedGrpoTrainer and backend == "torch":
        return settings
    if inspect.isabstract(trainer_class):
        raise InvalidRequest(
            f"trainer.type {config.trainer.type!r} is the base class {trainer_class.__name__}: expected "
            "self_hosted_grpo, or trainer.custom_trainer_module_path and custom_trainer_class_name"
        )
    values = {one.name: getattr(settings, one.name) for one in fields(GRPO) if one.init}
    own = WorkerSettings({**config.algorithm, **config.trainer, **values})
    own["model_tag"] = model_tag_of(config)
    service = {"train_service": MockTrainService()} if is_mock and issubclass(trainer_class, SelfHostedTrainer) else {}
    try:
        trainer = trainer_class(own, **service)
        if backend == "tinker":
            _set_tinker_service(trainer, config)
    except ValueError as error:
        raise InvalidRequest(f"trainer: {error}") from None
    return trainer


def _set_tinker_service(trainer: BaseTrainer, config: GuideConfig) -> None:
    """Let a service with the Tinker API train. Raises InvalidRequest for a trainer that has no such service."""
    service = config.service.train_service
    if not isinstance(trainer, RemoteApiTrainer):
        raise InvalidRequest(
            f"service.train_service.backend is 'tinker', and the trainer {type(trainer).__name__}: expected "
            "trainer.type remote_api_grpo or remote_api_cross_entropy, or a class that derives from RemoteApiTrainer"
        )
    base_model = service.base_model or service.model
    try:
        holder = TinkerServiceHolder(
            base_url=service.url,
            base_model=base_model,
            rank=service.rank,
            seed=service.seed,
            key_file=service.key_file,
            ca_file=service.ca_file,
            timeout_s=service.timeout_s,
        )
    except ValueError as error:
        raise InvalidRequest(f"service.train_service: {error}") from None
    trainer.set_service_holder(holder)


def _output(config: GuideConfig) -> tuple[Path | None, Path | None]:
    """Return the directory of the run, and the checkpoint to resume from that is not in it yet.

    Raises:
        InvalidRequest: what is there contradicts ``resume.mode``.
    """
    resume, path = config.resume, config.trainer.checkpoint_path
    if path is None:
        if resume.mode != "disable":
            raise InvalidRequest(f"trainer.checkpoint_path is missing; resume.mode {resume.mode!r} needs it")
        return None, None
    output = Path(path)
    # Checkpoints of a run are in a directory of this name.
    output = output.parent if output.name == CHECKPOINTS else output
    found = latest_checkpoint(output / CHECKPOINTS)
    if resume.mode == "disable" and found is not None:
        raise InvalidRequest(
            f"trainer.checkpoint_path has {found.path.name}, and resume.mode is 'disable': "
            "expected resume.mode: auto, or another checkpoint_path"
        )
    if resume.mode != "from_path":
        return output, None
    wanted = Path(str(resume.resume_path))
    if found is not None and found.path.resolve() != wanted.resolve():
        # The recipe is started again: its own checkpoints are later than the one that it began with.
        logger.info("resume.resume_path is not used: trainer.checkpoint_path has %s", found.path.name)
        return output, None
    return output, wanted
