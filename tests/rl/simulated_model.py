"""Model that costs nothing, for runs in the simulator: its weights are a number, and its tokens say which.

Each update makes a state of the weights, which has a number and knows the state that it was made of. The weights that
servers load are this number, and each token is this number too. So what the promises say about versions is checked
without a look at the bookkeeping of the run: which weights made a token, and whether they led to those that train it.
"""

from __future__ import annotations

import random
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import trio
from attrs import define, field, frozen

from fray import rl
from fray.rl.core.versions import Segment, VersionName
from fray.rl.inference.decoding import Decoder
from fray.rl.inference.decoding_thread import DecodingThread
from fray.rl.inference.requests import Completion, FinishReason, GenerateRequest
from fray.rl.weights_table import WeightTable
from fray.runtime.runtime import current

STATES_LIMIT = 600
"""States that a run may make, those of lost trainers included: as many tokens as the model has."""
CHARS = "".join(chr(0x4E00 + number) for number in range(STATES_LIMIT))
MODEL = rl.TinyLlama(chars=CHARS, eos=CHARS[0], max_length=64)
NOTHING_LEARNED_SHARE, NOT_FINITE_SHARE = 0.1, 0.04
FAILING_SHARE, SLOW_SHARE, TWO_TURNS_SHARE = 0.03, 0.05, 0.2
"""Shares of the episodes that raise, that take seconds, and that ask the model twice."""
STEP_S, LOAD_S = (0.02, 0.12), (0.2, 2.0)
"""Seconds of a decoding step, and of loading the model."""
TABLE = WeightTable.of_tensors([("state", (1,), "int64")])
STATE_FILE = "state"

Sample = tuple[str, int]
"""Task, and which of its samples."""
_books: list[ModelTruth] = []


@contextmanager
def recorded(truth: ModelTruth) -> Iterator[None]:
    """Make the record to which models and episodes write while entered."""
    _books.append(truth)
    try:
        yield
    finally:
        _books.pop()


@frozen
class WeightState:
    """Weights after an update."""

    parent: int
    """The state of which they were made; that of the model is its own."""
    number: int
    """Updates that led to them."""
    samples: frozenset[Sample] = frozenset()
    """Samples of the last of these."""
    groups: frozenset[str] = frozenset()
    missing: int = 0
    """Samples that its groups lack, which must have been dropped."""


