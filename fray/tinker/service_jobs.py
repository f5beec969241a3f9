"""Users and jobs of the service: accepts, queues, starts and ends them."""

from __future__ import annotations

import hmac
import logging
import secrets
import time
from pathlib import Path
from typing import Any

import trio
from attrs import evolve, frozen

from fray.api.cluster import Cluster
from fray.model.messages.session import VERSION
from fray.model.policy.priority import Band
from fray.tinker.cluster_users import ClusterUsers
from fray.tinker.core.inference_config import InferenceSettings, inference_settings_of
from fray.tinker.core.job_queue import QueuedJob, decide_starts, expected_start
from fray.tinker.core.job_states import ServiceJobState, may_become
from fray.tinker.core.keys import USER_NAME_LIMIT, ServiceUser, hash_of, new_key, new_user_id, user_of_key
from fray.tinker.core.limits import DEFAULT_LIMITS, UserLimits, is_abandoned, limit_text
from fray.tinker.core.training_config import ConfigError, settings_of
from fray.tinker.core.training_session import ACTOR_FOLDER
from fray.tinker.engine_runner import EnginePlan, JobCallbacks
from fray.tinker.inference_runner import InferenceRunner
from fray.tinker.job_runner import JobRunner
from fray.tinker.kept_engine import explained_engine
from fray.tinker.service_usage import ServiceUsage
from fray.tinker.store import ServiceJob, ServiceStore, with_state

CLIENT_GRACE_S = 3_600.0
"""Seconds without a request after which a job whose client is gone ends."""
ADAPTER_FILE = "adapter_config.json"
"""File of a saved adapter, as `peft` writes it."""
GRACE_CHECK_S = 30.0
"""Longest pause between two looks for such jobs."""

log = logging.getLogger("fray.tinker")


class JobRefused(Exception):
    """Job or user that is not accepted; the message says why."""


@frozen
class JobLimits:
    """Settings about users and jobs.

    Attributes:
        has_auth: keys are required.
        has_registration: registration is open to all.
        gpus: accelerators that the service gives out.
        default_gpus: of a job that does not say how many it needs.
        user: of each user.
        client_grace_s: seconds without a request after which a job whose client is gone ends; 0: never.
    """

    has_auth: bool = False
    has_registration: bool = True
    gpus: int = 0
    default_gpus: int = 0
    user: UserLimits = DEFAULT_LIMITS
    client_grace_s: float = CLIENT_GRACE_S


