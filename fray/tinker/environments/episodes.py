"""Episodes of a batch: the model and environments in turns, many episodes at a time; sync, in the engine's thread.

A conversation is that of `fray.rl`: the next prompt begins with the tokens that were generated. In its trajectory the
tokens of the model count, and those of observations are masked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from secrets import token_hex
from typing import Any, Protocol

import trio
from attrs import define, evolve, field, frozen

from fray.errors import InvalidRequest
from fray.rl.inference.chat_messages import checked_messages, key_of
from fray.rl.inference.client import LLM, ChatPrompt
from fray.rl.inference.replies import ModelReply
from fray.rl.inference.requests import Completion, GenerateRequest, Sampling
from fray.rl.nexrl_types import Trajectory
from fray.rl.rollout.scores import Score, trajectories_of
from fray.rl.tokenizers import Tokenizer
from fray.tinker.environments.client import EnvironmentClient, EnvironmentFailed, EnvironmentStep
from fray.tinker.wire.prompts import PromptRow

EPISODES = 512
"""Episodes under way at a time."""
THREADS = 64
"""Requests to environment servers at a time."""
FAILURES_SHOWN = 10


class EpisodeEngine(Protocol):
    """Part of `fray.rl.tensors.engine.Engine` that episodes need."""

    max_length: int

    @property
    def has_work(self) -> bool: ...
    def add(self, request: GenerateRequest) -> None: ...
    def step(self) -> list[Any]: ...
    def abort_all(self) -> Any: ...


@frozen
class AgentLoopPlan:
    """Settings of the episodes of a batch.

    Attributes:
        count: episodes of each prompt, which are a group.
        turns: replies of the model in an episode.
        max_prompt_length: tokens of the first prompt, with the first observation.
        max_response_length: tokens after it, those of observations included.
        max_turn_length: tokens of a reply; None: as many as fit.
        sampling: of each reply; its ``seed`` is that of ``seed_of``.
        seed_of: returns the seed of a reply, by prompt, episode and turn.
    """

    count: int
    turns: int
    max_prompt_length: int
    max_response_length: int
    max_turn_length: int | None
    sampling: Sampling
    seed_of: Callable[[int, int, int], int]


@define
class Episode:
    """Result of an episode.

    Attributes:
        at: number of its prompt in the batch.
        index: number of the episode among those of the prompt.
        trajectories: what is trained; none if it failed.
        reward: sum of its turns' rewards.
        turns: replies of the model.
        tokens: that the model generated.
        prompt: text of the prompt, and of all that follows it.
        response: likewise.
        is_done: the environment has ended it, and no limit.
        failure: why it failed; empty: it did not.
        record: answers of the environment as JSON, from which the episode is repeated without asking it again.
    """

    at: int
    index: int
    trajectories: tuple[Trajectory, ...] = ()
    reward: float = 0.0
    turns: int = 0
    tokens: int = 0
    prompt: str = ""
    response: str = ""
    is_done: bool = False
    failure: str = ""
    record: dict[str, Any] = field(factory=dict)

    @property
    def name(self) -> str:
        return f"prompt {self.at}, sample {self.index}"


def roll_out(
    engine: EpisodeEngine,
    tokenizer: Tokenizer,
    rows: Sequence[PromptRow],
    environments: Mapping[str, EnvironmentClient],
    plan: AgentLoopPlan,
    records: Sequence[Mapping[str, Any]] | None = None,
) -> list[Episode]:
    """Return the episodes of all prompts, those of the first prompt first. One that fails has its reason.

    Args:
        engine: generates; it has no other requests.
        tokenizer: of the model.
        rows: prompts; ``task["name"]`` chooses the environment, by default the first.
        environments: by name.
        plan: settings.
        records: of the same episodes when they were rolled out before: no environment is asked.
    """
    for environment in environments.values():
        environment.begin()
    loop = _Loop(engine, tokenizer, environments, plan)
    try:
        return trio.run(loop.run, rows, records)
    except BaseExceptionGroup as group:
        # The engine's error, as it would be without tasks.
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        raise error from None
    finally:
        engine.abort_all()


def failures_of(episodes: Sequence[Episode]) -> list[str]:
    """Return reasons for which episodes failed, the most frequent ones, each with its count and one place."""
    counts = Counter(episode.failure for episode in episodes if episode.failure)
    first = {episode.failure: episode.name for episode in reversed(episodes)}
    return [
        f"{count} of {len(episodes)} samples ({first[text]}{', …' if count > 1 else ''}): {text}"
        for text, count in counts.most_common(FAILURES_SHOWN)
    ]


class _Environment:
    """Environment of one episode. Its answers become a record.

    Args:
        client: its servers.
        task: what it gets when it is reset.
        threads: for the requests.
    """

    def __init__(self, client: EnvironmentClient, task: Mapping[str, Any], threads: trio.CapacityLimiter) -> None:
        self._client, self._task, self._threads = client, task, threads
        # An id of its own for each attempt: a request of an engine that was lost cannot reach it.
        self._instance_id = token_hex(12)
        self._has_begun = self._can_repeat = False
        self.record: dict[str, Any] = {"observation": "", "turns": []}

    async def reset(self) -> str:
        found: tuple[str, bool] = await self._in_thread(self._client.reset, self._instance_id, self._task)
        self.record["observation"], self._can_repeat = found
        self._has_begun = True
        return found[0]

    async def step(self, action: str, turn: int) -> EnvironmentStep:
        def send() -> EnvironmentStep:
            return self._client.step(self._instance_id, action, turn, can_repeat=self._can_repeat)

        try:
            found: EnvironmentStep = await self._in_thread(send)
        except EnvironmentFailed as error:
            self._has_begun = not error.is_unreachable
            raise
        self.record["turns"].append([found.observation, found.reward, found.done])
        return found

    async def end(self) -> None:
        if self._has_begun:
            await self._in_thread(self._client.finalize, self._instance_id)

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await trio.to_thread.run_sync(function, *arguments, limiter=self._threads, abandon_on_cancel=True)


class _RecordedEnvironment:
    """Environment of an episode that is repeated: it answers what it did before."""

    def __init__(self, record: Mapping[str, Any]) -> None:
        self.record = dict(record)

    async def reset(self) -> str:
        if "failure" in self.record:
            raise EnvironmentFailed(self.record["failure"])
        return str(self.record["observation"])

    async def step(self, action: str, turn: int) -> EnvironmentStep:
        turns = self.record["turns"]
        # A reply that rounding made another one has no answer: the episode ends where it did before.
        return EnvironmentStep(*turns[turn]) if turn < len(turns) else EnvironmentStep("", 0.0, done=True)

    async def end(self) -> None:
        """Do nothing."""


class _Loop:
    """Episodes and the engine as tasks."""

    def __init__(
        self,
        engine: EpisodeEngine,
        tokenizer: Tokenizer,
        environments: Mapping[str, EnvironmentClient],
        plan: AgentLoopPlan,
    ) -> None:
        self._engine, self._tokenizer, self._environments, self._plan = engine, tokenizer, environments, plan
        self._threads, self._places = trio.CapacityLimiter(THREADS), trio.CapacityLimiter(EPISODES)
        self._requests: dict[str, tuple[trio.Event, list[Completion]]] = {}
        self._added = trio.Event()

    async def run(self, rows: Sequence[PromptRow], records: Sequence[Mapping[str, Any]] | None) -> list[Episode]:
        episodes = [Episode(at, index) for at in range(len(rows)) for index in range(self._plan.count)]
        async with trio.open_nursery() as owner:
            owner.start_soon(self._generate)
            async with trio.open_nursery() as nursery:
                for number, episode in enumerate(episodes):
                    record = None if records is None else records[number]
                    nursery.start_soon(self._roll_out, episode, rows[episode.at], record)
            owner.cancel_scope.cancel()
        return episodes

    async def _generate(self) -> None:
        """Let the engine step while it has requests."""
        while True:
            while self._engine.has_work:
                for request_id, completion in self._engine.step():
                    event, completions = self._requests.pop(request_id)
                    completions.append(completion)
                    event.set()
                # Episodes that got their reply may ask on before the next step.
                await trio.lowlevel.checkpoint()
            self._added = trio.Event()
            await self._added.wait()

    async def _send(self, request: GenerateRequest) -> list[Completion]:
        self._engine.add(request)
        waiting: tuple[trio.Event, list[Completion]] = trio.Event(), []
        self._requests[request.request_id] = waiting
        self._added.set()
        await waiting[0].wait()
        return waiting[1]

    async def _roll_out(self, episode: Episode, row: PromptRow, record: Mapping[str, Any] | None) -> None:
        """Roll out an episode into its result."""
        async with self._places:
            environment: _Environment | _RecordedEnvironment
            if record is not None:
                environment = _RecordedEnvironment(record)
            else:
                name = row.task.get("name")
                client = self._environments.get(name if isinstance(name, str) else next(iter(self._environments)))
                if client is None:
                    episode.failure = (
                        f"no environment {name!r:.100} in the interaction config; expected one of "
                        f"{', '.join(self._environments)}"
                    )
                    episode.record = {"failure": episode.failure}
                    return
                environment = _Environment(client, row.task, self._threads)
            try:
                await self._converse(episode, row, environment)
            except (EnvironmentFailed, ValueError, InvalidRequest) as error:
                episode.failure, episode.trajectories = str(error), ()
                environment.record["failure"] = episode.failure
            episode.record = environment.record
            await environment.end()

    async def _converse(
        self, episode: Episode, row: PromptRow, environment: _Environment | _RecordedEnvironment
    ) -> None:
        plan, at = self._plan, (episode.at, episode.index)

        async def send(request: GenerateRequest) -> list[Completion]:
            return await self._send(evolve(request, request_id=f"{at[0]}/{at[1]}/{episode.turns}"))

        llm = LLM(send, self._tokenizer)
        messages, chat = self._first_prompt(llm, row, await environment.reset())
        length = len(chat.prompt_ids)
        if length > plan.max_prompt_length:
            raise ValueError(f"the prompt has {length} tokens, and data.max_prompt_length is {plan.max_prompt_length}")
        limit = min(length + plan.max_response_length, self._engine.max_length)
        rewards: list[float] = []
        while episode.turns < plan.turns and not episode.is_done:
            room = limit - len(chat.prompt_ids)
            if room < 1:
                break
            most = min(room, plan.sampling.max_tokens, plan.max_turn_length or room)
            sampling = evolve(plan.sampling, max_tokens=most, seed=plan.seed_of(*at, episode.turns))
            (reply,) = await llm.reply_to(chat, sampling)
            found = await environment.step(reply.text, episode.turns)
            rewards.append(found.reward)
            episode.turns, episode.is_done = episode.turns + 1, found.done
            episode.tokens += len(reply.token_ids)
            if not found.done and episode.turns < plan.turns:
                messages = [*messages, reply.message, {"role": "user", "content": found.observation}]
                chat = llm.chat_prompt(messages)
        if not rewards:
            raise ValueError(f"the prompt has {length} tokens, which leaves no room for a reply in {limit}")
        episode.reward = sum(rewards)
        made = trajectories_of(Score(None, episode.reward), llm.replies)
        episode.trajectories = tuple(
            {
                "tokens": each["tokens"],
                "loss_mask": each["loss_mask"],
                "logprobs": each["logprobs"],
                "reward": episode.reward,
                "step_rewards": _step_rewards(each, llm.replies, rewards),
                "group_id": f"prompt {at[0]}",
                "run_id": at[1],
            }
            for each in made
        )
        last = made[-1]["tokens"]
        first = llm.replies[0].prompt_ids
        episode.prompt, episode.response = (
            self._tokenizer.decode(list(part)) for part in (last[: len(first)], last[len(first) :])
        )

    def _first_prompt(self, llm: LLM, row: PromptRow, observation: str) -> tuple[list[dict[str, Any]], ChatPrompt]:
        """Return the conversation that begins, and its prompt.

        Raises ValueError if an observation cannot follow the prompt.
        """
        seen = [{"role": "user", "content": observation}] if observation else []
        if row.messages:
            messages = [*row.messages, *seen]
            return messages, llm.chat_prompt(messages)
        # The prompt is tokens: what follows them is what the chat template adds to a message that stands for them.
        known: list[dict[str, Any]] = [{"role": "user", "content": ""}]
        before, tokens = self._tokenizer.apply_chat_template(known), list(row.tokens)
        if seen:
            known = [*known, *seen]
            whole = self._tokenizer.apply_chat_template(known)
            if whole[: len(before)] != before:
                raise ValueError(
                    "the first observation of the environment cannot follow a prompt of tokens, which ends with the "
                    "beginning of a reply: give the prompt as messages (raw_prompt), or let reset return no observation"
                )
            tokens, before = tokens + whole[len(before) :], whole
        checked = checked_messages(known)
        return known, ChatPrompt(tuple(tokens), [key_of(each) for each in checked], checked, before, "[]")


def _step_rewards(
    trajectory: Mapping[str, Any], replies: Sequence[ModelReply], rewards: Sequence[float]
) -> list[float]:
    """Return the rewards of a trajectory's turns: runs of tokens that count.

    Replies without a token between them are one turn.
    """
    found: list[float] = []
    end = -1
    for reply, reward in zip(replies, rewards, strict=True):
        start, after = len(reply.prompt_ids), len(reply.prompt_ids) + len(reply.token_ids)
        if trajectory["tokens"][:after] != [*reply.prompt_ids, *reply.token_ids]:
            continue
        if start == end:
            found[-1] += reward
        else:
            found.append(reward)
        end = after
    return found
