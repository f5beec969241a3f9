"""Many adapters on one base model: trained, sampled, saved, offloaded, killed."""

from __future__ import annotations

import os
import signal
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import trio

torch = pytest.importorskip("torch", reason="needs torch: make test-rl")

from adapter_cases import (  # noqa: E402
    CROSS_ENTROPY,
    MODEL,
    STEP,
    VOCABULARY,
    batch_of,
    engine_at,
    executed,
    lora_of,
    losses_of,
    operations_of,
)

from fray.errors import ActorDied  # noqa: E402
from fray.model.specs import ActorConfig  # noqa: E402
from fray.rl.inference.requests import GenerateRequest, Sampling, TokenEvent  # noqa: E402
from fray.rl.train.datums import AdamParams, Datum  # noqa: E402
from fray.tinker.adapter_engine import AdapterEngine, AdapterEngineSettings  # noqa: E402
from fray.tinker.core.adapter_operations import (  # noqa: E402
    ForwardPass,
    LoadWeights,
    OptimStep,
    SaveWeights,
    SaveWeightsForSampler,
)
from fray.tinker.core.sampling_requests import SampleRequest  # noqa: E402
from tests.tinker.services import warm_cluster  # noqa: E402

pytestmark = pytest.mark.torch


async def test_weights_saved_and_loaded_continue_as_if_they_had_not_been(tmp_path: Path) -> None:
    engine, operations = engine_at(tmp_path), operations_of(1, 6)
    await engine.create_adapter("whole", "ada", lora_of(1))
    expected = losses_of(await executed(engine, "whole", operations))[6:]
    await engine.create_adapter("first", "ada", lora_of(1))
    saved = (await executed(engine, "first", [*operations[:9], SaveWeights("mid")]))[-1]
    assert saved.path == "first/weights/mid"
    assert saved.size == sum(file.stat().st_size for file in (tmp_path / saved.path).iterdir())
    await engine.create_adapter("second", "ada", lora_of(1))
    answers = await executed(engine, "second", [LoadWeights(saved.path, optimizer=True), *operations[9:]])
    assert losses_of(answers) == pytest.approx(expected, abs=1e-6)
    await engine.create_adapter("third", "ada", lora_of(1))
    answers = await executed(engine, "third", [LoadWeights(saved.path), *operations[9:]])
    assert losses_of(answers)[:2] == pytest.approx(expected[:2], abs=1e-6)
    assert losses_of(answers)[-1] != pytest.approx(expected[-1], abs=1e-6)


async def test_a_model_that_is_released_continues_in_another_engine_of_the_directory(tmp_path: Path) -> None:
    operations = operations_of(1, 4)
    alone = engine_at(tmp_path / "alone")
    await alone.create_adapter("m", "ada", lora_of(1))
    expected = losses_of(await executed(alone, "m", operations))
    first, second = engine_at(tmp_path, number=0), engine_at(tmp_path, number=1)
    assert await first.create_adapter("m", "ada", lora_of(1)) == -1
    # In the middle of a step: the gradients go, too.
    found = losses_of(await executed(first, "m", operations[:4]))
    assert await first.release_adapter("m") == ""
    assert "m" not in (await first.info())["resident"]
    assert await second.create_adapter("m", "ada", lora_of(1)) == 4, "nothing is executed again"
    assert found + losses_of(await executed(second, "m", operations[4:], 4)) == expected
    # It is removed by whatever engine is asked.
    assert await second.release_adapter("m") == ""
    assert (tmp_path / "m/snapshots").exists()
    await first.remove_adapter("m")
    assert not (tmp_path / "m/snapshots").exists()


async def test_a_model_whose_snapshot_cannot_be_written_is_not_released(tmp_path: Path) -> None:
    engine = engine_at(tmp_path)
    await engine.create_adapter("m", "ada", lora_of(1))
    (tmp_path / "m").mkdir()
    (tmp_path / "m/snapshots").write_text("in the way")
    await executed(engine, "m", [batch_of(1)])
    assert "m/snapshots" in await engine.release_adapter("m")
    await executed(engine, "m", [STEP], 1)


