"""Policy of `rl.py`: a softmax policy, linear in its features, trained by REINFORCE with a learned baseline."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rl_worlds import ACTIONS, LESSONS, Array, count_features, features

DISCOUNT = 0.97
LEARNING_RATE, BASELINE_RATE = 0.5, 0.2
MOST_TRUST = 2.0
"""Largest importance weight of a step that the present policy is more likely to take than the policy that took it."""
CURIOSITY = 0.003
"""Weight of the entropy."""


@dataclass(frozen=True)
class Weights:
    """Weights of a policy and of its baseline."""

    policy: Array
    value: Array

    def chances(self, seen: Array) -> Array:
        """Return the probabilities by observation and action."""
        scores = self.policy[seen].sum(axis=1)
        scores = np.exp(scores - scores.max(axis=1, keepdims=True))
        return scores / scores.sum(axis=1, keepdims=True)


def untrained() -> Weights:
    """Return weights with which all actions are equally likely."""
    return Weights(np.zeros((count_features(), ACTIONS)), np.zeros(count_features()))


@dataclass(frozen=True)
class Batch:
    """Steps of some episodes of a lesson, one after another, and the version of the weights that made them."""

    lesson: int
    version: int
    seen: Array
    actions: Array
    chances: Array
    returns: Array
    episodes: int
    won: int


def play(weights: Weights, version: int, lesson: int, rng: np.random.Generator, episodes: int) -> Batch:
    """Play so many episodes of a lesson simultaneously, to their ends."""
    world = LESSONS[lesson].world
    state, alive, won = world.begin(rng, episodes), np.ones(episodes, bool), 0
    steps: list[tuple[Array, Array, Array, Array, Array]] = []
    for _ in range(world.limit):
        seen = features(lesson, state)
        chances = weights.chances(seen)
        actions = (chances.cumsum(axis=1) < rng.random((episodes, 1))).sum(axis=1).clip(max=ACTIONS - 1)
        after = world.step(rng, state, actions)
        steps.append((seen, actions, chances[np.arange(episodes), actions], after.reward * alive, alive))
        won += int((after.won & alive).sum())
        state, alive = after.state, alive & ~after.over
        if not alive.any():
            break
    seen, actions, chances, rewards, played = (np.stack(column) for column in zip(*steps, strict=True))
    returns = discounted(rewards)
    return Batch(
        lesson, version, seen[played], actions[played], chances[played], returns[played], episodes=episodes, won=won
    )


def discounted(rewards: Array) -> Array:
    """Return the sum of the rewards that follow, by step and episode."""
    returns, following = np.zeros_like(rewards), np.zeros(rewards.shape[1])
    for step in reversed(range(len(rewards))):
        returns[step] = following = rewards[step] + DISCOUNT * following
    return returns


def improved(weights: Weights, batch: Batch) -> Weights:
    """Return the weights after one gradient step: actions that went better than expected become more likely.

    Steps of older weights have an importance weight, at most `MOST_TRUST`.
    """
    rows = np.arange(len(batch.actions))
    chances = weights.chances(batch.seen)
    expected = weights.value[batch.seen].sum(axis=1)
    trust = np.minimum(chances[rows, batch.actions] / batch.chances, MOST_TRUST)
    surprise = batch.returns - expected
    direction = -chances
    direction[rows, batch.actions] += 1
    gradient = (trust * surprise)[:, None] * direction + CURIOSITY * towards_doubt(chances)
    policy, value = weights.policy.copy(), weights.value.copy()
    times = np.bincount(batch.seen.ravel(), minlength=len(value)).clip(min=1)  # occurrences of each feature
    for column in batch.seen.T:
        np.add.at(policy, column, LEARNING_RATE * gradient / np.sqrt(times[column])[:, None])
        np.add.at(value, column, BASELINE_RATE * trust * surprise / times[column])
    return Weights(policy, value)


def towards_doubt(chances: Array) -> Array:
    """Return the gradient of the entropy, which keeps the policy exploring."""
    logs = np.log(chances + 1e-12)
    return -chances * (logs - (chances * logs).sum(axis=1, keepdims=True))


def success_rate(weights: Weights, lesson: int, episodes: int = 500, seed: int = 12345) -> float:
    """Return the share of episodes that are won."""
    return play(weights, 0, lesson, np.random.default_rng(seed), episodes).won / episodes
