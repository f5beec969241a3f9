"""Uses a service through the Tinker SDK, of whatever version its environment has; prints what it got as JSON.

It calls every public method of the SDK's four clients, and prints those that it has not.

It runs in an environment of its own. Arguments: the address of the service, the key, and the directory that has torch.
"""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import functools
import inspect
import json
import os
import sys
import tarfile
import time
import urllib.request
import warnings
from collections.abc import Callable
from typing import Any, get_args

# Torch is that of the tests; everything else is of this environment.
sys.path += sys.argv[3:]

import tinker
from tinker import types
from tinker.lib.api_future_impl import QueueState
from tinker.lib.public_interfaces.rest_client import RestClient

warnings.simplefilter("ignore")
TEXTS = ("407>407$", "123>123$", "9>9$")
CHARS = "0123456789+=>$ "
CLIP = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
LOSSES = {"importance_sampling": None, "ppo": CLIP, "cispo": CLIP, "gspo": CLIP, "dro": {"beta": 0.3}}


def ids(text: str) -> list[int]:
    return [CHARS.index(char) for char in text]


def datum(text: str, weight: float = 1.0) -> types.Datum:
    tokens = ids(text)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "weights": types.TensorData(data=[weight] * (len(tokens) - 1), dtype="float32"),
        },
    )


def rl_datum(text: str, logprobs: list[float], advantage: float) -> types.Datum:
    tokens = ids(text)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": types.TensorData(data=logprobs, dtype="float32"),
            "advantages": types.TensorData(data=[advantage] * (len(tokens) - 1), dtype="float32"),
        },
    )


def made(client: Any) -> Any:
    """Return a client; from 0.38 on, methods that make one return a future of it."""
    return client.result() if hasattr(client, "result") else client


def print_and_exit(found: Any) -> None:
    """Print JSON, and exit at once: the SDK's thread in the background may crash Python while it finalizes."""
    print(json.dumps(found), flush=True)
    os._exit(0)


def contents(file: Any) -> str:
    return base64.b64encode(file.read()).decode()


def output_of(result: Any) -> dict[str, Any]:
    return {
        "loss": result.metrics["loss:sum"],
        "logprobs": [list(map(float, each["logprobs"].data)) for each in result.loss_fn_outputs],
        "losses": [list(map(float, each["elementwise_loss"].data)) for each in result.loss_fn_outputs],
    }


def watch(*clients: type) -> set[str]:
    """Have every public method of these classes note that this file has called it; return those that it has not."""
    unused = set()

    def watched(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **options: Any) -> Any:
            # Not what the SDK calls itself, as its methods for asyncio do.
            if sys._getframe(1).f_code.co_filename == __file__:
                unused.discard(name)
            return method(*args, **options)

        return call

    for client in clients:
        for name, method in inspect.getmembers(client, callable):
            if not name.startswith("_"):
                unused.add(f"{client.__name__}.{name}")
                call = watched(f"{client.__name__}.{name}", method)
                is_static = isinstance(inspect.getattr_static(client, name), staticmethod)
                setattr(client, name, staticmethod(call) if is_static else call)
    return unused


async def got(value: Any) -> Any:
    """Wait for what a method returns: a future or a coroutine, or one after the other, by version."""
    while True:
        if isinstance(value, concurrent.futures.Future):
            value = await asyncio.wrap_future(value)
        elif inspect.isawaitable(value):
            value = await value
        else:
            return value


def finished(value: Any) -> Any:
    return asyncio.run(got(value))


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:  # noqa: BLE001 (which classes the SDK has differs by version: the texts are compared)
        return f"{type(error).__name__}: {error}"
    return ""


def negative(logprobs: Any, weights: Any) -> Any:
    loss = -(logprobs * weights).sum()
    return loss, {}


