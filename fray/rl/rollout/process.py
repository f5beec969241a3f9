"""Rollout process: an actor that runs the episodes of many workers in one loop."""

from __future__ import annotations

import traceback
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from itertools import chain, count, islice
from typing import Any, TypeAlias

import trio
from attrs import evolve, field, frozen

from fray.api.actors.current_actor import current_actor
from fray.api.actors.handle import ActorHandle
from fray.errors import ActorDied
from fray.rl.gateway.agent_gateway import AgentGateway, EpisodeAgents
from fray.rl.http_access.access import HttpAccess
from fray.rl.inference.client import LLM, ModelReply
from fray.rl.inference.requests import Completion, GenerateRequest, PromptTooLong
from fray.rl.messages import SampleResult, ServerRoute, TaskGrant, TaskResult
from fray.rl.model_spec import ModelSpec, model_name
from fray.rl.nexrl.experiment_posts import EpisodePosts, PostQueue, episode_posts
from fray.rl.nexrl_types import DEFAULT_MODEL_TAG, Trajectory
from fray.rl.process_start import loading, wait_for_preemption
from fray.rl.processes.actor_tasks import ActorTask, ActorTasks
from fray.rl.rollout.groups import by_model, grouped
from fray.rl.rollout.request_batches import RequestBatches
from fray.rl.rollout.scores import AttemptEnded, MadeTrajectories, Score, finite_scores, scores_of, trajectories_of
from fray.rl.rollout.server_choice import ServerChoice
from fray.rl.tokenizers import load_limits, load_tokenizer
from fray.rl.train.trajectory_checks import check_trajectory
from fray.runtime.serialization.pickling import dumps_plain

Episode: TypeAlias = Callable[[dict[str, Any], LLM], Awaitable[Any]]
"""``async def solve(task, llm)``: rolls out one episode of a row, and returns what `fray.rl.score` makes."""
UNLIMITED = 2**31
"""Vocabulary of a model that is not known here."""
EPISODE_POSTS = 100
"""Posts to the trackers of the run that are kept of one episode; the oldest are dropped."""
SLOWEST_PERIOD_S = 1.0
"""Seconds between two reports of what the oldest episode does."""
GENERATING, OWN_CODE = "generating", "in a tool call or its own code"
PREEMPTED = "preempted"
"""Reason of the repetition of tasks whose process gets no time to finish them."""
DETAIL_LIMIT_CHARACTERS = 4_000
"""Length of the end of a traceback that is kept of a failed episode."""
THRESHOLDS = (100_000, 5, 100)
"""Thresholds of the garbage collector: above the objects of hundreds of episodes, none of which is garbage."""


@frozen
class EpisodePlan:
    """Settings of the episodes of a rollout process.

    Args:
        rollout: the user's function.
        model: for its tokenizer.
        workers: episodes that run at once.
        timeout_s: limit of one episode, after which it is cancelled.
        seed: of the run; the seed of each request follows from it, the task and the number of the request.
        validation_sampling: replaces what a request of a validation task asks for.
        needs: keys that a trajectory must have to be trained, beside tokens and mask; None: nothing is trained.
        is_own_trainer: the user's trainer decides which tokens it takes, and how many.
        max_prompt_length: tokens of the first prompt of an episode; a task with a longer one is dropped. None: those
            that leave room for a response.
        model_tag: of the model of the run; trajectories with another one are left out.
        group_keys: keys of trajectories, or of their rows, by which samples are grouped; none: by rows.
    """

    rollout: Episode
    model: ModelSpec
    workers: int
    timeout_s: float
    seed: int
    validation_sampling: Mapping[str, Any] = field(factory=dict)
    needs: tuple[str, ...] | None = None
    is_own_trainer: bool = False
    max_prompt_length: int | None = None
    model_tag: str = DEFAULT_MODEL_TAG
    group_keys: tuple[str, ...] = ()


