"""Settings of a run are checked before anything is started."""

from __future__ import annotations

import re
from typing import Any

import pytest
import trio
from fsspec.registry import known_implementations

import fray
from fray import rl
from fray.errors import InvalidRequest
from fray.rl.controller import RunController
from fray.rl.core.validation import ValidationPlan
from fray.rl.records.run_log import RunResult, StepLog

ROWS = [{"prompt": "1"}]


async def solve(task: dict[str, Any], llm: rl.LLM) -> rl.Score:
    raise NotImplementedError


class Unchanged(rl.BaseTrainer):
    def train(self, trajectories: list[dict[str, Any]]) -> dict[str, float]:
        return {}


def not_async(task: dict[str, Any], llm: rl.LLM) -> None: ...


def run(**options: Any) -> rl.Run:
    settings: dict[str, Any] = {
        "model": rl.TinyLlama(),
        "data": [{"prompt": str(number)} for number in range(5)],
        "rollout": solve,
        "trainer": rl.GRPO(groups=2, group_size=3, steps=4),
    }
    return rl.Run(**settings | options)


def test_a_batch_is_as_many_rows_as_groups() -> None:
    plan = run(sync="fully-async", staleness_threshold=2).parts.plan
    assert (plan.order.batch_rows, plan.group_size, plan.batch_size, plan.steps) == (2, 3, 6, 4)
    assert plan.most_untrained == 18
    assert run(episode="group").parts.plan.order.whole_groups


def test_groups_by_keys_may_have_samples_of_several_rows() -> None:
    plan = run(group_keys=["user"], samples_per_row=1).parts.plan
    assert (plan.order.batch_rows, plan.order.repeats, plan.group_size, plan.batch_size) == (6, 1, 3, 6)
    assert run(group_keys=["user"]).parts.facts != run().parts.facts


def test_without_steps_a_run_ends_when_each_row_was_rolled_out() -> None:
    for trainer in (rl.GRPO(groups=2, group_size=3), Unchanged(rl.GRPO(groups=2, group_size=3))):
        parts = run(trainer=trainer).parts
        assert parts.trainer is not None
        assert (parts.plan.steps, parts.trainer.steps) == (3, 3)
    keyed = {"trainer": rl.GRPO(groups=2, group_size=3), "group_keys": ["user"], "samples_per_row": 6}
    assert run(**keyed).parts.plan.steps == 5
    with pytest.raises(InvalidRequest, match="invalid trainer: invalid warmup_steps=4 of GRPO: expected at most"):
        run(trainer=rl.GRPO(groups=2, group_size=3, warmup_steps=4))


def test_rows_are_collected_once_without_a_trainer() -> None:
    plan = run(trainer=None, samples_per_row=2).parts.plan
    assert (plan.order.epochs, plan.order.batch_rows, plan.group_size, plan.steps) == (1, 5, 2, None)


def test_workers_are_spread_over_processes() -> None:
    parts = run(rollout_workers=130).parts
    assert (parts.processes, parts.episodes.workers) == (3, 44)
    assert run(rollout_workers=130, rollout_processes=1).parts.episodes.workers == 130


