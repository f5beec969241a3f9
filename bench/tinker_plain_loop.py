"""Adapters trained in one plain loop, with which the Tinker API is compared: transformers, peft and torch, no Fray.

``python -m bench.tinker_plain_loop sft`` learns pig latin by cross-entropy, ``… rl`` to copy three digits by
importance sampling. The base models have random weights, and only the adapter is trained. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import math

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM

from bench.rl_plain_loop import END, PROMPTS, SAMPLES, generate
from bench.tinker_tasks import DIGITS, sft_batch

LAYERS = [*("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")]


def adapted(base, rank, seed):
    """Return a model with an adapter whose first weights are those of `fray.rl`'s of this seed, and its optimizer."""
    model = LlamaForCausalLM.from_pretrained(base)
    names = [name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)]
    model = get_peft_model(model, LoraConfig(r=rank, lora_alpha=32, lora_dropout=0.0, target_modules=LAYERS))
    generator = torch.Generator().manual_seed(seed)
    for name in names:
        weight = model.get_submodule(f"base_model.model.{name}.lora_A.default").weight
        bound = 1 / math.sqrt(weight.shape[1])
        with torch.no_grad():
            weight.copy_(torch.empty(weight.shape).uniform_(-bound, bound, generator=generator))
    return model


def adam(model, rate):
    trained = [each for each in model.parameters() if each.requires_grad]
    return torch.optim.AdamW(trained, lr=rate, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0)


def logprobs_of(model, inputs, targets):
    logits = model(input_ids=inputs, use_cache=False).logits
    return torch.log_softmax(logits, -1).gather(2, targets[:, :, None])[:, :, 0]


def sft(base, *, rank, rate, steps, seed):
    """Return the loss of each step, in nats a token of the answers."""
    model = adapted(base, rank, seed)
    optimizer, losses = adam(model, rate), []
    for step in range(steps):
        rows = sft_batch(step)
        width = max(len(tokens) for tokens, _ in rows)
        tokens = torch.tensor([[*tokens, *[0] * (width - len(tokens))] for tokens, _ in rows])
        weights = torch.tensor([[*of, *[0.0] * (width - 1 - len(of))] for _, of in rows])
        loss = -(logprobs_of(model, tokens[:, :-1], tokens[:, 1:]) * weights).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss) / float(weights.sum()))
    return losses


def reinforce(base, *, rank, rate, steps, seed):
    """Return the mean reward of each step: the share of the four positions that are right."""
    torch.manual_seed(seed)
    model = adapted(base, rank, seed)
    optimizer, means = adam(model, rate), []
    for _ in range(steps):
        digits = torch.randint(10, (PROMPTS, 3))
        prompts = torch.cat([digits, torch.full((PROMPTS, 1), DIGITS.index(">"))], 1)
        answers = torch.cat([digits, torch.full((PROMPTS, 1), END)], 1).repeat_interleave(SAMPLES, 0)
        tokens, old, mask = generate(model, prompts)
        rewards = ((tokens == answers) & mask).float().mean(1)
        groups = rewards.view(PROMPTS, SAMPLES)
        advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)).view(-1, 1)
        row = torch.cat([prompts.repeat_interleave(SAMPLES, 0), tokens], 1)
        now = logprobs_of(model, row[:, :-1], row[:, 1:])[:, prompts.shape[1] - 1 :]
        torch.where(mask, -torch.exp(now - old) * advantages, 0.0).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        means.append(float(rewards.mean()))
    return means


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=["sft", "rl"])
    parser.add_argument("base", help="directory of the base model")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = vars(parser.parse_args())
    torch.set_num_threads(1)
    run = {"sft": sft, "rl": reinforce}[options.pop("task")]
    print(json.dumps(run(options.pop("base"), **options)))


if __name__ == "__main__":
    main()