class RolloutProcess:
    """Actor that takes tasks from the coordinator of a run, and delivers samples."""

    def __init__(self, plan: EpisodePlan, coordinator: ActorHandle) -> None:
        self._plan, self._coordinator = plan, coordinator
        with loading(THRESHOLDS):
            self._tokenizer = load_tokenizer(plan.model)
            limits = None if plan.needs is None or plan.is_own_trainer else load_limits(plan.model)
            self._limits = (UNLIMITED, None) if limits is None else (limits.vocabulary_size, limits.max_length)
        self._idle = plan.workers
        self._freed = trio.Event()
        self._running: dict[str, EpisodeRequests] = {}
        """Requests of the episodes under way by their leases, the oldest first."""
        self._is_preempted = False
        self._results: list[TaskResult] = []
        self._has_results = trio.Event()
        self._tasks = ActorTasks()
        self._work: ActorTask[None] | None = None

    async def ping(self) -> None:
        """Return: the process answers. For health checks."""

    async def run(self, access: HttpAccess | None = None) -> None:
        """Roll out episodes until this process ends, or is taken for lost; what is unfinished then is cancelled.

        They continue when this call is cancelled, and a further call waits for the same end. At the notice of a
        preemption, unfinished tasks are given back, and the process ends, to be started elsewhere.

        Args:
            access: to sessions of agents from other machines; None: they are on loopback. It has secrets, so it is not
                in the plan: the cluster stores the arguments of constructors.
        """
        if self._work is None:
            self._work = self._tasks.start(partial(self._run, access))
        await self._work.wait()

    async def __fray_cleanup__(self) -> None:
        await self._tasks.aclose()

    async def _run(self, access: HttpAccess | None) -> None:
        async with trio.open_nursery() as nursery:
            batches = RequestBatches(nursery)
            self._servers = ServerChoice(batches.generate, batches.give_up, _max_length)
            self._gateway = AgentGateway(nursery, model_name(self._plan.model), self._servers.max_length, access)
            nursery.start_soon(self._follow_routes)
            nursery.start_soon(self._deliver)
            nursery.start_soon(self._stop_at_preemption, nursery.cancel_scope)
            worker = current_actor().incarnation
            await self._coordinator.begin_worker.options(idempotent=True)(worker)
            nursery.start_soon(self._report_slowest, worker)
            take_tasks, requests = self._coordinator.take_tasks.options(idempotent=True), count(1)
            while grants := await take_tasks(worker, self._idle, next(requests)):
                for grant in grants:
                    self._idle -= 1
                    # Here, and not in the task: tasks start in any order, and the coordinator's is that of the leases.
                    self._running[grant.lease] = EpisodeRequests(grant, self._plan, self._servers)
                    nursery.start_soon(self._roll_out, grant)
                while not self._idle:
                    await self._freed.wait()
            nursery.cancel_scope.cancel()
        if self._is_preempted:
            # It costs the tasks nothing: unlike those of a process that was lost, they are not to blame.
            unfinished = [TaskResult(lease, failure=PREEMPTED, is_attempt=False) for lease in self._running]
            await self._coordinator.put_results.options(idempotent=True)([*self._results, *unfinished])
            current_actor().fail(ActorDied("the cluster ends this process; its tasks were given back"))

    async def _stop_at_preemption(self, scope: trio.CancelScope) -> None:
        await wait_for_preemption()
        self._is_preempted = True
        scope.cancel()

    async def _follow_routes(self) -> None:
        number = 0
        while True:
            number, routes = await self._coordinator.wait_for_routes.options(idempotent=True)(number)
            self._servers.set_routes(routes)

    async def _deliver(self) -> None:
        """Send results, as many as there are, in one call after another."""
        while True:
            await self._has_results.wait()
            self._has_results = trio.Event()
            results, self._results = self._results, []
            await self._coordinator.put_results.options(idempotent=True)(results)

    async def _report_slowest(self, worker: str) -> None:
        while True:
            await trio.sleep(SLOWEST_PERIOD_S)
            for lease, requests in islice(self._running.items(), 1):
                await self._coordinator.note_slowest.options(idempotent=True)(worker, lease, requests.does)

    async def _roll_out(self, grant: TaskGrant) -> None:
        posts = PostQueue(EPISODE_POSTS)
        # The table of servers comes with another call, and may be older than the grant. The variable is of this Trio
        # task alone, which ends with the episode.
        episode_posts.set(EpisodePosts(posts, max(grant.version, self._servers.newest_version)))
        result = evolve(await self._result_of(grant), posts=posts.fetch())
        del self._running[grant.lease]
        self._results.append(result)
        self._has_results.set()
        self._idle += 1
        self._freed.set()
        self._freed = trio.Event()

    async def _result_of(self, grant: TaskGrant) -> TaskResult:
        """Run an episode. An error of it ends this attempt of the task, and nothing else."""
        requests = self._running[grant.lease]
        llm = LLM(requests.send, self._tokenizer)
        result = await self._attempt(grant, llm)
        error = requests.too_long
        # The first prompt is that of the data: it is too long in each attempt, whatever the episode made of the error.
        if not result.failure or error is None or llm.replies:
            return result
        reason = type(error).__name__
        detail = result.detail if result.failure == reason else f"{result.detail.rstrip()}\n{reason}: {error}"
        return evolve(result, failure=reason, detail=detail, is_attempt=True, is_final=True)

    async def _attempt(self, grant: TaskGrant, llm: LLM) -> TaskResult:
        deadline = trio.current_time() + self._plan.timeout_s
        try:
            patience = trio.CancelScope(deadline=deadline)
            with patience, EpisodeAgents(self._gateway, llm, deadline):
                result = await self._plan.rollout({**grant.row, "is_val": grant.is_validation}, llm)
            if patience.cancelled_caught:
                return TaskResult(grant.lease, failure="timeout", detail=f"no result after {self._plan.timeout_s:g} s")
            scores = scores_of(result, grant.samples)
            every = [_trajectories_of(grant, run, one, llm.replies) for run, one in enumerate(scores)]
            made, others = by_model(every, self._plan.model_tag)
            if others and not all(made):
                detail = f"the episode made nothing for the model of the run, whose model_tag is {self._plan.model_tag}"
                return TaskResult(grant.lease, failure=f"model_tag {others[0]}", detail=detail, is_final=True)
            if grant.is_validation:
                keys = [grouped(grant, each, ()) for each in made]
            else:
                for trajectory in chain.from_iterable(made):
                    self._check(trajectory)
                keys = [grouped(grant, each, self._plan.group_keys) for each in made]
            samples = tuple(_sample_of(grant, each, key) for each, key in zip(made, keys, strict=True))
            added = chain.from_iterable(one.added for one in scores if isinstance(one, MadeTrajectories))
            return TaskResult(grant.lease, samples, left_out=tuple(others), added=tuple(added))
        except AttemptEnded as ended:
            return TaskResult(grant.lease, failure=ended.reason, detail=ended.detail, is_attempt=ended.is_attempt)
        except Exception as error:  # noqa: BLE001 (the user's code may raise anything)
            text = "".join(traceback.format_exception(error))
            # An agent in a thread ends by the answer that its session has ended.
            reason = "timeout" if trio.current_time() >= deadline else type(error).__name__
            return TaskResult(grant.lease, failure=reason, detail=text[-DETAIL_LIMIT_CHARACTERS:])

    def _check(self, trajectory: Trajectory) -> None:
        """Raise InvalidTrajectory if the trainer could not train it, which would end the run."""
        if self._plan.needs is not None:
            size, length = self._limits
            check_trajectory(trajectory, vocabulary_size=size, max_length=length, needs=self._plan.needs)


