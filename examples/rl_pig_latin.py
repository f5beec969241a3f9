"""Teach a model that knows nothing to say words in Pig Latin, by examples, in under a minute on two cores.

The prompt is ``bat>``, the answer ``atbay``. What the model shall say is in the data, the loss is cross-entropy. The
trainer is of NexRL's guide. In validation, the model says words that it was not trained with.

    pip install 'fray[rl]'
    python examples/rl_pig_latin.py
"""

from __future__ import annotations

import argparse
import random
from typing import Any

import trio

from fray import rl

WORDS = [first + vowel + last for first in "bdgmprst" for vowel in "aeiou" for last in "bdgmnprst"]


def in_pig_latin(word: str) -> str:
    """Return the word with its first letter at the end, and ``ay`` after it."""
    return f"{word[1:]}{word[0]}ay"


async def study(task: dict[str, Any], llm: rl.LLM) -> rl.Score | rl.Trajectory:
    """Return an example to learn from; in a validation, have the model say the word."""
    prompt, answer = f"{task['word']}>", in_pig_latin(task["word"])
    if task["is_val"]:
        reply = await llm.completion(prompt, max_tokens=len(answer) + 1)
        return rl.score(reply, reward=float(reply.text == answer))
    before, after = llm.tokenizer.encode(prompt), [*llm.tokenizer.encode(answer), llm.tokenizer.eos_id]
    return {"tokens": [*before, *after], "loss_mask": [0] * len(before) + [1] * len(after)}


def pig_latin_run(**options: Any) -> rl.Run:
    """Return the run; ``options`` replace those below."""
    words = random.Random(0).sample(WORDS, len(WORDS))
    settings: dict[str, Any] = {
        "model": rl.TinyLlama(layers=2, width=64, chars="abcdefghijklmnopqrstuvwxyz>$"),
        "data": [{"word": word} for word in words[60:]],
        "validation_data": [{"word": word} for word in words[:60]],
        "validate_freq": 20,
        "validate_before": True,
        "rollout": study,
        "trainer": rl.RemoteApiCrossEntropyTrainer({"batch_size": 60, "total_train_steps": 80, "lr": 3e-3}),
        "sync": "fully-async",
        "rollout_workers": 64,
    }
    return rl.Run(**{**settings, **options})


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    validations = trio.run(pig_latin_run().main).validations
    for metrics in validations:
        print(f"after {metrics['step']:.0f} updates: {metrics['val/reward']:.0%} of the words that were held out")


if __name__ == "__main__":
    main()
