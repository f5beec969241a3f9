"""A tiny base model, data and users of its engine."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from fray import rl
from fray.rl.train.datums import AdamParams, Datum, ServiceLoss
from fray.rl.train.lora import LoRA
from fray.tinker.adapter_engine import AdapterEngine, AdapterEngineSettings
from fray.tinker.core.adapter_operations import AdapterOperation, ForwardPass, OperationResult, OptimStep

MODEL = rl.TinyLlama(layers=1, width=16, heads=2, mlp=32, max_length=64)
VOCABULARY = len(MODEL.chars)
CROSS_ENTROPY = ServiceLoss("cross_entropy")
STEP = OptimStep(AdamParams(learning_rate=1e-2))


def engine_at(directory: Path, **settings: Any) -> AdapterEngine:
    return AdapterEngine(MODEL, directory, AdapterEngineSettings(**{"threads": 1, **settings}))


def lora_of(number: int) -> LoRA:
    """Settings of unlike rank and layers."""
    return LoRA(2 + number, attention=number % 3 != 1, mlp=number % 3 != 2, unembed=number % 2 == 0, seed=number)


def batch_of(seed: int, count: int = 4) -> ForwardPass:
    rng = random.Random(seed)
    data = []
    for _ in range(count):
        tokens = [rng.randrange(VOCABULARY) for _ in range(rng.randint(2, 9))]
        data.append(Datum(tokens[:-1], tokens[1:], {"weights": [1.0] * (len(tokens) - 1)}))
    return ForwardPass(data, CROSS_ENTROPY)


def operations_of(number: int, steps: int) -> list[AdapterOperation]:
    """Gradients of two requests, then a step."""
    found: list[AdapterOperation] = []
    for step in range(steps):
        found += [batch_of(1000 * number + step), batch_of(1000 * number + step + 500, 2), STEP]
    return found


async def executed(engine: Any, name: str, operations: list[AdapterOperation], after: int = 0) -> list[OperationResult]:
    answers = []
    for seq, operation in enumerate(operations, after + 1):
        answer = await engine.execute(name, seq, operation)
        assert not answer.error, answer.error
        answers.append(answer)
    return answers


def losses_of(answers: list[OperationResult]) -> list[float]:
    return [answer.metrics["loss"] for answer in answers if "loss" in answer.metrics]