async def use_asyncio(service: Any, model: str, data: list[types.Datum]) -> dict[str, Any]:
    """Train, save, load and sample by the methods for asyncio: four steps, as the other ones take."""
    adam, prompt = types.AdamParams(learning_rate=1e-2), types.ModelInput.from_ints(ids("407>"))
    training = await service.create_lora_training_client_async(base_model=model, rank=8, seed=3)
    queued = []
    for _ in range(4):
        queued.append(await training.forward_backward_async(data, "cross_entropy"))
        queued.append(await training.optim_step_async(adam))
    results = [await got(each) for each in queued]
    found: dict[str, Any] = {
        "losses": [each.metrics["loss:sum"] for each in results[::2]],
        "rank": (await training.get_info_async()).lora_rank,
    }
    forward = output_of(await got(training.forward_async(data, "cross_entropy")))
    found["logprobs"] = [forward["logprobs"][0][:3]]
    saved = (await got(training.save_state_async("asyncio"))).path
    named = (await got(training.save_weights_for_sampler_async("asyncio"))).path
    for sampler in (
        await training.save_weights_and_get_sampling_client_async(),
        await training.create_sampling_client_async(named),
        await service.create_sampling_client_async(model_path=named),
    ):
        found["logprobs"].append((await sampler.compute_logprobs_async(prompt))[1:])
    params = types.SamplingParams(max_tokens=6, temperature=1.0, seed=7)
    sampled = await sampler.sample_async(prompt, 4, params)
    found["samples"] = [list(map(int, each.tokens)) for each in sampled.sequences]
    found["base_model"] = await sampler.get_base_model_async()

    # Loaded: with the optimizer, the next step is that of the model that was not saved.
    steps = []
    for with_optimizer in (True, False):
        name = f"create_training_client_from_state{'_with_optimizer' if with_optimizer else ''}_async"
        fresh = await service.create_lora_training_client_async(base_model=model, rank=8, seed=9)
        load = fresh.load_state_with_optimizer_async if with_optimizer else fresh.load_state_async
        await got(load(saved))
        steps.append([await getattr(service, name)(saved), fresh])
    custom = await service.create_lora_training_client_async(base_model=model, rank=8, seed=3)
    result = await got(
        custom.forward_backward_custom_async(data, lambda data, rows: (-sum(row.sum() for row in rows), {}))
    )
    found["custom"] = result.metrics["loss:sum"]
    found["loaded"] = []
    for copies in [*steps, [training]]:
        for copy in copies:
            await got(await copy.forward_backward_async(data, "cross_entropy"))
            await got(await copy.optim_step_async(adam))
            found["loaded"].append(output_of(await got(copy.forward_async(data, "cross_entropy")))["loss"])
    return found


def use_rest(rest: Any, run_id: str, path: str, named: str, sampler_id: str) -> dict[str, Any]:
    """Call the methods of the client for REST, each with its twin for asyncio; return those that differ, and more."""
    session = run_id.partition(":")[0]
    reading = {
        "get_training_run": (run_id,),
        "get_training_run_by_tinker_path": (path,),
        "list_training_runs": (2, 1),
        "list_checkpoints": (run_id,),
        "list_user_checkpoints": (1,),
        "get_session": (session,),
        "list_sessions": (),
        "get_sampler": (sampler_id,),
    }
    results = {
        name: [finished(getattr(rest, each)(*args)) for each in (name, f"{name}_async")]
        for name, args in reading.items()
    }
    run = results["get_training_run_by_tinker_path"][0]
    sampler = results["get_sampler"][0]
    found: dict[str, Any] = {
        "differ": [name for name, (one, other) in results.items() if one != other],
        "run": [run.training_run_id == run_id, run.lora_rank],
        "page": [
            len(results["list_training_runs"][0].training_runs),
            len(results["list_user_checkpoints"][0].checkpoints),
        ],
        "sampler": [sampler.base_model, sampler.model_path == named],
    }

    def shown() -> list[Any]:
        listed = {each.tinker_path: each for each in rest.list_user_checkpoints().result().checkpoints}
        return [listed[named].public, listed[named].expires_at is not None]

    found["changed"] = []
    for name, args in (
        ("publish_checkpoint_from_tinker_path_async", (named,)),
        ("set_checkpoint_ttl_from_tinker_path_async", (named, 7200)),
        ("unpublish_checkpoint_from_tinker_path_async", (named,)),
        ("set_checkpoint_ttl_from_tinker_path_async", (named, None)),
    ):
        finished(getattr(rest, name)(*args))
        found["changed"].append(shown())
    return found


