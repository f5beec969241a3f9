"""Small language model: it predicts the next character of Python code from the four before it.

Characters become vectors, four of them a hidden layer, and that a prediction; all in numpy, trained with Adam (Kingma
and Ba, 2015). `training.py` trains it, `inference.py` serves it.
"""

from __future__ import annotations

import io
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

CONTEXT, WIDTH, HIDDEN, SYMBOLS = 4, 16, 96, 97
"""Characters of input, numbers per character, hidden units, and symbols: 95 printable ones, newline, all others."""
Arrays = dict[str, NDArray[np.float32]]


def encode(text: str) -> NDArray[np.int64]:
    """Return a number from 0 to 96 for each character."""
    codes = np.frombuffer(text.encode("ascii", "replace"), dtype=np.uint8).astype(np.int64)
    return np.where((codes >= 32) & (codes < 127), codes - 32, np.where(codes == 10, 95, 96))


def decode(codes: NDArray[np.int64]) -> str:
    return "".join(chr(code + 32) if code < 95 else "\n" if code == 95 else "?" for code in codes.tolist())


def corpus(root: str | None = None, characters: int = 1_000_000) -> NDArray[np.int64]:
    """Return the Python files below a directory (default: the standard library), in order, up to so many characters."""
    texts, length = [], 0
    for path in sorted(Path(root or sysconfig.get_path("stdlib")).rglob("*.py")):
        if "site-packages" in path.parts or "test" in path.parts:
            continue
        texts.append(path.read_text(errors="replace"))
        length += len(texts[-1])
        if length >= characters:
            break
    if length < 10_000:
        raise SystemExit(f"{root}: {length} characters of Python are too few to learn from; pass a directory with more")
    return encode("".join(texts)[:characters])


def fresh(seed: int) -> Arrays:
    """Return weights before training."""
    rng = np.random.default_rng(seed)
    shapes = {"embed": (SYMBOLS, WIDTH), "in": (CONTEXT * WIDTH, HIDDEN), "out": (HIDDEN, SYMBOLS)}
    weights = {name: rng.normal(0, shape[0] ** -0.5, shape).astype(np.float32) for name, shape in shapes.items()}
    return weights | {"in_bias": np.zeros(HIDDEN, np.float32), "out_bias": np.zeros(SYMBOLS, np.float32)}


def forward(weights: Arrays, seen: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return, for contexts ``(batch, CONTEXT)``, the inputs, the hidden layer, and the logarithms of probabilities."""
    inputs = weights["embed"][seen].reshape(len(seen), -1)
    hidden = np.tanh(inputs @ weights["in"] + weights["in_bias"])
    scores = hidden @ weights["out"] + weights["out_bias"]
    scores -= scores.max(axis=1, keepdims=True)
    return inputs, hidden, scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))


def loss_and_gradients(weights: Arrays, seen: NDArray[np.int64], answers: NDArray[np.int64]) -> tuple[float, Arrays]:
    """Return the mean cross entropy in nats per character, and its gradients."""
    inputs, hidden, logs = forward(weights, seen)
    rows = np.arange(len(answers))
    wrong = np.exp(logs)
    wrong[rows, answers] -= 1
    wrong /= len(answers)
    below = (wrong @ weights["out"].T) * (1 - hidden**2)
    which = np.eye(SYMBOLS, dtype=np.float32)[seen.ravel()]
    gradients = {
        "embed": which.T @ (below @ weights["in"].T).reshape(-1, WIDTH),
        "in": inputs.T @ below,
        "in_bias": below.sum(axis=0),
        "out": hidden.T @ wrong,
        "out_bias": wrong.sum(axis=0),
    }
    return -float(logs[rows, answers].mean()), gradients


def batches(text: NDArray[np.int64], size: int, seed: int, first: int) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """Yield random places of the text, equal for equal seed and step, from step ``first`` on."""
    step = first
    while True:
        places = np.random.default_rng((seed, step)).integers(0, len(text) - CONTEXT - 1, size)
        yield text[places[:, None] + np.arange(CONTEXT)], text[places + CONTEXT]
        step += 1


def adam(state: Arrays, gradients: Arrays, step: int, rate: float) -> None:
    """Make a step of Adam in place; ``state`` holds the weights and their two moments."""
    for name, gradient in gradients.items():
        mean, square = state[f"mean.{name}"], state[f"square.{name}"]
        mean += 0.1 * (gradient - mean)
        square += 0.001 * (gradient**2 - square)
        unbiased = mean / (1 - 0.9 ** (step + 1)), square / (1 - 0.999 ** (step + 1))
        state[name] -= rate * unbiased[0] / (np.sqrt(unbiased[1]) + 1e-8)


def state_of(weights: Arrays) -> Arrays:
    """Return weights with moments of zero."""
    moments = {f"{kind}.{name}": np.zeros_like(value) for name, value in weights.items() for kind in ("mean", "square")}
    return weights | moments


# Storage -------------------------------------------------------------------------------------------------------------


def save(storage: Any, path: str, state: Arrays, step: int) -> None:
    """Write a checkpoint atomically: to a temporary file, which is then moved."""
    buffer = io.BytesIO()
    np.savez(buffer, step=np.array(step), **state)  # type: ignore[arg-type]
    part = f"{path}.{os.getpid()}.part"
    with storage.open(part, "wb") as file:
        file.write(buffer.getvalue())
    storage.mv(part, path)


def load(storage: Any, path: str) -> tuple[Arrays, int] | None:
    """Return the state and its step; None if there is no checkpoint yet."""
    if not storage.exists(path):
        return None
    with storage.open(path, "rb") as file:
        found = dict(np.load(io.BytesIO(file.read())))
    return found, int(found.pop("step"))


def complete(weights: Arrays, start: str, length: int, seed: int = 0) -> str:
    """Return ``length`` characters that could follow, drawn by their probability."""
    rng = np.random.default_rng(seed)
    codes = encode(" " * CONTEXT + start)
    for _ in range(length):
        _, _, logs = forward(weights, codes[None, -CONTEXT:])
        codes = np.append(codes, rng.choice(SYMBOLS, p=np.exp(logs[0]) / np.exp(logs[0]).sum()))
    return decode(codes[CONTEXT:])
