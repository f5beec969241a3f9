"""Runs the operations of one training job, one after another: sync, in a thread of its engine.

Generation and training share one model in one process, so that weights are never copied. All that the operations change
is in a snapshot: weights, optimizer and `TrainingSession`.
"""

from __future__ import annotations

import json
import logging
import re
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, Protocol

from attrs import asdict, evolve, frozen

from fray.rl.checkpoint import begin_checkpoint, finish_checkpoint, remove_older
from fray.rl.core.versions import VersionName
from fray.rl.inference.requests import Completion, GenerateRequest, Sampling
from fray.rl.model_spec import ModelSpec
from fray.rl.train.lora import LoRA
from fray.rl.train.settings import CRITIC_FOLDER, GRPO, Critic, KlPenalty
from fray.tinker.core.limits import DEFAULT_LIMITS, UserLimits, limit_text
from fray.tinker.core.training_config import ConfigError, TrainingSettings, settings_of
from fray.tinker.core.training_session import ACTOR_FOLDER, GENERATION_KEYS, OutOfOrder, TrainingSession, merged
from fray.tinker.environments.client import EnvironmentClient, EnvironmentFailed, read_environments
from fray.tinker.environments.episodes import AgentLoopPlan, Episode, failures_of, roll_out
from fray.tinker.job_directories import share
from fray.tinker.rewards.remote import RemoteReward
from fray.tinker.rewards.uploaded import RewardCall, RewardError, UploadedReward, check_upload
from fray.tinker.saving import SaveFailed, saving
from fray.tinker.wire.dataproto import DataProtoError, decode_data_proto
from fray.tinker.wire.prompts import PromptRow, rows_of

SNAPSHOT_SHARE = 0.1
"""Share of the time that snapshots may take; the requests since the last are executed again when the engine is lost."""
SESSION_FILE = "session.json"
PROGRESS_FILE = "progress.json"
"""File of a checkpoint with what the job continues from beside weights and optimizer."""
SLOTS = 512
"""Completions that are decoded at a time."""
SAMPLES_SHOWN = 10
TRACEBACK_LIMIT = 4_000
_SNAPSHOT_NAME = re.compile(r"global_step_(\d+)")

log = logging.getLogger("fray.tinker")


class Reward(Protocol):
    """Reward of samples."""

    def scores(self, calls: Sequence[RewardCall]) -> list[float]: ...

    def close(self) -> None: ...


@frozen
class EngineAnswer:
    """Result of an operation.

    Attributes:
        status: of HTTP.
        body: JSON value.
        scores: rewards of a training step, or what environments answered in its episodes: JSON values, which are not
            asked for again when it is repeated.
        snapshot: number of the request up to which a snapshot has everything; 0: there is none.
        snapshot_error: why there is no newer one, though it was due; empty: there is, or it was not due.
        checkpoint: directory that was saved for the client; empty: none.
        global_steps: training steps done.
        tokens: generated.
    """

    status: int
    body: dict[str, Any]
    scores: tuple[Any, ...] | None = None
    snapshot: int = 0
    snapshot_error: str = ""
    checkpoint: str = ""
    global_steps: int = 0
    tokens: int = 0

    @property
    def is_failure(self) -> bool:
        """True if it had no effect: it is not repeated after a snapshot."""
        return self.status >= 400 or self.body.get("status") == "error"


