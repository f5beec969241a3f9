"""The Tinker SDK, unmodified, against a service with real processes, compared with a plain loop over `fray.rl`."""

from __future__ import annotations

import base64
import functools
import json
import math
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import trio

from fray import rl, tinker
from tests.tinker.services import warm_cluster

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]
MODEL = rl.TinyLlama(layers=2, width=32)
TEXTS = ("407>407$", "123>123$", "9>9$")


def sdk(version: str) -> Path:
    python = ROOT / f".venv-tinker-{version}" / "bin" / "python"
    if not python.is_file():
        pytest.skip(f"no environment with the SDK: tools/venv tinker-{version} makes it")
    return python


async def run_script(python: Path, url: str, key: str, script: str = "sdk_script.py") -> dict[str, Any]:
    command = [str(python), str(Path(__file__).with_name(script)), url, key, str(Path(torch.__file__).parents[1])]
    run = functools.partial(trio.run_process, capture_stdout=True, stderr=subprocess.STDOUT, check=False)
    done = await run(command, env={**os.environ, "TINKER_TELEMETRY": "0"})
    assert done.returncode == 0, done.stdout.decode()[-4_000:]
    found: dict[str, Any] = json.loads(done.stdout.decode().splitlines()[-1])
    return found


def reference(steps: int, lora: rl.LoRA) -> tuple[list[float], list[float], list[list[float]], list[list[float]]]:
    """Train in one plain process: losses, norms, then logprobs after training, and those of the base model."""
    from fray.rl.tensors.adapter_trainer import AdapterTrainer, finished
    from fray.rl.tensors.language_model import load_model
    from fray.rl.train.datums import AdamParams, Datum, ServiceLoss

    trainer = AdapterTrainer(load_model(MODEL))
    trainer.create("it", lora)
    ids = [MODEL.tokenizer.encode(text) for text in TEXTS]
    data = [Datum(tokens[:-1], tokens[1:], {"weights": [1.0] * (len(tokens) - 1)}) for tokens in ids]
    loss, losses, norms = ServiceLoss("cross_entropy"), [], []
    for _ in range(steps):
        losses.append(finished(trainer.forward("it", data, loss, backward=True)).loss)
        norms.append(trainer.step("it", AdamParams(learning_rate=1e-2))["grad_norm"])
    after, base = (finished(trainer.forward(name, data, loss)).logprobs for name in ("it", None))
    return losses, norms, [list(map(float, row)) for row in after], [list(map(float, row)) for row in base]


