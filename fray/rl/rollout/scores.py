"""Results of an episode: replies of the model with a reward, and the trajectories that are trained of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from attrs import field, frozen

from fray.rl.core.versions import Segment
from fray.rl.nexrl_types import Trajectory


class ScoredReply(Protocol):
    """Part of a reply of the model of which a trajectory is made."""

    @property
    def prompt_ids(self) -> Sequence[int]: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> Sequence[float]: ...
    @property
    def segments(self) -> Sequence[Segment]: ...
    @property
    def finish_reason(self) -> str: ...


@frozen
class Score:
    """A reply with its reward, made by `score`; without a reply, all that the episode got."""

    reply: ScoredReply | None
    reward: float
    extra: Mapping[str, Any] = field(factory=dict)


@frozen
class MadeTrajectories:
    """Result of an episode that made the trajectories of its sample itself."""

    trajectories: tuple[Trajectory, ...]
    added: tuple[tuple[dict[str, Any], bool], ...] = ()
    """Rows that are added to the data if the result is accepted, and whether in front of what is waiting."""


class AttemptEnded(Exception):
    """An episode ends its attempt of the task without a result.

    Args:
        reason: short, by which the run counts it.
        detail: for readers.
        is_attempt: False if the task is to be rolled out again without counting one of its attempts.
    """

    def __init__(self, reason: str, detail: str = "", *, is_attempt: bool = True) -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail, self.is_attempt = reason, detail, is_attempt


class InvalidReward(ValueError):
    """A reward or score is not a finite number; the rollout fails by this name."""


def score(
    reply: ScoredReply | None = None,
    reward: float = math.nan,
    score: Mapping[str, float] | None = None,
    **extra: Any,
) -> Score:
    """Return the result of an episode.

    Args:
        reply: the last reply of the model; earlier turns that its prompt continues are trained with it. Default: all
            replies of the episode, such as those to an agent at `agent_url`.
        reward: of the episode, a finite number.
        score: further finite numbers by name; a validation reports the mean of each. They are in the trajectory, too.
        extra: further keys of the trajectory, such as ``metrics``.

    Raises:
        InvalidReward: ``reward`` or a value of ``score`` is not a finite number.
    """
    scores = finite_scores(score or {})
    return Score(reply, _finite("reward", reward), extra | {"score": scores} if scores else extra)


def finite_scores(scores: Mapping[str, Any]) -> dict[str, float]:
    """Return scores as numbers. Raises InvalidReward for one that is not a finite number."""
    return {str(name): _finite(f"score[{name!r}]", value) for name, value in scores.items()}


def _finite(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise InvalidReward(f"invalid {name} {value!r}: expected a number") from None
    if not math.isfinite(number):
        raise InvalidReward(f"invalid {name} {number}: expected a finite number")
    return number


def scores_of(result: object, samples: int) -> list[Score | MadeTrajectories]:
    """Return what an episode returned as a list of scores.

    Args:
        result: a `Score`, a trajectory (a dict with ``tokens`` and ``loss_mask``, for training without a reply), or
            `MadeTrajectories`; or an iterable of them.
        samples: expected number of scores.

    Raises:
        TypeError: it is of another kind.
        ValueError: another number of scores.
        InvalidReward: the reward of a trajectory is not a finite number.
    """
    kinds = (Score, MadeTrajectories)
    several = result if isinstance(result, Iterable) and not isinstance(result, Mapping) else [result]
    scores = [_made_of(one) for one in several]
    if not all(isinstance(one, kinds) for one in scores):
        expected = "rl.score(reply, reward=...)" if samples == 1 else f"a list of {samples} of rl.score(reply, ...)"
        raise TypeError(f"an episode returned {type(result).__name__}; expected {expected}")
    if len(scores) != samples:
        raise ValueError(f"an episode returned {len(scores)} scores; expected {samples}")
    if samples > 1 and any(isinstance(one, Score) and one.reply is None for one in scores):
        raise ValueError("rl.score(reward=...) is for all turns of an episode; in a group give each score its reply")
    return scores


def trajectories_of(one: Score, turns: Sequence[ScoredReply]) -> tuple[Trajectory, ...]:
    """Return the trajectories of a score, in which each reply is trained once.

    Without a reply they are those of all turns: a turn whose prompt continues an earlier one is in one trajectory with
    it, others are trajectories of their own.

    Args:
        one: the score.
        turns: all replies that the episode got, in order.

    Raises:
        ValueError: there is no reply at all.
    """
    if one.reply is not None:
        return (trajectory_of(one, turns),)
    if not turns:
        raise ValueError("rl.score(reward=...) scores all turns of the episode, but it has asked the model nothing")
    left = list(turns)
    made = []
    for last in turns:
        if any(_begins(turn.prompt_ids, last) for turn in turns if turn is not last):
            continue  # a later turn has it
        made.append(trajectory_of(Score(last, one.reward, one.extra), left))
        left = [turn for turn in left if turn is not last and not _begins(last.prompt_ids, turn)]
    return tuple(made)


def _made_of(result: Any) -> Any:
    """Return what an episode made of a trajectory that it returned; anything else as it is."""
    if not isinstance(result, Mapping) or not {"tokens", "loss_mask"} <= result.keys():
        return result
    rewards = {"reward": _finite("reward", result["reward"])} if "reward" in result else {}
    return MadeTrajectories(({**result, **rewards},))


def trajectory_of(last: Score, turns: Sequence[ScoredReply]) -> Trajectory:
    """Return the trajectory of a score: the tokens of its reply's prompt and of the reply.

    Tokens of earlier turns are trained too (``loss_mask`` 1), where the prompt of the next turn begins with all tokens
    of that turn: nothing is tokenised again.

    Args:
        last: the score, of a reply.
        turns: replies that the episode got, in order.
    """
    reply = last.reply
    assert reply is not None
    tokens = [*reply.prompt_ids, *reply.token_ids]
    mask, logprobs = [0] * len(tokens), [0.0] * len(tokens)
    segments: list[Segment] = []
    # Replies to the same prompt, of which a group has many, are not compared with one another.
    length = len(reply.prompt_ids)
    earlier = [turn for turn in turns if len(turn.prompt_ids) < length and _begins(reply.prompt_ids, turn)]
    # Of two replies to one prompt, the longer one is in the conversation.
    for turn in [*sorted(earlier, key=lambda turn: (len(turn.prompt_ids), -len(turn.token_ids))), reply]:
        start, end = len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.token_ids)
        if not any(mask[start:end]):
            mask[start:end] = [1] * (end - start)
            logprobs[start:end] = turn.logprobs
            segments.extend(turn.segments)
    return {
        "tokens": tokens,
        "loss_mask": mask,
        "logprobs": logprobs,
        "versions": segments,
        "reward": last.reward,
        "finish_reason": reply.finish_reason,
        **last.extra,
    }


def _begins(prompt: Sequence[int], turn: ScoredReply) -> bool:
    """Return whether a prompt begins with all tokens of an earlier turn."""
    length = len(turn.prompt_ids) + len(turn.token_ids)
    if len(prompt) < length or (turn.token_ids and prompt[length - 1] != turn.token_ids[-1]):
        return False  # most of many turns, without a copy
    return list(prompt[:length]) == [*turn.prompt_ids, *turn.token_ids]
