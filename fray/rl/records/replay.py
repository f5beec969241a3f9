"""Updates of a run, done again from the groups that its journal has: no server and no other process is started."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from attrs import frozen

from fray.errors import InvalidRequest
from fray.rl.checkpoint import complete_checkpoints
from fray.rl.records.run_files import read_metrics, read_settings_of
from fray.rl.records.steps import read_step


@frozen
class ReplayedStep:
    """Metrics of an update that was done again, and those recorded of it."""

    number: int
    metrics: dict[str, float]
    recorded: dict[str, float]


def replay(output: Path, number: int) -> Iterator[ReplayedStep]:
    """Do updates again up to ``number``, from the last checkpoint before it, or from the model.

    Needs torch; nothing of the run is changed. It computes on a GPU if the run did and there is one here.

    Args:
        output: directory of the run.
        number: of the last update.

    Raises:
        InvalidRequest: the run had no trainer, or one of the user; or a step or the checkpoint that it needs is
            missing.
    """
    settings = read_settings_of(output)
    if settings.trainer is None:
        raise InvalidRequest(f"{output} has no updates: its run collected samples")
    if settings.own_trainer:
        name = settings.own_trainer
        raise InvalidRequest(
            f"{output} was trained by {name}, a class of yours: the run has its settings, and neither its code nor how "
            f"its constructor was called, so that only a program of yours can do its updates again: {name}(...).train("
            f"read_step(Path({str(output)!r}), {number}).trajectories), with read_step of fray.rl.records.steps; "
            f"docs/rl.md has an example. `fray rl show {output} --step {number}` shows what the update was made of"
        )
    read_step(output, number)
    checkpoints = [one for one in complete_checkpoints(output / "checkpoints") if one.step < number]
    first = checkpoints[-1].step + 1 if checkpoints else 1
    # Missing ones are known before the first update, which may take long.
    for step in range(first, number):
        read_step(output, step)

    from fray.rl.tensors.language_model import hide_progress, load_model, set_threads, usable_device
    from fray.rl.tensors.policy_trainer import PolicyTrainer

    hide_progress()
    if settings.threads is not None:
        set_threads(settings.threads)
    trainer = PolicyTrainer(load_model(settings.model, device=usable_device(settings.device)), settings.trainer)
    if checkpoints:
        trainer.load(checkpoints[-1].model)
    recorded = {int(one["step"]): one for one in read_metrics(output)}
    for step in range(first, number + 1):
        yield ReplayedStep(step, trainer.update(read_step(output, step).trajectories), recorded.get(step, {}))
