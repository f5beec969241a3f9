"""Tasks of `bench.tinker`, in plain Python: for the plain loop and for the program that uses the SDK."""

from __future__ import annotations

import random

DIGITS = "0123456789+=>$ "
LETTERS = "abcdefghijklmnopqrstuvwxyz>$"
BATCH = 32


def pig_latin(word: str) -> str:
    """Return a word with its consonants before the first vowel at the end, and ``ay``."""
    at = next((index for index, letter in enumerate(word) if letter in "aeiou"), 0)
    return (word[at:] + word[:at] + "ay") if at else word + "way"


def sft_batch(step: int) -> list[tuple[list[int], list[float]]]:
    """Return the token ids of 32 words with their answers, ``cat>atcay$``, and the weights of their targets."""
    rng, rows = random.Random(step), []
    for _ in range(BATCH):
        word = rng.choice("bcdfgklmnprst") + rng.choice("aeiou") + rng.choice("bcdfgklmnprst")
        prompt, answer = f"{word}>", f"{pig_latin(word)}$"
        rows.append(
            ([LETTERS.index(letter) for letter in prompt + answer], [0.0] * (len(prompt) - 1) + [1.0] * len(answer))
        )
    return rows
