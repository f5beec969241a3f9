"""Takes forty steps of training through the Tinker SDK, one after another; prints losses and tokens as JSON."""

from __future__ import annotations

import sys

import tinker
from sdk_script import TEXTS, datum, made, print_and_exit
from tinker import types

service = tinker.ServiceClient(base_url=sys.argv[1], api_key=sys.argv[2])
training = made(service.create_lora_training_client(base_model="tiny", rank=8, seed=3))
losses = []
for _ in range(40):
    result = training.forward_backward([datum(text) for text in TEXTS], "cross_entropy")
    step = training.optim_step(types.AdamParams(learning_rate=1e-2))
    losses.append(result.result().metrics["loss:sum"])
    step.result()
# The service has the tokenizer of such a model in a directory, which a sampler takes in the place of the name.
tokenizers = [training.get_tokenizer()]
model = training.get_info().model_data.tokenizer_id
tokenizers.append(made(service.create_sampling_client(base_model=model)).get_tokenizer())
found = [each.encode("407> $", add_special_tokens=False) for each in tokenizers]
assert tokenizers[0].decode(found[0]) == "407> $"
print_and_exit({"losses": losses, "tokenizers": found})
