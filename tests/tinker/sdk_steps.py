"""Takes forty steps of training through the Tinker SDK, one after another; prints the losses as JSON."""

from __future__ import annotations

import json
import sys

import tinker
from sdk_script import TEXTS, datum, made
from tinker import types

service = tinker.ServiceClient(base_url=sys.argv[1], api_key=sys.argv[2])
training = made(service.create_lora_training_client(base_model="tiny", rank=8, seed=3))
losses = []
for _ in range(40):
    result = training.forward_backward([datum(text) for text in TEXTS], "cross_entropy")
    step = training.optim_step(types.AdamParams(learning_rate=1e-2))
    losses.append(result.result().metrics["loss:sum"])
    step.result()
print(json.dumps({"losses": losses}))
