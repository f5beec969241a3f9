"""Signatures of NexRL's guide: the names of parameters, their order and their defaults are as there."""

from __future__ import annotations

import ast
import enum
import inspect
from typing import Any

import attrs
import pytest

from fray import rl
from fray.rl.nexrl_types import ModelTag, NexRLRole, Trajectory
from fray.rl.rollout_worker import BaseEvaluationTarget, EvaluationRunResult, Evaluator, NexAUEvaluationTarget
from tests.rl.nexrl.test_conformance import ROWS, found, full_names

GUIDE = """
rollout_worker.Evaluator: evaluate(data, evaluation_target)
NexRLModule: __init__(), set_activity_tracker(tracker), set_module_name(module_name), get_module_name()
NexRLModule: health_check()
NexRLModule: easy_dump(value, keys, value_formatter)
NexRLController: __init__(config), _get_module_class_for_role(role, config), run(), _stop(), _check_finish()
NexRLController: _check_module_liveness(timeout=5.0), _check_module_exceptions(), _load_initial_checkpoint()
NexRLController: _load_resume_checkpoint(), _find_latest_checkpoint(checkpoint_folder), _run_validate(model_tag)
NexRLController: _start_validate(model_tag), _end_validate(model_tag)
BaseDataLoader: __init__(config, is_validate=False), __len__(), __getitem__(index), get_next_item(), is_finished()
BaseDataLoader: can_return_item(), reset(), add_item(item), add_item_front(item), add_item_back(item)
LLMServiceClient: __init__(config), completion(prompt, **kwargs), generate(messages, **kwargs)
LLMServiceClient: set_weight_sync_controller(controller)
BaseRolloutWorker: __init__(config), set_activity_tracker(tracker), run(), stop(), begin_validate(), end_validate()
BaseRolloutWorker: set_module_references(trajectory_pool, dataloader, weight_sync_controller, validate_dataloader, \
validator)
BaseRolloutWorker: step(task), _put_trajectory(trajectory), _get_rollout_task(), _put_rollout_task(task)
BaseRolloutWorker: _get_validate_task(), _put_validate_trajectory(trajectory)
SimpleRolloutWorker: __init__(config), step(task)
AgentRolloutWorker: __init__(config)
BaseNexAURolloutWorker: __init__(config), format_task_query(data_item), get_train_loss_mask(trajectory_infos)
BaseNexAURolloutWorker: run_agent(task)
TrajectoryPool: __init__(config), put_trajectory(trajectory), get_batch(batch_size=None, model_tag=None)
TrajectoryPool: get_batch_any(batch_size=None), is_empty(model_tag=None), get_model_tags()
TrajectoryPoolInstance: set_module_references(dataloader, weight_sync_controller, activity_tracker)
TrajectoryPoolInstance: put_trajectory(trajectory), notify_weight_sync_starting(), unlock_for_weight_sync()
BaseTrainer: __init__(config), train(trajectories), initialize_workers(), run(), stop()
SelfHostedTrainer: _prepare_batch(batch), _process_trajectories(trajectories), train(trajectories)
SelfHostedGrpoTrainer: _prepare_batch(batch), _compute_advantage(batch), _reward_fn(batch)
SelfHostedGrpoTrainer: _compute_old_log_probs(batch)
SelfHostedGrpoTrainer: _apply_kl_penalty(batch, kl_ctrl, kl_penalty), _log_rollout_metrics(batch)
SelfHostedGrpoTrainer: _compute_data_metrics(batch)
RemoteApiTrainer: _prepare_trajectories(trajectories, metrics), train(trajectories)
RemoteApiTrainer: set_service_holder(service_holder)
RemoteApiTrainer: _convert_trajectories_to_datums(trajectories)
RemoteApiGrpoTrainer: _prepare_trajectories(trajectories, metrics)
TinkerServiceHolder: train(datums, config)
Validator: __init__(config), set_module_references(validate_dataloader), put_trajectory(trajectory), is_complete()
Validator: compute_and_log_metrics(), clear()
WeightSyncController: __init__(config), set_module_references(dataloader, trajectory_pool)
WeightSyncController: is_waiting_for_validation()
WeightSyncController: check_rollout_service_status(model_tag), trajectory_pool_notify_batch_ready(model_tag)
WeightSyncController: train_worker_notify_weight_update(worker_name, model_tag)
WeightSyncController: sync_weight_to_rollout_service(model_tag)
WeightSyncController: get_rollout_model_version(model_tag), end_validate(model_tag)
ActivityTracker: __init__(config, max_errors=1000), start(module, work), end(token), is_quiescent()
ActivityTracker: get_training_step()
ActivityTracker: wait_quiescent(timeout=None), get_running_status_summary(), is_rollout_worker_quiescent()
ActivityTracker: register_module(module_name, module_ref, is_rollout_worker=False), check_module_liveness(timeout=5.0)
ActivityTracker: report_exception(module, work, exception, severity=None), get_error_health_status()
ActivityTracker: set_training_step(step)
ActivityTracker: experiment_logger_post(backend, **kwargs)
ActivityTrackerProxy: __init__(central_tracker), track(module, work, auto_report_errors=True)
ActivityTrackerProxy: is_rollout_worker_quiescent()
ActivityTrackerProxy: set_training_step(step), get_training_step(), experiment_logger_post(backend, **kwargs)
ErrorReporter: __init__(max_errors=1000), get_health_status()
ErrorReporter: report_exception(module_name, work_context, exception, severity="error", details=None)
ErrorReporter: report_error(module_name, work_context, message, severity="error", details=None)
RayResourceManager: __init__(), register_role(role, cls, config, count, colocation_group=None), create_all_actors()
RayResourceManager: get_actor_wrapper(role)
RayActorWrapper: __init__(actor, actor_class, role, is_colocated=True)
Batch: __len__(), copy(), to_dict(), to_nextrainer_batch()
Batch: remove_redundant_left_padding(data, pad_token_id, fields, anchor_field, max_strip_threshold)
Batch: remove_redundant_right_padding(data, pad_token_id, fields, anchor_field, max_strip_threshold)
"""
"""Methods of each class; values after ``=`` are defaults."""
METHODS = [
    (owner, node)
    for owner, _, methods in (line.partition(": ") for line in GUIDE.strip().splitlines())
    for node in ast.parse(f"[{methods}]").body[0].value.elts  # type: ignore[attr-defined]
]


