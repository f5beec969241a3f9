"""Tasks of `bench.tinker` through the Tinker SDK, in an environment that has it: ``python -m bench.tinker_client``."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import tinker
from tinker import types

from bench.tinker_tasks import DIGITS, sft_batch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from tinker_rl import made, train


class Characters:
    """Tokenizer of the digits' model, of which the SDK has none."""

    def encode(self, text, add_special_tokens=False):
        return [DIGITS.index(letter) for letter in text]


def sft(training, rate, steps):
    """Return the loss of each step, in nats a token of the answers."""
    return [forward.result().metrics["loss:sum"] / tokens for forward, tokens in queued_sft(training, rate, steps)]


def queued_sft(training, rate, steps):
    """Queue steps; return the future of each with its tokens."""
    queued = []
    for step in range(steps):
        rows = sft_batch(step)
        data = [
            types.Datum(
                model_input=types.ModelInput.from_ints(tokens[:-1]),
                loss_fn_inputs={
                    "target_tokens": tokens[1:],
                    "weights": types.TensorData(data=weights, dtype="float32"),
                },
            )
            for tokens, weights in rows
        ]
        forward = training.forward_backward(data, "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=rate))
        queued.append((forward, sum(sum(weights) for _, weights in rows)))
    return queued


def request_seconds(clients, count):
    """Return the seconds of requests of each client, in turn: forward and backward of one datum of two tokens."""
    datum = types.Datum(model_input=types.ModelInput.from_ints([1, 2]), loss_fn_inputs={"target_tokens": [2, 3]})
    found = [[] for _ in clients]
    for _ in range(count):
        for seconds, training in zip(found, clients, strict=True):
            began = time.perf_counter()
            training.forward_backward([datum], "cross_entropy").result()
            seconds.append(time.perf_counter() - began)
    return found


def posted(connection, path, body):
    """Post JSON and return what the answer has."""
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    text = response.read()
    if response.status != 200:
        raise ValueError(f"{path}: {response.status} {text[:200]}")
    return json.loads(text)


def route_seconds(service, stub, count):
    """Return the seconds of heartbeats to the service, and of requests to the stub's empty route, in turn.

    Each has one connection.
    """
    to_service, to_stub = (HTTPConnection(urlsplit(url).netloc) for url in (service, stub))
    session = posted(to_service, "/api/v1/create_session", {"tags": [], "sdk_version": "bench"})["session_id"]
    routes = [(to_service, "/api/v1/session_heartbeat", {"session_id": session}), (to_stub, "/empty", {})]
    found = [[] for _ in routes]
    for _ in range(count):
        for seconds, route in zip(found, routes, strict=True):
            began = time.perf_counter()
            posted(*route)
            seconds.append(time.perf_counter() - began)
    return found


def adapters_seconds(clients, rate, steps):
    """Return the seconds of the steps of each adapter alone, then those of all together."""
    found = []
    for group in [*([each] for each in clients), clients]:
        began = time.perf_counter()
        queued = [future for each in group for future, _ in queued_sft(each, rate, steps)]
        for future in queued:
            future.result()
        found.append(time.perf_counter() - began)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=["sft", "rl", "requests", "adapters"])
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument("--stub", metavar="URL", help="of `bench.tinker_stub`, for requests")
    parser.add_argument("--key", default="tml-none")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    service = tinker.ServiceClient(base_url=options.url, api_key=options.key)

    def trained(seed):
        return made(service.create_lora_training_client(base_model=options.model, rank=options.rank, seed=seed))

    if options.task == "adapters":
        # Each of a user of its own.
        keys = os.environ["BENCH_TINKER_KEYS"].split()
        services = [tinker.ServiceClient(base_url=options.url, api_key=key) for key in keys]
        clients = [
            made(each.create_lora_training_client(base_model=options.model, rank=options.rank, seed=seed))
            for seed, each in enumerate(services)
        ]
        print(json.dumps(adapters_seconds(clients, options.rate, options.steps)))
        return
    training = trained(options.seed)
    if options.task == "requests":
        stub = tinker.ServiceClient(base_url=options.stub, api_key=options.key)
        of_stub = made(stub.create_lora_training_client(base_model="stub", rank=options.rank))
        found = [
            *request_seconds([training, of_stub], options.steps),
            *route_seconds(options.url, options.stub, options.steps),
        ]
    elif options.task == "sft":
        found = sft(training, options.rate, options.steps)
    else:
        found = list(train(training, Characters(), options.rate, options.steps, options.seed))
    print(json.dumps(found))
    service.close("success").result()


if __name__ == "__main__":
    main()