class TrainingRunner:
    """State of one training job.

    Args:
        models: those of the service, by name.
        config: of the job, as it was submitted.
        directory: of the job; snapshots and checkpoints are below it.
        limits: of the user.
        clock: seconds.
    """

    def __init__(
        self,
        models: Mapping[str, ModelSpec],
        config: dict[str, Any],
        directory: Path,
        limits: UserLimits = DEFAULT_LIMITS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._models, self._directory, self._limits, self._clock = models, directory, limits, clock
        self._snapshots, self._snapshot = directory / "snapshots", 0
        self._session = TrainingSession(config=config)
        self._settings = TrainingSettings()
        self._trainer: Any = None
        self._engine: Any = None
        self._reward: Reward | None = None
        self._environments: dict[str, EnvironmentClient] = {}
        self._snapshot_due = 0.0
        self._snapshot_error = ""
        self._has_new_step = False
        """A step was trained, or a checkpoint resumed, that no snapshot has."""

    # Snapshots --------------------------------------------------------------------------------------------------------

    def begin(self) -> int:
        """Continue from the newest snapshot; return the number of the request up to which it has all, 0 without one."""
        found = [
            (int(match[1]), path)
            for path in (self._snapshots.iterdir() if self._snapshots.is_dir() else ())
            if (match := _SNAPSHOT_NAME.fullmatch(path.name)) and (path / SESSION_FILE).is_file()
        ]
        if not found:
            return 0
        self._snapshot, path = max(found)
        self._session = TrainingSession(**json.loads((path / SESSION_FILE).read_text()))
        self._load(path)
        return self._snapshot

    def _take_snapshot(self, seq: int) -> None:
        began = self._clock()
        try:
            unfinished = begin_checkpoint(self._snapshots, seq)
            with saving(f"the snapshot of request {seq}", unfinished):
                self._trainer.save(unfinished)
                (unfinished / SESSION_FILE).write_text(json.dumps(asdict(self._session)))
                share(self._directory, unfinished)
                path = finish_checkpoint(unfinished, seq)
            remove_older(self._snapshots, path)
            self._snapshot, self._has_new_step, self._snapshot_error = seq, False, ""
        except OSError as error:
            # The requests since the last one stay in the store, so nothing is lost. Tried again later.
            self._snapshot_error = str(error)
            log.warning("job %s: %s", self._directory.name, error)
        ended = self._clock()
        self._snapshot_due = ended + (ended - began) / SNAPSHOT_SHARE

    # Operations -------------------------------------------------------------------------------------------------------

    def execute(self, seq: int, kind: str, body: bytes, scores: Sequence[Any] | None = None) -> EngineAnswer:
        """Execute a request and return its answer; one that fails has no effect.

        It is given when the answers to those before it are on disk.

        Args:
            seq: its number.
            kind: an operation of `fray.tinker.core.training_session.EFFECTS`.
            body: JSON.
            scores: `EngineAnswer.scores` of the step when it was executed first, which count again.
        """
        if self._has_new_step and self._clock() >= self._snapshot_due:
            # Not right after the step: this request comes when the answer to the one before is on disk. A snapshot that
            # had a request whose answer was lost would leave its client to wait for ever.
            self._take_snapshot(seq - 1)
        answer = self._answer(kind, body, scores)
        return evolve(answer, snapshot=self._snapshot, snapshot_error=self._snapshot_error)

    def _answer(self, kind: str, body: bytes, scores: Sequence[Any] | None) -> EngineAnswer:
        is_batch = kind in ("train_step", "validate")
        try:
            message = _object_of(body)
            self._session.check(kind)
            answer = getattr(self, f"_{kind}")(message, scores)
        except OutOfOrder as error:
            return EngineAnswer(400, {"detail": str(error)})
        except _Malformed as error:
            return EngineAnswer(422, {"detail": error.problems})
        except (ConfigError, RewardError, EnvironmentFailed, ValueError) as error:
            if is_batch:
                return self._failure(str(error), error)
            return EngineAnswer(400, {"detail": str(error)})
        except SaveFailed as error:
            return self._failure(f"{kind}: {error}", error)
        except OSError as error:
            return self._failure(f"{kind}: {error.strerror or error}: {error.filename or self._directory}", error)
        except Exception as error:  # noqa: BLE001 (whatever fails in a step: its client gets it, and the job continues)
            return self._failure(f"{type(error).__name__}: {error}", error)
        result = {name: value for name, value in answer.items() if not name.startswith("_")}
        return EngineAnswer(
            200,
            result,
            answer.get("_scores"),
            checkpoint=answer.get("_path", ""),
            global_steps=self._session.global_steps,
            tokens=answer.get("_tokens", 0),
        )

    def _failure(self, text: str, error: Exception) -> EngineAnswer:
        trace = getattr(error, "traceback", "") or "".join(traceback.format_exception(error))
        body = {"status": "error", "error": text, "traceback": trace[-TRACEBACK_LIMIT:]}
        return EngineAnswer(200, body)

    def _set_generation_config(self, message: dict[str, Any], scores: object) -> dict[str, Any]:
        changes = {name: message[name] for name in GENERATION_KEYS if message.get(name) is not None}
        generation = {**self._session.generation, **changes}
        _sampling(generation, 1, 1, 0)
        self._session.generation = generation
        return {"status": "success", "config": {name: generation.get(name) for name in GENERATION_KEYS}}

    def _upload_reward_function(self, message: dict[str, Any], scores: object) -> dict[str, Any]:
        name, source = _required(message, "function_name", str), _required(message, "source_code", str)
        check_upload(name, source)
        self._replace_reward(self._uploaded(name, source, self._settings.reward_timeout_s))
        self._session.reward_name, self._session.reward_source = name, source
        path = self._directory / "reward" / f"{name}.py"
        path.write_text(source)
        share(self._directory, path)
        return {"status": "success", "message": f"reward function {name!r} is there", "path": str(path)}

    def _set_config(self, message: dict[str, Any], scores: object) -> dict[str, Any]:
        answer = self._override_config(message, scores)
        self._session.is_configured = True
        return answer

    def _override_config(self, message: dict[str, Any], scores: object) -> dict[str, Any]:
        config = merged(self._session.config, _required(message, "config_overrides", dict))
        settings, unused = settings_of(config)
        self._model_of(settings)
        if settings.interaction_config:
            read_environments(settings.interaction_config)
        self._session.config = config
        text = f"these keys are not used: {', '.join(unused)}" if unused else "all keys are used"
        return {"status": "success", "message": f"configuration set; {text}"}

    def _init_workers(self, message: dict[str, Any], scores: object) -> dict[str, Any]:
        steps = message.get("total_steps")
        if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
            raise ConfigError(f"total_steps: expected an integer of at least 1, not {steps!r:.100}")
        settings, _ = settings_of(self._session.config)
        if settings.has_agent_loop and not settings.interaction_config:
            raise ConfigError(
                "init_workers needs the environment servers first, as enable_agent_loop is set: the key "
                "multi_turn.interaction_config_content with the text of a YAML file"
            )
        steps = steps or settings.total_steps
        before = self._session.reward_name, self._session.reward_source
        if not settings.has_agent_loop and not self._session.reward_source and not settings.reward_endpoint:
            if not settings.reward_path:
                raise ConfigError(
                    "init_workers needs a reward first: POST upload_reward_function {function_name, source_code}, or "
                    "the key custom_reward_function.endpoint with the URL of a reward server, or .path and .name of a "
                    "function in a file here"
                )
            self._session.reward_name, self._session.reward_source = settings.reward_name, _source_at(settings)
        self._session.total_steps = steps or 0
        try:
            self._load()
        except BaseException:
            self._session.total_steps = None
            self._session.reward_name, self._session.reward_source = before
            raise
        return {"status": "success", "result": {"model": self._model_of(settings), "total_steps": steps}}

    def _resume(self, message: dict[str, Any], scores: object) -> dict[str, Any]:
        path = Path(_required(message, "path", str))
        progress = json.loads((path / PROGRESS_FILE).read_text())
        self._load_model(self._settings, path / ACTOR_FOLDER)
        self._session.global_steps, self._session.seed = progress["global_steps"], progress["seed"]
        self._session.generation = progress["generation"]
        # The checkpoint may be replaced later, so that the next snapshot is taken before anything else.
        self._has_new_step, self._snapshot_due = True, 0.0
        generation = {name: self._session.generation.get(name) for name in GENERATION_KEYS}
        return {"status": "success", "global_steps": self._session.global_steps, "generation_config": generation}

    def _train_step(self, message: dict[str, Any], scores: Sequence[Any] | None) -> dict[str, Any]:
        settings = self._settings
        rows = self._rows(message)
        if len(rows) * settings.rollouts > self._limits.batch_samples:
            what = f"batch_data: {len(rows)} prompts with {settings.rollouts} samples each"
            raise DataProtoError(limit_text(what, "batch_samples", self._limits.batch_samples))
        purpose = f"step {self._session.global_steps}"
        if settings.has_agent_loop:
            return self._train_episodes(
                self._episodes(rows, settings.rollouts, self._session.generation, purpose, scores)
            )
        samples = self._generate(rows, settings.rollouts, self._session.generation, purpose)
        rewards = list(scores) if scores is not None else self._rewards_of(samples)
        metrics = self._trainer.update(
            [
                _trajectory(row, at, completion, reward)
                for (at, row, completion), reward in zip(samples, rewards, strict=True)
            ]
        )
        self._count_step()
        return {
            "status": "success",
            "metrics": _metrics(metrics, rewards, [len(each.token_ids) for _, _, each in samples]),
            "global_steps": self._session.global_steps,
            "_scores": tuple(rewards),
            "_tokens": _token_count(samples),
        }

    def _validate(self, message: dict[str, Any], scores: object) -> dict[str, Any]:
        rows = self._rows(message)
        generation = {**self._session.generation, "temperature": 0.0, "top_p": 1.0, "top_k": 0}
        if self._settings.has_agent_loop:
            episodes = self._episodes(rows, 1, generation, "validation")
            played = _played(episodes)
            answer = _validation([(each.prompt, each.response, each.reward) for each in played])
            answer["metrics"] |= _episode_metrics(episodes)
            answer |= _failures(episodes) | {"_tokens": sum(each.tokens for each in episodes)}
        else:
            samples = self._generate(rows, 1, generation, "validation")
            rewards = self._rewards_of(samples)
            answer = _validation(
                [
                    (self._decode(row.tokens), self._text(completion), reward)
                    for (_, row, completion), reward in zip(samples, rewards, strict=True)
                ]
            )
            answer["_tokens"] = _token_count(samples)
        return {**answer, "global_steps": self._session.global_steps}

    def _train_episodes(self, episodes: Sequence[Episode]) -> dict[str, Any]:
        """Train on the episodes that did not fail."""
        played = _played(episodes)
        metrics = self._trainer.update([each for episode in played for each in episode.trajectories])
        self._count_step()
        rewards, tokens = [each.reward for each in played], [each.tokens for each in played]
        return {
            "status": "success",
            "metrics": _metrics(metrics, rewards, tokens) | _episode_metrics(episodes),
            "global_steps": self._session.global_steps,
            **_failures(episodes),
            "_scores": tuple(each.record for each in episodes),
            "_tokens": sum(each.tokens for each in episodes),
        }

    def _count_step(self) -> None:
        self._session.global_steps += 1
        self._has_new_step = True

    def _save_checkpoint(self, message: dict[str, Any], scores: object) -> dict[str, Any]:
        steps = self._session.global_steps
        unfinished = begin_checkpoint(self._directory / "checkpoints", steps)
        progress = {"global_steps": steps, "seed": self._seed, "generation": self._session.generation}
        with saving(f"the checkpoint of step {steps}", unfinished):
            self._trainer.save(unfinished / ACTOR_FOLDER)
            (unfinished / PROGRESS_FILE).write_text(json.dumps(progress))
            share(self._directory, unfinished)
            path = finish_checkpoint(unfinished, steps)
        actor = path / ACTOR_FOLDER
        critic = None if self._trainer.critic is None else str(actor / CRITIC_FOLDER)
        paths = {"actor_path": str(actor), "critic_path": critic, "checkpoint_dir": str(path)}
        return {"status": "success", "result": {"global_steps": steps, **paths}, "_path": str(path)}

    # Inside -----------------------------------------------------------------------------------------------------------

    def _model_of(self, settings: TrainingSettings) -> str:
        """Return the name of the model that a configuration chooses. Raises ConfigError for one that is not served."""
        known = ", ".join(self._models)
        if settings.critic_model and settings.critic_model not in self._models:
            raise ConfigError(
                f"critic.model.path: {settings.critic_model!r} is not served here; expected one of {known}"
            )
        if not settings.model and len(self._models) == 1:
            return next(iter(self._models))
        # A client of this machine may name a directory.
        found = [name for name, spec in self._models.items() if settings.model in (name, spec)]
        if not found:
            raise ConfigError(
                f"actor_rollout_ref.model.path: {settings.model!r} is not served here; expected one of {known}"
            )
        return found[0]

    @property
    def _seed(self) -> int:
        return self._settings.seed if self._session.seed is None else self._session.seed

    def _load(self, saved: Path | None = None) -> None:
        """Load model, trainer and reward of a configuration that is complete; ``saved`` as of `_load_model`."""
        settings, _ = settings_of(self._session.config)
        self._load_model(settings, saved)
        self._settings = settings
        if settings.has_agent_loop:
            found, job_id = read_environments(settings.interaction_config), self._directory.name
            self._environments = {name: EnvironmentClient(each, job_id) for name, each in found.items()}
        elif settings.reward_endpoint and not self._session.reward_source:
            self._replace_reward(RemoteReward(settings.reward_endpoint, settings.reward_timeout_s))
        elif self._reward is None:
            name, source = self._session.reward_name, self._session.reward_source
            self._reward = self._uploaded(name, source, settings.reward_timeout_s)
        elif isinstance(self._reward, UploadedReward):
            self._reward.timeout_s = settings.reward_timeout_s

    def _load_model(self, settings: TrainingSettings, saved: Path | None) -> None:
        """Load model and trainer; those that are there stay if it fails.

        Args:
            settings: of the job.
            saved: directory with weights and optimizer from which the trainer continues; None: it begins.
        """
        from fray.rl.tensors.adapters import POLICY_ADAPTER
        from fray.rl.tensors.engine import Engine
        from fray.rl.tensors.language_model import load_model
        from fray.rl.tensors.policy_trainer import PolicyTrainer

        critic = None
        if settings.estimator == "gae":
            critic = Critic(settings.critic_lr, clip=settings.critic_clip, lam=settings.lam)
        algorithm = GRPO(
            groups=1,
            group_size=max(settings.rollouts, 1),
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            clip_low=settings.clip_ratio,
            clip_high=settings.clip_ratio,
            advantage=settings.estimator,
            gamma=settings.gamma or 1.0,
            critic=critic,
            kl=_penalty_of(settings),
            lora=None if settings.lora is None else LoRA(**settings.lora),
        )
        name = self._model_of(settings)
        model = load_model(self._models[name])
        has_other = critic is not None and settings.critic_model not in ("", name)
        other = load_model(self._models[settings.critic_model]) if has_other else None
        trainer = PolicyTrainer(model, algorithm, critic=other)
        if saved is not None:
            trainer.load(saved)
        self._trainer = trainer
        # The same model: generation always has the weights of the last step.
        adapter = None if settings.lora is None else POLICY_ADAPTER
        self._engine = Engine(model, VersionName(0, 0), slots=SLOTS, adapters=trainer.adapters, adapter=adapter)

    def _uploaded(self, name: str, source: str, timeout_s: float) -> UploadedReward:
        reward = UploadedReward(name, source, self._directory / "reward", timeout_s)
        share(self._directory, self._directory / "reward")
        return reward

    def _replace_reward(self, reward: Reward) -> None:
        if self._reward is not None:
            self._reward.close()
        self._reward = reward

    def _rows(self, message: dict[str, Any]) -> list[PromptRow]:
        data = decode_data_proto(_required(message, "batch_data", dict))
        rows = rows_of(data, self._trainer.lm.tokenizer)
        if len(rows) > self._limits.batch_prompts:
            what = f"batch_data: {len(rows)} prompts"
            raise DataProtoError(limit_text(what, "batch_prompts", self._limits.batch_prompts))
        # The prompt of an episode has the first observation, too, and is checked with it.
        for at, row in enumerate(() if self._settings.has_agent_loop else rows):
            if len(row.tokens) > self._settings.max_prompt_length:
                raise DataProtoError(
                    f"batch_data: prompt {at} has {len(row.tokens)} tokens, and data.max_prompt_length is "
                    f"{self._settings.max_prompt_length}"
                )
        return rows

    def _generate(
        self, rows: Sequence[PromptRow], count: int, generation: Mapping[str, Any], purpose: str
    ) -> list[tuple[int, PromptRow, Completion]]:
        """Return the samples of all prompts, interleaved: those of the first prompt first."""
        engine, limit = self._engine, self._settings.max_response_length
        for at, row in enumerate(rows):
            seed = self._seed_of(f"{purpose}/{at}")
            engine.add(GenerateRequest(str(at), tuple(row.tokens), _sampling(generation, count, limit, seed)))
        found: dict[tuple[int, int], Completion] = {}
        try:
            while engine.has_work:
                for answer in engine.step():
                    found[int(answer[0]), answer[1].index] = answer[1]
        finally:
            engine.abort_all()
        return [(at, row, found[at, index]) for at, row in enumerate(rows) for index in range(count)]

    def _seed_of(self, name: str) -> int:
        return int.from_bytes(sha256(f"{self._seed}/{name}".encode()).digest()[:6], "big")

    def _episodes(
        self,
        rows: Sequence[PromptRow],
        count: int,
        generation: Mapping[str, Any],
        purpose: str,
        records: Sequence[Any] | None = None,
    ) -> list[Episode]:
        """Return the episodes of all prompts, ``count`` of each, with the environments of the configuration."""
        settings = self._settings
        plan = AgentLoopPlan(
            count,
            settings.turns,
            settings.max_prompt_length,
            settings.max_response_length,
            settings.max_turn_length,
            _sampling(generation, 1, settings.max_response_length, 0),
            lambda at, index, turn: self._seed_of(f"{purpose}/{at}/{index}/{turn}"),
        )
        return roll_out(self._engine, self._trainer.lm.tokenizer, rows, self._environments, plan, records)

    def _rewards_of(self, samples: Sequence[tuple[int, PromptRow, Completion]]) -> list[float]:
        assert self._reward is not None
        return self._reward.scores(
            [(row.data_source, self._text(each), row.ground_truth, row.extra_info) for _, row, each in samples]
        )

    def _text(self, completion: Completion) -> str:
        return self._decode(completion.token_ids)

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._trainer.lm.tokenizer.decode(tokens))

    def close(self) -> None:
        """End the process of an uploaded reward function, and close connections."""
        if self._reward is not None:
            self._reward.close()
        for environment in self._environments.values():
            environment.close()