async def test_eight_adapters_together_have_the_losses_of_each_alone(tmp_path: Path) -> None:
    operations = [operations_of(number, 20) for number in range(8)]
    alone, together = {}, {}
    for number in range(8):
        engine = engine_at(tmp_path / f"alone{number}", slice_tokens=16)
        await engine.create_adapter("m", "ada", lora_of(number))
        alone[number] = losses_of(await executed(engine, "m", operations[number]))
    # Three are in memory at a time, and most requests take several turns.
    engine = engine_at(tmp_path / "together", slice_tokens=16, resident=3)

    async def train(number: int) -> None:
        await engine.create_adapter(f"m{number}", f"user {number}", lora_of(number))
        together[number] = losses_of(await executed(engine, f"m{number}", operations[number]))

    async with trio.open_nursery() as nursery:
        for number in range(8):
            nursery.start_soon(train, number)
    for number in range(8):
        assert together[number] == alone[number]
    info = await engine.info()
    assert (len(info["resident"]) <= 3, len(info["offloaded"]) >= 5) == (True, True)


async def test_a_directory_keeps_the_size_of_its_slices(tmp_path: Path) -> None:
    assert (await engine_at(tmp_path / "new").info())["slice_tokens"] == 1024
    engine = engine_at(tmp_path / "small", slice_tokens=8)
    await engine.create_adapter("a", "ada", lora_of(0))
    await executed(engine, "a", [batch_of(1, 8)])
    assert (await engine_at(tmp_path / "small").info())["slice_tokens"] == 8
    with pytest.raises(ValueError, match=r"slice_tokens=16: .*small was begun with 8, .*; choose another directory"):
        engine_at(tmp_path / "small", slice_tokens=16)


async def test_a_request_that_fails_has_no_effect_and_says_why(tmp_path: Path) -> None:
    engine = engine_at(tmp_path, slice_tokens=8)
    await engine.create_adapter("a", "ada", lora_of(0))
    await executed(engine, "a", [batch_of(1), STEP, batch_of(2), SaveWeights("x")])
    cases = [
        (
            ForwardPass([Datum([1, 99], [1, 2], {"weights": [1.0, 1.0]})], CROSS_ENTROPY),
            "data[0]: token 99 at position 1",
        ),
        (SaveWeights("x"), "a/weights/x: there are saved weights of this name already; choose another name"),
        (LoadWeights("a/weights/y"), "nothing was saved at 'a/weights/y'"),
    ]
    for seq, (operation, message) in enumerate(cases, 5):
        assert message in (await engine.execute("a", seq, operation)).error
    with pytest.raises(ValueError, match="model a: request 3 comes after 7, which was executed"):
        await engine.execute("a", 3, STEP)
    with pytest.raises(KeyError, match="there is no model 'b'"):
        await engine.execute("b", 1, STEP)
    with pytest.raises(ValueError, match="model a has LoRA"):
        await engine.create_adapter("a", "ada", lora_of(1))
    # Cancelled in the midst: the gradient is that of before.
    with trio.CancelScope() as scope:
        original = engine._turns.end

        def end(seconds: float) -> None:
            original(seconds)
            scope.cancel()

        engine._turns.end = end  # type: ignore[method-assign]
        await engine.execute("a", 8, batch_of(3, 8))
    assert scope.cancelled_caught
    engine._turns.end = original  # type: ignore[method-assign]
    (step,) = await executed(engine, "a", [STEP], after=7)
    await engine.create_adapter("same", "ada", lora_of(0))
    assert (await executed(engine, "same", [batch_of(1), STEP, batch_of(2), STEP]))[-1].metrics == step.metrics
    again = await engine.execute("a", 8, STEP)
    assert again is step


async def test_a_learning_rate_of_0_changes_nothing(tmp_path: Path) -> None:
    engine = engine_at(tmp_path)
    await engine.create_adapter("a", "ada", lora_of(0))
    answers = await executed(
        engine, "a", [batch_of(1), STEP, batch_of(1), OptimStep(AdamParams(learning_rate=0.0)), batch_of(1)]
    )
    assert answers[2].metrics == answers[4].metrics