def logprobs_in_peft(files: dict[str, bytes], directory: Path) -> list[float]:
    """Return the logprobs of the first text by the base model with the adapter of downloaded files."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    from fray.rl.tensors.language_model import load_model

    load_model(MODEL).save(directory / "base")
    (directory / "adapter").mkdir()
    for name, content in files.items():
        (directory / "adapter" / name).write_bytes(content)
    model = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(directory / "base"), directory / "adapter"
    )
    ids = torch.tensor([MODEL.tokenizer.encode(TEXTS[0])])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(input_ids=ids[:, :-1]).logits, -1)
    found: list[float] = logprobs.gather(-1, ids[:, 1:, None])[0, :, 0].tolist()
    return found


def reference_losses() -> dict[str, tuple[list[list[float]], float]]:
    """Return the losses of tokens and the norm of the gradient of each loss, from its formula, a sequence at a time."""
    from fray.rl.tensors.adapters import AdapterSet
    from fray.rl.tensors.language_model import load_model

    lm = load_model(MODEL)
    adapters = AdapterSet(lm.model)
    parameters = adapters.add("it", rl.LoRA(8, seed=3)).parameters

    def clipped(ratio: Any, advantage: float) -> Any:
        return -torch.minimum(ratio * advantage, ratio.clamp(0.9, 1.1) * advantage)

    def gspo(now: Any, old: Any, advantage: float) -> Any:
        ratio = torch.exp((now - old).mean())
        # The ratio of the sequence in value, the token's own logprob in gradient.
        return clipped(ratio.detach() * torch.exp(now - now.detach()), advantage)

    formulas: dict[str, Any] = {
        "importance_sampling": lambda now, old, advantage: -torch.exp(now - old) * advantage,
        "ppo": lambda now, old, advantage: clipped(torch.exp(now - old), advantage),
        "cispo": lambda now, old, advantage: -torch.exp(now - old).clamp(0.9, 1.1).detach() * advantage * now,
        "gspo": gspo,
        "dro": lambda now, old, advantage: -now * advantage + 0.15 * (now - old) ** 2,
    }
    found = {}
    for name, formula in formulas.items():
        rows = []
        for text, advantage in zip(TEXTS, (0.5, -0.5, 1.0), strict=True):
            ids = torch.tensor(MODEL.tokenizer.encode(text))
            with adapters.selected("it"):
                logits = lm.model(input_ids=ids[None, :-1]).logits[0]
            now = torch.log_softmax(logits, -1).gather(-1, ids[1:, None])[:, 0]
            old = torch.tensor([-2.5 + at / 10 for at in range(len(ids) - 1)])
            losses = formula(now, old, advantage)
            losses.sum().backward()
            rows.append(losses.tolist())
        norm = torch.nn.utils.clip_grad_norm_(parameters, float("inf"))
        found[name] = (rows, float(norm))
        for parameter in parameters:
            parameter.grad = None
    return found


def save_with_tokenizer(spec: rl.TinyLlama, directory: Path) -> None:
    """Write a model with a tokenizer of Hugging Face, which clients load: a token for each letter."""
    import tokenizers
    import transformers

    from fray.rl.tensors.language_model import load_model

    load_model(spec).model.save_pretrained(directory)
    inner = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({char: at for at, char in enumerate(spec.chars)}, unk_token=spec.eos)
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    inner.decoder = tokenizers.decoders.Fuse()
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=spec.eos).save_pretrained(directory)


def close(found: Sequence[float], expected: Sequence[float], tolerance: float = 1e-5) -> None:
    assert list(found) == pytest.approx(list(expected), abs=tolerance)


def check_other_methods(found: dict[str, Any], version: str, model: str, losses: list[float]) -> None:
    """Check what further methods returned, those for asyncio among them."""
    before = found["forward"]["loss"]
    close([found["load_state"], found["load_state_with_optimizer"]], [before] * 2, 1e-6)
    close(found["plain"][1:], found["base"][1:])
    assert len(found["others"]) == (1 if version == "0.25" else 2), "a handle of a sampler exists from 0.38 on"
    for logprobs in found["others"]:
        close(logprobs[1:], found["named"][1][1:])
    assert found["tokenizers"] == [MODEL.tokenizer.encode("407>")] * 2
    assert found["base_model"] == found["asyncio"]["base_model"] == model
    assert set(found["capabilities"]) == {model}

    stops, end, zero = found["stops"], MODEL.tokenizer.eos_id, MODEL.tokenizer.encode("0")[0]
    assert {tokens[-1] for tokens, reason in stops["tokens"] if reason == "stop"} == {zero}
    assert stops["text"] == stops["tokens"]
    assert any(tokens[-1] == end and reason == "stop" for tokens, reason in stops["end"])
    assert {(len(tokens), reason) for tokens, reason in stops["none"]} == {(12, "length")}
    assert any(end in tokens[:-1] for tokens, _ in stops["none"]), "not even the end of the sequence ends one"

    rest = found["rest"]
    assert rest["differ"] == []
    assert (rest["run"], rest["page"], rest["sampler"]) == ([True, 8], [2, 1], [model, False])
    assert rest["changed"] == [[True, False], [True, True], [False, True], [False, False]]
    assert [path.rpartition("/")[2] for path in found["left_at_last"]] == ["here", "more3"]
    assert found["archives"] == ([200] * 4 if version == "0.25" else [2])
    assert "whoami requires JWT auth" in found["hosted"].pop("whoami")
    if version == "0.25":
        # This version's own mistake: it never gets as far as a request.
        assert "incorrect event loop" in found["hosted"].pop("get_audit_log_async")
    assert len(found["hosted"]) == (7 if version == "0.25" else 14)
    for name, text in found["hosted"].items():
        assert "404" in text, name
        assert "is not part of this service; see docs/tinker.md" in text, name

    twin = found["asyncio"]
    close(twin["losses"], losses)
    assert (twin["rank"], twin["samples"]) == (8, found["samples"][0])
    for logprobs in twin["logprobs"]:
        close(logprobs, found["forward"]["logprobs"][0][:3], 1e-4)
    close([twin["custom"]], losses[:1])
    continued, continued_too, fresh, fresh_too, never_stopped = twin["loaded"]
    close([continued, continued_too], [never_stopped] * 2, 1e-6)
    close([fresh], [fresh_too], 1e-6)
    assert abs(fresh - never_stopped) > 1e-3
    if version != "0.25":
        close([found["traced"]], losses[:1])
        assert [url.startswith("https://") for url in found["urls"]] == [True, True]
    assert found["telemetry"] == [None] * 4


@pytest.mark.within(120)
@pytest.mark.parametrize("version", ["0.25", "0.38"])
async def test_the_sdk_trains_samples_saves_and_loads(version: str, tmp_path: Path) -> None:
    python, model = sdk(version), str(tmp_path / "model")
    await trio.to_thread.run_sync(save_with_tokenizer, MODEL, Path(model))
    async with warm_cluster() as cluster:
        directory = tmp_path / "service"
        # By its whole path, where a sampler's get_tokenizer looks for it.
        serving = tinker.serve(models={model: model}, threads=1, directory=directory, cluster=cluster, auth=True)
        async with serving as service:
            key = (await service.create_key("ada")).replace("otk_", "tml-")
            found = await run_script(python, service.url, key)
            # From 0.38 on the script ends its session; an older SDK has no way to.
            assert bool((await service.status())["models"]) == (version == "0.25")
    assert found["version"].startswith(version)
    assert (found["models"], found["info"]) == ([model], [model, True, 8])
    assert not found["unused"], "public methods of the SDK's clients that the script does not call"

    losses, norms, after, base = reference(4, rl.LoRA(8, seed=3))
    close([each["loss"] for each in found["training"]], losses)
    close(found["norms"], norms, 1e-3)
    for row, expected in zip(found["forward"]["logprobs"], after, strict=True):
        close(row, expected)
    for output in [*found["training"], found["forward"]]:
        for row, values in zip(output["losses"], output["logprobs"], strict=True):
            close(row, [-value for value in values])
    close(found["second"], reference(4, rl.LoRA(4, seed=5, mlp=False))[0])

    close(found["custom"], losses[:2])

    expected_losses = reference_losses()
    assert found["losses"].keys() == expected_losses.keys() - ({"gspo"} if version == "0.25" else set())
    for name, (output, norm) in found["losses"].items():
        rows, expected_norm = expected_losses[name]
        for row, values in zip(output["losses"], rows, strict=True):
            close(row, values)
        close([norm], [expected_norm], 1e-4)

    # With logprobs of -1 and advantages of .5 of the sampler.
    for row, values in zip(
        found["importance_sampling"]["losses"], found["importance_sampling"]["logprobs"], strict=True
    ):
        close(row, [-0.5 * math.exp(value + 1) for value in values])
    for row, values in zip(found["ppo"]["losses"], found["ppo"]["logprobs"], strict=True):
        close(row, [-0.5 * min(math.exp(value + 1), 1.1) for value in values])

    # Trainer and sampler agree, and the sampler keeps its weights.
    before, later = found["logprobs"]
    assert before == later
    assert before[0] is None
    close(before[1:], after[0][:3], 1e-4)
    close(found["base"][1:], base[0][:3], 1e-4)
    first, again = found["samples"]
    assert first == again
    assert len({tuple(tokens) for tokens in first}) > 1
    assert [len(row) for row in found["sample_logprobs"]] == [len(tokens) for tokens in first]
    assert found["greedy"][0][-1] == 0
    assert found["greedy"][1] == "stop"
    close(found["prompt_logprobs"][1:], before[1:])
    assert [row if row is None else len(row) for row in found["topk"]] == [None, 2, 2, 2]

    # Loaded states continue.
    continued, stopped = found["with_optimizer"], found["without_optimizer"]
    assert continued[0] == stopped[0] == found["importance_sampling"]
    close([continued[1]["loss"]], [found["never_stopped"]["loss"]], 1e-6)
    assert abs(stopped[1]["loss"] - found["never_stopped"]["loss"]) > 1e-3, "Adam has forgotten its means"
    close(found["named"][1][1:], found["never_stopped"]["logprobs"][0][:3], 1e-4)

    assert found["checkpoints"] == sorted([found["named"][0], found["state"]])
    assert (found["run"], found["runs"], found["weights_info"]) == (8, 7, 8)
    assert found["published"] == [True, True]
    assert found["left"] == [found["state"]]
    # What is downloaded computes the same in peft. That of 0.38 was saved later than the state, after a step.
    files = {name: base64.b64decode(content) for name, content in found["files"].items()}
    is_tar = version == "0.25"
    assert files.keys() == {*("adapter_config.json", "adapter_model.safetensors"), *(["checkpoint_complete"] * is_tar)}
    close(
        logprobs_in_peft(files, tmp_path),
        (found["with_optimizer"][0] if is_tar else found["never_stopped"])["logprobs"][0],
    )
    assert 600 < found["expires_in_s"] < 900
    assert is_tar or "age_encryption_recipients: files are not encrypted here" in found["encrypted"]
    assert (found["sessions"], found["session_runs"]) == (1, 7)
    assert "exists; with overwrite=True it is replaced" in found["again"]
    token, column, base, path = found["errors"]
    assert "data[1]: token 99 at position 2 of target_tokens is outside the vocabulary" in token
    assert "data[0]: loss 'importance_sampling' needs logprobs; it has weights" in column
    assert f"base_model: 'absent' is not served here; expected one of {model}" in base
    assert "there is no checkpoint 'tinker://a/weights/b'" in path
    assert found["after_errors"] < found["second"][-1], "a request that fails ends nothing"
    check_other_methods(found, version, model, losses)


@pytest.mark.within(170)
async def test_kills_of_engine_and_service_change_no_result(tmp_path: Path) -> None:
    python = sdk("0.38")
    result: dict[str, Any] = {}
    async with (
        warm_cluster() as cluster,
        tinker.serve(models=[MODEL], threads=1, directory=tmp_path, cluster=cluster) as service,
        trio.open_nursery() as nursery,
    ):

        async def run() -> None:
            result.update(await run_script(python, service.url, "tml-any", "sdk_steps.py"))

        async def executed(count: int) -> None:
            while True:
                models = (await service.status())["models"]
                if models and models[0]["executed"] >= count:
                    return
                await trio.sleep(0.01)

        async def kill(prefix: str) -> None:
            jobs = [job for job in await cluster.list_jobs() if job.name.startswith(prefix) and job.attempts]
            os.kill(jobs[0].attempts[-1].pid, signal.SIGKILL)

        nursery.start_soon(run)
        await executed(6)
        await kill("tinker-engine")
        await executed(14)
        assert not result, "the client has not ended yet"
        await kill("tinker-service")
    close(result["losses"], reference(40, rl.LoRA(8, seed=3))[0])
    assert result["tokenizers"] == [MODEL.tokenizer.encode("407> $")] * 2


@pytest.mark.within(120)
async def test_the_example_of_supervised_training_learns(tmp_path: Path) -> None:
    python, model = sdk("0.38"), tmp_path / "model"
    spec = rl.TinyLlama(layers=2, width=64, chars="0123456789 :$copy")
    await trio.to_thread.run_sync(save_with_tokenizer, spec, model)
    async with (
        warm_cluster() as cluster,
        tinker.serve(models=[str(model)], threads=1, directory=tmp_path / "service", cluster=cluster) as service,
    ):
        command = [str(python), str(ROOT / "examples/tinker_sft.py"), service.url]
        run = functools.partial(trio.run_process, capture_stdout=True, stderr=subprocess.STDOUT, check=False)
        done = await run(command, env={**os.environ, "TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1"})
        found = done.stdout.decode().splitlines()
        assert done.returncode == 0, "\n".join(found)[-4_000:]
    losses = [float(line.split()[-1]) for line in found if line.startswith("batch ")]
    assert len(losses) == 40
    assert mean(losses[-5:]) < 0.7 * losses[0]
    answer, path = found[-2:]
    assert len(answer) <= 8
    assert path.startswith("tinker://")
    assert path.endswith("/weights/final")
