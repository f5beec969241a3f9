"""Uses a service through the Tinker SDK, of whatever version its environment has; prints what it got as JSON.

It runs in an environment of its own. Arguments: the address of the service, the key, and the directory that has torch.
"""

from __future__ import annotations

import base64
import json
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


def contents(file: Any) -> str:
    return base64.b64encode(file.read()).decode()


def output_of(result: Any) -> dict[str, Any]:
    return {
        "loss": result.metrics["loss:sum"],
        "logprobs": [list(map(float, each["logprobs"].data)) for each in result.loss_fn_outputs],
        "losses": [list(map(float, each["elementwise_loss"].data)) for each in result.loss_fn_outputs],
    }


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:  # noqa: BLE001 (which classes the SDK has differs by version: the texts are compared)
        return f"{type(error).__name__}: {error}"
    return ""


def main(url: str, key: str) -> None:
    found: dict[str, Any] = {"version": tinker.__version__}
    service = tinker.ServiceClient(base_url=url, api_key=key)
    found["models"] = [each.model_name for each in service.get_server_capabilities().supported_models]
    training = made(service.create_lora_training_client(base_model="tiny", rank=8, seed=3))
    second = made(service.create_lora_training_client(base_model="tiny", rank=4, seed=5, train_mlp=False))
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
    policy = made(service.create_lora_training_client(base_model="tiny", rank=8, seed=3))
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
    base = made(service.create_sampling_client(base_model="tiny"))
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

    rest = service.create_rest_client()
    run_id = info.model_id
    found["checkpoints"] = sorted(each.tinker_path for each in rest.list_checkpoints(run_id).result().checkpoints)
    found["run"] = rest.get_training_run(run_id).result().lora_rank
    found["runs"] = rest.list_training_runs().result().cursor.total_count
    found["weights_info"] = rest.get_weights_info_by_tinker_path(state).result().lora_rank
    if hasattr(rest, "get_checkpoint_archive_url_from_tinker_path"):
        signed = rest.get_checkpoint_archive_url_from_tinker_path(state).result()
        with tarfile.open(fileobj=urllib.request.urlopen(signed.url), mode="r|") as tar:
            found["files"] = {each.name: contents(tar.extractfile(each)) for each in tar}
    else:
        external = training.save_weights_external("out").result().path
        signed = rest.get_external_weights_urls(external).result()
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

    # A loss that is computed here, where torch is.
    custom = made(service.create_lora_training_client(base_model="tiny", rank=8, seed=3))
    found["custom"] = []
    for _ in range(2):
        result = made(custom.forward_backward_custom(data, lambda data, rows: (-sum(row.sum() for row in rows), {})))
        custom.optim_step(adam).result()
        found["custom"].append(result.metrics["loss:sum"])

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
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