@define
class ModelTruth:
    """Record of what really happened to the weights.

    Args:
        rng: decides what episodes and updates do.
        max_age: updates by which a trained token may be behind; None: any number.
        group_size: samples of a group.
        breach: called with what must never happen.
        target: returns the version that servers shall have, as the controller of the run knows it.
    """

    rng: random.Random
    max_age: int | None
    group_size: int
    breach: Callable[[str], None]
    target: Callable[[], VersionName | None]
    states: list[WeightState] = field(factory=lambda: [WeightState(0, 0)])
    names: dict[VersionName, int] = field(factory=lambda: {VersionName(0, 0): 0})
    """State of each version that a server has loaded."""
    happened: Counter[str] = field(factory=Counter)

    def history(self, state: int) -> list[int]:
        """Return a state and those that led to it, the newest first."""
        found = [state]
        while found[-1]:
            found.append(self.states[found[-1]].parent)
        return found

    def train(self, before: int, trajectories: Sequence[dict[str, Any]]) -> int:
        """Check a batch, and return the state that an update with it makes of the one before."""
        history = self.history(before)
        number = self.states[before].number
        samples = Counter({(one["task_id"], one["run_id"]) for one in trajectories})
        for trajectory in trajectories:
            self._check_tokens(trajectory, history, number)
        twice = [one for state in history for one in self.states[state].samples if one in samples]
        if twice:
            self.breach(f"samples {sorted(twice)} are trained again, in update {number + 1}")
        groups = {(one["task_id"], one["run_id"]): one["group_id"] for one in trajectories}
        sizes = Counter(groups.values())
        if split := {group for state in history for group in self.states[state].groups if group in sizes}:
            self.breach(f"groups {sorted(split)} are trained in part, and the rest in update {number + 1}")
        if too_large := [group for group, size in sizes.items() if size > self.group_size]:
            self.breach(f"groups {too_large} have more than {self.group_size} samples")
        missing = len(sizes) * self.group_size - len(samples)
        self.states.append(WeightState(before, number + 1, frozenset(samples), frozenset(sizes), missing))
        self.happened["update"] += 1
        return len(self.states) - 1

    def _check_tokens(self, trajectory: dict[str, Any], history: list[int], number: int) -> None:
        made = [token for token, counts in zip(trajectory["tokens"], trajectory["loss_mask"], strict=True) if counts]
        self.check_names(made, trajectory["versions"])
        for state in set(made):
            if state not in history:
                self.breach(f"{trajectory['task_id']}: tokens of weights of a lost trainer are trained")
            elif self.max_age is not None and number - self.states[state].number > self.max_age:
                age = number - self.states[state].number
                self.breach(f"{trajectory['task_id']}: tokens of age {age} are trained, at most {self.max_age} allowed")

    def check_names(self, tokens: Sequence[int], segments: Sequence[Segment]) -> None:
        """Check that each token was made by the weights of the version that it is said to be of."""
        versions = [name for name, count in segments for _ in range(count)]
        if len(versions) != len(tokens):
            self.breach(f"{len(tokens)} tokens have {len(versions)} versions")
        for token, version in zip(tokens, versions, strict=False):
            if self.names.get(version) != token:
                self.breach(f"a token of state {token} is said to be of {version}, which is {self.names.get(version)}")

    def note_loaded(self, version: VersionName, state: int) -> None:
        """Check the name of weights that a server loads."""
        if self.names.setdefault(version, state) != state:
            self.breach(f"version {version} is the name of states {self.names[version]} and {state}")
        if self.states[state].number != version.number:
            self.breach(f"version {version} is the name of weights after {self.states[state].number} updates")


def truth() -> ModelTruth:
    """Return the record of the run that is simulated."""
    return _books[-1]


# The trainer ---------------------------------------------------------------------------------------------------------


class SimPolicy:
    """Policy with the methods of `fray.rl.tensors.policy_trainer.PolicyTrainer`."""

    table = TABLE

    def __init__(self) -> None:
        self._state = 0

    def update(self, trajectories: Sequence[dict[str, Any]]) -> dict[str, float]:
        known = truth()
        outcome = known.rng.random()
        if outcome < NOT_FINITE_SHARE:
            return {"not_finite": 1.0}
        self._state = known.train(self._state, trajectories)
        is_skipped = outcome > 1 - NOTHING_LEARNED_SHARE
        return {"not_finite": 0.0, "state": float(self._state), **({"skipped": 1.0} if is_skipped else {})}

    def write_weights(self, buffer: Any) -> None:
        struct.pack_into("<q", buffer, 0, self._state)

    def write_weight_file(self, path: Path) -> WeightTable:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(struct.pack("<q", self._state))
        return TABLE

    def save(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / STATE_FILE).write_text(str(self._state))

    def load(self, directory: Path) -> None:
        self._state = int((directory / STATE_FILE).read_text())
        number = truth().states[self._state].number
        if directory.parent.name != f"global_step_{number}":
            truth().breach(f"{directory} has weights after {number} updates")

    def check_ranks(self) -> None:
        pass


# The servers ---------------------------------------------------------------------------------------------------------


@define
class _Work:
    request: GenerateRequest
    tokens: list[int] = field(factory=list)
    versions: list[VersionName] = field(factory=list)

    def completions(self, reason: FinishReason) -> list[tuple[str, Completion]]:
        segments = [(version, len(list(same))) for version, same in groupby(self.versions)]
        logprobs = [-1.0] * len(self.tokens)
        return [
            (self.request.request_id, Completion(list(self.tokens), logprobs, list(segments), reason, index))
            for index in range(self.request.sampling.n)
        ]


