"""Computations of `fray.rl` with tensors: the one folder of it that imports torch.

Upwards, each may import those above it:

- `kl_control`: how much a KL divergence weighs, fixed or adaptive; without torch.
- `token_tensors`: checks of tensors with one number for each token, sums over the tokens that count.
- `aggregation`: one loss of the losses of tokens; `kl`: KL divergence of each token; `corrections`: weights of tokens
  whose policy differs from the one that generated them.
- `losses`: policy losses.
- `flat_weights`: weights of a model in one flat buffer. `adapters`: low-rank adapters of a model.
- `language_model`: models of Hugging Face with their tokenizers, and tiny ones of random weights.
- `sampling`: choice of the next tokens; `slot_cache`: keys and values of what is generated; `engine`: generation.
- `adapter_trainer`: training of adapters by requests, for a service.
- `ranks`, `token_batches`, `trainer_files`, `policy_trainer`: trajectories as tensors, checkpoints, and the trainer.
- `padded_rows`: trajectories as NexRL's trainers pad them.
"""