@pytest.fixture(autouse=True)
def _storage_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"class": "fray_missing_package.FileSystem", "err": "Install missing"}
    monkeypatch.setitem(known_implementations, "missing", known)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sync": "fuly-async"}, "invalid sync 'fuly-async'; expected one of 'sync', 'batch-async', 'fully-async'"),
        ({"stale": "ignore"}, "invalid stale 'ignore'; expected one of"),
        ({"stale": "keep"}, "invalid stale policy 'keep' with sync mode 'sync'"),
        (
            {"weight_sync": "memori"},
            "invalid weight_sync 'memori'; expected one of 'memory', 'disk', 'network',",
        ),
        ({"weight_sync": "disk"}, "needs a directory that trainer and servers have: write output='./out'"),
        ({"weight_sync": "none"}, "write sync='fully-async', stale='keep'"),
        ({"samples_per_row": 2}, "invalid samples_per_row 2: expected group_size of the trainer (3), or None"),
        ({"group_keys": ["u"], "trainer": None}, "group_keys ['u'] with trainer=None, which compares nothing"),
        ({"group_keys": ["u"], "episode": "group"}, "group_keys ['u'] with episode='group', a whole group: expected"),
        ({"group_keys": ["u", "u"]}, "invalid group_keys ['u', 'u']: expected names, each once"),
        ({"episode": "row"}, "invalid episode 'row'; expected one of 'sample', 'group'"),
        ({"rollout": not_async}, "expected an async function, async def solve(task, llm), or a class of BaseRollout"),
        ({"rollout": rl.MockRolloutWorker, "episode": "group"}, "a step is one sample; expected episode='sample'"),
        ({"rollout_workers": 0}, "invalid rollout_workers 0: expected 1 or more"),
        ({"rollout_processes": 65}, "invalid rollout_processes 65: expected 1 to rollout_workers (64)"),
        ({"min_servers": 2}, "invalid min_servers 2: expected 1 to inference_servers (1)"),
        ({"deterministic": True, "sync": "fully-async"}, "invalid deterministic True: expected sync='sync'"),
        ({"output": "nosuch://bucket/run"}, "invalid location 'nosuch://bucket/run': Protocol not known: nosuch"),
        (
            {"output": "missing://b/run"},
            "'missing://b/run' needs a package that is not installed here: Install missing",
        ),
        ({"output": "memory://run", "trainer": None}, "output 'memory://run' without a trainer: expected a directory"),
        ({"output": "memory://run"}, "invalid output 'memory://run': each process of a run has a memory of its own"),
        ({"output": "memory://run", "weight_sync": "disk"}, "weight_sync='disk' with output 'memory://run': expected"),
        ({"interrupt": "stop"}, "invalid interrupt 'stop'; expected one of 'keep', 'wait', 'abort'"),
        ({"transfer_s": 0.0}, "invalid transfer_s 0.0: expected seconds above 0"),
        ({"liveness_s": 0.0}, "invalid liveness_s 0.0: expected seconds above 0"),
        ({"max_length": 257}, "invalid max_length 257: expected 2 to 256, the context of the model, or None"),
        (
            {"max_prompt_length": 256},
            "invalid max_prompt_length 256: expected 1 to 255, which leave room",
        ),
        ({"model": "a/b", "max_prompt_length": 0}, "invalid max_prompt_length 0: expected 1 or more, or None"),
        ({"model": "a/b", "max_length": 1}, "invalid max_length 1: expected 2 or more, or None"),
        (
            {"max_length": 64, "validation_sampling": {"max_tokens": 64}},
            "invalid validation_sampling: found max_tokens 64; expected less than 64, which are a prompt and its",
        ),
        ({"on_error": "stop"}, "invalid on_error 'stop'; expected one of"),
        (
            {"resources": {"servers": None}},
            "invalid key 'servers' of resources; expected trainer, reference, server, rollout or controller",
        ),
        ({"inference_port": 0}, "invalid inference_port 0: expected the first of 1 ports, such as 8000, or None"),
        ({"inference_key": "k"}, "inference_key is for the HTTP ports of servers: expected inference_port=8000, too"),
        ({"resources": {"server": "h100"}}, "invalid resources['server'] 'h100': expected a ResourceConfig, such as"),
        ({"rollout_workers": "64"}, "invalid rl.Run: rollout_workers: found '64' (str); expected a whole number"),
        ({"rollout_workers": True}, "rollout_workers: found True (bool); expected a whole number"),
        ({"liveness_s": "60"}, "liveness_s: found '60' (str); expected a number"),
        ({"shuffle": "no"}, "shuffle: found 'no' (str); expected true or false"),
        ({"env_vars": {"A": 1}}, "env_vars.A: found 1 (int); expected text"),
        ({"env_vars": ["A"]}, "env_vars: found a list; expected a mapping"),
        ({"group_keys": "user"}, "group_keys: found 'user' (str); expected a list"),
        ({"trackers": [1]}, "trackers[0]: found 1 (int); expected text"),
        ({"rollout_timeout_s": 0}, "invalid rollout_timeout_s 0: expected seconds above 0"),
        ({"threads": 0}, "invalid threads 0: expected 1 or more"),
        ({"staleness_threshold": -1}, "invalid staleness_threshold -1: expected 0 or more"),
        ({"model": 3}, "invalid model 3 (int): expected a name, a directory as text, or rl.TinyLlama()"),
        ({"model": "./no-such-model"}, "invalid model './no-such-model': there is no such directory in "),
        ({"model": ""}, "invalid model '': there is no such directory in "),
        ({"output": __file__}, "it is a file; expected a directory"),
        (
            {"rollout": rl.DefaultNexAURolloutWorker},
            "nexau_agent_config_path: missing; workers of type 'nexau' need it",
        ),
        ({"data": None}, "invalid data None: expected a .jsonl or .parquet file, or an iterable of dicts"),
        ({"data": []}, "the iterable has no rows"),
        ({"validation_data": [], "validate_freq": 5}, "invalid validation_data: the iterable has no rows"),
        ({"validate_freq": 5}, "validate_freq without validation_data: expected validation_data="),
        ({"validate_before": True}, "validate_before without validation_data"),
        ({"validation_data": ROWS}, "validation_data is never used: expected validate_freq=50, or validate_before="),
        ({"validation_data": ROWS, "validate_freq": 0}, "invalid validate_freq 0: expected 1 or more, or None"),
        ({"validation_data": ROWS, "validate_before": True, "trainer": None}, "to score rows once, give them as data="),
        ({"validation_sampling": {"temperatur": 0}}, "'temperatur'; did you mean temperature?"),
        ({"validation_sampling": {"n": 2}}, "'n' is the episode's; expected validation_samples_per_row="),
    ],
)
def test_an_invalid_setting_is_refused_with_what_would_do(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(message)):
        run(**options)


