"""Worker of the pig latin example: it asks no model, and makes trajectories for cross-entropy."""

from __future__ import annotations

from typing import Any, ClassVar

from fray.rl.rollout_worker.base_rollout_worker import BaseRolloutWorker, NeededKeys

VOWELS = "aeiou"


class PigLatinRolloutWorker(BaseRolloutWorker):
    """Worker whose trajectories are prompts with the response that the model shall learn.

    Tasks have ``prompt`` (default: ``English: <input>`` and ``Pig Latin:`` on the next line) and ``response`` (default:
    the pig latin of ``input``). Tokens of the response count; there are neither logprobs nor rewards.
    """

    needed_keys: ClassVar[NeededKeys] = (("input", "prompt"), ("input", "response"))

    def step(self, task: dict[str, Any]) -> Any:
        """Put the trajectory of a task; None if it has neither ``input`` nor prompt and response."""
        text = task.get("input")
        if text is None and not ("prompt" in task and "response" in task):
            return None
        prompt = str(task.get("prompt", f"English: {text}\nPig Latin:"))
        response = str(task.get("response", f" {pig_latin(str(text))}"))
        tokenizer = self._llm.tokenizer
        # With the end of the text, so that a model that has learned stops.
        before, after = tokenizer.encode(prompt), [*tokenizer.encode(response), tokenizer.eos_id]
        return self._put_trajectory(
            {
                "prompt": prompt,
                "response": response,
                "tokens": [*before, *after],
                "loss_mask": [0] * len(before) + [1] * len(after),
                "finish_reason": "stop",
                "model_tag": self._llm_client._model_tag,
            }
        )


def pig_latin(text: str) -> str:
    """Return a text in pig latin: consonants before the first vowel move behind, then "ay"; else "way"."""
    return " ".join(_pig_latin_word(word) for word in text.split())


def _pig_latin_word(word: str) -> str:
    start = next((place for place, letter in enumerate(word) if letter.lower() in VOWELS), len(word))
    return f"{word}way" if start == 0 else f"{word[start:]}{word[:start]}ay"
