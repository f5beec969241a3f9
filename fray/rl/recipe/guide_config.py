"""Keys of the configuration in NexRL's guide, as typed classes. See docs/rl-recipes.md."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from attrs import define, field, fields

from fray.model.text import near_text
from fray.rl.recipe.sources import Settings, Source, read_settings
from fray.rl.recipe.typed import AtLeast, expected_one_of, invalid, structure
from fray.rl.train.settings import GRPO, KlPenalty

logger = logging.getLogger(__name__)
Count = Annotated[int, AtLeast(1)]
FromZero = Annotated[int, AtLeast(0)]
Seconds = Annotated[float, AtLeast(0)]
TYPES: dict[str, tuple[str, ...]] = {
    "data": ("mock", "torch"),
    "rollout_worker": ("mock", "simple", "agent", "nexau", "pig_latin", "single_turn_math"),
    "trajectory_pool": ("default",),
    "trainer": ("self_hosted", "self_hosted_grpo", "remote_api_grpo", "remote_api_cross_entropy"),
    "algorithm": ("grpo",),
    "weight": ("default",),
    "validate.data": ("mock", "torch"),
    "validate.eval": ("default",),
}
"""Values of ``type``, by the path of their section."""
TRAIN_BACKENDS = ("torch", "mock", "tinker")
INFERENCE_BACKENDS = ("fray", "vllm", "openai", "mock")


INPUT, OUTPUT, OBJECT, AGENT = {"path": "input"}, {"path": "output"}, {"path": "object"}, {"path": "agent"}
"""Marks of paths: of what must exist, of what the run makes, of ``file.py:name``, and of a file or ``file.py:name``."""
OWN_SERVERS = "a run has servers of its own; a client of yours may read it"
EACH_ROW_ONCE = "a validation takes each row of its data, and the order does not matter"
ALWAYS_WATCHED = "events act at once, and processes are always watched (liveness_s)"
WITHOUT_EFFECT: dict[str, str] = {
    "algorithm.inference_service": "a run has one inference service, service.inference_service",
    "data.batch_size": "a run loads the rows of one update at a time; a loader of yours may read it",
    "data.drop_last": "batches are whole groups, and the last one is whole, too",
    "data.num_workers": "rows are read once, when the run starts; a loader of yours may read it",
    "defaults": "",
    "hydra": "",
    **{
        f"runtime_monitor.{key}": ALWAYS_WATCHED
        for key in (
            *("exception_handling.check_interval", "health_check.enabled"),
            *("health_check.check_interval", "health_check.timeout"),
        )
    },
    **{f"service.inference_service.{key}": OWN_SERVERS for key in ("url", "api_key", "max_retries", "timeout_s")},
    **{
        f"service.train_service.{key}": "a run trains in processes of its own"
        for key in ("url", "api_key", "identifier", "max_retries", "timeout_s")
    },
    **{
        f"service.train_service.{key}": "it is of the backend 'tinker'"
        for key in ("base_model", "rank", "seed", "key_file", "ca_file")
    },
    "trainer.sync_weight_path": "files of weights (sync_method: disk) are beside the checkpoints",
    **{
        f"validate.data.{key}": EACH_ROW_ONCE
        for key in (
            *("seed", "batch_size", "shuffle", "epochs", "keep_batch_order"),
            *("skip_batches", "num_workers", "drop_last"),
        )
    },
    "weight.checkpoint_manager": "trainer.checkpoint_path and its neighbours say what is saved",
}
"""Keys that are accepted and have no effect in a run, and why. Those without a reason are of Hydra itself."""
OF_TINKER = {
    f"service.train_service.{key}" for key in ("url", "base_model", "rank", "seed", "key_file", "ca_file", "timeout_s")
}
"""Such keys that have an effect with the backend ``tinker``."""


@define
class Section(Mapping[str, Any]):
    """Settings under one key: its fields, and as a mapping those of them that are not None.

    ``config.get("batch_size", 8)`` and ``config.batch_size`` both read it, as in a DictConfig.
    """

    OWN_CLASS: ClassVar[str] = ""
    """Field that names a class of the user."""
    own: dict[str, Any] = field(factory=dict, init=False, kw_only=True)
    """Keys for the user's own class."""

    @classmethod
    def own_keys(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys that the user's own class reads; none where the class is one of Fray.

        A key that is similar to one of Fray's is not one of them: it is a typing error.
        """
        if not cls.OWN_CLASS or values.get(cls.OWN_CLASS) is None:
            return {}
        names = _names(cls)
        return {key: value for key, value in values.items() if key not in names and not near_text(str(key), names)}

    def __getitem__(self, key: str) -> Any:
        value = getattr(self, key, None) if key in _names(type(self)) else self.own.get(key)
        if value is None:
            raise KeyError(key)
        return value

    def __iter__(self) -> Iterator[str]:
        return (key for key in (*_names(type(self)), *self.own) if self.get(key) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "own":  # while it is unpickled
            raise AttributeError(name)
        if name not in self.own:
            raise AttributeError(f"{type(self).__name__} has no key {name!r}{near_text(name, _names(type(self)))}")
        return self.own[name]


def _names(kind: type[Any]) -> list[str]:
    return [attribute.name for attribute in fields(kind) if attribute.init]


@define
class ServiceConfig(Section):
    """Part of both services. ``model`` is a name or directory of Hugging Face, or the arguments of `TinyLlama`."""

    url: str | None = None
    model: Any = None
    model_tag: str = "default"
    api_key: str | None = field(default=None, repr=False)
    max_retries: FromZero = 3
    timeout_s: Seconds = 600.0


@define
class TrainServiceConfig(ServiceConfig):
    """``service.train_service``."""

    backend: str = "torch"
    identifier: str | None = None
    world_size: Count = 1
    """Processes of the trainer."""
    reference: Literal["trainer", "server"] = "trainer"
    """Place of the frozen model of a KL penalty: each of those processes, or one of its own."""
    base_model: str | None = None
    """Name of the model for the backend ``tinker``. Default: ``model``, if that is a name."""
    rank: Count = 32
    """Rank of the adapter that ``tinker`` trains."""
    seed: FromZero = 0
    """Seed of the first weights of that adapter."""
    key_file: str | None = field(default=None, metadata=INPUT)
    ca_file: str | None = field(default=None, metadata=INPUT)


@define
class InferenceServiceConfig(ServiceConfig):
    """``service.inference_service``. ``max_length``: tokens of prompt and response; None: as the model has."""

    backend: str = "fray"
    freeze_for_weight_sync: bool = True
    servers: Count = 1
    max_length: Count | None = None
    temperature: Seconds | None = None
    top_p: Seconds | None = None


@define
class ServicesConfig(Section):
    """``service``."""

    train_service: TrainServiceConfig = field(factory=TrainServiceConfig)
    inference_service: InferenceServiceConfig = field(factory=InferenceServiceConfig)


@define
class DataConfig(Section):
    """``data`` and ``validate.data``."""

    OWN_CLASS = "custom_data_loader_class_name"
    type: str = "torch"
    seed: int = 0
    data_files: tuple[str, ...] = field(default=(), metadata=INPUT)
    batch_size: Count | None = None
    """Rows that are loaded at a time."""
    rollout_repeat_n: Count | None = None
    """Rollouts of each row. Default ``trajectory_pool.group_size``."""
    shuffle: bool = False
    epochs: Count = 1
    keep_batch_order: bool = False
    skip_batches: FromZero = 0
    prompt_key: str = "prompt"
    max_prompt_length: Count | None = None
    prompts: tuple[str, ...] | None = None
    """Rows of the mock loader."""
    size: Count | None = None
    """Number of rows of the mock loader."""
    custom_data_loader_module_path: str | None = field(default=None, metadata=INPUT)
    custom_data_loader_class_name: str | None = None
    num_workers: FromZero = 0
    drop_last: bool = False


@define
class RolloutWorkerConfig(Section):
    """``rollout_worker``."""

    OWN_CLASS = "custom_rollout_worker_class_name"
    type: str = "simple"
    num_workers: Count = 64
    processes: Count | None = None
    custom_rollout_worker_module_path: str | None = field(default=None, metadata=INPUT)
    custom_rollout_worker_class_name: str | None = None
    evaluator_module_path: str | None = field(default=None, metadata=OBJECT)
    nexau_agent_config_path: str | None = field(default=None, metadata=AGENT)
    nexau_agent_workspace: str | None = field(default=None, metadata=INPUT)
    task_name: str | None = None
    tools: tuple[str, ...] = field(default=(), metadata=OBJECT)
    """Tools of ``agent``, ``file.py:function`` each."""
    system_prompt: str | None = None
    max_turns: Count = 8
    max_prompt_length: Count | None = None
    max_response_length: Count | None = None
    temperature: Seconds | None = None
    top_p: Seconds | None = None
    rollout_timeout_s: Annotated[float, AtLeast(0.001)] = 600.0
    max_attempts: Count = 3


@define
class TrajectoryPoolConfig(Section):
    """``trajectory_pool``."""

    type: str = "default"
    batch_size: Count | None = None
    group_size: Count = 1
    key_list: tuple[str, ...] = ()
    check_batch_ready_function: Literal[
        "batch_size", "batch_size_reached", "loaded_batch_finished", "batch_size_reached_and_loaded_batch_finished"
    ] = "batch_size"


@define
class TrainerConfig(Section):
    """``trainer``; the keys of the optimizer mean what they mean in `fray.rl.GRPO`, None its default."""

    OWN_CLASS = "custom_trainer_class_name"
    type: str = "self_hosted_grpo"
    total_train_steps: Count | None = None
    checkpoint_path: str | None = field(default=None, metadata=OUTPUT)
    sync_weight_path: str | None = field(default=None, metadata=OUTPUT)
    save_freq: FromZero = 0
    """Updates between two checkpoints; 0: only the last."""
    remove_previous_ckpt: bool = False
    custom_trainer_module_path: str | None = field(default=None, metadata=INPUT)
    custom_trainer_class_name: str | None = None
    max_prompt_length: Count | None = None
    max_response_length: Count | None = None
    lr: Seconds | None = None
    warmup_steps: FromZero | None = None
    betas: tuple[float, ...] | None = None
    eps: float | None = None
    weight_decay: float | None = None
    grad_clip: float | None = None
    minibatches: Count | None = None
    micro_batch: Count | None = None
    micro_batch_tokens: Count | None = None
    dtype: Literal["float32", "bfloat16"] | None = None
    gradient_checkpointing: bool | None = None
    seed: FromZero | None = None


@define
class KlControlConfig(Section):
    """``algorithm.critic.kl_ctrl``."""

    type: Literal["fixed", "adaptive"] = "fixed"
    kl_coef: Seconds = 0.001
    target_kl: Seconds | None = None
    horizon: Seconds = 10_000.0


@define
class CriticConfig(Section):
    """``algorithm.critic``."""

    kl_ctrl: KlControlConfig = field(factory=KlControlConfig)


@define
class AlgorithmConfig(Section):
    """``algorithm``; the keys from ``advantage`` on mean what they mean in `fray.rl.GRPO`, None its default."""

    type: str = "grpo"
    batch_size: Count | None = None
    do_old_log_prob_compute: bool = True
    use_kl_in_reward: bool = False
    kl_penalty: Literal["kl", "abs", "mse", "low_var_kl"] = "kl"
    critic: CriticConfig = field(factory=CriticConfig)
    inference_service: InferenceServiceConfig | None = None
    use_kl_loss: bool = False
    advantage: str | None = None
    gamma: float | None = None
    loss: str | None = None
    clip_low: float | None = None
    clip_high: float | None = None
    loss_options: dict[str, Any] | None = None
    aggregation: str | None = None
    aggregation_length: Count | None = None
    correction: str | None = None


@define
class WeightConfig(Section):
    """``weight``."""

    type: str = "default"
    sync_mode: Literal["sync", "fully-async", "batch-async"] = "sync"
    sync_method: Literal["memory", "disk", "network", "vllm", "none"] = "memory"
    staleness_threshold: FromZero = 1
    validate_freq: FromZero = 0
    """Versions between two validations; 0: none."""
    checkpoint_manager: dict[str, Any] | None = None


@define
class EvalConfig(Section):
    """``validate.eval``."""

    type: str = "default"


@define
class ValidateConfig(Section):
    """``validate``."""

    validate_before_train: bool = False
    data: DataConfig | None = None
    eval: EvalConfig = field(factory=EvalConfig)


@define
class ResumeConfig(Section):
    """``resume``."""

    mode: Literal["disable", "auto", "from_path"] = "disable"
    resume_path: str | None = field(default=None, metadata=INPUT)


@define
class LoggerConfig(Section):
    """``logger``: one backend or several."""

    backend: tuple[str, ...] = ()


@define
class ExceptionHandlingConfig(Section):
    """``runtime_monitor.exception_handling``; times in seconds."""

    enabled: bool = True
    check_interval: Seconds = 1.0
    policy: Literal["stop_on_error", "continue", "stop_on_critical"] = "stop_on_critical"


@define
class HealthCheckConfig(Section):
    """``runtime_monitor.health_check``; times in seconds. Processes of a run are always watched."""

    enabled: bool = True
    check_interval: Seconds = 5.0
    timeout: Seconds = 5.0


@define
class RuntimeMonitorConfig(Section):
    """``runtime_monitor``."""

    exception_handling: ExceptionHandlingConfig = field(factory=ExceptionHandlingConfig)
    health_check: HealthCheckConfig = field(factory=HealthCheckConfig)


@define
class GuideConfig(Section):
    """Configuration of NexRL's guide."""

    launch_mode: Literal["local", "ray", "cluster"] = "local"
    project_name: str = "fray"
    experiment_name: str = "rl"
    deterministic: bool = False
    data: DataConfig = field(factory=DataConfig)
    rollout_worker: RolloutWorkerConfig = field(factory=RolloutWorkerConfig)
    trajectory_pool: TrajectoryPoolConfig = field(factory=TrajectoryPoolConfig)
    trainer: TrainerConfig = field(factory=TrainerConfig)
    algorithm: AlgorithmConfig = field(factory=AlgorithmConfig)
    weight: WeightConfig = field(factory=WeightConfig)
    service: ServicesConfig = field(factory=ServicesConfig)
    validate: ValidateConfig = field(factory=ValidateConfig)
    resume: ResumeConfig = field(factory=ResumeConfig)
    logger: LoggerConfig = field(factory=LoggerConfig)
    runtime_monitor: RuntimeMonitorConfig = field(factory=RuntimeMonitorConfig)
    resources: dict[str, Any] = field(factory=dict)
    """Arguments of `ResourceConfig` by part: what each ``trainer``, ``server`` and ``rollout`` process reserves."""
    defaults: Any = None
    hydra: Any = None
    directory: Path = field(factory=Path.cwd, init=False, kw_only=True)
    """Directory to which the paths referred; they are absolute now."""
    unused: tuple[str, ...] = field(default=(), init=False, kw_only=True)
    """Paths of keys that were set and have no effect."""

    @property
    def batch_size(self) -> int:
        """Trajectories of an update: ``trajectory_pool.batch_size``, else ``algorithm.batch_size``, else one group."""
        return self.trajectory_pool.batch_size or self.algorithm.batch_size or self.trajectory_pool.group_size

    def grpo(self) -> GRPO:
        """Return the settings of training.

        Raises:
            InvalidRequest: a value that `GRPO` refuses.
        """
        trainer, algorithm = self.trainer, self.algorithm
        # ``critic`` of the guide is a section about the KL penalty.
        names = set(_names(GRPO)) - {"critic"}
        values = {
            name: value
            for section in (trainer, algorithm)
            for name, value in section.items()
            if name in names and value is not None
        }
        if algorithm.use_kl_in_reward or algorithm.use_kl_loss:
            control = algorithm.critic.kl_ctrl
            values["kl"] = KlPenalty(
                control.kl_coef,
                algorithm.kl_penalty,
                "reward" if algorithm.use_kl_in_reward else "loss",
                control.target_kl if control.type == "adaptive" else None,
                control.horizon,
            )
        if algorithm.do_old_log_prob_compute:
            values["old_logprobs"] = "trainer"
        group_size = self.trajectory_pool.group_size
        try:
            return GRPO(self.batch_size // group_size, group_size, steps=trainer.total_train_steps, **values)
        except ValueError as error:
            raise invalid("config", [("trainer or algorithm", str(error))]) from None


def load_guide_config(
    config: Source, overrides: Sequence[str] = (), *, types: Mapping[str, Collection[str]] | None = None
) -> GuideConfig:
    """Return a configuration of NexRL's guide, checked.

    Keys of `WITHOUT_EFFECT` are accepted, and a warning of the log says why they have no effect.

    Args:
        config: a YAML file, a mapping or a DictConfig. Relative paths in it refer to the directory of ``NEXRL_PATH``,
            else to that of the file, else to the current one.
        overrides: ``key.below=value`` each.
        types: values of ``type`` by section, which replace those of `TYPES`: ``{"rollout_worker": ["mine"]}``.

    Raises:
        InvalidRequest: it cannot be read, or keys or values are wrong; the message has a line for each, with its path,
            what was found, what was expected, and the nearest name. Nothing was started.
    """
    return guide_config(read_settings(config, overrides), types=types)


def guide_config(settings: Settings, *, types: Mapping[str, Collection[str]] | None = None) -> GuideConfig:
    """Return the configuration in settings that were read; see `load_guide_config`."""
    config = structure(settings.values, GuideConfig, settings.name)
    config.directory = settings.directory
    problems = [*_wrong_types(config, {**TYPES, **(types or {})}), *_contradictions(config)]
    problems += _resolve_paths(config, settings.directory, "")
    if problems:
        raise invalid(settings.name, problems)
    config.grpo()
    used = OF_TINKER if config.service.train_service.backend == "tinker" else set()
    config.unused = tuple(path for path in _unused_keys(settings.values) if path not in used)
    if reasons := [f"{path} ({reason})" for path in config.unused if (reason := WITHOUT_EFFECT[path])]:
        logger.warning("%s: keys without effect: %s", settings.name, "; ".join(reasons))
    return config


def is_guide_config(values: Mapping[str, Any]) -> bool:
    """Return whether settings are in the words of the guide, and not in those of `fray.rl.Run`."""
    only_here = set(_names(GuideConfig)) - {"data", "trainer", "resources", "deterministic"}
    return not only_here.isdisjoint(values)


def _wrong_types(config: GuideConfig, types: Mapping[str, Collection[str]]) -> Iterator[tuple[str, str]]:
    for path, known in types.items():
        section: Any = config
        for name in path.split("."):
            section = None if section is None else getattr(section, name)
        if section is None or (section.OWN_CLASS and section.get(section.OWN_CLASS)):
            continue
        if section.type not in known:
            yield f"{path}.type", expected_one_of(section.type, known)


def _contradictions(config: GuideConfig) -> Iterator[tuple[str, str]]:
    """Return what each key alone does not show."""
    train, inference = config.service.train_service, config.service.inference_service
    if train.backend == "nextrainer":
        text = "'nextrainer' is not part of Fray; expected 'torch', which trains in the run's own trainer process"
        yield "service.train_service.backend", text
    elif train.backend not in TRAIN_BACKENDS:
        yield "service.train_service.backend", expected_one_of(train.backend, TRAIN_BACKENDS)
    yield from _tinker_problems(config)
    if inference.backend not in INFERENCE_BACKENDS:
        yield "service.inference_service.backend", expected_one_of(inference.backend, INFERENCE_BACKENDS)
    group, pool = config.trajectory_pool.group_size, config.trajectory_pool.batch_size
    for path, size in (("trajectory_pool.batch_size", pool), ("algorithm.batch_size", config.algorithm.batch_size)):
        if size is not None and size % group:
            near = max(size // group, 1) * group
            text = f"found {size}, which no whole number of groups of {group} fills; expected a multiple of {group}"
            yield path, f"{text}, such as {near}"
    if config.resume.mode == "from_path" and config.resume.resume_path is None:
        yield "resume.resume_path", "missing; mode 'from_path' needs it"
    yield from _pairs(config)
    if (limit := inference.max_length) is not None:
        yield from length_problems(config, limit, "service.inference_service.max_length")


def _tinker_problems(config: GuideConfig) -> Iterator[tuple[str, str]]:
    train = config.service.train_service
    if train.backend != "tinker":
        return
    if train.url is None:
        yield "service.train_service.url", "missing; backend 'tinker' needs the address of the service"
    if train.base_model is None and not isinstance(train.model, str):
        yield "service.train_service.base_model", "missing; expected the name that the service has for the model"
    if train.api_key is not None:
        text = "a configuration is logged; expected key_file, or the variable FRAY_TINKER_KEY or TINKER_API_KEY"
        yield "service.train_service.api_key", text
    if train.world_size != 1:
        yield "service.train_service.world_size", f"found {train.world_size}; the service trains, with 1 process here"


def _pairs(config: GuideConfig) -> Iterator[tuple[str, str]]:
    """Return keys of own classes without the file or without the name."""
    for section, part in (("rollout_worker", "rollout_worker"), ("trainer", "trainer"), ("data", "data_loader")):
        names = [f"custom_{part}_{key}" for key in ("module_path", "class_name")]
        found = [getattr(getattr(config, section), name) is not None for name in names]
        if any(found) and not all(found):
            has_, lacks = names if found[0] else reversed(names)
            yield f"{section}.{lacks}", f"missing; {has_} is set, which needs it"


def least_prompt(config: GuideConfig) -> tuple[str, int | None]:
    """Return path and value of the least limit of a prompt: the guide does not say which of its sections has it."""
    sections = {
        "data": config.data,
        "rollout_worker": config.rollout_worker,
        "trainer": config.trainer,
        "validate.data": config.validate.data,
    }
    limits = [
        (one.max_prompt_length, f"{path}.max_prompt_length")
        for path, one in sections.items()
        if one is not None and one.max_prompt_length is not None
    ]
    least, path = min(limits, default=(None, ""))
    return path, least


def length_problems(config: GuideConfig, limit: int, source: str) -> Iterator[tuple[str, str]]:
    """Yield the paths of lengths that are above a limit, and what is wrong there.

    Args:
        limit: tokens of a prompt and its response together.
        source: what allows them, for the messages.
    """
    path, prompt = least_prompt(config)
    for name in ("rollout_worker", "trainer"):
        response = getattr(config, name).max_response_length
        if response is None:
            continue
        if response > limit:
            yield f"{name}.max_response_length", f"found {response}; {source} allows {limit}"
        elif prompt is not None and prompt + response > limit:
            text = f"found {response}; with {path}, {prompt}, it is above {limit}, which {source} allows"
            yield f"{name}.max_response_length", text


def _resolve_paths(section: Section, directory: Path, prefix: str) -> Iterator[tuple[str, str]]:
    for attribute in fields(type(section)):
        value, path = getattr(section, attribute.name), f"{prefix}{attribute.name}"
        if isinstance(value, Section):
            yield from _resolve_paths(value, directory, f"{path}.")
        elif (kind := attribute.metadata.get("path")) and value:
            values = [value] if isinstance(value, str) else value
            absolute = tuple(str(directory / one) for one in values)
            setattr(section, attribute.name, absolute[0] if isinstance(value, str) else absolute)
            yield from ((path, text) for one in absolute if (text := _missing(one, kind)))


def _missing(path: str, kind: str) -> str:
    if kind == "object" or (kind == "agent" and ".py:" in path):
        path, colon, name = path.rpartition(":")
        if not colon or not name:
            return f"found {path or name!r}; expected path/to/file.py:name"
    return "" if kind == "output" or Path(path).exists() else f"there is no such file: {path}"


def _unused_keys(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        path = f"{prefix}{key}"
        if path in WITHOUT_EFFECT:
            yield path
        elif isinstance(value, Mapping):
            yield from _unused_keys(value, f"{path}.")
