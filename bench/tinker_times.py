"""Times of a training service for `bench.tinker`, by plain HTTP: neighbours, answers, and processes that are killed."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from threading import Event, Thread
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import trio

import fray
from fray import rl, tinker
from fray.tinker.http_client import JsonConnection
from fray.tinker.tinker_api.tinker_runs import TinkerRuns
from fray.tinker.wire.messages import MESSAGES

MODEL = rl.TinyLlama()
SMALL = [[1, 2]]
LARGE = [[index % 15 for index in range(200)]] * 128
"""Twenty-five thousand tokens: seven slices."""
COUNT = 100


class Trainer:
    """Model of one user, which sends one request after another."""

    def __init__(self, url: str, key: str) -> None:
        self._connection = JsonConnection(f"{url}/api/v1", headers={"X-API-Key": key.replace("otk_", "tml-")})
        session = self._post("create_session", {"tags": [], "user_metadata": {}, "sdk_version": "0"})["session_id"]
        lora = {"rank": 8, "seed": 1}
        body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": lora}
        self._model = self.result(self._post("create_model", body))["model_id"]
        self._seq = 0

    def _post(self, path: str, body: Any, **headers: str) -> Any:
        while True:
            try:
                reply = self._connection.request("POST", f"/{path}", body, headers=headers)
            except ConnectionError:  # the service was killed
                time.sleep(0.01)
                continue
            if reply.status != 200:
                raise ValueError(f"{path}: {reply.status} {reply.body}")
            return reply.body

    def result(self, future: Any) -> Any:
        while (found := self._post("retrieve_future", {"request_id": future["request_id"]})).get("type") == "try_again":
            pass
        return found

    def forward(self, rows: list[list[int]]) -> str:
        """Have a batch computed, forward and backward, and return the id of its future."""
        self._seq += 1
        message = MESSAGES["ForwardBackwardRequest"](model_id=self._model, seq_id=self._seq, loss_fn="cross_entropy")
        for tokens in rows:
            datum = message.data.add()
            datum.model_input.add().encoded_text.tokens = np.array(tokens, "<i4").tobytes()
            datum.loss_fn_inputs["target_tokens"].dtype = 2
            datum.loss_fn_inputs["target_tokens"].dense = np.array(tokens, "<i8").tobytes()
        future = self._post(
            "forward_backward", message.SerializeToString(), **{"Content-Type": "application/x-protobuf"}
        )
        self.result(future)
        request_id: str = future["request_id"]
        return request_id

    def seconds(self, count: int, rows: list[list[int]]) -> list[float]:
        """Return the seconds of each of so many requests."""
        found = []
        for _ in range(count):
            began = time.perf_counter()
            self.forward(rows)
            found.append(time.perf_counter() - began)
        return found


@asynccontextmanager
async def serving(directory: Path, spec: str = "machine?nodes=1&cpu=4") -> AsyncIterator[tuple[fray.Cluster, Any]]:
    async with (
        fray.open_cluster(spec, logs=False) as cluster,
        tinker.serve({"tiny": MODEL}, threads=1, directory=directory, cluster=cluster, auth=True) as service,
    ):
        yield cluster, service


def p95(seconds: list[float]) -> float:
    return sorted(seconds)[len(seconds) * 19 // 20]


async def neighbours(directory: Path) -> None:
    """Print the times of small requests of one user, alone and beside another user's large ones."""
    async with serving(directory) as (_, service):
        keys = [await service.create_key(name) for name in ("small", "large")]

        def measure() -> tuple[list[float], list[float], list[float]]:
            small, large = (Trainer(service.url, key) for key in keys)
            small.seconds(10, SMALL)
            alone, whole, ended = small.seconds(COUNT, SMALL), large.seconds(2, LARGE), Event()

            def keep_busy() -> None:
                while not ended.is_set():
                    large.forward(LARGE)

            busy = Thread(target=keep_busy)
            busy.start()
            beside = small.seconds(COUNT, SMALL)
            ended.set()
            busy.join()
            return alone, beside, whole

        alone, beside, whole = await trio.to_thread.run_sync(measure)
    print(
        f"neighbours: p95 of small requests {1e3 * p95(alone):.0f} ms alone, {1e3 * p95(beside):.0f} ms beside those "
        f"of {1e3 * min(whole):.0f} ms; target {1e3 * (2 * p95(alone) + 0.1):.0f} ms"
    )


async def answers(directory: Path) -> None:
    """Print the time from an answer's being on disk to its being in the client, service and client in one process."""
    done: dict[str, float] = {}
    answered = TinkerRuns._answered

    def noted(runs: TinkerRuns, request_id: str) -> None:
        done[request_id] = time.perf_counter()
        answered(runs, request_id)

    TinkerRuns._answered = noted  # type: ignore[method-assign]
    async with serving(directory, "local") as (_, service):
        key = await service.create_key("ada")

        def measure() -> list[float]:
            trainer, found = Trainer(service.url, key), []
            for _ in range(COUNT):
                request_id = trainer.forward(SMALL)
                found.append(time.perf_counter() - done[request_id])
            return found

        late = await trio.to_thread.run_sync(measure)
    TinkerRuns._answered = answered  # type: ignore[method-assign]
    print(f"answers: in the client after p50 {1e3 * median(late):.1f} ms, p95 {1e3 * p95(late):.1f} ms; target 5 ms")


async def kills(directory: Path) -> None:
    """Print the seconds after which a service and an engine that were killed answer again."""
    load = (
        "from fray.rl.tensors.language_model import load_model; from fray.rl import TinyLlama; load_model(TinyLlama())"
    )
    began = time.perf_counter()
    await trio.run_process([sys.executable, "-c", load], capture_stderr=True)
    loaded = time.perf_counter() - began
    seconds: dict[str, list[float]] = {"tinker-service": [], "tinker-engine": []}
    async with serving(directory) as (cluster, service):
        key = await service.create_key("ada")
        trainer = await trio.to_thread.run_sync(Trainer, service.url, key)

        def answers_again() -> None:
            while True:
                connection = HTTPConnection(urlsplit(service.url).netloc)
                try:
                    connection.request("GET", "/api/v1/healthz")
                    connection.getresponse().read()
                    return
                except OSError:
                    time.sleep(0.005)

        for _ in range(5):
            for prefix, found in seconds.items():
                await trio.to_thread.run_sync(trainer.forward, SMALL)
                # The newest: an engine ends with its service, and its job is listed still.
                job = [each for each in await cluster.list_jobs() if each.name.startswith(prefix)][-1]
                os.kill(job.attempts[-1].pid, signal.SIGKILL)
                began = time.perf_counter()
                wait = answers_again if prefix == "tinker-service" else partial(trainer.forward, SMALL)
                await trio.to_thread.run_sync(wait)
                found.append(time.perf_counter() - began)
    of_service, of_engine = seconds.values()
    print(f"kills: the service answers after p50 {median(of_service):.2f} s, {max(of_service):.2f} s at most; target 3")
    print(
        f"kills: an engine answers after p50 {median(of_engine):.2f} s, {max(of_engine):.2f} s at most; a process "
        f"that imports and loads takes {loaded:.2f} s; target 5 s more"
    )


TASKS = {"neighbours": neighbours, "answers": answers, "kills": kills}