def test_all_settings_of_another_type_are_in_one_message() -> None:
    with pytest.raises(InvalidRequest) as caught:
        run(rollout_workers="64", seed=0.5)
    assert str(caught.value).splitlines() == [
        "invalid rl.Run: 2 errors",
        "  rollout_workers: found '64' (str); expected a whole number",
        "  seed: found 0.5 (float); expected a whole number",
    ]


def test_an_argument_that_is_not_there_is_refused_with_the_nearest() -> None:
    with pytest.raises(TypeError, match=r"Run has no argument 'inference_server'; did you mean inference_servers, "):
        run(inference_server=2)
    with pytest.raises(TypeError, match=r"TinyLlama has no argument 'layer'; did you mean layers\?"):
        rl.TinyLlama(layer=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'trainer'"):
        rl.Run(model=rl.TinyLlama(), data=ROWS, rollout=solve)  # type: ignore[call-arg]


def test_a_directory_that_only_other_machines_have_may_be_a_model() -> None:
    assert run(model="/models/of/the/cluster").model == "/models/of/the/cluster"
    assert run(model="Qwen/Qwen3-0.6B").model == "Qwen/Qwen3-0.6B"


def test_the_facts_of_a_run_are_those_that_a_checkpoint_must_have() -> None:
    facts = run().parts.facts
    assert facts == run(sync="fully-async").parts.facts
    for options in ({"data": [{"prompt": "other"}] * 5}, {"model": rl.TinyLlama(seed=1)}, {"seed": 1}):
        assert run(**options).parts.facts != facts


def test_dynamic_sampling_is_asked_for() -> None:
    assert not run().parts.plan.drop_equal_rewards
    plan = run(dynamic_sampling=True, max_replaced_groups=5).parts.plan
    assert (plan.drop_equal_rewards, plan.max_replaced_groups) == (True, 5)
    with pytest.raises(InvalidRequest, match="max_replaced_groups"):
        run(max_replaced_groups=-1)


def test_a_group_is_validated_as_a_whole_and_samples_alone() -> None:
    validated = {"validation_data": ROWS * 3, "validate_freq": 5}
    plan = run(**validated).parts.plan.validation
    assert plan == ValidationPlan(rows=3, every=5)
    plan = run(**validated, episode="group").parts.plan.validation
    assert plan == ValidationPlan(rows=3, every=5, samples=3, whole_groups=True)
    assert run().parts.plan.validation is None


async def test_a_run_that_is_stopped_before_its_parts_have_started_starts_no_more_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = run(progress=False)
    ended: list[Any] = []
    async with fray.open_cluster("local", logs=False) as cluster:
        with trio.fail_after(30), StepLog(RunResult(), one) as log:
            controller = RunController(cluster, one.parts, log)

            create = controller._processes.create

            async def stop_and_create(*arguments: Any, **options: Any) -> Any:
                await controller.stop()
                return await create(*arguments, **options)

            # The first part is the coordinator.
            monkeypatch.setattr(controller._processes, "create", stop_and_create)
            ended.append(await controller.run())
        assert ended == [None]
        assert {info.name.partition("-")[0] for info in await cluster.list_jobs()} <= {"Coordinator"}


def test_a_row_is_added_to_a_run_that_works_and_to_no_other() -> None:
    added: list[Any] = []

    class Controller:
        async def add_rows(self, rows: list[dict[str, Any]], in_front: bool) -> None:
            added.append((rows, in_front))

    one = run(name="digits")
    with pytest.raises(InvalidRequest, match="no row can be added: run digits does not work in this process"):
        trio.run(one.add_item, {"prompt": "9"})
    one._controller = Controller()  # type: ignore[assignment]
    with pytest.raises(InvalidRequest, match="row 0 is of type str; expected a dict"):
        trio.run(one.add_item, "9")
    for add in (one.add_item, one.add_item_back, one.add_item_front):
        trio.run(add, {"prompt": "9"})
    assert added == [([{"prompt": "9"}], False), ([{"prompt": "9"}], False), ([{"prompt": "9"}], True)]