def _trajectories_of(
    grant: TaskGrant, run: int, one: Score | MadeTrajectories, replies: Sequence[ModelReply]
) -> list[Trajectory]:
    names = {"group_id": grant.group_id, "run_id": run, "task_id": grant.task_id, "is_val": grant.is_validation}
    made = one.trajectories if isinstance(one, MadeTrajectories) else trajectories_of(one, replies)
    return [{**names, **trajectory} for trajectory in made]


def _sample_of(grant: TaskGrant, trajectories: list[Trajectory], key: tuple[Hashable, ...]) -> SampleResult:
    segments = tuple(dict.fromkeys(tuple(each) for one in trajectories for each in one.get("versions", ())))
    rewards = tuple(float(one.get("reward") or 0.0) for one in trajectories)
    scores: tuple[tuple[str, float], ...] = ()
    if grant.is_validation:  # those of training samples are in the content alone
        scores = tuple(pair for one in trajectories for pair in finite_scores(one.get("score") or {}).items())
    return SampleResult(segments, rewards, key, dumps_plain(trajectories), scores)


class EpisodeRequests:
    """Requests of one attempt: numbers them, and gives each a seed."""

    def __init__(self, grant: TaskGrant, plan: EpisodePlan, servers: ServerChoice) -> None:
        self._grant, self._plan, self._servers = grant, plan, servers
        self._numbers = count()
        self._open = 0
        self._has_answer = False
        self.too_long: PromptTooLong | None = None
        """Error of a prompt before the first answer."""

    @property
    def does(self) -> str:
        """Return what the episode does: `GENERATING` while it waits for an answer, else `OWN_CODE`."""
        return GENERATING if self._open else OWN_CODE

    async def send(self, request: GenerateRequest) -> list[Completion]:
        name = f"{self._grant.task_id}/{self._grant.attempt}/{next(self._numbers)}"
        if self._grant.is_validation:
            request = evolve(request, sampling=evolve(request.sampling, **self._plan.validation_sampling))
        digest = sha256(f"{self._plan.seed}/{name}".encode()).digest()
        seed, request_id = int.from_bytes(digest[:6], "big"), f"{self._grant.lease}/{name}"
        self._open += 1
        try:
            self._check_length(request)
            answer = await self._servers.send(evolve(request, request_id=request_id, seed=seed))
        except PromptTooLong as error:
            if not self._has_answer:
                self.too_long = error
            raise
        finally:
            self._open -= 1
        self._has_answer = True
        return answer

    def _check_length(self, request: GenerateRequest) -> None:
        length, most = len(request.prompt_ids), self._plan.max_prompt_length
        if most is not None and length > most and not self._has_answer:
            raise PromptTooLong(f"the prompt has {length} tokens; max_prompt_length is {most}")


async def _max_length(route: ServerRoute) -> int:
    return int((await route.handle.status())["max_length"])
