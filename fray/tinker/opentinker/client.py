"""Client for OpenTinker's protocol, sync, in the shape of OpenTinker's own."""

from __future__ import annotations

import atexit
import json
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from fray.errors import FrayError
from fray.tinker.core.training_session import GENERATION_KEYS
from fray.tinker.http_client import JsonConnection, JsonReply
from fray.tinker.wire.dataproto import encode_data_proto

RETRY_DELAY_S = 5.0
"""First pause of a request that is sent again; doubled each time."""
RETRY_LIMIT_S = 20.0
"""Longest such pause."""
MAX_RETRIES = 1_000
POLL_S = 0.2
"""Pause between two questions for the state of a job."""


class TrainingServiceError(FrayError):
    """Answer of a service that refuses a request, or whose execution failed.

    Attributes:
        status: of HTTP.
        traceback: of the training server; empty: there is none.
    """

    def __init__(self, message: str, status: int = 0, traceback: str = "") -> None:
        super().__init__(message)
        self.status, self.traceback = status, traceback


class _Retries:
    """Requests that are sent again after a connection error or time-out, with the same request id."""

    def __init__(
        self,
        connection: JsonConnection,
        retry_delay_s: float = RETRY_DELAY_S,
        max_retries: int = MAX_RETRIES,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.connection = connection
        self._delay_s, self._max_retries, self._sleep = retry_delay_s, max_retries, sleep

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Return the body of the answer.

        Raises:
            TrainingServiceError: the service refuses it, or its execution failed.
            ConnectionError, TimeoutError: the last of all tries.
        """
        headers = {"X-Request-ID": uuid.uuid4().hex}
        content = None if body is None else json.dumps(body).encode()
        for attempt in range(self._max_retries + 1):
            try:
                return _body_of(self.connection.request(method, path, content, headers=headers), path)
            except (ConnectionError, TimeoutError):
                if attempt == self._max_retries:
                    raise
            self._sleep(min(self._delay_s * 2.0 ** min(attempt, 10), RETRY_LIMIT_S))
        raise AssertionError("unreachable")


def _body_of(reply: JsonReply, path: str) -> Any:
    detail = reply.body.get("detail") if isinstance(reply.body, dict) else reply.body
    if reply.status != 200:
        raise TrainingServiceError(f"{path}: {reply.status}: {detail}", reply.status)
    if isinstance(reply.body, dict) and reply.body.get("status") == "error":
        raise TrainingServiceError(f"{path}: {reply.body.get('error')}", 200, str(reply.body.get("traceback", "")))
    return reply.body


class HTTPTrainingClient:
    """Client of one training server.

    Args:
        server_url: as the scheduler gave it.
        timeout_s: for one answer; then the request is sent again, and gets the same answer. None: no limit.
        retry_delay_s: first pause after a connection error or time-out, doubled up to 20 s.
        max_retries: tries after the first.
        ca_file: certificates that the server's is signed by, with https.
    """

    def __init__(
        self,
        server_url: str,
        *,
        timeout_s: float | None = None,
        retry_delay_s: float = RETRY_DELAY_S,
        max_retries: int = MAX_RETRIES,
        ca_file: str | None = None,
    ) -> None:
        self.server_url = server_url.rstrip("/")
        connection = JsonConnection(f"{self.server_url}/api/v1", timeout_s=timeout_s, ca_file=ca_file)
        self._retries = _Retries(connection, retry_delay_s, max_retries)

    def health(self) -> dict[str, Any]:
        """Return ``{"status": "healthy"}``. Raises as `train_step`."""
        return self._ask("GET", "/health")

    def status(self) -> dict[str, Any]:
        """Return ``status``, ``is_initialized``, ``global_steps``, ``generation_config``."""
        return self._ask("GET", "/status")

    def set_generation_config(self, **settings: Any) -> dict[str, Any]:
        """Set temperature, top_p, top_k, max_new_tokens; those that are not given stay."""
        unknown = sorted(set(settings) - set(GENERATION_KEYS))
        if unknown:
            raise TypeError(f"unknown setting {unknown[0]!r}; expected {', '.join(GENERATION_KEYS)}")
        return self._ask("POST", "/set_generation_config", settings)

    def upload_reward_function(self, function_name: str, source_code: str) -> dict[str, Any]:
        """Upload a reward function, which is executed in a child process of the job."""
        return self._ask(
            "POST", "/upload_reward_function", {"function_name": function_name, "source_code": source_code}
        )

    def set_config(self, config_overrides: Mapping[str, Any]) -> dict[str, Any]:
        """Set the configuration; keys may be paths. The message names the keys that are not used."""
        return self._ask("POST", "/set_config", {"config_overrides": dict(config_overrides)})

    def override_config(self, config_overrides: Mapping[str, Any]) -> dict[str, Any]:
        """Change keys of the configuration before `init_workers`, which needs `set_config` all the same."""
        return self._ask("POST", "/override_config", {"config_overrides": dict(config_overrides)})

    def init_workers(self, total_steps: int | None = None) -> dict[str, Any]:
        """Load the model."""
        return self._ask("POST", "/init_workers", {"total_steps": total_steps})

    def resume(self, path: str) -> dict[str, Any]:
        """Continue from a checkpoint, after `init_workers`; return ``global_steps`` and ``generation_config`` of it.

        Args:
            path: ``checkpoint_dir`` of a checkpoint that a job of the same user has saved.

        Raises:
            TrainingServiceError: there is none, or it is of another model; then nothing has changed.
        """
        return self._ask("POST", "/resume", {"path": path})

    def train_step(self, batch: Any) -> dict[str, Any]:
        """Train on a batch: a `DataProto`, verl's own, or a dict of its three parts; return metrics and global_steps.

        Sent again after a lost connection, it is trained once.

        Raises:
            TrainingServiceError: the batch is refused, or the step failed.
            ConnectionError, TimeoutError: the last of all tries.
        """
        return self._ask("POST", "/train_step", {"batch_data": encode_data_proto(batch)})

    def validate(self, batch: Any) -> dict[str, Any]:
        """Generate greedily and return metrics and samples. Raises as `train_step`."""
        return self._ask("POST", "/validate", {"batch_data": encode_data_proto(batch)})

    def save_checkpoint(self) -> dict[str, Any]:
        """Write a checkpoint and return its paths. Raises as `train_step`."""
        result: dict[str, Any] = self._ask("POST", "/save_checkpoint", {})["result"]
        return result

    def close(self) -> None:
        """Close the connections."""
        self._retries.connection.close()

    def _ask(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        answer: dict[str, Any] = self._retries.ask(method, path, body)
        return answer


class SchedulerClient:
    """Client of a scheduler.

    Args:
        scheduler_url: its address.
        api_key: ``otk_…``, where keys are required.
        timeout_s: for one answer.
        ca_file: certificates that the scheduler's is signed by, with https.
    """

    def __init__(
        self,
        scheduler_url: str,
        api_key: str | None = None,
        *,
        timeout_s: float = 60.0,
        retry_delay_s: float = RETRY_DELAY_S,
        max_retries: int = MAX_RETRIES,
        ca_file: str | None = None,
    ) -> None:
        self.scheduler_url = scheduler_url.rstrip("/")
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._connection = JsonConnection(self.scheduler_url, timeout_s=timeout_s, headers=headers, ca_file=ca_file)
        self._retries = _Retries(self._connection, retry_delay_s, max_retries)

    def register(self, username: str) -> dict[str, Any]:
        """Create a user; return ``user_id``, ``username`` and ``api_key``, which is shown once."""
        from urllib.parse import quote

        return self._once("POST", f"/register?username={quote(username)}")

    def submit_job(
        self,
        config: Mapping[str, Any],
        *,
        num_gpus: int | None = None,
        enable_agent_loop: bool = False,
        wandb_key: str | None = None,
    ) -> dict[str, Any]:
        """Submit a training job; return its id, status, message and ``server_url``, null while it waits.

        It is sent once: a scheduler that has accepted it and lost the connection has the job.
        """
        body = {"config": dict(config), "enable_agent_loop": enable_agent_loop, "wandb_key": wandb_key}
        return self._with_local_url(self._once("POST", "/submit_job", {**body, "num_gpus": num_gpus}))

    def job_status(self, job_id: str) -> dict[str, Any]:
        """Return the state of a job. Raises TrainingServiceError 404 if there is none."""
        return self._with_local_url(self._retries.ask("GET", f"/job_status/{job_id}"))

    def list_jobs(self) -> list[dict[str, Any]]:
        """Return the caller's jobs."""
        return [self._with_local_url(job) for job in self._retries.ask("GET", "/list_jobs")["jobs"]]

    def wait_until_running(self, job_id: str, timeout_s: float = 600.0) -> dict[str, Any]:
        """Wait until a job takes requests; return its state.

        Raises:
            TrainingServiceError: the job has ended; the message has the reason.
            TimeoutError: it waits for longer than ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            job = self.job_status(job_id)
            if job["status"] == "RUNNING":
                return job
            if job["status"] in ("COMPLETED", "FAILED", "CANCELLED"):
                raise TrainingServiceError(f"job {job_id} is {job['status']}: {job['error_message'] or 'ended'}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"job {job_id} is {job['status']} after {timeout_s:g} s")
            time.sleep(POLL_S)

    def cancel_job(self, job_id: str) -> dict[str, Any]:
        """Cancel a job."""
        return self._asked("DELETE", f"/cancel_job/{job_id}")

    def complete_job(self, job_id: str) -> dict[str, Any]:
        """End a job in order."""
        return self._asked("POST", f"/complete_job/{job_id}")

    def close(self) -> None:
        """Close the connections."""
        self._connection.close()

    def _asked(self, method: str, path: str) -> dict[str, Any]:
        answer: dict[str, Any] = self._retries.ask(method, path)
        return answer

    def _once(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        answer: dict[str, Any] = _body_of(self._connection.request(method, path, body), path)
        return answer

    def _with_local_url(self, job: dict[str, Any]) -> dict[str, Any]:
        """Replace the host of an address when the scheduler is reached through a tunnel of this machine."""
        ours = urlsplit(self.scheduler_url)
        for name in ("server_url", "vllm_server_url"):
            if (url := job.get(name)) and ours.hostname == "localhost":
                parts = urlsplit(url)
                port = ours.port if parts.port is None else parts.port
                local = parts._replace(netloc=f"localhost:{port}" if port else "localhost")
                job = {**job, name: urlunsplit(local)}
        return job


class InferenceSchedulerClient(SchedulerClient):
    """Client of a scheduler, for inference jobs."""

    def submit_inference_job(
        self,
        model_path: str,
        *,
        tokenizer_path: str | None = None,
        tensor_parallel_size: int = 1,
        num_gpus: int | None = None,
        gpu_memory_utilization: float = 0.9,
        max_model_len: int | None = None,
        trust_remote_code: bool = False,
        priority: str | None = None,
    ) -> dict[str, Any]:
        """Submit an inference job; return its id, status, message and ``vllm_server_url``, null while it waits.

        The message lists what is not used. It is sent once, as `submit_job`.

        Args:
            model_path: a served model, or the ``actor_path`` of a checkpoint that a job of the user has saved.
            tokenizer_path: not used: that of the model.
            tensor_parallel_size: not used.
            num_gpus: None: the default of the service.
            gpu_memory_utilization: not used.
            max_model_len: tokens of a prompt and a completion together; None: those of the model.
            trust_remote_code: not used.
            priority: band of its engine on the cluster, such as ``"batch"``; None: the default of the user.
        """
        body = {
            "model_path": model_path,
            "tokenizer_path": tokenizer_path,
            "tensor_parallel_size": tensor_parallel_size,
            "num_gpus": num_gpus,
            "gpu_memory_utilization": gpu_memory_utilization,
            "max_model_len": max_model_len,
            "trust_remote_code": trust_remote_code,
            "priority": priority,
        }
        return self._with_local_url(self._once("POST", "/submit_inference_job", body))


class ServiceClient:
    """A training job as programs use it: configuration, then batches.

    Args:
        server_url: address of the training server.
        retry_delay_s: as `HTTPTrainingClient`.
        ca_file: as `HTTPTrainingClient`.
    """

    def __init__(self, server_url: str, *, retry_delay_s: float = RETRY_DELAY_S, ca_file: str | None = None) -> None:
        self.client = HTTPTrainingClient(server_url, retry_delay_s=retry_delay_s, ca_file=ca_file)

    def set_config(
        self,
        config: Mapping[str, Any],
        *,
        reward: tuple[str, str] | None = None,
        generation: Mapping[str, Any] | None = None,
        total_steps: int | None = None,
        resume: str | None = None,
    ) -> None:
        """Configure the server and load the model, in the order that it needs.

        Args:
            config: keys of the configuration.
            reward: name and source of a reward function; None: the configuration has a reward server.
            generation: settings of `HTTPTrainingClient.set_generation_config`.
            total_steps: steps that are planned.
            resume: ``checkpoint_dir`` of a checkpoint to continue from.
        """
        if generation:
            self.client.set_generation_config(**generation)
        if reward is not None:
            self.client.upload_reward_function(*reward)
        self.client.set_config(config)
        self.client.init_workers(total_steps)
        if resume is not None:
            self.client.resume(resume)

    def fit(
        self,
        batches: Iterable[Any],
        *,
        validation: Any = None,
        validate_every: int = 0,
        save_every: int = 0,
        on_step: Callable[[dict[str, Any]], object] = lambda answer: None,
    ) -> list[dict[str, float]]:
        """Train on each batch; return the metrics of each step.

        Args:
            batches: as for `HTTPTrainingClient.train_step`.
            validation: batch that is validated every ``validate_every`` steps; its metrics are among the step's.
            validate_every: 0: never.
            save_every: steps between checkpoints; 0: none.
            on_step: called with each answer.
        """
        history: list[dict[str, float]] = []
        for batch in batches:
            answer = self.client.train_step(batch)
            metrics = dict(answer["metrics"])
            steps = answer["global_steps"]
            if validation is not None and validate_every and steps % validate_every == 0:
                metrics |= self.client.validate(validation)["metrics"]
            if save_every and steps % save_every == 0:
                self.client.save_checkpoint()
            history.append(metrics)
            on_step({**answer, "metrics": metrics})
        return history


class SchedulerClientLifecycleManager:
    """Ends a job with the program: a normal exit completes it, SIGINT and SIGTERM cancel it.

    Args:
        scheduler: client of the scheduler.
        job_id: of the job.
        reward_server: process that the program has started and that shall end with it.
    """

    def __init__(
        self, scheduler: SchedulerClient, job_id: str, *, reward_server: subprocess.Popen[Any] | None = None
    ) -> None:
        self._scheduler, self._job_id, self._reward_server = scheduler, job_id, reward_server
        self._callbacks: list[Callable[[], object]] = []
        self._before: dict[int, Any] = {}
        self._has_ended = False
        atexit.register(self._complete)
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._on_signal)

    def add_cleanup(self, callback: Callable[[], object]) -> None:
        """Call something at the end, in the order in which it was added."""
        self._callbacks.append(callback)

    def end(self, *, cancel: bool = False) -> None:
        """End the job, the reward server, and call the callbacks; the second time nothing happens."""
        if self._has_ended:
            return
        self._has_ended = True
        atexit.unregister(self._complete)
        for number, before in self._before.items():
            signal.signal(number, before)
        try:
            (self._scheduler.cancel_job if cancel else self._scheduler.complete_job)(self._job_id)
        finally:
            if self._reward_server is not None and self._reward_server.poll() is None:
                self._reward_server.terminate()
                self._reward_server.wait()
            for callback in self._callbacks:
                callback()

    def _complete(self) -> None:
        self.end()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.end(cancel=True)
        # As without this manager: KeyboardInterrupt, or the end of the program.
        signal.raise_signal(number)
