"""Rollout workers of the guide: as episodes of a run, and by themselves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import trio

from fray import rl
from fray.errors import InvalidRequest
from fray.rl.inference.requests import Completion, GenerateRequest
from fray.rl.nexrl.data_loader import MockDataLoader
from fray.rl.rollout.scores import AttemptEnded
from fray.rl.rollout_worker import SingleTurnMathRolloutWorker, WorkerEpisode
from fray.rl.rollout_worker.agent_tools import tool_of
from fray.rl.rollout_worker.prompt_workers import is_same_answer
from fray.runtime.serialization.pickling import dumps, loads
from tests.support.counting_engine import TOKENIZER, CountingEngine

NEEDS = ("logprobs", "reward", "group_id")
EVALUATOR = """
from fray.rl.rollout_worker import EvaluationRunResult, Evaluator


class Length(Evaluator):
    def evaluate(self, data, target):
        metrics = {"turns": float(len(getattr(target, "observation", [])))}
        return EvaluationRunResult(float(len(target.final_answer)), data.get("answer", ""), metrics)


class Wrong(Evaluator):
    def evaluate(self, data, target):
        return EvaluationRunResult(reward=float("nan"))


def not_a_class():
    return None
"""


async def counted(request: GenerateRequest) -> list[Completion]:
    engine = CountingEngine(max_length=1000)
    engine.add(request)
    ended: list[Any] = []
    while engine.has_work:
        ended += engine.step()
    return [completion for _, completion in ended]


def model(texts: list[str] | None = None) -> rl.LLM:
    """Return a model that replies with these texts in turn, else by counting."""
    left = list(texts or ())

    async def send(request: GenerateRequest) -> list[Completion]:
        (completion,) = await counted(request)
        if left:
            completion.token_ids[:] = [*map(ord, left.pop(0)), TextTokenizer.eos_id]
            completion.logprobs[:] = [-0.5] * len(completion.token_ids)
            completion.segments[:] = [(completion.segments[0][0], len(completion.token_ids))]
        return [completion]

    return rl.LLM(send, TOKENIZER if texts is None else TextTokenizer())


class TextTokenizer:
    """A token for each character; a conversation is its texts with their roles."""

    eos_id = 0

    def encode(self, text: str) -> list[int]:
        return [*map(ord, text)]

    def decode(self, ids: Any) -> str:
        return "".join(map(chr, ids))

    def apply_chat_template(self, messages: Any, tools: Any = None) -> list[int]:
        texts = [f"<{message['role']}>{message['content']}" for message in messages]
        return self.encode("".join([*texts, "<assistant>"]))


async def rolled_out(
    worker: Callable[[Mapping[str, Any]], rl.BaseRolloutWorker],
    task: dict[str, Any],
    config: dict[str, Any] | None = None,
    llm: rl.LLM | None = None,
    needs: tuple[str, ...] = NEEDS,
) -> list[dict[str, Any]]:
    return list((await WorkerEpisode(worker, config or {}, needs)(task, llm or model())).trajectories)


class Guide(rl.BaseRolloutWorker):
    def step(self, task: dict[str, Any]) -> str | None:
        if "prompt" not in task:
            return None
        result = self._llm_client.completion(task["prompt"], temperature=0.7)
        trajectory = {"prompt": task["prompt"], "response": result["response"], "reward": 1.0}
        return self._put_trajectory({**trajectory, "model_tag": self._llm_client._model_tag})


async def test_a_trajectory_without_tokens_gets_those_of_the_reply_that_it_quotes() -> None:
    (trajectory,) = await rolled_out(Guide, {"prompt": "12"})
    assert trajectory["tokens"] == [1, 2, 3, 4, 5, 6, TOKENIZER.eos_id]
    assert trajectory["loss_mask"] == [0, 0, 1, 1, 1, 1, 1]
    assert [length for _, length in trajectory["versions"]] == [5]
    assert (trajectory["response"], trajectory["model_tag"], trajectory["reward"]) == ("3456", "default", 1.0)


class Async(rl.BaseRolloutWorker):
    async def step(self, task: dict[str, Any]) -> str:
        one = await self._llm.completion("12", max_tokens=1)
        await self._llm.completion("21", max_tokens=1)
        return self._put_trajectory({"prompt": "12", "response": one.text, "reward": 0.5})


async def test_an_async_step_runs_on_the_loop_and_the_prompt_decides_between_equal_replies() -> None:
    (trajectory,) = await rolled_out(Async, {})
    assert trajectory["tokens"] == [1, 2, 3]


def answering(answer: Any) -> type[rl.BaseRolloutWorker]:
    class Answers(rl.BaseRolloutWorker):
        def step(self, task: dict[str, Any]) -> Any:
            return answer

    return Answers


@pytest.mark.parametrize(
    ("answer", "reason", "is_attempt"),
    [
        ("re-rollout", "re-rollout", False),
        ("fail", "step_failed", True),
        (None, "step_failed", True),
        ("success", "no_trajectory", True),
    ],
)
async def test_the_answer_of_a_step_decides_what_becomes_of_the_task(
    answer: Any, reason: str, is_attempt: bool
) -> None:
    with pytest.raises(AttemptEnded) as ended:
        await rolled_out(answering(answer), {})
    assert (ended.value.reason, ended.value.is_attempt) == (reason, is_attempt)


async def test_a_task_that_a_step_puts_back_is_rolled_out_again() -> None:
    class PutsBack(rl.BaseRolloutWorker):
        def step(self, task: dict[str, Any]) -> str:
            assert self._get_rollout_task() is None
            assert self._put_rollout_task(task)
            return "success"

    with pytest.raises(AttemptEnded, match="re-rollout"):
        await rolled_out(PutsBack, {})


async def test_a_failed_put_names_the_key_that_the_trainer_needs() -> None:
    class NoReward(rl.BaseRolloutWorker):
        def step(self, task: dict[str, Any]) -> str:
            return self._put_trajectory({"tokens": [1, 2], "loss_mask": [0, 1], "logprobs": [0.0, -1.0]})

    with pytest.raises(AttemptEnded) as ended:
        await rolled_out(NoReward, {})
    assert "step returned 'fail'" in ended.value.detail
    assert "lacks 'reward', which the trainer needs; set rollout_worker.evaluator_module_path" in ended.value.detail
    assert len(await rolled_out(NoReward, {}, needs=("logprobs",))) == 1


async def test_a_response_that_no_reply_has_is_refused() -> None:
    class Invents(rl.BaseRolloutWorker):
        def step(self, task: dict[str, Any]) -> str:
            self._llm_client.completion("12")
            return self._put_trajectory({"response": "other", "reward": 1.0})

    with pytest.raises(AttemptEnded, match="its response 'other' is not among the 1 replies of the model"):
        await rolled_out(Invents, {})


async def test_a_validation_task_is_known_by_the_step_and_not_lost() -> None:
    seen = []

    class OfTheGuide(rl.BaseRolloutWorker):
        def step(self, task: dict[str, Any]) -> str | None:
            seen.append(self._is_running_validate)
            if self._is_running_validate:
                validate_task = self._get_validate_task()
                assert validate_task is not None
                return self._put_validate_trajectory(self._process_task(validate_task))
            return self._put_trajectory(self._process_task(task))

        def _process_task(self, task: dict[str, Any]) -> dict[str, Any]:
            return {"prompt": task["prompt"], **self._llm_client.completion(task["prompt"]), "reward": 1.0}

    for is_val in (True, False):
        (trajectory,) = await rolled_out(OfTheGuide, {"prompt": "12", "is_val": is_val})
        assert trajectory["response"] == "3456"
    assert seen == [True, False]


def evaluator(tmp_path: Path, name: str = "Length") -> dict[str, Any]:
    (tmp_path / "evaluator.py").write_text(EVALUATOR)
    return {"evaluator_module_path": f"{tmp_path / 'evaluator.py'}:{name}"}


async def test_the_evaluator_gives_the_reward_and_scores(tmp_path: Path) -> None:
    config = {"max_response_length": 2, **evaluator(tmp_path)}
    (trajectory,) = await rolled_out(rl.SimpleRolloutWorker, {"prompt": "12", "answer": "99"}, config)
    assert (trajectory["response"], trajectory["reward"], trajectory["ground_truth"]) == ("34", 2.0, "99")
    assert trajectory["score"] == {"reward": 2.0, "turns": 0.0}


async def test_a_reward_that_is_not_finite_fails_by_name(tmp_path: Path) -> None:
    with pytest.raises(AttemptEnded, match="the evaluator returned reward nan; expected a finite number"):
        await rolled_out(rl.SimpleRolloutWorker, {"prompt": "12"}, evaluator(tmp_path, "Wrong"))


def test_an_evaluator_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"not_a_class': expected an Evaluator class"):
        rl.SimpleRolloutWorker(evaluator(tmp_path, "not_a_class"))
    with pytest.raises(InvalidRequest, match="there is no such file"):
        rl.SimpleRolloutWorker({"evaluator_module_path": str(tmp_path / "none.py:Length")})


async def test_single_turn_math_compares_the_answer() -> None:
    for answer, reward in (("3456", 1.0), ("7", 0.0)):
        task = {"prompt": "12", "answer": answer}
        (trajectory,) = await rolled_out(SingleTurnMathRolloutWorker, task, {"max_tokens": 4})
        assert trajectory["reward"] == reward
    assert is_same_answer(r"it is 3, so \boxed{1,200.0}", "1200")
    assert is_same_answer("first 3, then 7.", "7")
    assert not is_same_answer("yes", "no")


async def test_pig_latin_asks_no_model() -> None:
    (trajectory,) = await rolled_out(
        rl.PigLatinRolloutWorker, {"input": "string apple rhythm"}, llm=model([]), needs=()
    )
    text = "English: string apple rhythm\nPig Latin: ingstray appleway rhythmay"
    assert TextTokenizer().decode(trajectory["tokens"]) == text + chr(0)
    assert trajectory["loss_mask"].index(1) == text.index(" ingstray")
    assert "logprobs" not in trajectory


async def test_the_mock_worker_asks_no_model_and_repeats_itself() -> None:
    first, second = [await rolled_out(rl.MockRolloutWorker, {"prompt": "12"}) for _ in range(2)]
    assert first == second
    assert len(first[0]["tokens"]) == len(first[0]["logprobs"]) == 5


async def test_a_worker_has_one_task_at_a_time_and_is_used_again() -> None:
    made: list[rl.BaseRolloutWorker] = []

    class Counted(Guide):
        def __init__(self, config: Mapping[str, Any]) -> None:
            super().__init__(config)
            made.append(self)

    episode = WorkerEpisode(Counted, {})
    for _ in range(3):
        await episode({"prompt": "12"}, model())
    assert len(made) == 1
    assert made[0].get_module_name() == "rollout_worker-0"
    loads(dumps(WorkerEpisode(rl.MockRolloutWorker, {"max_tokens": 3})))


async def test_a_step_that_does_not_return_is_left_at_the_limit_with_its_worker() -> None:
    release, made = threading.Event(), []

    class Hangs(Guide):
        def __init__(self, config: Mapping[str, Any]) -> None:
            super().__init__(config)
            made.append(self)

        def step(self, task: dict[str, Any]) -> str | None:
            if task.get("hangs"):
                entered.set()
                release.wait()
            return super().step(task)

    episode, entered = WorkerEpisode(Hangs, {}), threading.Event()
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(episode, {"prompt": "12", "hangs": True}, model())
            await trio.to_thread.run_sync(entered.wait)
            nursery.cancel_scope.cancel()
        await episode({"prompt": "12"}, model())
        assert len(made) == 2
    finally:
        release.set()


# Agents --------------------------------------------------------------------------------------------------------------

TOOLS = '''
def add(a: int, b: int = 1) -> int:
    """Return the sum of two numbers."""
    return a + b


def fail(text: str) -> str:
    raise RuntimeError(text)
'''


def call(text: str) -> str:
    return f"<tool_call>{text}</tool_call>"


async def test_an_agent_calls_tools_until_it_calls_none(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(TOOLS)
    config = {"tools": [f"{tmp_path / 'tools.py'}:add"], "system_prompt": "s", **evaluator(tmp_path)}
    llm = model([call('{"name": "add", "arguments": {"a": 2, "b": 3}}'), "five"])
    (trajectory,) = await rolled_out(rl.AgentRolloutWorker, {"prompt": "2+3"}, config, llm)
    roles = [(message["role"], message["content"]) for message in trajectory["messages"]]
    assert roles == [("system", "s"), ("user", "2+3"), ("assistant", ""), ("tool", "5"), ("assistant", "five")]
    assert (trajectory["turns"], trajectory["response"], trajectory["finish_reason"]) == (2, "five", "stop")
    # Both replies count, and were generated once: what lies between them is masked.
    assert sum(trajectory["loss_mask"]) == sum(len(reply.token_ids) for reply in llm.replies)
    assert trajectory["score"]["turns"] == 5.0


async def test_an_agent_ends_after_its_last_turn(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(TOOLS)
    config = {"tools": [f"{tmp_path / 'tools.py'}:add"], "max_turns": 2, **evaluator(tmp_path)}
    again = call('{"name": "add", "arguments": {"a": 2}}')
    (trajectory,) = await rolled_out(rl.AgentRolloutWorker, {"prompt": "2+3"}, config, model([again] * 3))
    assert (trajectory["turns"], trajectory["finish_reason"]) == (2, "max_turns")
    assert len(await rolled_out(rl.AgentRolloutWorker, {"prompt": "1"}, evaluator(tmp_path), model(["x"]))) == 1
    with pytest.raises(AttemptEnded, match="step returned None"):
        await rolled_out(rl.AgentRolloutWorker, {})


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        ('{"a": 2, "b": 3}', "5"),
        ({"a": 2}, "3"),
        ("{", "error: the arguments of add are not JSON"),
        ("[1]", "error: the arguments of add are array; expected an object"),
        ({"c": 1}, "error: unknown argument 'c' of add; expected a, b"),
        ({"a": "2"}, "error: argument 'a' of add is string; expected integer"),
        ({"a": True}, "error: argument 'a' of add is boolean; expected integer"),
        ({"b": 1}, "error: missing argument 'a' of add; expected a, b"),
    ],
)
def test_arguments_of_tools_are_checked(arguments: Any, answer: str) -> None:
    namespace: dict[str, Any] = {}
    exec(TOOLS, namespace)
    assert tool_of(namespace["add"]).call(arguments) == answer


def test_a_tool_is_described_by_its_signature_and_its_error_is_an_answer(tmp_path: Path) -> None:
    namespace: dict[str, Any] = {}
    exec(TOOLS, namespace)
    assert tool_of(namespace["add"]).schema["function"] == {
        "name": "add",
        "description": "Return the sum of two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a"],
        },
    }
    assert tool_of(namespace["fail"]).call({"text": "no"}) == "error: RuntimeError: no"
    (tmp_path / "tools.py").write_text("def many(*args): ...")
    with pytest.raises(InvalidRequest, match=r"rollout_worker\.tools: .*cannot be given by name"):
        rl.AgentRolloutWorker({"tools": [f"{tmp_path / 'tools.py'}:many"]})


# By themselves -------------------------------------------------------------------------------------------------------


class Validated:
    def __init__(self) -> None:
        self.trajectories: list[dict[str, Any]] = []
        self.arrived = threading.Event()

    def put_trajectory(self, trajectory: dict[str, Any]) -> str:
        self.trajectories.append(trajectory)
        self.arrived.set()
        return "success"


def test_a_worker_by_itself_rolls_out_what_the_loader_has() -> None:
    loader = MockDataLoader({"size": 6, "rollout_repeat_n": 2})
    pool = rl.TrajectoryPool({"key_list": ["group_id"], "group_size": 2, "batch_size": 12})
    tracker = rl.ActivityTracker()
    workers = [rl.MockRolloutWorker({}) for _ in range(3)]
    validation, validator = MockDataLoader({"size": 1}, is_validate=True), Validated()
    with pytest.raises(RuntimeError, match="call set_module_references before run"):
        workers[0].run()
    for number, worker in enumerate(workers):
        worker.set_module_name(f"worker-{number}")
        worker.set_activity_tracker(rl.ActivityTrackerProxy(tracker))
        worker.set_module_references(pool, loader, None, validation, validator)
        tracker.register_module(worker.get_module_name(), worker, is_rollout_worker=True)
        worker.run()
    try:
        with pytest.raises(RuntimeError, match="worker-0 runs already"):
            workers[0].run()
        workers[1].begin_validate()
        assert validator.arrived.wait(30)
        workers[1].end_validate()
        while not (loader.is_finished() and tracker.wait_quiescent(timeout=1)):
            pass
        batch = pool.get_batch()
        assert batch is not None
        assert len(batch) == 12
        assert [one["prompt"] for one in validator.trajectories] == ["prompt 0"]
        assert tracker.get_error_health_status()["status"] == "healthy"
    finally:
        for worker in workers:
            worker.stop()


def test_a_task_that_fails_is_repeated_and_then_left() -> None:
    answers = iter(["fail", "re-rollout", None, "success"])
    done = threading.Event()
    seen = []

    class Fails(rl.BaseRolloutWorker):
        def step(self, task: dict[str, Any]) -> str | None:
            seen.append(task.get("fray_attempts", 0))
            answer = next(answers)
            if answer == "success":
                done.set()
            if answer is None:
                raise KeyError("answer")
            return answer

    worker = Fails({"max_attempts": 3})
    worker.set_module_references(Validated(), MockDataLoader({"size": 1}))
    worker.run()
    assert done.wait(30)
    worker.stop()
    assert seen == [0, 1, 1, 2]
    assert worker._activity_tracker.get_error_health_status()["error_level_count"] == 1
