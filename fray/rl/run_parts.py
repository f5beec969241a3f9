"""Parts of a run: what its settings come to, once they are checked."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from attrs import evolve, field, frozen

from fray.errors import InvalidRequest
from fray.model.monitoring.health import HealthCheck
from fray.model.resources import GpuConfig, ResourceConfig
from fray.model.specs import ActorConfig
from fray.model.text import near_text
from fray.rl.checkpoint_store import CheckpointStore, DirectoryCheckpoints, StoredCheckpoints
from fray.rl.core.run_record import RunPlan
from fray.rl.http_access.access import LOOPBACK, HttpAccess, load_access, make_access
from fray.rl.inference.http_settings import HttpPort
from fray.rl.model_spec import ModelSpec
from fray.rl.rollout.process import EpisodePlan
from fray.rl.train.settings import GRPO
from fray.rl.trainer.base_trainer import BaseTrainer
from fray.rl.weights.published import WeightSync

RESTARTS = 20
"""Restarts of each rollout process and of the trainer within `RESTART_PERIOD_S`, before the run fails."""
RESTART_PERIOD_S = 600.0
DEVICES = ("cpu", "cuda")
RESERVING = ("trainer", "reference", "server", "rollout", "controller")
"""Parts of a run whose processes may reserve resources."""
START_PERIODS, START_LEAST_S = 10, 60.0
"""Time until the first answer of a process, in which a model may be loaded: in ``liveness_s``, and at least."""


@frozen
class RunParts:
    """Parts of a run, checked by `fray.rl.Run`.

    Args:
        plan: settings that decide about samples.
        rows: the data.
        model: of servers and trainer.
        trainer: settings of the trainer; None: samples are collected.
        trainer_ranks: processes of the trainer.
        reference: where the frozen model of a KL penalty is: ``trainer`` or ``server``.
        device: on which servers and trainer compute; None: as `device_of` says.
        unencrypted_ranks: whether they may be on several machines of a cluster with TLS.
        own_trainer: the user's trainer with these settings; None: that of Fray.
        episodes: how rollout processes run episodes.
        processes: number of rollout processes.
        servers: number of inference servers.
        slots: requests that a server decodes at once.
        max_length: tokens of a prompt and its response together that servers allow; None: those of the model.
        http: HTTP port of the first server; the next ones have the ports after it. None: they have none.
        access: to HTTP ports and sessions from other machines; None: `with_access` was not called, or there is none.
        http_host: at which HTTP ports and sessions of agents are reached; with `OWN_ADDRESS`, that of each machine.
        weight_sync: way of the weights to the servers.
        interrupt: what becomes of requests in flight when a server loads weights: ``keep``, ``wait`` or ``abort``.
        freezes: whether a server that has not loaded the newest weights gets no new requests.
        transfer_s: seconds within which a server has to load weights; later it gets no requests until it has.
        threads: of the computation in each server and the trainer.
        resources: what each part reserves, by ``trainer``, ``reference``, ``server``, ``rollout``, ``controller``.
        output: directory for journal and checkpoints, which all machines of the run can write; None: a run that loses
            its coordinator fails, and one that loses its trainer begins again. With ``url``, a directory that each
            machine has for itself.
        url: of a storage for checkpoints, and for copies of what is in ``output``.
        save_every: updates between two checkpoints.
        keep_checkpoints: keep all of them, and not the last one alone.
        liveness_s: seconds without an answer after which a process is ended and started again.
        min_servers: inference servers without which no task is given out.
        name: of the run, for those who look for it.
        env_vars: variables of the environment of its processes.
        facts: about data, model and trainer, which must be equal for a run to continue from a checkpoint.
        validation_rows: the data of the plan's validations.
        settings: all of them as texts, for those who start the run again while it lives.
    """

    plan: RunPlan
    rows: Sequence[dict[str, Any]]
    model: ModelSpec
    trainer: GRPO | None
    episodes: EpisodePlan
    processes: int
    servers: int
    slots: int = 512
    max_length: int | None = None
    http: HttpPort | None = None
    weight_sync: WeightSync = WeightSync.MEMORY
    transfer_s: float = 120.0
    threads: int | None = None
    resources: dict[str, ResourceConfig] = field(factory=dict)
    output: Path | None = None
    url: str | None = None
    save_every: int = 50
    keep_checkpoints: bool = False
    liveness_s: float = 60.0
    min_servers: int = 1
    facts: dict[str, Any] = field(factory=dict)
    validation_rows: Sequence[dict[str, Any]] = ()
    name: str = "rl"
    env_vars: dict[str, str] = field(factory=dict, repr=False)
    own_trainer: BaseTrainer | None = None
    settings: dict[str, str] = field(factory=dict)
    trainer_ranks: int = 1
    unencrypted_ranks: bool = False
    reference: str = "trainer"
    device: str | None = None
    interrupt: str = "keep"
    freezes: bool = False
    http_host: str = LOOPBACK[0]
    access: HttpAccess | None = None

    @property
    def health(self) -> HealthCheck:
        """Check by which the node of a process finds that it is frozen."""
        # Three answers are missing, and a process that says nothing at all gets one more period.
        start_s = max(START_PERIODS * self.liveness_s, START_LEAST_S)
        return HealthCheck(actor="ping", period_s=self.liveness_s / 4, failures=3, start_s=start_s)

    def process_settings(self, restarts: int = RESTARTS, notice_s: float = 0.0) -> ActorConfig:
        """Return how a server, a trainer or a rollout process is started, and started again.

        Args:
            notice_s: seconds that it has when its machine leaves the cluster, or is given to others.
        """
        # Two incarnations may live for a while: leases, names of versions and routes are of one of them, and
        # checkpoints have directories of their own.
        return ActorConfig(
            max_restarts=restarts,
            restart_period_s=RESTART_PERIOD_S,
            must_start=True,
            may_overlap=True,
            health=self.health,
            preemption_notice_s=notice_s,
        )

    @property
    def state_facts(self) -> dict[str, Any]:
        """Facts about the run in ``state.json`` of a checkpoint: `facts`, and the hash of all settings."""
        settings = json.dumps(self.settings, sort_keys=True)
        return {**self.facts, "recipe_sha256": sha256(settings.encode()).hexdigest()}

    @property
    def trainer_device(self) -> str:
        """Device on which each rank of the trainer computes."""
        return device_of(self.resources.get("trainer"), self.device)

    @property
    def reference_device(self) -> str:
        """Device on which a reference in a process of its own computes."""
        return device_of(self.resources.get("reference"), self.device)

    @property
    def server_device(self) -> str:
        """Device on which each inference server computes."""
        return device_of(self.resources.get("server"), self.device)

    @property
    def checkpoints(self) -> CheckpointStore | None:
        """The checkpoints; None: there are none."""
        if self.url is not None:
            return StoredCheckpoints(f"{self.url}/checkpoints")
        return None if self.output is None else DirectoryCheckpoints(self.output / "checkpoints")

    @property
    def weight_files(self) -> Path | None:
        """Directory of the files by which servers get weights; None: they get them otherwise."""
        is_used = self.weight_sync is WeightSync.DISK
        return self.output / "weights" if is_used and self.output is not None else None


def with_access(parts: RunParts) -> RunParts:
    """Return the parts of a run that starts: its HTTP ports beyond loopback get an authority and a key. Blocks.

    Raises:
        InvalidRequest: those in the output directory are damaged.
        OSError: they cannot be written there.
    """
    host, output = parts.http_host, parts.output
    if host in LOOPBACK:
        return parts
    access = make_access(host) if output is None else load_access(host, output)
    return evolve(parts, access=access, http=None if parts.http is None else evolve(parts.http, access=access))


def check_resources(resources: Mapping[str, object]) -> None:
    """Raise InvalidRequest unless each key is a part of a run, and each value a `ResourceConfig`."""
    for part, wanted in resources.items():
        if part not in RESERVING:
            text = f"expected {', '.join(RESERVING[:-1])} or {RESERVING[-1]}{near_text(str(part), RESERVING)}"
            raise InvalidRequest(f"invalid key {part!r} of resources; {text}")
        if not isinstance(wanted, ResourceConfig):
            text = "expected a ResourceConfig, such as ResourceConfig.with_cpu(4)"
            raise InvalidRequest(f"invalid resources[{part!r}] {wanted!r}: {text}")


def device_of(reserved: ResourceConfig | None, chosen: str | None = None) -> str:
    """Return the device on which a process computes: ``cuda`` is the first of the GPUs that it sees.

    Args:
        reserved: by the process; None: nothing.
        chosen: by the user; None: ``cuda`` for a process that reserves GPUs, else ``cpu``.
    """
    has_gpus = reserved is not None and isinstance(reserved.device, GpuConfig)
    return chosen or ("cuda" if has_gpus else "cpu")