class SimEngine:
    """`fray.rl.inference.decoding.DecodingEngine` whose tokens are the state of its weights."""

    max_length = MODEL.max_length

    def __init__(self) -> None:
        self.version = VersionName(0, 0)
        self._state = 0
        self._target = truth().target()
        """Version that servers should have when this one began."""
        self._work: dict[str, _Work] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._work)

    def add(self, request: GenerateRequest, *, stream: bool = False) -> None:
        if self._target is not None and self.version < self._target:
            text = f"a server with {self.version} gets a request, and since its start servers should have"
            truth().breach(f"{text} {self._target} or newer")
        self._work[request.request_id] = _Work(request)

    def cancel(self, request_id: str) -> None:
        self._work.pop(request_id, None)

    def step(self) -> list[tuple[str, Completion]]:
        ended: list[tuple[str, Completion]] = []
        for name, work in list(self._work.items()):
            work.tokens.append(self._state)
            work.versions.append(self.version)
            if len(work.tokens) == work.request.sampling.max_tokens:
                ended += self._work.pop(name).completions("length")
        return ended

    def load(self, version: VersionName, table: Any, buffer: Any) -> None:
        if table is not None:
            (self._state,) = struct.unpack_from("<q", buffer, table.places["state"].offset)
        truth().note_loaded(version, self._state)
        truth().happened["weights loaded"] += 1
        self.version = version

    def abort_all(self) -> list[tuple[str, Completion]]:
        work, self._work = self._work, {}
        return [found for one in work.values() for found in one.completions("abort")]


class DecodingTask(DecodingThread):
    """`DecodingThread` as a task of its process, in virtual time."""

    def _start(self, name: str) -> None:
        self._sent = trio.Event()
        current().nursery.start_soon(self._work)

    def send(self, command: Any) -> None:
        super().send(command)
        self._sent.set()

    def stop(self) -> None:
        super().stop()
        self._sent.set()

    def call_soon(self, call: Callable[[], None]) -> None:
        call()

    async def _work(self) -> None:
        rng, error = truth().rng, None
        try:
            await trio.sleep(rng.uniform(*LOAD_S))
            decoder = Decoder(self._make_engine(), trio.current_time)
            self._begin(decoder)
            while not self._stopping.is_set():
                if not decoder.can_step and self._commands.empty():
                    self._sent = trio.Event()
                    await self._sent.wait()
                await trio.sleep(rng.uniform(*STEP_S))
                self._turn(decoder)
        except Exception as caught:  # noqa: BLE001 (it fails the server, as that of the thread)
            error = caught
        self._finish(error)


# Episodes ------------------------------------------------------------------------------------------------------------


async def solve(task: dict[str, Any], llm: Any) -> Any:
    """Roll out an episode: a request or two, some time of its own, and now and then an error."""
    known = truth()
    kind = known.rng.random()
    await trio.sleep(known.rng.uniform(3.0, 12.0) if kind < SLOW_SHARE else known.rng.uniform(0.0, 0.3))
    if kind > 1 - FAILING_SHARE:
        raise RuntimeError("the tool of this episode has failed")
    prompt = (task["number"],)
    for _ in range(2 if known.rng.random() < TWO_TURNS_SHARE else 1):
        (reply,) = await _ask(llm, prompt, 1)
        prompt = (*reply.prompt_ids, *reply.token_ids, task["number"])
    return rl.score(reply, reward=float(known.rng.random() < 0.5))


async def solve_group(task: dict[str, Any], llm: Any) -> Any:
    """Roll out a whole group with one request; a validation has one sample for each row."""
    known = truth()
    await trio.sleep(known.rng.uniform(0.0, 0.3))
    replies = await _ask(llm, (task["number"],), known.group_size)
    return [rl.score(reply, reward=float(known.rng.random() < 0.5)) for reply in replies]


async def _ask(llm: Any, prompt: tuple[int, ...], count: int) -> list[Any]:
    """Return replies, which are never an error: a request whose server is lost goes to another."""
    known = truth()
    try:
        found = await llm.completion(prompt, max_tokens=known.rng.randint(1, 12), n=count)
    except Exception as error:
        known.breach(f"a request has failed: {error!r}")
        raise
    replies = found if isinstance(found, list) else [found]
    for reply in replies:
        known.check_names(reply.token_ids, reply.segments)
        known.happened["reply"] += 1
        known.happened["reply of two versions"] += len(reply.segments) > 1
    return replies