def _source_at(settings: TrainingSettings) -> str:
    """Return the source of a reward function of the configuration. Raises ConfigError."""
    try:
        source = Path(settings.reward_path).read_text(encoding="utf-8")
        check_upload(settings.reward_name, source)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"custom_reward_function.path: {settings.reward_path!r:.500}: {reason}; the file is read on the machine of "
            "the engine: upload a function of the client's with POST upload_reward_function"
        ) from None
    return source


def _penalty_of(settings: TrainingSettings) -> KlPenalty | None:
    """Return the penalty for distance from the first weights; with a coefficient of 0 there is none."""
    if not settings.kl:
        return None
    return KlPenalty(
        settings.kl,
        estimator=settings.kl_estimator,
        place=settings.kl_place,
        target=settings.kl_target or None,
        horizon=settings.kl_horizon or 10_000.0,
    )


def _played(episodes: Sequence[Episode]) -> list[Episode]:
    """Return the episodes that did not fail. Raises EnvironmentFailed if all did."""
    played = [each for each in episodes if not each.failure]
    if not played:
        raise EnvironmentFailed("; ".join(failures_of(episodes)))
    return played


def _failures(episodes: Sequence[Episode]) -> dict[str, list[str]]:
    """Return what an answer says about episodes that failed."""
    found = failures_of(episodes)
    return {"failures": found} if found else {}