def asked_of(call: ast.Call) -> list[tuple[str, Any]]:
    """Return names and defaults of the parameters that the guide writes; `REQUIRED` without a default."""
    required = [(one.id, REQUIRED) for one in call.args if isinstance(one, ast.Name)]
    return required + [(one.arg, ast.literal_eval(one.value)) for one in call.keywords if one.arg is not None]


REQUIRED = inspect.Parameter.empty


@pytest.mark.parametrize(("owner", "call"), METHODS, ids=[f"{owner}.{node.func.id}" for owner, node in METHODS])
def test_a_method_has_the_parameters_and_defaults_of_the_guide(owner: str, call: ast.Call) -> None:
    assert isinstance(call.func, ast.Name)
    # The proxy has methods of the tracker by forwarding.
    source = rl.ActivityTrackerProxy(rl.ActivityTracker()) if owner == "ActivityTrackerProxy" else found(owner)
    signature = inspect.signature(getattr(source, call.func.id))
    parameters = [one for name, one in signature.parameters.items() if name != "self"]
    positional = [one for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    asked = asked_of(call)
    assert [one.name for one in positional[: len(asked)]] == [name for name, _ in asked]
    for one, (_, default) in zip(positional, asked, strict=False):
        value = one.default.value if isinstance(one.default, enum.Enum) else one.default
        # What the guide requires may be left out here.
        assert value == default or default is REQUIRED
    # Further parameters have defaults.
    assert all(one.default is not REQUIRED for one in positional[len(asked) :])
    if any(one.arg is None for one in call.keywords):
        assert any(one.kind is one.VAR_KEYWORD for one in parameters)


def test_the_table_of_the_page_has_every_method_of_the_guide() -> None:
    # Other names of the same class, and forwarded methods.
    same = {"RayResourceManager": "ResourceManager", "ActivityTrackerProxy": "ActivityTracker"}
    named = {tuple(full.split(".")[-2:]) for names, _ in ROWS for full in full_names(names)}
    methods = {(owner.rpartition(".")[2], node.func.id) for owner, node in METHODS if isinstance(node.func, ast.Name)}
    wanted = {(owner, name) for owner, name in methods if name != "__init__"}
    assert not {one for one in wanted if not {one, (same.get(one[0], ""), one[1])} & named}


def test_functions_of_the_guide_have_its_parameters() -> None:
    for function in (rl.execute, rl.execute_async):
        assert list(inspect.signature(function).parameters) == ["func", "args", "kwargs"]
    assert list(inspect.signature(rl.set_logging_basic_config).parameters) == ["level"]


def test_values_of_the_guide_have_its_fields() -> None:
    assert ModelTag is str
    assert Trajectory == dict[str, Any]
    assert {role.name: role.value for role in NexRLRole} == {
        name.upper(): name
        for name in (
            "rollout_worker", "trainer", "trajectory_pool", "weight_sync_controller", "data_loader",
            "validate_dataloader", "validator",
        )
    }  # fmt: skip
    assert {one.name: one.value for one in rl.ErrorSeverity} == {
        "INFO": "info", "WARNING": "warning", "ERROR": "error", "CRITICAL": "critical",
    }  # fmt: skip
    names = "error_id timestamp module_name work_context severity message details exception_type exception_traceback"
    assert fields_of(rl.ErrorInfo) == names.split()
    assert fields_of(rl.Batch) == ["values", "metadata"]
    assert fields_of(BaseEvaluationTarget) == ["final_answer"]
    assert fields_of(NexAUEvaluationTarget) == ["final_answer", "observation"]
    assert fields_of(EvaluationRunResult) == ["reward", "ground_truth", "metrics", "extra_info"]
    result = EvaluationRunResult()
    assert (result.reward, result.ground_truth, result.metrics, result.extra_info) == (0.0, "", {}, {})
    target = NexAUEvaluationTarget("a", [{"type": "LLM"}])
    assert isinstance(target, BaseEvaluationTarget)
    assert (target.final_answer, target.observation) == ("a", [{"type": "LLM"}])
    assert inspect.isabstract(Evaluator)


def fields_of(kind: type[Any]) -> list[str]:
    return [one.name for one in attrs.fields(kind)] if attrs.has(kind) else list(kind.__dataclass_fields__)
