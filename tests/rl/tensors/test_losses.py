"""Policy losses: golden numbers, values and gradients against a slow reference, masks, metrics, errors."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="needs torch: make test-rl")

from loss_reference import aggregated, token_loss  # noqa: E402

from fray.rl.tensors.aggregation import denominator_of  # noqa: E402
from fray.rl.tensors.corrections import reject, truncate  # noqa: E402
from fray.rl.tensors.losses import LOSSES, LossInputs, clip, policy_loss, value_loss  # noqa: E402

pytestmark = pytest.mark.torch

DEFAULTS: dict[str, dict[str, float]] = {
    "clip": {"low": 0.2, "high": 0.2},
    "dual_clip": {"low": 0.2, "high": 0.2, "bound": 3.0},
    "gspo": {"low": 3e-4, "high": 4e-4},
    "cispo": {"low": 1.0, "high": 4.0},
    "importance_sampling": {},
    "dro": {"beta": 0.05},
    "cross_entropy": {},
}
OPTIONS = {
    "clip": st.fixed_dictionaries({"low": st.floats(0, 1), "high": st.floats(0, 1)}),
    "dual_clip": st.fixed_dictionaries({"low": st.floats(0, 1), "high": st.floats(0, 1), "bound": st.floats(1.1, 5)}),
    "gspo": st.fixed_dictionaries({"low": st.floats(0, 0.5), "high": st.floats(0, 0.5)}),
    "cispo": st.fixed_dictionaries({"low": st.floats(0, 1), "high": st.floats(0, 4)}),
    "importance_sampling": st.just({}),
    "dro": st.fixed_dictionaries({"beta": st.floats(0, 2)}),
    "cross_entropy": st.just({}),
}
KINDS = st.sampled_from(["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant-length"])


def double(rows: Any) -> Any:
    return torch.tensor(rows, dtype=torch.float64)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list, list, list, list]:
    """Draw new and old logprobs, advantages and a mask."""
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 5))

    def table(of: st.SearchStrategy) -> list:
        return draw(st.lists(st.lists(of, min_size=columns, max_size=columns), min_size=rows, max_size=rows))

    logprobs = st.floats(-4, 0)
    return table(logprobs), table(logprobs), table(st.floats(-3, 3)), table(st.booleans())


def reference(loss: str, options: dict, new: list, frozen: list, old: list, advantages: list, mask: list) -> list:
    return [
        [
            token_loss(loss, new, frozen, old, advantages, mask, row, column, options) if mask[row][column] else 0.0
            for column in range(len(mask[0]))
        ]
        for row in range(len(mask))
    ]


def test_golden_numbers_of_clip_and_importance_sampling() -> None:
    inputs = LossInputs(
        logprobs=torch.tensor([[-0.5, -1.5, -1.0, -3.0]]),
        old_logprobs=torch.full((1, 4), -1.0),
        advantages=torch.tensor([[1.0, 1.0, -1.0, -1.0]]),
        mask=torch.ones(1, 4),
    )
    loss, metrics = policy_loss(inputs, "clip", low=0.2, high=0.2)
    assert loss.item() == pytest.approx(-0.001633, abs=5e-7)
    assert metrics["clip_fraction"] == 0.5
    assert policy_loss(inputs, "importance_sampling")[0].item() == pytest.approx(-0.279979, abs=5e-7)


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_defaults_are_those_of_the_table_of_the_docs(loss: str) -> None:
    new, old, advantages = [[-0.1, -3.0, -1.0]], [[-2.0, -0.5, -1.0001]], [[1.0, -2.0, -1.5]]
    mask = [[True] * 3]
    inputs = LossInputs(double(new), double(mask), double(old), double(advantages))
    expected = aggregated(reference(loss, DEFAULTS[loss], new, new, old, advantages, mask), mask, "token-mean")
    assert policy_loss(inputs, loss)[0].item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("loss", sorted(LOSSES))
@given(data=st.data())
def test_a_loss_is_what_the_slow_reference_computes(loss: str, data: st.DataObject) -> None:
    new, old, advantages, mask = data.draw(batches())
    options, kind = data.draw(OPTIONS[loss]), data.draw(KINDS)
    length = 7 if kind == "constant-length" else None
    inputs = LossInputs(double(new), torch.tensor(mask), double(old), double(advantages))
    value, metrics = policy_loss(inputs, loss, aggregation=kind, length=length, **options)
    expected = aggregated(reference(loss, options, new, new, old, advantages, mask), mask, kind, length)
    assert value.item() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert metrics["tokens"] == sum(map(sum, mask))


@pytest.mark.parametrize("loss", sorted(LOSSES))
@given(data=st.data())
def test_a_gradient_is_the_finite_difference_of_the_slow_reference(loss: str, data: st.DataObject) -> None:
    new, old, advantages, mask = data.draw(batches())
    options, kind = data.draw(OPTIONS[loss]), data.draw(KINDS)
    length = 7 if kind == "constant-length" else None
    leaf = double(new).requires_grad_()
    inputs = LossInputs(leaf, torch.tensor(mask), double(old), double(advantages))
    policy_loss(inputs, loss, aggregation=kind, length=length, **options)[0].backward()

    def shifted(row: int, column: int, by: float) -> float:
        moved = [list(line) for line in new]
        moved[row][column] += by
        return aggregated(reference(loss, options, moved, new, old, advantages, mask), mask, kind, length)

    here, step = shifted(0, 0, 0.0), 1e-5
    for row in range(len(new)):
        for column in range(len(new[0])):
            up = (shifted(row, column, step) - here) / step
            down = (here - shifted(row, column, -step)) / step
            scale = 1 + abs(up) + abs(down)
            # No gradient at a corner of the loss, also at one of two small slopes: with this step a smooth loss has
            # slopes that are closer to each other than what is checked below.
            assume(abs(up - down) < 1e-4 * scale)
            assert leaf.grad[row, column].item() == pytest.approx((up + down) / 2, abs=1e-4 * scale)


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_values_of_padding_change_nothing(loss: str) -> None:
    new, old = double([[-1.0, -2.0, math.nan], [-math.inf] * 3]), double([[-1.5, -1.0, 5.0], [math.nan] * 3])
    advantages = double([[1.0, -1.0, math.inf], [math.nan] * 3])
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    leaf, alone = new.clone().requires_grad_(), new[:1, :2].clone().requires_grad_()
    padded, _ = policy_loss(LossInputs(leaf, mask, old, advantages), loss, aggregation="seq-mean-token-mean")
    plain, _ = policy_loss(
        LossInputs(alone, mask[:1, :2], old[:1, :2], advantages[:1, :2]), loss, aggregation="seq-mean-token-mean"
    )
    padded.backward()
    plain.backward()
    assert padded.item() == pytest.approx(plain.item(), abs=1e-12)
    assert leaf.grad.tolist() == [[*alone.grad[0].tolist(), 0.0], [0.0] * 3]


def test_a_batch_without_tokens_has_loss_0_and_gradient_0() -> None:
    leaf = double([[-1.0, -2.0]]).requires_grad_()
    loss, metrics = policy_loss(LossInputs(leaf, torch.zeros(1, 2)), "cross_entropy")
    loss.backward()
    assert (loss.item(), leaf.grad.tolist(), metrics["tokens"]) == (0.0, [[0.0, 0.0]], 0.0)


def test_one_advantage_for_each_sequence_is_that_of_all_its_tokens() -> None:
    new, old = double([[-1.0, -2.0], [-0.5, -0.1]]), double([[-1.1, -1.0], [-0.7, -0.3]])
    each = LossInputs(new, torch.ones(2, 2), old, double([[1.0, 1.0], [-2.0, -2.0]]))
    assert policy_loss(LossInputs(new, torch.ones(2, 2), old, double([1.0, -2.0]))) == policy_loss(each)


@given(batch=batches(), kind=KINDS, loss=st.sampled_from(sorted(LOSSES)))
def test_losses_and_gradients_of_parts_sum_up_to_those_of_the_batch(batch: tuple, kind: str, loss: str) -> None:
    new, old, advantages, mask = batch
    length = 3 if kind == "constant-length" else None
    keep = torch.tensor(mask)
    assume(keep.any())
    whole, parts = double(new).requires_grad_(), double(new).requires_grad_()
    how: dict[str, Any] = {"aggregation": kind, "length": length}
    total = policy_loss(LossInputs(whole, keep, double(old), double(advantages)), loss, **how)[0]
    total.backward()
    summed = 0.0
    for row in range(len(new)):
        of = slice(row, row + 1)
        part = policy_loss(
            LossInputs(parts[of], keep[of], double(old)[of], double(advantages)[of]),
            loss,
            denominator=denominator_of(keep, kind, length),
            **how,
        )[0]
        part.backward()
        summed += part.item()
    assert summed == pytest.approx(total.item(), abs=1e-9)
    assert torch.allclose(whole.grad, parts.grad, atol=1e-12)


@pytest.mark.parametrize("loss", ["clip", "gspo", "dro"])
def test_a_correction_weighs_tokens_and_rejected_ones_leave_the_denominator(loss: str) -> None:
    new, old, rollout = [[-1.0, -1.2, -0.4]], [[-1.1, -1.0, -0.5]], [[-1.0, -1.3, -3.0]]
    advantages, mask = [[1.0, -1.0, 2.0]], [[True] * 3]
    inputs = LossInputs(double(new), torch.tensor(mask), double(old), double(advantages))
    correction = reject(double(old), double(rollout), torch.tensor(mask), low=0.5, high=2.0)
    loss_value, metrics = policy_loss(inputs, loss, correction=correction)
    kept = [[True, True, False]]
    tokens = reference(loss, DEFAULTS[loss], new, new, old, advantages, kept)
    weights = [math.exp(-0.1), math.exp(0.3)]
    assert loss_value.item() == pytest.approx((tokens[0][0] * weights[0] + tokens[0][1] * weights[1]) / 2)
    assert (metrics["tokens"], metrics["rollout_rejected_fraction"]) == (2, pytest.approx(1 / 3))
    truncated, metrics = policy_loss(
        inputs, loss, correction=truncate(double(old), double(rollout), torch.tensor(mask), high=2.0)
    )
    tokens = reference(loss, DEFAULTS[loss], new, new, old, advantages, mask)
    assert truncated.item() == pytest.approx(sum(t * w for t, w in zip(tokens[0], [*weights, 2.0], strict=True)) / 3)
    assert (metrics["tokens"], metrics["rollout_truncated_fraction"]) == (3, pytest.approx(1 / 3))


def test_a_function_of_the_user_is_a_loss() -> None:
    def squared(inputs: LossInputs, *, scale: float) -> Any:
        return scale * inputs.logprobs.square(), {"largest": inputs.logprobs.max()}

    loss, metrics = policy_loss(LossInputs(double([[-1.0, -3.0]]), torch.ones(1, 2)), squared, scale=2.0)
    assert (loss.item(), metrics["largest"], metrics["loss"]) == (10.0, -1.0, 10.0)


def test_metrics_are_means_over_the_tokens_that_count() -> None:
    inputs = LossInputs(
        double([[-1.0, -0.5, -9.0]]), torch.tensor([[1, 1, 0]]), double([[-1.5, -0.5, -1.0]]), double([2.0]),
        entropy=double([[0.5, 1.5, 99.0]]),
    )  # fmt: skip
    _, metrics = policy_loss(inputs)
    expected = {
        "clip_fraction": 0.5,
        "ratio_mean": (math.exp(0.5) + 1) / 2,
        "mismatch_k3": (math.exp(0.5) - 1.5) / 2,
        "entropy": 1.0,
        "tokens": 2.0,
        "loss": -(1.2 + 1) * 2 / 2,
    }
    assert metrics == pytest.approx(expected)


def test_the_dual_clip_bounds_the_loss_of_a_bad_token_that_became_likely() -> None:
    inputs = LossInputs(double([[-0.1]]), torch.ones(1, 1), double([[-3.1]]), double([-1.0]))
    assert policy_loss(inputs, "clip")[0].item() == pytest.approx(math.exp(3))
    loss, metrics = policy_loss(inputs, "dual_clip", bound=3.0)
    assert (loss.item(), metrics["dual_clip_fraction"]) == (3.0, 1.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"loss": "clp"},
            "unknown loss 'clp'; did you mean clip?; expected one of 'clip', 'dual_clip', 'gspo', 'cispo'",
        ),
        ({"aggregation": "token_mean"}, "unknown aggregation 'token_mean'; did you mean token-mean"),
        (
            {"aggregation": "constant-length"},
            "invalid length None of aggregation 'constant-length': expected 1 or more",
        ),
        ({"length": 5}, "length=5 belongs to aggregation 'constant-length', not to 'token-mean'"),
        ({"denominator": 0}, "invalid denominator 0: expected a number above 0"),
        ({"low": 1.5}, "invalid clip bounds, low 1.5 and high 0.2: expected 0 <= low <= 1 and high >= 0"),
        ({"high": math.nan}, "invalid clip bounds, low 0.2 and high nan"),
        ({"loss": "dual_clip", "bound": 1.0}, "invalid bound 1.0 of loss 'dual_clip': expected a number above 1"),
        ({"loss": "dro", "beta": -1.0}, "invalid beta -1.0 of loss 'dro': expected 0 or more"),
    ],
)
def test_an_invalid_argument_is_refused_with_what_would_do(arguments: dict, message: str) -> None:
    inputs = LossInputs(double([[-1.0]]), torch.ones(1, 1), double([[-1.0]]), double([1.0]))
    with pytest.raises(ValueError, match=re.escape(message)):
        policy_loss(inputs, **arguments)


@pytest.mark.parametrize("loss", sorted(set(LOSSES) - {"cross_entropy"}))
def test_a_loss_that_lacks_a_tensor_names_it(loss: str) -> None:
    inputs = LossInputs(double([[-1.0]]), torch.ones(1, 1))
    with pytest.raises(ValueError, match=f"loss '{loss}' needs old_logprobs and advantages; 'cross_entropy' needs"):
        policy_loss(inputs, loss)
    with pytest.raises(ValueError, match=f"loss '{loss}' needs advantages;"):
        policy_loss(LossInputs(double([[-1.0]]), torch.ones(1, 1), double([[-1.0]])), loss)


def test_tensors_of_other_shapes_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=re.escape("old_logprobs has shape [1, 3], but mask has [1, 2]")):
        LossInputs(torch.zeros(1, 2), torch.ones(1, 2), torch.zeros(1, 3))
    with pytest.raises(ValueError, match=re.escape("advantages has shape [3], but mask has [1, 2]")):
        LossInputs(torch.zeros(1, 2), torch.ones(1, 2), torch.zeros(1, 2), torch.zeros(3))
    with pytest.raises(ValueError, match=re.escape("invalid mask of shape [2]: expected [batch, tokens]")):
        LossInputs(torch.zeros(2), torch.ones(2))
    inputs = LossInputs(torch.zeros(1, 2), torch.ones(1, 2))
    correction = truncate(torch.zeros(1, 3), torch.zeros(1, 3), torch.ones(1, 3))
    with pytest.raises(ValueError, match=re.escape("correction.mask has shape [1, 3], but mask has [1, 2]")):
        policy_loss(inputs, "cross_entropy", correction=correction)
    with pytest.raises(ValueError, match=re.escape("losses has shape [1], but mask has [1, 2]")):
        policy_loss(inputs, lambda inputs: (inputs.logprobs.sum(-1), {}))


def test_no_gradient_flows_into_old_logprobs_and_advantages() -> None:
    old, advantages = double([[-1.0]]).requires_grad_(), double([[1.0]]).requires_grad_()
    losses, _ = clip(LossInputs(double([[-0.9]]).requires_grad_(), torch.ones(1, 1), old, advantages))
    losses.sum().backward()
    assert (old.grad, advantages.grad) == (None, None)


@given(batches(), st.floats(0.05, 2.0))
def test_the_value_loss_and_its_gradient_are_those_of_its_definition(
    batch: tuple[list, list, list, list], bound: float
) -> None:
    values, old, returns, mask = batch

    def slow(values: list[list[float]]) -> float:
        terms = []
        for row in range(len(mask)):
            for at in range(len(mask[row])):
                if mask[row][at]:
                    value, before, wanted = values[row][at], old[row][at], returns[row][at]
                    near = min(max(value, before - bound), before + bound)
                    terms.append(0.5 * max((value - wanted) ** 2, (near - wanted) ** 2))
        return sum(terms) / max(len(terms), 1)

    tensor = double(values).requires_grad_()
    loss, metrics = value_loss(tensor, double(returns), double(old), torch.tensor(mask), clip=bound)
    assert loss.item() == metrics["loss"] == pytest.approx(slow(values), abs=1e-9)
    assert metrics["tokens"] == sum(map(sum, mask))
    loss.backward()
    step = 1e-6
    for row in range(len(mask)):
        for at in range(len(mask[row])):
            value, before, wanted = values[row][at], old[row][at], returns[row][at]
            near = min(max(value, before - bound), before + bound)
            # No derivative where the two terms are equal, or where the bound is.
            edges = (abs(abs(value - before) - bound), abs((value - wanted) ** 2 - (near - wanted) ** 2))
            if mask[row][at] and value != before and abs(value - before) > bound and min(edges) < 1e-4:
                continue
            if abs(abs(value - before) - bound) < 1e-4:
                continue
            moved = [[list(line) for line in values] for _ in range(2)]
            moved[0][row][at] += step
            moved[1][row][at] -= step
            slope = (slow(moved[0]) - slow(moved[1])) / (2 * step)
            assert tensor.grad[row, at].item() == pytest.approx(slope, abs=1e-5)


def test_parts_of_a_value_loss_sum_up_and_padding_counts_nowhere() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    values, returns, old = double([[1, 2, math.nan], [3, 0, 9]]), double([[0, 2, 7], [1, 8, 8]]), double([[1] * 3] * 2)
    whole, metrics = value_loss(values, returns, old, mask, clip=0.5)
    parts = [
        value_loss(*(each[at : at + 1] for each in (values, returns, old, mask)), denominator=3.0) for at in (0, 1)
    ]
    assert sum(loss.item() for loss, _ in parts) == pytest.approx(whole.item())
    # (1 + max(0, (1.5 - 2)²) + max(4, (1.5 - 1)²)) / 2 / 3
    assert whole.item() == pytest.approx((1 + 0.25 + 4) / 6)
    assert metrics["clip_fraction"] == pytest.approx(1 / 3)
    with pytest.raises(ValueError, match=r"returns has shape \[1, 3\]"):
        value_loss(values, returns[:1], old, mask)
    with pytest.raises(ValueError, match="invalid clip 0"):
        value_loss(values, returns, old, mask, clip=0)