def _episode_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    turns = [each.turns for each in episodes if not each.failure]
    return {
        "environment/episodes": float(len(episodes)),
        "environment/failed": float(len(episodes) - len(turns)),
        "environment/done": float(sum(each.is_done for each in episodes if not each.failure)),
        "environment/turns_mean": fmean(turns),
        "environment/turns_max": float(max(turns)),
    }


def _validation(scored: Sequence[tuple[str, str, float]]) -> dict[str, Any]:
    """Return the answer about samples: input, output, score of each."""
    rewards = [reward for _, _, reward in scored]
    spread = {"mean_score": fmean(rewards), "std": pstdev(rewards), "max": max(rewards), "min": min(rewards)}
    return {
        "status": "success",
        "metrics": {f"val/{name}": value for name, value in spread.items()},
        "samples": [dict(zip(("input", "output", "score"), each, strict=True)) for each in scored[:SAMPLES_SHOWN]],
    }


def _token_count(samples: Sequence[tuple[int, PromptRow, Completion]]) -> int:
    return sum(len(each.token_ids) for _, _, each in samples)


class _Malformed(Exception):
    """Body of another form than the operation has."""

    def __init__(self, kind: str, place: list[str], message: str, got: Any) -> None:
        super().__init__(message)
        self.problems = [{"type": kind, "loc": place, "msg": message, "input": got}]


