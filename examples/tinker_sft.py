"""Supervised fine-tuning through the Tinker SDK: a model learns to copy three digits. It needs `tinker`, not Fray.

In another terminal: fray tinker serve --base-model Qwen/Qwen3-0.6B
Then: python examples/tinker_sft.py http://localhost:8765 [KEY]
"""

from __future__ import annotations

import sys

import tinker
from tinker import types

BATCHES, BATCH = 40, 16


def datum(tokenizer: object, number: int) -> types.Datum:
    """A prompt and its answer: only the answer's tokens have a weight."""
    prompt, answer = (tokenizer.encode(text, add_special_tokens=False) for text in (f"copy {number}:", f" {number}"))
    tokens = prompt + answer
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(answer)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": types.TensorData(data=weights, dtype="float32")},
    )


def made(client: object) -> object:
    """A client; newer versions of the SDK return a future of it."""
    return client.result() if hasattr(client, "result") else client


def main(url: str, key: str) -> None:
    service = tinker.ServiceClient(base_url=url, api_key=key)
    model = service.get_server_capabilities().supported_models[0].model_name
    training = made(service.create_lora_training_client(base_model=model, rank=8))
    tokenizer = training.get_tokenizer()
    for batch in range(BATCHES):
        data = [datum(tokenizer, 100 + (batch * BATCH + at) * 7 % 900) for at in range(BATCH)]
        # Both are queued before the first has an answer.
        forward = training.forward_backward(data, "cross_entropy")
        step = training.optim_step(types.AdamParams(learning_rate=1e-3))
        print(f"batch {batch}: loss {forward.result().metrics['loss:sum'] / BATCH:.3f}")
        step.result()
    sampler = made(training.save_weights_and_get_sampling_client())
    prompt = types.ModelInput.from_ints(tokenizer.encode("copy 407:", add_special_tokens=False))
    answer = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=8, temperature=0.0)).result()
    print(tokenizer.decode(answer.sequences[0].tokens))
    print(training.save_state("final").result().path)
    # Ends the session now, and the SDK's requests in the background, which may crash Python while it exits.
    if hasattr(service, "close"):
        service.close("success").result()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "tml-none")