async def test_samples_of_several_adapters_share_batches_and_have_the_trainers_logprobs(tmp_path: Path) -> None:
    engine, answers = engine_at(tmp_path, resident=2, slots=6), {}
    paths: list[str | None] = [None]
    for number in range(4):
        await engine.create_adapter(f"m{number}", "ada", lora_of(number))
        done = await executed(engine, f"m{number}", [*operations_of(number, 3), SaveWeightsForSampler("s")])
        paths.append(done[-1].path)
    prompt = (1, 2, 3)

    async def sample(path: str | None) -> None:
        request = SampleRequest(
            prompt=prompt,
            num_samples=3,
            max_tokens=6,
            seed=7,
            stop=[],
            prompt_logprobs=True,
            topk_prompt_logprobs=2,
            weights=path,
        )
        answers[path] = await engine.sample(f"user of {path}", request)

    async with trio.open_nursery() as nursery:
        for path in paths:
            nursery.start_soon(sample, path)
    together = dict(answers)
    for path in paths:
        await sample(path)
        assert [each.tokens for each in answers[path].sequences] == [each.tokens for each in together[path].sequences]
        assert len({tuple(each.tokens) for each in answers[path].sequences}) == 3
    for number, path in enumerate(paths[1:]):
        rows = [[*prompt, *each.tokens] for each in together[path].sequences]
        data = [Datum(row[:-1], row[1:], {"weights": [1.0] * (len(row) - 1)}) for row in rows]
        seq = engine._runner.models[f"m{number}"].seq + 1
        check = await engine.execute(f"m{number}", seq, ForwardPass(data, CROSS_ENTROPY, backward=False))
        for each, logprobs in zip(together[path].sequences, check.logprobs, strict=True):
            assert each.logprobs == pytest.approx(logprobs[2:].tolist(), abs=1e-4)
            assert together[path].prompt_logprobs[1:] == pytest.approx(logprobs[:2].tolist(), abs=1e-4)
        top = together[path].topk_prompt_logprobs
        assert (top[0], [len(of) for of in top[1:]]) == (None, [2, 2])
    assert len((await engine.info())["resident"]) <= 2


async def test_a_sampler_keeps_its_weights_while_training_continues(tmp_path: Path) -> None:
    engine = engine_at(tmp_path)
    await engine.create_adapter("a", "ada", lora_of(0))
    path = (await executed(engine, "a", [batch_of(1), STEP, SaveWeightsForSampler("s")]))[-1].path
    greedy = SampleRequest(prompt=[1], max_tokens=8, temperature=0.0, stop=[], weights=path)
    first = await engine.sample("ada", greedy)
    later = (await executed(engine, "a", [*operations_of(3, 5), SaveWeightsForSampler("t")], after=3))[-1].path
    assert await engine.sample("ada", greedy) == first
    other = SampleRequest(prompt=[1], max_tokens=8, temperature=0.0, stop=[], weights=later)
    assert (await engine.sample("ada", other)).sequences[0].logprobs != first.sequences[0].logprobs
    # The first token that it generates stops it.
    stop = SampleRequest(prompt=[1], max_tokens=8, temperature=0.0, stop=first.sequences[0].tokens[:1], weights=path)
    (stopped,) = (await engine.sample("ada", stop)).sequences
    assert (stopped.tokens, stopped.stop_reason) == (first.sequences[0].tokens[:1], "stop")
    with pytest.raises(FileNotFoundError, match="nothing was saved at 'a/sampler_weights/u'"):
        await engine.sample("ada", SampleRequest(prompt=[1], weights="a/sampler_weights/u"))
    with pytest.raises(ValueError, match=f"outside the vocabulary of {VOCABULARY} tokens"):
        await engine.sample("ada", SampleRequest(prompt=[VOCABULARY], max_tokens=1))
    with trio.move_on_after(0):
        await engine.sample("ada", greedy)
    assert await engine.sample("ada", greedy) == first


