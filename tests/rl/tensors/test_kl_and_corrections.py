"""KL divergences, corrections and aggregations: golden numbers, the slow reference, bounds, errors."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="needs torch: make test-rl")

from loss_reference import aggregated, kl, ratios  # noqa: E402

from fray.rl.tensors.aggregation import AGGREGATIONS, aggregate  # noqa: E402
from fray.rl.tensors.corrections import LEVELS, reject, truncate  # noqa: E402
from fray.rl.tensors.kl import ESTIMATORS, kl_divergence, mismatch_k3  # noqa: E402

pytestmark = pytest.mark.torch

LOGPROB = st.floats(-12, 0)
ROW = st.lists(st.tuples(LOGPROB, LOGPROB, st.booleans()), min_size=3, max_size=3)
TABLES = st.lists(ROW, min_size=1, max_size=4).map(
    lambda rows: tuple([[cell[part] for cell in row] for row in rows] for part in range(3))
)


def double(rows: object) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize(
    ("estimator", "golden"),
    [
        ("kl", [0.5, 0, -2]),
        ("abs", [0.5, 0, 2]),
        ("mse", [0.125, 0, 2]),
        ("low_var_kl", [0.106531, 0, 4.389056]),
    ],
)
def test_golden_numbers_of_the_estimators(estimator: str, golden: list[float]) -> None:
    found = kl_divergence(torch.tensor([-0.2, -1.3, -4.0]), torch.tensor([-0.7, -1.3, -2.0]), estimator)
    assert found.tolist() == pytest.approx(golden, abs=1e-6)


def test_the_low_variance_estimate_is_bounded() -> None:
    new, ref = double([-20.0, -0.0, -3.0]), double([0.0, -20.0, 0.0])
    assert kl_divergence(new, ref, "low_var_kl").tolist() == pytest.approx([10.0, math.exp(-5) + 4, 10.0])


@given(tables=TABLES, estimator=st.sampled_from(sorted(ESTIMATORS)))
def test_an_estimate_is_what_the_slow_reference_computes(tables: tuple, estimator: str) -> None:
    new, ref, _ = tables
    found = kl_divergence(double(new), double(ref), estimator)
    expected = [[kl(*pair, estimator) for pair in zip(*rows, strict=True)] for rows in zip(new, ref, strict=True)]
    assert found.tolist() == [pytest.approx(row, rel=1e-9, abs=1e-9) for row in expected]


@pytest.mark.parametrize("estimator", sorted(ESTIMATORS))
def test_the_gradient_of_an_estimate_is_its_finite_difference_and_none_flows_into_the_reference(estimator: str) -> None:
    new, ref = double([-0.2, -1.3, -4.0]).requires_grad_(), double([-0.7, -1.1, -2.0]).requires_grad_()
    kl_divergence(new, ref, estimator).sum().backward()
    step = 1e-6
    pairs = zip(new.tolist(), ref.tolist(), strict=True)
    slopes = [(kl(n + step, r, estimator) - kl(n - step, r, estimator)) / (2 * step) for n, r in pairs]
    assert new.grad.tolist() == pytest.approx(slopes, abs=1e-6)
    assert ref.grad is None


def test_the_mean_of_the_mismatch_over_the_behaviour_policy_is_its_divergence() -> None:
    behaviour, policy = double([0.5, 0.3, 0.2]), double([0.2, 0.3, 0.5])
    mean = (behaviour * mismatch_k3(policy.log(), behaviour.log())).sum()
    assert mean.item() == pytest.approx((behaviour * (behaviour / policy).log()).sum().item())


def test_golden_numbers_of_truncated_importance_sampling() -> None:
    correction = truncate(torch.tensor([[-0.8, -1, -0.1, -2]]), torch.full((1, 4), -1.0), torch.ones(1, 4), high=2)
    assert correction.weights[0].tolist() == pytest.approx([1.221403, 1, 2, 0.367879], abs=1e-6)
    assert correction.mask.all()
    assert correction.metrics["truncated_fraction"] == 0.25


@given(tables=TABLES, level=st.sampled_from(LEVELS), high=st.floats(1, 3), low=st.floats(0, 1))
def test_weights_and_rejections_are_those_of_the_slow_reference(
    tables: tuple, level: str, high: float, low: float
) -> None:
    trainer, rollout, mask = tables
    expected = ratios(trainer, rollout, mask, level)
    flat = [value for row in expected for value in row]
    near_bound = any(abs(value - bound) < 1e-9 for value in flat for bound in (low, high))
    arguments = (double(trainer), double(rollout), torch.tensor(mask))
    truncated = truncate(*arguments, high=high, level=level)
    assert truncated.mask.tolist() == mask
    assert truncated.weights.tolist() == [
        pytest.approx([min(value, high) if keep else 0.0 for value, keep in zip(*rows, strict=True)], rel=1e-9)
        for rows in zip(expected, mask, strict=True)
    ]
    if near_bound:
        return
    masked = reject(*arguments, low=low, high=high, level=level)
    kept = [[k and low <= v <= high for v, k in zip(*rows, strict=True)] for rows in zip(expected, mask, strict=True)]
    assert masked.mask.tolist() == kept
    assert masked.weights.tolist() == [
        pytest.approx([value if keep else 0.0 for value, keep in zip(*rows, strict=True)], rel=1e-9)
        for rows in zip(expected, kept, strict=True)
    ]
    counted = sum(map(sum, mask))
    assert masked.metrics["rejected_fraction"] == pytest.approx((counted - sum(map(sum, kept))) / max(counted, 1))


def test_a_sequence_of_rejected_tokens_leaves_the_number_of_sequences() -> None:
    mask = torch.ones(2, 2)
    correction = reject(double([[-1.0, -1.0], [-3.0, -3.0]]), double([[-1.0, -1.0], [-1.0, -1.0]]), mask)
    losses = double([[1.0, 3.0], [100.0, 100.0]])
    assert aggregate(losses, correction.mask, "seq-mean-token-mean").item() == 2.0


def test_no_gradient_flows_through_weights() -> None:
    correction = truncate(double([[-1.0]]).requires_grad_(), double([[-1.5]]), torch.ones(1, 1))
    assert not correction.weights.requires_grad


@pytest.mark.parametrize(
    ("aggregation", "length", "golden"),
    [
        ("token-mean", None, 2.5),
        ("seq-mean-token-mean", None, 3.0),
        ("seq-mean-token-sum", None, 5.0),
        ("constant-length", 10, 0.5),
    ],
)
def test_golden_numbers_of_the_aggregations(aggregation: str, length: int | None, golden: float) -> None:
    losses, mask = torch.tensor([[1.0, 2.0, 3.0], [4.0, 9.0, 9.0]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
    assert aggregate(losses, mask, aggregation, length=length).item() == golden


@given(tables=TABLES, aggregation=st.sampled_from(AGGREGATIONS))
def test_an_aggregation_is_what_the_slow_reference_computes(tables: tuple, aggregation: str) -> None:
    losses, _, mask = tables
    length = 3 if aggregation == "constant-length" else None
    found = aggregate(double(losses), torch.tensor(mask), aggregation, length=length)
    assert found.item() == pytest.approx(aggregated(losses, mask, aggregation, length), rel=1e-9, abs=1e-9)


def test_what_is_not_valid_is_refused_with_what_would_do() -> None:
    one = torch.ones(1, 1)
    with pytest.raises(ValueError, match=r"unknown KL estimator 'low_var'.*expected one of 'kl', 'abs', 'mse'"):
        kl_divergence(one, one, "low_var")
    with pytest.raises(ValueError, match=re.escape("ref_logprobs has shape [1], but logprobs has [1, 1]")):
        kl_divergence(one, one[0])
    with pytest.raises(ValueError, match=r"unknown level of correction 'seq'.*'token', 'sequence', 'geometric'"):
        truncate(one, one, one, level="seq")
    with pytest.raises(ValueError, match=r"invalid bounds of ratios, low 3.0 and high 2.0: expected 0 <= low <= high"):
        reject(one, one, one, low=3.0)
    with pytest.raises(ValueError, match=r"invalid bounds of ratios, low 0.0 and high 0"):
        truncate(one, one, one, high=0)
