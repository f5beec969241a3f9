"""Training run as a job with an environment, retries, and checkpoints from which it continues.

    python examples/training.py [--client SPEC] [--steps N] [--output URL] [--fail-at STEP] [--text DIR] [--json]

The job trains the model of `language_model.py` and writes a checkpoint every 100 steps to --output, which is any
storage that fsspec supports. --fail-at kills its process on the way: the cluster restarts the job, which continues from
its last checkpoint. Without restarts (--client local), run it again with the same --output.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import language_model as model
from fray.v2 import Entrypoint, JobRequest, ResourceConfig, create_environment
from fray.v2.client import client_of

EVERY = 100
"""Steps between checkpoints."""


@dataclass(frozen=True)
class Run:
    """Parameters of the job."""

    output: str
    steps: int
    text: str | None = None
    fail_at: int | None = None
    batch: int = 256


def train(run: Run) -> None:
    """Job. The rate and the seed come from its environment; each attempt adds a line to ``attempts.jsonl``."""
    from fsspec.core import url_to_fs

    storage, root = url_to_fs(run.output)
    storage.makedirs(root, exist_ok=True)
    rate, seed = float(os.environ.get("TRAIN_RATE", "0.003")), int(os.environ.get("TRAIN_SEED", "0"))
    state, first = model.load(storage, f"{root}/checkpoint.npz") or (model.state_of(model.fresh(seed)), 0)
    weights = {name: value for name, value in state.items() if "." not in name}
    attempt = sum(storage.exists(f"{root}/attempt-{n}.json") for n in range(100))
    with storage.open(f"{root}/attempt-{attempt}.json", "w") as file:
        json.dump({"from_step": first, "rate": rate, "pid": os.getpid()}, file)
    print(f"attempt {attempt}: from step {first}", flush=True)
    seen = model.batches(model.corpus(run.text), run.batch, seed, first)
    losses: list[float] = []
    for step, (context, answers) in zip(range(first, run.steps), seen, strict=False):
        if step == run.fail_at and attempt == 0:
            die()
        loss, gradients = model.loss_and_gradients(weights, context, answers)
        model.adam(state, gradients, step, rate)
        losses.append(loss)
        if (step + 1) % EVERY == 0 or step + 1 == run.steps:
            model.save(storage, f"{root}/checkpoint.npz", state, step + 1)
            print(f"step {step + 1}: {sum(losses) / len(losses):.3f} nats a character", flush=True)
            with storage.open(f"{root}/loss-{step + 1:06}.json", "w") as file:
                json.dump({"step": step + 1, "loss": sum(losses) / len(losses)}, file)
            losses.clear()


def die() -> None:
    """End like a lost machine: by SIGKILL, or by an error where the job is a thread."""
    if os.environ.get("FRAY_JOB_ID"):
        os.kill(os.getpid(), 9)
    raise RuntimeError("failed on purpose (--fail-at); run again with the same --output to continue")


def launch(spec: str, run: Run, rate: float, seed: int) -> dict[str, Any]:
    """Submit the job, wait for it, and read its results."""
    began = time.perf_counter()
    client = client_of(spec)
    try:
        job = client.submit(
            JobRequest(
                name=f"train-{os.getpid()}",
                entrypoint=Entrypoint.from_callable(train, args=[run]),
                resources=ResourceConfig.with_cpu(cpu=1, ram="1g"),
                environment=create_environment(
                    workspace=str(Path(__file__).parent), env_vars={"TRAIN_RATE": str(rate), "TRAIN_SEED": str(seed)}
                ),
                max_retries_failure=2,
            )
        )
        job.wait()
    finally:
        client.shutdown()
    return read(run.output) | {"seconds": round(time.perf_counter() - began, 2)}


def read(output: str) -> dict[str, Any]:
    """Return the losses, the attempts and some text of the model."""
    from fsspec.core import url_to_fs

    storage, root = url_to_fs(output)

    def read_json(path: str) -> dict[str, Any]:
        with storage.open(path) as file:
            return dict(json.load(file))

    attempts = []
    for n in count():
        if not storage.exists(path := f"{root}/attempt-{n}.json"):
            break
        attempts.append(read_json(path))
    found = model.load(storage, f"{root}/checkpoint.npz")
    assert found is not None, "a job that has succeeded has a checkpoint"
    return {
        "losses": [read_json(path) for path in sorted(storage.glob(f"{root}/loss-*.json"))],
        "attempts": attempts,
        "says": model.complete(found[0], "def ", 60),
        "output": output,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="training.py",
        description=(__doc__ or "").split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    spec = os.environ.get("FRAY_CLIENT_SPEC", "local")
    parser.add_argument("--client", default=spec, help="local, machine, or fray://HOST:PORT with FRAY_TOKEN")
    parser.add_argument("--steps", type=int, default=1000, help="steps of training, including those before a restart")
    parser.add_argument("--batch", type=int, default=256, help="contexts a step")
    parser.add_argument("--rate", type=float, default=0.003, help="learning rate, by the job's environment")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches")
    parser.add_argument("--text", metavar="DIR", help="Python code to learn; default the standard library")
    parser.add_argument(
        "--output",
        metavar="URL",
        help="directory of checkpoints, new or to continue; default: a new one",
    )
    parser.add_argument("--fail-at", type=int, metavar="STEP", help="the first attempt is killed at this step")
    parser.add_argument("--json", action="store_true", help="the whole report as JSON on stdout")
    options = parser.parse_args(argv)
    if options.steps < 1 or options.batch < 1:
        parser.error("--steps and --batch must be 1 or more")
    output = options.output or tempfile.mkdtemp(prefix="fray-training-")
    run = Run(output, options.steps, options.text, options.fail_at, options.batch)
    report = launch(options.client, run, options.rate, options.seed)
    if options.json:
        print(json.dumps(report))
        return 0
    starts = ", ".join(f"from step {attempt['from_step']}" for attempt in report["attempts"])
    losses = " ".join(f"{point['loss']:.2f}" for point in report["losses"])
    print(f"attempts: {starts}\nnats a character: {losses}\nit says: {report['says']!r}\ncheckpoints: {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
