"""Inference server with a real engine: an actor that generates with a tiny Llama and takes the weights of another."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs torch: make test-rl")

import numpy as np  # noqa: E402

import fray  # noqa: E402
from fray.rl.core.versions import VersionName  # noqa: E402
from fray.rl.inference.model_engine import ModelEngine  # noqa: E402
from fray.rl.inference.requests import GenerateRequest, Sampling  # noqa: E402
from fray.rl.inference.server import InferenceServer  # noqa: E402
from fray.rl.model_spec import TinyLlama  # noqa: E402
from fray.rl.tensors import flat_weights  # noqa: E402
from fray.rl.tensors.language_model import load_model  # noqa: E402

pytestmark = pytest.mark.torch

MODEL = TinyLlama(layers=1, width=16, heads=2, mlp=32)
V0, V1 = VersionName(0, 0), VersionName(0, 1)


def greedy(name: str) -> GenerateRequest:
    return GenerateRequest(name, (4, 0, 7, 12), Sampling(max_tokens=6, temperature=0, ignore_eos=True))


async def test_the_actor_generates_as_the_model_whose_weights_it_has() -> None:
    other = load_model(TinyLlama(layers=1, width=16, heads=2, mlp=32, seed=1))
    table = flat_weights.table_of(other.model)
    buffer = np.zeros(table.total_bytes, np.uint8)
    flat_weights.write(other.model, buffer)
    async with fray.open_cluster("local") as cluster, cluster.open_scope("run") as scope:
        server = await scope.create_actor(InferenceServer, ModelEngine(MODEL, threads=1))
        reference = await scope.create_actor(InferenceServer, ModelEngine(TinyLlama(1, 16, heads=2, mlp=32, seed=1)))
        (before,) = await server.generate(greedy("a"))
        await server.load_weights(V1, table, buffer)
        (after,) = await server.generate(greedy("b"))
        (expected,) = await reference.generate(greedy("a"))
    assert (before.segments, after.segments) == ([(V0, 6)], [(V1, 6)])
    assert before.token_ids != after.token_ids == expected.token_ids
    assert after.logprobs == expected.logprobs


async def test_weights_of_another_shape_are_refused_and_the_server_continues() -> None:
    other = load_model(TinyLlama(layers=2, width=16, heads=2, mlp=32))
    table = flat_weights.table_of(other.model)
    async with fray.open_cluster("local") as cluster, cluster.open_scope("run") as scope:
        server = await scope.create_actor(InferenceServer, ModelEngine(MODEL))
        with pytest.raises(ValueError, match=r"model\.layers\.1"):
            await server.load_weights(V1, table, np.zeros(table.total_bytes, np.uint8))
        assert (await server.generate(greedy("a")))[0].segments == [(V0, 6)]