async def test_tokens_of_a_stream_come_as_they_are_made_and_a_slow_reader_delays_no_other(tmp_path: Path) -> None:
    engine = engine_at(tmp_path)
    sampling = Sampling(n=2, max_tokens=20, seed=4, ignore_eos=True)
    request = GenerateRequest("", (1, 2), sampling)
    whole = await engine.generate("ada", request)
    assert [each.index for each in whole] == [0, 1]
    tokens: dict[int, list[int]] = {0: [], 1: []}
    stream, ended = engine.stream("ada", request), []
    async with aclosing(stream) as events:  # type: ignore[type-var]
        async for event in events:
            if isinstance(event, TokenEvent):
                tokens[event.index].append(event.token_id)
                # Others are answered while it is not read.
                ended.append(await engine.generate("bob", GenerateRequest("", (3,), Sampling(max_tokens=3))))
            else:
                assert event.token_ids == tokens[event.index] == whole[event.index].token_ids
    assert len(ended) == 40
    stream = engine.stream("ada", request)
    assert isinstance(await anext(stream), TokenEvent)
    await stream.aclose()  # type: ignore[attr-defined]
    assert await engine.generate("ada", request) == whole
    assert not engine._open
    assert not engine._runner._engine.has_work


class WatchedEngine(AdapterEngine):
    """An engine that says its process, and ends it when it is in the midst of a request."""

    def __init__(self, *arguments: Any, mark: Path) -> None:
        super().__init__(*arguments)
        self._mark = mark

    async def pid(self) -> int:
        return os.getpid()

    async def end_within(self, turns: int) -> None:
        """End this process without a word after so many turns."""
        original = self._turns.end

        def end(seconds: float) -> None:
            nonlocal turns
            turns -= 1
            if turns < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            original(seconds)

        self._turns.end = end  # type: ignore[method-assign]


async def test_an_engine_killed_twice_has_the_losses_and_weights_of_one_that_was_not(tmp_path: Path) -> None:
    operations = [*operations_of(1, 6), SaveWeights("end")]
    calm = engine_at(tmp_path / "calm", slice_tokens=8)
    await calm.create_adapter("m", "ada", lora_of(1))
    expected = losses_of(await executed(calm, "m", operations))
    losses: dict[int, float] = {}
    kills = {5: "between", 10: "midst"}
    async with warm_cluster() as cluster, cluster.open_scope("engine") as scope:
        engine: Any = await scope.create_actor(
            WatchedEngine,
            MODEL,
            tmp_path / "killed",
            AdapterEngineSettings(threads=1, slice_tokens=8),
            mark=tmp_path,
            actor_config=ActorConfig(max_restarts=5),
            on_failure="absorb",
        )
        seq = await engine.create_adapter("m", "ada", lora_of(1))
        assert seq == -1
        seq, restarts = 0, 0
        while seq < len(operations):
            try:
                how = kills.pop(seq + 1, "")
                if how == "between":
                    os.kill(await engine.pid(), signal.SIGKILL)
                elif how:
                    await engine.end_within(1)
                answer = await engine.execute("m", seq + 1, operations[seq])
                assert not answer.error
                if "loss" in answer.metrics:
                    assert losses.setdefault(seq + 1, answer.metrics["loss"]) == pytest.approx(
                        answer.metrics["loss"], abs=1e-6
                    )
                seq += 1
            except (ActorDied, KeyError):
                restarts += 1
                seq = max(0, await engine.create_adapter("m", "ada", lora_of(1)))
    assert (restarts, kills) == (2, {})
    assert [losses[key] for key in sorted(losses)] == pytest.approx(expected, abs=1e-6)
    for name in ("adapter_model.safetensors", "optimizer.pt"):
        one, other = (_tensors(tmp_path / which / "m/weights/end" / name) for which in ("calm", "killed"))
        assert [each.flatten().tolist() for each in one] == [
            pytest.approx(each.flatten().tolist(), abs=1e-6) for each in other
        ]


def _tensors(path: Path) -> list[Any]:
    if path.suffix == ".pt":
        state = torch.load(path, weights_only=True)
        return [state[key][name] for key in sorted(state) for name in sorted(state[key])]
    from safetensors.torch import load_file

    return [tensor for _, tensor in sorted(load_file(path).items())]