def _object_of(body: bytes) -> dict[str, Any]:
    try:
        message = json.loads(body or b"{}")
    except (ValueError, RecursionError) as error:
        raise _Malformed("json_invalid", ["body"], f"JSON decode error: {error}", None) from None
    if not isinstance(message, dict):
        raise _Malformed("model_attributes_type", ["body"], "Input should be an object", None)
    return message


def _required(message: dict[str, Any], name: str, kind: type) -> Any:
    if name not in message:
        raise _Malformed(
            "missing", ["body", name], "Field required", {key: type(each).__name__ for key, each in message.items()}
        )
    if not isinstance(message[name], kind):
        known = ("string_type", "a valid string") if kind is str else ("dict_type", "a valid dictionary")
        raise _Malformed(known[0], ["body", name], f"Input should be {known[1]}", type(message[name]).__name__)
    return message[name]


def _sampling(generation: Mapping[str, Any], count: int, limit: int, seed: int) -> Sampling:
    """Return the sampling of generation settings; raises ConfigError for one that the engine has not."""
    if generation.get("repetition_penalty", 1.0) != 1.0:
        raise ConfigError("repetition_penalty: the engine has none; expected 1.0")
    top_k = generation.get("top_k", 0)
    wanted = generation.get("max_new_tokens", limit)
    try:
        return Sampling(
            max_tokens=min(wanted, limit) if limit > 1 else wanted,
            temperature=generation.get("temperature", 1.0),
            top_p=generation.get("top_p", 1.0),
            top_k=0 if top_k == -1 else top_k,
            seed=seed,
            n=count,
        )
    except (ValueError, TypeError) as error:
        raise ConfigError(str(error)) from None


