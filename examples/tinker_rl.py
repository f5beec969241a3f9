"""Reinforcement learning through the Tinker SDK: a model learns to copy three digits. It needs `tinker`, not Fray.

In another terminal: fray tinker serve --base-model Qwen/Qwen3-0.6B
Then: python examples/tinker_rl.py http://localhost:8765 [KEY]
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Iterator

import tinker
from tinker import types

PROMPTS, SAMPLES = 32, 16


def datum(prompt: list[int], tokens: list[int], logprobs: list[float], advantage: float) -> types.Datum:
    """A prompt and its sample: the prompt's tokens have no advantage."""
    before, row = len(prompt) - 1, prompt + tokens
    columns = {"logprobs": [0.0] * before + logprobs, "advantages": [0.0] * before + [advantage] * len(tokens)}
    floats = {name: types.TensorData(data=values, dtype="float32") for name, values in columns.items()}
    return types.Datum(
        model_input=types.ModelInput.from_ints(row[:-1]), loss_fn_inputs={"target_tokens": row[1:], **floats}
    )


def train(training: object, tokenizer: object, rate: float, steps: int, seed: int = 0) -> Iterator[float]:
    """Train, and yield the mean reward of each step: the share of the answer's tokens that are right."""
    rng, stop = random.Random(seed), tokenizer.encode("$", add_special_tokens=False)
    for step in range(steps):
        sampler = made(training.save_weights_and_get_sampling_client())
        asked = []
        for index in range(PROMPTS):
            number = f"{rng.randrange(1000):03}"
            prompt, answer = (tokenizer.encode(number + end, add_special_tokens=False) for end in ">$")
            params = types.SamplingParams(
                max_tokens=len(answer), stop=stop, seed=(seed * steps + step) * PROMPTS + index
            )
            asked.append((prompt, answer, sampler.sample(types.ModelInput.from_ints(prompt), SAMPLES, params)))
        data, means = [], []
        for prompt, answer, future in asked:
            samples = future.result().sequences
            rewards = [sum(map(int.__eq__, each.tokens, answer)) / len(answer) for each in samples]
            mean, deviation = statistics.mean(rewards), statistics.stdev(rewards)
            means.append(mean)
            # A group whose rewards are equal teaches nothing.
            for each, reward in zip(samples, rewards, strict=True):
                if deviation:
                    data.append(datum(prompt, list(each.tokens), list(each.logprobs), (reward - mean) / deviation))
        if data:
            training.forward_backward(data, "importance_sampling")
            training.optim_step(types.AdamParams(learning_rate=rate)).result()
        yield statistics.mean(means)


def made(client: object) -> object:
    """A client; newer versions of the SDK return a future of it."""
    return client.result() if hasattr(client, "result") else client


def main(url: str, key: str) -> None:
    service = tinker.ServiceClient(base_url=url, api_key=key)
    model = service.get_server_capabilities().supported_models[0].model_name
    training = made(service.create_lora_training_client(base_model=model, rank=32))
    for step, reward in enumerate(train(training, training.get_tokenizer(), rate=1e-4, steps=50)):
        print(f"step {step}: mean reward {reward:.3f}")
    print(training.save_state("final").result().path)
    # Ends the session now, and the SDK's requests in the background, which may crash Python while it exits.
    if hasattr(service, "close"):
        service.close("success").result()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "tml-none")
