"""Groups and models of the trajectories of an episode; pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from fray.errors import InvalidRequest
from fray.rl.messages import TaskGrant
from fray.rl.nexrl_types import ModelTag, Trajectory
from fray.rl.train.trajectory_checks import InvalidTrajectory, name_of


def check_groups(keys: Sequence[str], episode: str, samples_per_row: int | None, group_size: int | None) -> None:
    """Check what groups of a run are made of.

    Args:
        keys: by which samples are grouped; none: by rows.
        episode: ``sample`` or ``group``.
        samples_per_row: None: those of a group.
        group_size: of the trainer; None: nothing is trained.

    Raises:
        InvalidRequest: it is not possible.
    """
    if keys and (group_size is None or episode == "group"):
        other = "trainer=None, which compares nothing" if group_size is None else "episode='group', a whole group"
        raise InvalidRequest(f"group_keys {list(keys)!r} with {other}: expected group_keys=[]")
    if not keys and None not in (samples_per_row, group_size) and samples_per_row != group_size:
        text = f"expected group_size of the trainer ({group_size}), or None; group_keys=[...] groups several rows"
        raise InvalidRequest(f"invalid samples_per_row {samples_per_row}: {text}")
    if len(set(keys)) < len(keys) or not all(isinstance(key, str) and key for key in keys):
        raise InvalidRequest(f"invalid group_keys {list(keys)!r}: expected names, each once")


def by_model(samples: Iterable[list[Trajectory]], tag: ModelTag) -> tuple[list[list[Trajectory]], list[ModelTag]]:
    """Return the trajectories of each sample that are of a model, and the tags of the others.

    A trajectory without ``model_tag`` is of this model.
    """
    kept, others = [], list[ModelTag]()
    for trajectories in samples:
        kept.append([one for one in trajectories if (one.get("model_tag") or tag) == tag])
        if len(kept[-1]) < len(trajectories):
            others += [str(one["model_tag"]) for one in trajectories if (one.get("model_tag") or tag) != tag]
    return kept, others


def grouped(grant: TaskGrant, trajectories: Sequence[Trajectory], keys: Sequence[str]) -> tuple[Hashable, ...]:
    """Return the key of the group of a sample; with keys, its trajectories get the group as their ``group_id``.

    So those are compared with one another that are trained together.

    Args:
        trajectories: of the sample.
        keys: of trajectories, or of the row where a trajectory lacks one; ``uid`` is ``group_id`` where both do. None:
            the group is that of the row.

    Raises:
        InvalidTrajectory: a key is missing, its value is neither a text nor a number, or the trajectories differ in it.
    """
    if not keys:
        return (grant.group_id,)
    found = [tuple(_value(grant, one, key) for key in keys) for one in trajectories]
    if len(set(found)) > 1:
        raise InvalidTrajectory(
            f"the trajectories of task {grant.task_id} differ in {', '.join(keys)}, the group_keys of the run: "
            f"{found[0]} and {next(one for one in found if one != found[0])}"
        )
    key = found[0]
    names = (f"{name}={value!r}" for name, value in zip(keys, key, strict=True))
    group = key[0] if len(keys) == 1 else ", ".join(names)
    for one in trajectories:
        one["group_id"] = group
    return key


def _value(grant: TaskGrant, trajectory: Trajectory, key: str) -> Hashable:
    for source in (trajectory, grant.row, {"uid": grant.group_id}):
        if key in source:
            value: Hashable = source[key]
            if not isinstance(value, str | int | float):
                text = f"{key} is {value!r}: expected a text or a number, as it is one of the group_keys of the run"
                raise InvalidTrajectory(f"{name_of(trajectory)}: {text}")
            return value
    have = ", ".join(sorted(map(str, {**grant.row, **trajectory})))
    raise InvalidTrajectory(
        f"{name_of(trajectory)}: key {key!r} is missing, one of the group_keys of the run; it has {have}"
    )
