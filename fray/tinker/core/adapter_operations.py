"""Numbered requests of a model that is trained through the Tinker API, and their answers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from attrs import field, frozen

from fray.rl.train.datums import AdamParams, Datum, ServiceLoss

FOLDERS = ("weights", "sampler_weights", "external_weights")
"""Kinds of saved weights: those of training have the optimizer's, too."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_SAVED = re.compile(rf"{_NAME.pattern}(@[0-9]+)?")


def _checked_name(instance: Any, attribute: Any, value: Any) -> None:
    check_name(attribute.name, value)


def check_name(what: str, value: Any) -> None:
    """Check a name that becomes a directory. Raises ValueError with the characters that it may have."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ValueError(
            f"{what}={value!r:.200}: expected 1 to 128 letters, digits, '_', '-' and '.', the first no '-' or '.'"
        )


def check_path(path: str) -> None:
    """Check the ``path`` of saved weights. Raises ValueError with the form that it has."""
    parts = path.split("/")
    forms = (_NAME, re.compile("|".join(FOLDERS)), _SAVED)
    if len(parts) != 3 or not all(form.fullmatch(part) for form, part in zip(forms, parts, strict=True)):
        expected = " or ".join(f"MODEL/{folder}/NAME" for folder in FOLDERS)
        raise ValueError(f"path={path!r:.400}: expected {expected}")


def name_of_saved(path: str) -> tuple[str, str]:
    """Return the folder and the name, as the client gave it, of the ``path`` of saved weights."""
    _, folder, saved = path.split("/")
    return folder, saved.partition("@")[0]


@frozen
class ForwardPass:
    """Compute a loss, and with ``backward`` add its gradient to that of the model."""

    data: Sequence[Datum]
    loss: ServiceLoss
    backward: bool = True


@frozen
class OptimStep:
    """Change the weights by the gradients since the last step."""

    params: AdamParams = field(factory=AdamParams)


@frozen
class SaveWeights:
    """Save weights and what the optimizer knows, as ``MODEL/weights/NAME``.

    With ``overwrite`` it is ``MODEL/weights/NAME@NUMBER``, with the number of the request, beside those of the name:
    they stay until the record of the checkpoint has the new path, and after it for the samplers that have them.
    """

    name: str = field(validator=_checked_name)
    overwrite: bool = False


@frozen
class SaveWeightsForSampler:
    """Save the weights alone, as ``MODEL/sampler_weights/NAME``; samples of this path keep them.

    With ``is_external`` it is ``MODEL/external_weights/NAME``, for downloads.
    """

    name: str = field(validator=_checked_name)
    is_external: bool = False


@frozen
class LoadWeights:
    """Replace the weights by saved ones; with ``optimizer`` continue as they would have continued."""

    path: str
    optimizer: bool = False

    def __attrs_post_init__(self) -> None:
        check_path(self.path)


AdapterOperation: TypeAlias = ForwardPass | OptimStep | SaveWeights | SaveWeightsForSampler | LoadWeights


@frozen(eq=False)
class OperationResult:
    """Answer to an operation.

    Attributes:
        error: why it failed, without an effect; such an error is the request's. Empty: it did not fail.
        logprobs: of `ForwardPass`: of the targets of each datum, float32 arrays.
        losses: of the same places.
        metrics: numbers by name: ``loss`` (a sum), ``grad_norm``.
        path: of what was saved, below the directory of the engine.
        size: its bytes.
        snapshot: number up to which the requests of this model are in a snapshot, so that they need not be kept; -1:
            there is none.
        snapshot_error: why there is no newer one, though it was due; empty: there is, or it was not due.
    """

    error: str = ""
    logprobs: Sequence[Any] = ()
    losses: Sequence[Any] = ()
    metrics: Mapping[str, float] = field(factory=dict)
    path: str = ""
    size: int = 0
    snapshot: int = -1
    snapshot_error: str = ""
