"""Victims of the campaign of kills are found by the titles of their processes."""

from __future__ import annotations

from bench.faults.rl_kills import OF_JOBS, OF_REFERENCES, ROLES, VARIED, WEIGHTS
from fray.rl.coordinator import Coordinator
from fray.rl.inference.server import InferenceServer
from fray.rl.rollout.process import RolloutProcess
from fray.rl.trainer.reference_process import ReferenceProcess
from fray.rl.trainer_process import TrainerProcess

PARTS = {
    "rollout": RolloutProcess,
    "server": InferenceServer,
    "trainer": TrainerProcess,
    "reference": ReferenceProcess,
    "pool": Coordinator,
}
KERNEL_LIMIT_CHARS = 15


def test_each_part_of_a_run_is_a_victim_by_the_title_that_its_process_has() -> None:
    titles = {role: f"fray:{part.__name__}"[:KERNEL_LIMIT_CHARS] for role, part in PARTS.items()}
    assert {role: title for role, title in ROLES.items() if role != "job"} == titles
    drawn = WEIGHTS.keys() | OF_JOBS.keys() | OF_REFERENCES.keys()
    assert drawn == ROLES.keys() | {"node", "driver", "controller"}
    assert "server" in VARIED["reference"]
