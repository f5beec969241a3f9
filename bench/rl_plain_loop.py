"""Reinforcement learning in one loop, with which `fray.rl` is compared: copy three digits, ``407>`` to ``407$``.

``python -m bench.rl_plain_loop --seed 0`` trains a Llama of 133k parameters with GRPO, 32 prompts x 16 samples, in one
thread of one process, without Fray. The reward is the share of the four positions that are right.
"""

from __future__ import annotations

import argparse
import copy
from collections import deque
from time import perf_counter

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

CHARS = "0123456789+=>$ "
END = CHARS.index("$")
PROMPTS, SAMPLES, LENGTH = 32, 16, 4


def generate(model, prompts):
    """Return ``[512, 4]`` tokens of 32 prompts, their logprobs, and whether they are there (up to the first end)."""
    with torch.inference_mode():
        cache = DynamicCache(config=model.config)
        logits = model(prompts, past_key_values=cache, logits_to_keep=1).logits[:, -1]
        cache.batch_repeat_interleave(SAMPLES)
        logits, tokens, logprobs = logits.repeat_interleave(SAMPLES, 0), [], []
        while True:
            distribution = torch.log_softmax(logits, -1)
            tokens.append(torch.multinomial(distribution.exp(), 1))
            logprobs.append(distribution.gather(1, tokens[-1]))
            if len(tokens) == LENGTH:
                break
            logits = model(tokens[-1], past_key_values=cache).logits[:, -1]
        tokens = torch.cat(tokens, 1)
        ends = (tokens == END).cumsum(1) - (tokens == END).long()
    return tokens.clone(), torch.cat(logprobs, 1).clone(), (ends == 0).clone()


def train(model, optimizer, prompts, tokens, old_logprobs, mask, rewards):
    """Do one update with the clipped loss of GRPO, averaged over tokens."""
    groups = rewards.view(PROMPTS, SAMPLES)
    advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)).view(-1, 1)
    inputs = torch.cat([prompts.repeat_interleave(SAMPLES, 0), tokens[:, :-1]], 1)
    logits = model(inputs, use_cache=False, logits_to_keep=LENGTH).logits
    logprobs = torch.log_softmax(logits, -1).gather(2, tokens[:, :, None])[:, :, 0]
    ratio = (logprobs - old_logprobs).exp()
    losses = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    (torch.where(mask, losses, 0.0).sum() / mask.sum()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def run(seed=0, steps=200, lag=0, control=None):
    """Return the mean reward of each step, and the seconds of generation and of training.

    Args:
        lag: updates by which the weights that generate are behind those that are trained.
        control: ``unsynced`` generates with the first weights, ``shuffled`` rewards the answer to another prompt.
    """
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=len(CHARS), max_position_embeddings=256, tie_word_embeddings=False, **sizes)
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    old = copy.deepcopy(model) if lag or control == "unsynced" else model
    waiting: deque[dict] = deque()
    means, generating, training = [], 0.0, 0.0
    for _ in range(steps):
        start = perf_counter()
        if lag:
            waiting.append({name: value.clone() for name, value in model.state_dict().items()})
            if len(waiting) > lag:
                old.load_state_dict(waiting.popleft())
        digits = torch.randint(10, (PROMPTS, 3))
        prompts = torch.cat([digits, torch.full((PROMPTS, 1), CHARS.index(">"))], 1)
        answers = torch.cat([digits, torch.full((PROMPTS, 1), END)], 1)
        if control == "shuffled":
            answers = answers.roll(1, 0)
        tokens, logprobs, mask = generate(old, prompts)
        rewards = ((tokens == answers.repeat_interleave(SAMPLES, 0)) & mask).float().mean(1)
        generated = perf_counter()
        train(model, optimizer, prompts, tokens, logprobs, mask, rewards)
        means.append(rewards.mean().item())
        generating, training = generating + generated - start, training + perf_counter() - generated
    return means, generating, training


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lag", type=int, default=0)
    parser.add_argument("--control", choices=["unsynced", "shuffled"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    means, generating, training = run(**vars(options))
    first, last = means[:10], means[-10:]
    print(
        f"seed {options.seed}, {options.steps} steps: mean reward {sum(first) / len(first):.3f} in steps 1-10, "
        f"{sum(last) / len(last):.3f} in the last ten; {generating + training:.1f} s, "
        f"generating {generating / options.steps * 1e3:.0f} and training {training / options.steps * 1e3:.0f} ms a step"
    )


if __name__ == "__main__":
    main()
