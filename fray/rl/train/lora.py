"""Settings of low-rank adapters (LoRA). Without torch."""

from __future__ import annotations

from attrs import field, frozen

from fray.rl.train.checks import ABOVE_0, count, flag, names_similar_arguments


@names_similar_arguments
@frozen
class LoRA:
    """Settings of a low-rank adapter: in the layers that it adapts, ``x W`` becomes ``x W + alpha / rank · x A B``.

    From Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models". A is drawn at random, B is 0: a new
    adapter changes nothing.

    Attributes:
        rank: columns of A.
        alpha: scale of the product, divided by the rank.
        attention: whether the linear layers of attention are adapted.
        mlp: whether those of the feed-forward blocks are.
        unembed: whether the layer that makes logits is.
        seed: of A.

    Raises:
        ValueError: a value is out of its range, or nothing would be adapted.
    """

    rank: int = field(default=32, validator=count(1))
    alpha: float = field(default=32.0, validator=ABOVE_0, kw_only=True)
    attention: bool = field(default=True, validator=flag, kw_only=True)
    mlp: bool = field(default=True, validator=flag, kw_only=True)
    unembed: bool = field(default=True, validator=flag, kw_only=True)
    seed: int = field(default=0, validator=count(0), kw_only=True)

    def __attrs_post_init__(self) -> None:
        if not (self.attention or self.mlp or self.unembed):
            raise ValueError("LoRA without attention, mlp and unembed adapts nothing: expected at least one of them")