def _trajectory(row: PromptRow, at: int, completion: Completion, reward: float) -> dict[str, Any]:
    prompt, response = list(row.tokens), completion.token_ids
    return {
        "tokens": prompt + response,
        "loss_mask": [0] * len(prompt) + [1] * len(response),
        "logprobs": [0.0] * len(prompt) + completion.logprobs,
        "reward": reward,
        "step_rewards": [reward],
        "group_id": f"prompt {at}",
    }


def _metrics(trained: Mapping[str, float], rewards: Sequence[float], lengths: Sequence[int]) -> dict[str, float]:
    """Return the metrics of a step by the names that OpenTinker's clients show."""
    metrics = {
        "training_step_reward": fmean(rewards),
        "critic/score/mean": fmean(rewards),
        "critic/score/max": max(rewards),
        "critic/score/min": min(rewards),
        "response_length/mean": fmean(lengths),
        "response_length/max": float(max(lengths)),
        "response_length/min": float(min(lengths)),
    }
    skipped = ("reward_mean", "reward_std", "reward_min", "reward_max")
    return metrics | {_shown_name(name): value for name, value in trained.items() if name not in skipped}


_SHOWN_NAMES = {
    "loss": "actor/pg_loss",
    "clip_fraction": "actor/pg_clipfrac",
    "mismatch_k3": "actor/ppo_kl",
    "critic_loss": "critic/vf_loss",
    "critic_clip_fraction": "critic/vf_clipfrac",
    "critic_explained_variance": "critic/vf_explained_var",
    "critic_value_mean": "critic/values/mean",
    "critic_return_mean": "critic/returns/mean",
}


def _shown_name(name: str) -> str:
    part, _, rest = name.partition("_")
    return _SHOWN_NAMES.get(name) or (f"critic/{rest}" if part == "critic" else f"actor/{name}")