class ServiceJobs:
    """Users and jobs; `run` owns the tasks of the jobs.

    Args:
        store: of the service.
        plan: settings of engines.
        limits: about users and jobs.
    """

    anonymous = ServiceUser("user_00000000", "anonymous", "", 0.0, True)
    """User of all requests when no keys are required."""

    def __init__(self, store: ServiceStore, plan: EnginePlan, limits: JobLimits) -> None:
        self._store, self._plan, self.limits = store, plan, limits
        self.users: dict[str, ServiceUser] = {}
        self.jobs: dict[str, ServiceJob] = {}
        self.runners: dict[str, JobRunner | InferenceRunner] = {}
        self._reasons: dict[str, str] = {}
        self._accepting = trio.Lock()
        self._unwritten: set[str] = set()
        """Jobs whose last change is not on disk yet."""
        self._nursery: trio.Nursery | None = None
        self._cluster: Cluster | None = None
        self.version = VERSION
        self.cluster_users = ClusterUsers()
        self.usage = ServiceUsage(store)
        self.operator_key = new_key(secrets.token_hex)
        """Key of an administrator until this service ends; it is in its directory alone."""
        self._operator = ServiceUser("user_operator", "operator", hash_of(self.operator_key), time.time(), True)

    @property
    def has_auth(self) -> bool:
        return self.limits.has_auth

    @property
    def has_registration(self) -> bool:
        # Else a stranger could register as a user of the cluster.
        return self.limits.has_registration and self.cluster_users.weights is None

    @property
    def weights(self) -> dict[str, float]:
        """Weights of the users' shares of engines, by id; those of others are 1."""
        known = self.cluster_users.weights or {}
        return {user.user_id: known[user.name] for user in self.users.values() if user.name in known}

    async def run(self, cluster: Cluster, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the jobs until cancelled, those of before a restart first. Reports `started` when all are known."""
        store = self._store
        self.users = {user.user_id: user for user in await store.call(store.users)}
        self.jobs = {job.job_id: job for job in await store.call(store.jobs)}
        async with trio.open_nursery() as self._nursery:
            self._cluster = cluster
            self._nursery.start_soon(self.usage.run)
            await self._nursery.start(self.cluster_users.run, cluster)
            for job in self.jobs.values():
                if not job.state.is_final:
                    await self._add_runner(job)
                    if job.state is not ServiceJobState.QUEUED:
                        self._start(job.job_id)
            await self._schedule()
            task_status.started()
            await self._end_abandoned()

    async def _end_abandoned(self) -> None:
        """End jobs whose clients are gone, and write what could not be written, until cancelled."""
        grace_s = self.limits.client_grace_s
        while True:
            await trio.sleep(min(grace_s / 4 or GRACE_CHECK_S, GRACE_CHECK_S))
            for job_id in list(self._unwritten):
                await self._write(self.jobs[job_id])
            now = trio.current_time()
            for job_id, runner in list(self.runners.items()):
                if is_abandoned(now, runner.seen_at, runner.unfinished, grace_s):
                    text = f"no request of its client for {grace_s:g} s, the client grace of this service"
                    await self.end(self.jobs[job_id], ServiceJobState.CANCELLED, text)

    def see_client(self, job: ServiceJob) -> None:
        """Note that the client of a job exists."""
        if job.job_id in self.runners:
            self.runners[job.job_id].see_client()

    # Users

    async def create_user(self, name: str, *, is_admin: bool = False) -> tuple[ServiceUser, str]:
        """Create a user and return it with its key, which is not kept. One whose key was revoked gets a new key.

        Raises:
            JobRefused: the name is taken, or cannot be one, or is of no user of the cluster, which has users.
        """
        if not name or len(name) > USER_NAME_LIMIT or not name.isprintable():
            raise JobRefused(f"username {name!r:.100}: expected 1 to {USER_NAME_LIMIT} printable characters")
        if refusal := self.cluster_users.refusal_of(name):
            raise JobRefused(refusal)
        key = new_key(secrets.token_hex)
        known = next((user for user in self.users.values() if user.name == name), None)
        if known is not None and not known.key_hash and known.is_admin == is_admin:
            user = evolve(known, key_hash=hash_of(key))
            await self._store.call(self._store.set_key, user.user_id, user.key_hash)
        else:
            user = ServiceUser(new_user_id(secrets.token_hex), name, hash_of(key), time.time(), is_admin)
            if not await self._store.call(self._store.add_user, user):
                raise JobRefused(f"Username '{name}' already exists")
        self.users[user.user_id] = user
        return user, key

    async def revoke_key(self, name: str) -> ServiceUser:
        """Revoke the key of a user, whose jobs stay; return the user. Raises JobRefused if there is none."""
        user = next((user for user in self.users.values() if user.name == name), None)
        if user is None:
            raise JobRefused(
                f"no user {name!r}; users: {', '.join(each.name for each in self.users.values()) or 'none'}"
            )
        user = evolve(user, key_hash="")
        # Refused from now on, and on disk before the answer.
        self.users[user.user_id] = user
        await self._store.call(self._store.set_key, user.user_id, "")
        return user

    def user_of_key(self, key: str) -> ServiceUser | None:
        """Return the user of a key, ``otk_…`` or ``tml-…``; None if it belongs to none who is a user still."""
        user = user_of_key({**self.users, "": self._operator}, key)
        return user if user is None or self._is_user(user.user_id) else None

    def key_hash_of(self, user_id: str) -> str | None:
        """Return the hash of a user's key, empty where none is required; None: it has ended."""
        user = self.users.get(user_id)
        if user is None:
            return ""
        return user.key_hash if user.key_hash and self._is_user(user_id) else None

    def _is_user(self, user_id: str) -> bool:
        """Return whether a user has not been removed from the cluster."""
        user = self.users.get(user_id)
        # The others are the service's own: the operator, and who needs no key.
        return user is None or self.cluster_users.has(user.name)

    def may_see(self, user: ServiceUser, job: ServiceJob) -> bool:
        """Return whether a user may see and end a job: its owner, and administrators."""
        return user.is_admin or user.user_id == job.user_id

    # Jobs

    async def submit(self, user: ServiceUser, config: dict[str, Any], gpus: int | None) -> ServiceJob:
        """Accept a training job and return it as it is then. Raises JobRefused."""
        try:
            settings_of(config)
        except ConfigError as error:
            raise JobRefused(f"config: {error}") from None
        return await self._accept(user, config, gpus, is_inference=False)

    async def submit_inference(self, user: ServiceUser, config: dict[str, Any], gpus: int | None) -> ServiceJob:
        """Accept an inference job and return it as it is then. Raises JobRefused."""
        try:
            settings = inference_settings_of(config)
        except ConfigError as error:
            raise JobRefused(str(error)) from None
        if settings.model_path not in self._plan.models:
            await self._check_own_checkpoint(user, settings.model_path)
        return await self._accept(user, config, gpus, is_inference=True)

    async def _check_own_checkpoint(self, user: ServiceUser, path: str) -> None:
        if Path(path) not in {Path(saved, ACTOR_FOLDER) for saved in await self._checkpoints_of_user(user.user_id)}:
            raise JobRefused(
                f"model_path: {path!r:.500} is neither served here ({', '.join(self._plan.models)}) nor the actor_path "
                "of a checkpoint that a job of yours has saved"
            )
        if await trio.Path(path, ADAPTER_FILE).is_file():
            raise JobRefused(
                f"model_path: {path!r:.500} is an adapter (lora), and an inference job needs all weights: "
                "`peft` merges it into the model that it was trained on"
            )

    async def check_resumable(self, job: ServiceJob, path: str) -> None:
        """Check that a path is a checkpoint that a job of the same user has saved. Raises JobRefused."""
        if Path(path) not in {Path(saved) for saved in await self._checkpoints_of_user(job.user_id)}:
            raise JobRefused(
                f"path: {path!r:.500} is not the checkpoint_dir of a checkpoint that a job of yours has saved"
            )

    async def _checkpoints_of_user(self, user_id: str) -> list[str]:
        jobs = [job.job_id for job in self.jobs.values() if job.user_id == user_id]
        return [path for job_id in jobs for path, _ in await self._store.call(self._store.checkpoints, job_id)]

    async def _accept(
        self, user: ServiceUser, config: dict[str, Any], gpus: int | None, *, is_inference: bool
    ) -> ServiceJob:
        wanted = self.limits.default_gpus if gpus is None else gpus
        if wanted < 0 or wanted > self.limits.gpus:
            raise JobRefused(
                f"num_gpus: {wanted} GPUs, and this service has {self.limits.gpus}; 0 is a job without GPUs"
            )
        job = ServiceJob(
            *(secrets.token_hex(6), secrets.token_hex(16), user.user_id, config, wanted, time.time()),
            is_inference=is_inference,
        )
        # One at a time, because of the limit. In the table when it is on disk and can be started.
        async with self._accepting:
            open_jobs = [
                each for each in self.jobs.values() if each.user_id == user.user_id and not each.state.is_final
            ]
            if len(open_jobs) >= self.limits.user.jobs:
                what = f"{len(open_jobs)} of your jobs have not ended"
                raise JobRefused(limit_text(what, "jobs", self.limits.user.jobs))
            with trio.CancelScope(shield=True):
                await self._store.call(self._store.put_job, job)
                await self._add_runner(job)
            self.jobs[job.job_id] = job
        await self._schedule()
        return self.jobs[job.job_id]

    def message_of(self, job: ServiceJob) -> str:
        """Return what a client is shown about a job."""
        text = self._reasons.get(job.job_id) or job.error or f"job {job.job_id} is {job.state.value.lower()}"
        if job.job_id in self._reasons:
            text += f"; {self._expected_start(job)}"
        not_used = inference_settings_of(job.config).not_used if job.is_inference and not job.state.is_final else ()
        return f"{text}; not used: {', '.join(not_used)}" if not_used else text

    def _expected_start(self, job: ServiceJob) -> str:
        """Return when a queued job is expected to start, in words."""
        waiting, taken = self._queue()
        ends = {name: runner.seconds_left for name, runner in self.runners.items()}
        seconds = expected_start(job.job_id, waiting, taken, self.limits.gpus, ends)
        if seconds is None:
            return "when it starts is not known: jobs that have the GPUs have no planned end, or were not measured yet"
        amount = f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
        return f"expected to start in about {amount}, if the jobs that have the GPUs end after their planned steps"

    async def explained_message_of(self, job: ServiceJob) -> str:
        """Return `message_of`, with what its engine waits for while it is being started, or started again."""
        text, runner = self.message_of(job), self.runners.get(job.job_id)
        waits = job.state is not ServiceJobState.QUEUED and runner is not None and not runner.is_up
        return f"{text}: {await self.explain(job)}" if waits else text

    def ended_text(self, job: ServiceJob) -> str:
        """Return that a job has ended, and why."""
        return f"job {job.job_id} has ended: {job.state.value}{job.error and ': '}{job.error}"

    def job_at(self, address: str) -> ServiceJob | None:
        """Return the job of an address, ``ID-SECRET``; None if there is none of one who is a user still."""
        job_id, _, secret = address.rpartition("-")
        job = self.jobs.get(job_id)
        if job is None or not hmac.compare_digest(job.secret.encode(), secret.encode()):
            return None
        return job if self._is_user(job.user_id) else None

    def name_of(self, user_id: str) -> str:
        """Return the name of a user."""
        known = {each.user_id: each for each in (self.anonymous, self._operator)} | self.users
        return known[user_id].name if user_id in known else user_id

    async def explain(self, job: ServiceJob) -> str:
        """Return why a job is in its state: what it waits for, does, or what ended it."""
        runner = self.runners.get(job.job_id)
        if runner is None or job.state is ServiceJobState.QUEUED:
            return self.message_of(job)
        if job.state is ServiceJobState.RUNNING and runner.is_up:
            return runner.activity()
        assert self._cluster is not None
        text = await explained_engine(self._cluster, f"tinker-{job.job_id}")
        return f"{runner.activity()}; {text}" if runner.starts else text

    async def checkpoints_of(self, job: ServiceJob) -> list[dict[str, Any]]:
        """Return ``path``, ``step`` and ``bytes`` of each checkpoint that the client has saved."""
        found = await self._store.call(self._store.checkpoints, job.job_id)
        return [
            {"path": path, "step": step, "bytes": await trio.to_thread.run_sync(_size_of, Path(path))}
            for path, step in found
        ]

    async def end(self, job: ServiceJob, state: ServiceJobState, error: str = "") -> ServiceJob:
        """End a job, and start those that waited for what it had; return it. One that has ended stays as it is."""
        job = self.jobs[job.job_id]
        if may_become(job.state, state):
            job = with_state(job, state, time.time(), error)
            await self._write(job)
            runner = self.runners.pop(job.job_id, None)
            if runner is not None:
                runner.end(self.ended_text(job))
            self._reasons.pop(job.job_id, None)
            await self._schedule()
        return job

    # Inside

    async def _write(self, job: ServiceJob) -> None:
        """Change a job; on a full disk it is written later, and counts all the same."""
        self.jobs[job.job_id] = job
        self._unwritten.add(job.job_id)
        if await self._store.attempt(self._store.put_job, job) and self.jobs[job.job_id] is job:
            self._unwritten.discard(job.job_id)

    async def _add_runner(self, job: ServiceJob) -> None:
        async def on_start() -> None:
            current = self.jobs[job.job_id]
            if may_become(current.state, ServiceJobState.RUNNING):
                await self._write(with_state(current, ServiceJobState.RUNNING, time.time()))

        async def on_failure(text: str) -> None:
            await self.end(job, ServiceJobState.FAILED, text)

        def on_use(tokens: int, seconds: float) -> None:
            self.usage.add(job.user_id, tokens, seconds)

        def room() -> int:
            runners = [self.runners[each.job_id] for each in self.jobs.values() if each.job_id in self.runners]
            unfinished = sum(each.unfinished for each in runners if self.jobs[each.job_id].user_id == job.user_id)
            return self.limits.user.queued_requests - unfinished

        callbacks = JobCallbacks(on_start, on_failure, on_use, room)
        settings = inference_settings_of(job.config) if job.is_inference else settings_of(job.config)[0]
        plan = evolve(self._plan, priority=Band(settings.priority) if settings.priority else None)
        user = self.users.get(job.user_id)
        if self.cluster_users.weights is not None and user is not None:
            plan = evolve(plan, on_behalf_of=user.name)
        if isinstance(settings, InferenceSettings):
            path = settings.model_path
            # A name that is not served any more is not looked for elsewhere.
            model = self._plan.models.get(path) or (path if Path(path).is_absolute() else None)
            self.runners[job.job_id] = InferenceRunner(job, settings, model, plan, callbacks)
            return
        entries = await self._store.keep(self._store.entries, job.job_id)
        self.runners[job.job_id] = JobRunner(job, plan, self._store, entries, callbacks)

    def _queue(self) -> tuple[list[QueuedJob], dict[str, tuple[int, ...]]]:
        """Return the jobs that wait, and the GPUs of the others."""
        waiting = [QueuedJob(job.job_id, job.gpus) for job in self.jobs.values() if job.state is ServiceJobState.QUEUED]
        return waiting, {job.job_id: job.gpu_ids for job in self.jobs.values() if not job.state.is_final}

    async def _schedule(self) -> None:
        """Start the jobs that can start now."""
        waiting, taken = self._queue()
        decision = decide_starts(waiting, taken, self.limits.gpus)
        self._reasons = decision.reasons
        for job_id, gpu_ids in decision.starts:
            job = with_state(self.jobs[job_id], ServiceJobState.STARTING, time.time())
            # In the table before the first await: another call decides with it.
            self.jobs[job_id] = job = evolve(job, gpu_ids=gpu_ids)
            await self._write(job)
            self._start(job_id)

    def _start(self, job_id: str) -> None:
        runner = self.runners.get(job_id)
        if runner is not None:
            assert self._nursery is not None
            assert self._cluster is not None
            self._nursery.start_soon(runner.run, self._cluster)


def _size_of(directory: Path) -> int:
    """Return the bytes of the files below a directory; 0 if it was removed."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