def hosted_only(service: Any, rest: Any, session: str, path: str) -> dict[str, str]:
    """Return the errors of what belongs to the hosted service."""
    calls: dict[str, tuple[Any, ...]] = {
        "get_audit_log": (),
        "get_billing_usage": ("2026-01-01", "2026-02-01"),
        "assign_session_project": (session, "project"),
        "export_session_trace": (session,),
        "copy_weights": (path, "project"),
        "get_current_checkpoint_storage_usage": (),
    }
    for name in list(calls):
        calls[f"{name}_async"] = calls[name]
    calls["whoami"] = ()
    if hasattr(rest, "search_sessions"):
        calls["search_sessions"] = (types.SessionSearchRequest(),)

    def error(client: Any, name: str, args: tuple[Any, ...]) -> str:
        return error_of(lambda: finished(getattr(client, name)(*args)))

    errors = {name: error(rest, name, args) for name, args in calls.items() if hasattr(rest, name)}
    if hasattr(service, "copy_weights"):
        errors["ServiceClient.copy_weights"] = error(service, "copy_weights", (path,))
    return errors


def main(url: str, key: str) -> None:
    found: dict[str, Any] = {"version": tinker.__version__}
    unused = watch(tinker.ServiceClient, tinker.TrainingClient, tinker.SamplingClient, RestClient)
    service = tinker.ServiceClient(project_id="project", base_url=url, api_key=key)
    found["models"] = [each.model_name for each in service.get_server_capabilities().supported_models]
    [model] = found["models"]
    training = made(service.create_lora_training_client(base_model=model, rank=8, seed=3))
    second = made(service.create_lora_training_client(base_model=model, rank=4, seed=5, train_mlp=False))
    info = training.get_info()
    found["info"] = [info.model_data.model_name, info.is_lora, info.lora_rank]
    data, adam = [datum(text) for text in TEXTS], types.AdamParams(learning_rate=1e-2)

    # Queued together, executed in order.
    queued = []
    for _ in range(4):
        queued.append(training.forward_backward(data, "cross_entropy"))
        queued.append(training.optim_step(adam))
        queued.append(second.forward_backward(data, "cross_entropy"))
        queued.append(second.optim_step(adam))
    results = [each.result() for each in queued]
    found["training"] = [output_of(each) for each in results[::4]]
    found["second"] = [output_of(each)["loss"] for each in results[2::4]]
    found["norms"] = [each.metrics["grad_norm"] for each in results[1::4]]
    found["forward"] = output_of(training.forward(data, "cross_entropy").result())

    # Losses on one gradient each; steps of learning rate 0 clear it.
    policy = made(service.create_lora_training_client(base_model=model, rank=8, seed=3))
    examples = [
        rl_datum(text, [-2.5 + at / 10 for at in range(len(text) - 1)], advantage)
        for text, advantage in zip(TEXTS, (0.5, -0.5, 1.0), strict=True)
    ]
    found["losses"] = {}
    for name, config in LOSSES.items():
        if name in get_args(types.LossFnType):
            fb = policy.forward_backward(examples, name, config)
            norm = policy.optim_step(types.AdamParams(learning_rate=0.0)).result().metrics["grad_norm"]
            found["losses"][name] = [output_of(fb.result()), norm]

    # A sampler keeps its weights while training continues.
    sampler = made(training.save_weights_and_get_sampling_client())
    prompt = types.ModelInput.from_ints(ids("407>"))
    before = sampler.compute_logprobs(prompt).result()
    state = training.save_state("here").result().path
    found["state"] = state
    found["again"] = error_of(lambda: training.save_state("here").result())
    rl = [rl_datum(text, [-1.0] * (len(text) - 1), 0.5) for text in TEXTS]
    fb, step = training.forward_backward(rl, "importance_sampling"), training.optim_step(adam)
    found["importance_sampling"] = output_of(fb.result())
    step.result()
    found["ppo"] = output_of(
        training.forward(rl, "ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}).result()
    )
    found["logprobs"] = [before, sampler.compute_logprobs(prompt).result()]
    params = types.SamplingParams(max_tokens=6, temperature=1.0, seed=7)
    samples = [sampler.sample(prompt, 4, params).result() for _ in range(2)]
    found["samples"] = [[list(map(int, each.tokens)) for each in one.sequences] for one in samples]
    found["sample_logprobs"] = [list(map(float, each.logprobs)) for each in samples[0].sequences]
    greedy = types.SamplingParams(max_tokens=6, temperature=0.0, stop=[CHARS.index("0")])
    one = sampler.sample(prompt, 1, greedy, include_prompt_logprobs=True, topk_prompt_logprobs=2).result()
    found["greedy"] = [list(map(int, one.sequences[0].tokens)), str(one.sequences[0].stop_reason)]
    found["prompt_logprobs"] = one.prompt_logprobs
    found["topk"] = [None if row is None else [list(pair) for pair in row] for row in one.topk_prompt_logprobs]
    base = made(service.create_sampling_client(base_model=model))
    found["base"] = base.compute_logprobs(prompt).result()

    # A saved state continues as if there had been no interruption; without the optimizer it has the same weights.
    copies = [
        made(service.create_training_client_from_state_with_optimizer(state)),
        made(service.create_training_client_from_state(state)),
    ]
    for name, copy in zip(("with_optimizer", "without_optimizer"), copies, strict=True):
        first, step = copy.forward_backward(rl, "importance_sampling"), copy.optim_step(adam)
        step.result()
        found[name] = [output_of(first.result()), output_of(copy.forward(data, "cross_entropy").result())]
    found["never_stopped"] = output_of(training.forward(data, "cross_entropy").result())
    named = training.save_weights_for_sampler("named").result().path
    found["named"] = [named, made(service.create_sampling_client(model_path=named)).compute_logprobs(prompt).result()]

    # Loaded into a model that exists, as its first request; weights of every kind of client are the same.
    for load in ("load_state", "load_state_with_optimizer"):
        fresh = made(service.create_lora_training_client(base_model=model, rank=8, seed=9))
        getattr(fresh, load)(state).result()
        found[load] = output_of(fresh.forward(data, "cross_entropy").result())["loss"]
    others = [made(training.create_sampling_client(named))]
    if hasattr(sampler, "get_sampler_handle"):
        others.append(tinker.SamplingClient.from_sampler_handle(others[0].get_sampler_handle(), api_key=key))
    found["others"] = [each.compute_logprobs(prompt).result() for each in others]
    plain = made(tinker.SamplingClient.create(service.holder, base_model=model))
    found["plain"] = plain.compute_logprobs(prompt).result()
    tokenizers = [training.get_tokenizer(), plain.get_tokenizer()]
    found["tokenizers"] = [each.encode("407>", add_special_tokens=False) for each in tokenizers]
    found["base_model"] = plain.get_base_model()

    # Ends of samples: texts, tokens, the end of the sequence, and none.
    found["stops"] = {}
    for name, stop in (("text", ["0"]), ("tokens", [CHARS.index("0")]), ("end", None), ("none", [])):
        params = types.SamplingParams(max_tokens=12, temperature=1.0, seed=3, stop=stop)
        sampled = plain.sample(prompt, 16, params).result().sequences
        found["stops"][name] = [[list(map(int, each.tokens)), str(each.stop_reason)] for each in sampled]

    rest = service.create_rest_client()
    run_id = info.model_id
    found["checkpoints"] = sorted(each.tinker_path for each in rest.list_checkpoints(run_id).result().checkpoints)
    found["run"] = rest.get_training_run(run_id).result().lora_rank
    found["runs"] = rest.list_training_runs().result().cursor.total_count
    found["weights_info"] = rest.get_weights_info_by_tinker_path(state).result().lora_rank
    if hasattr(rest, "get_checkpoint_archive_url_from_tinker_path"):
        parts = (run_id, "weights/here")
        urls = [
            rest.get_checkpoint_archive_url_from_tinker_path(state),
            rest.get_checkpoint_archive_url_from_tinker_path_async(state),
            rest.get_checkpoint_archive_url(*parts),
            rest.get_checkpoint_archive_url_async(*parts),
        ]
        archives = [finished(each) for each in urls]
        signed = archives[0]
        found["archives"] = [urllib.request.urlopen(each.url).status for each in archives]
        with tarfile.open(fileobj=urllib.request.urlopen(signed.url), mode="r|") as tar:
            found["files"] = {each.name: contents(tar.extractfile(each)) for each in tar}
    else:
        external = training.save_weights_external("out").result().path
        signed = rest.get_external_weights_urls(external).result()
        twin = finished(training.save_weights_external_async("twin")).path
        found["archives"] = [len(finished(rest.get_external_weights_urls_async(twin)).urls)]
        rest.delete_checkpoint_from_tinker_path(twin).result()
        found["files"] = {name: contents(urllib.request.urlopen(url)) for name, url in signed.urls.items()}
        rest.delete_checkpoint_from_tinker_path(external).result()
        found["encrypted"] = error_of(lambda: training.save_weights_external("x", None, ["age1x"]).result())
    found["expires_in_s"] = signed.expires.timestamp() - time.time()
    rest.publish_checkpoint_from_tinker_path(state).result()
    rest.set_checkpoint_ttl_from_tinker_path(named, 7200).result()
    listed = {each.tinker_path: each for each in rest.list_user_checkpoints().result().checkpoints}
    found["published"] = [listed[state].public, listed[named].expires_at is not None]
    rest.unpublish_checkpoint_from_tinker_path(state).result()
    rest.delete_checkpoint_from_tinker_path(named).result()
    found["left"] = [each.tinker_path for each in rest.list_checkpoints(run_id).result().checkpoints]
    sessions = rest.list_sessions().result().sessions
    found["sessions"] = len(sessions)
    found["session_runs"] = len(rest.get_session(run_id.partition(":")[0]).result().training_run_ids)

    sampler_id = finished(rest.get_session(run_id.partition(":")[0])).sampler_ids[0]
    names = [training.save_weights_for_sampler(f"more{at}").result().path for at in range(4)]
    found["rest"] = use_rest(rest, run_id, state, names[0], sampler_id)
    finished(rest.delete_checkpoint_from_tinker_path_async(names[0]))
    finished(rest.delete_checkpoint(run_id, names[1].partition(f"{run_id}/")[2]))
    finished(rest.delete_checkpoint_async(run_id, names[2].partition(f"{run_id}/")[2]))
    found["left_at_last"] = [each.tinker_path for each in finished(rest.list_checkpoints(run_id)).checkpoints]
    found["hosted"] = hosted_only(service, rest, run_id.partition(":")[0], state)
    found["asyncio"] = asyncio.run(use_asyncio(service, model, data))
    capabilities = [service.get_server_capabilities_async()]
    if hasattr(rest, "get_server_capabilities"):
        capabilities.append(rest.get_server_capabilities())
    found["capabilities"] = [finished(each).supported_models[0].model_name for each in capabilities]

    # A loss that is computed here, where torch is.
    custom = made(service.create_lora_training_client(base_model=model, rank=8, seed=3))
    found["custom"] = []
    for _ in range(2):
        result = made(custom.forward_backward_custom(data, lambda data, rows: (-sum(row.sum() for row in rows), {})))
        custom.optim_step(adam).result()
        found["custom"].append(result.metrics["loss:sum"])

    if hasattr(service, "create_custom_loss"):
        handle = service.create_custom_loss(negative, {"logprobs": 1, "weights": 1}).result()
        traced = made(service.create_lora_training_client(base_model=model, rank=8, seed=3))
        found["traced"] = traced.forward_backward_custom(data, handle).result().metrics["loss:sum"]

    # What asks the service for nothing.
    clients = [service, training, sampler, rest]
    found["telemetry"] = [each.get_telemetry() for each in clients]
    found["urls"] = [each.get_console_url() for each in clients if hasattr(each, "get_console_url")]
    sampler.on_queue_state_change(QueueState.ACTIVE, None)

    # Mistakes.
    wrong = types.Datum(model_input=types.ModelInput.from_ints([1, 2, 3]), loss_fn_inputs={"target_tokens": [1, 2, 99]})
    found["errors"] = [
        error_of(lambda: second.forward_backward([data[0], wrong], "cross_entropy").result()),
        error_of(lambda: second.forward_backward(data, "importance_sampling").result()),
        error_of(lambda: made(service.create_lora_training_client(base_model="absent", rank=8))),
        error_of(lambda: made(service.create_training_client_from_state("tinker://a/weights/b"))),
    ]
    found["after_errors"] = output_of(second.forward(data, "cross_entropy").result())["loss"]
    if hasattr(service, "close"):
        service.close("success").result()
    found["unused"] = sorted(unused)
    print_and_exit(found)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
