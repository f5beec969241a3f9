"""``fray-node`` whose zygote has imported torch and made a model, for `tests.support.warm_cluster`."""

from __future__ import annotations

import sys

from fray.node import daemon
from fray.node.main import main
from fray.node.zygotes import manager

WARM = (
    "fray.rl.tensors.engine",
    "fray.rl.tensors.policy_trainer",
    "fray.rl.tensors.adapter_trainer",
    "tests.support.warm_node:make_model",
)


def make_model() -> None:
    """Import what a model of a known architecture needs, which is half of the time that torch and Transformers take."""
    from transformers import LlamaForCausalLM

    assert LlamaForCausalLM


if __name__ == "__main__":
    daemon.PRELOAD += WARM
    # On a machine with other work these imports take longer than those of other nodes may.
    manager.READY_S = 300.0
    sys.exit(main())
