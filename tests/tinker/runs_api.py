"""The Tinker API in the process of a test, without HTTP."""

from __future__ import annotations

import json
import random
from typing import Any

from fray import rl
from fray.tinker.core.keys import ServiceUser
from fray.tinker.tinker_api.model_run import CREATE
from fray.tinker.tinker_api.tinker_runs import TinkerRuns
from fray.tinker.wire.messages import MESSAGES
from fray.tinker.wire.tinker_json import Fields

ADA = ServiceUser("user_1", "ada", "", 0.0)
MODEL = rl.TinyLlama(layers=1, width=16)
LARGE = {"note": "x" * 50_000}
"""More than fits into the pages that a full store has."""


class RunsApi:
    """The Tinker API in this process, whose engine is a thread."""

    def __init__(self, runs: TinkerRuns, user: ServiceUser = ADA) -> None:
        self.runs, self.user, self.session_id = runs, user, ""

    async def create(self, number: int, *, load: str | None = None) -> str:
        """Create a model: new, or from a checkpoint."""
        if not self.session_id:
            self.session_id = (await self.runs.create_session(self.user, Fields({}))).id
        wanted = {"session_id": self.session_id, "model_seq_id": number, "base_model": "tiny"}
        wanted |= {"user_metadata": LARGE, "note": LARGE}
        wanted["lora_config"] = {"rank": 4, "seed": number}
        kind = CREATE
        if load is not None:
            wanted, kind = {**wanted, "path": load}, "load_weights"
        future = await self.runs.create_model(self.user, Fields(wanted), json.dumps(wanted).encode(), kind)
        return future.rpartition(":")[0]

    async def forward(self, model_id: str, seq: int, count: int = 1) -> dict[str, Any]:
        return await self.result(await self.submit_forward(model_id, seq, count))

    async def submit_forward(self, model_id: str, seq: int, count: int) -> str:
        """Ask for a forward pass of so many texts; return the future."""
        message = MESSAGES["ForwardBackwardRequest"](model_id=model_id, seq_id=seq, loss_fn="cross_entropy")
        rng = random.Random(seq)
        for _ in range(count):
            tokens = [rng.randrange(10) for _ in range(50)]
            datum = message.data.add()
            datum.model_input.add().encoded_text.tokens = b"".join(each.to_bytes(4, "little") for each in tokens)
            datum.loss_fn_inputs["target_tokens"].dtype = 2
            datum.loss_fn_inputs["target_tokens"].dense = b"".join(each.to_bytes(8, "little") for each in tokens)
        body = message.SerializeToString()
        return await self.runs.submit(self.user, "forward_backward", model_id, seq, body)

    async def ask(self, kind: str, model_id: str, seq: int, **body: Any) -> dict[str, Any]:
        content = json.dumps({"model_id": model_id, "seq_id": seq, **body}).encode()
        effect = kind == "optim_step"
        return await self.result(await self.runs.submit(self.user, kind, model_id, seq, content, has_effect=effect))

    async def result(self, request_id: str) -> dict[str, Any]:
        while (answer := await self.runs.answer(self.user, request_id, 5.0)).get("type") == "try_again":
            pass
        return answer

    async def sampler(self, number: int, path: str | None = None) -> str:
        """Create a sampler of a checkpoint, or of the base model."""
        wanted = {"session_id": self.session_id, "sampling_session_seq_id": number, "base_model": "tiny"}
        if path is not None:
            wanted["model_path"] = path
        return (await self.runs.create_sampler(self.user, Fields(wanted))).id

    async def submit_sample(self, sampler_id: str, seq: int, **params: Any) -> str:
        """Ask for two samples; return the future."""
        prompt = {"chunks": [{"tokens": [1, 2, 3, 4]}]}
        wanted = {"sampling_session_id": sampler_id, "seq_id": seq, "prompt": prompt, "num_samples": 2}
        wanted |= {"prompt_logprobs": True, "sampling_params": {"max_tokens": 1, **params}}
        return (await self.runs.submit_sample(self.user, Fields(wanted), json.dumps(wanted).encode()))[0]

    async def logprobs(self, sampler_id: str, seq: int) -> list[float]:
        """Return the logprobs of a prompt."""
        answer = await self.result(await self.submit_sample(sampler_id, seq))
        found: list[float] = answer["prompt_logprobs"][1:]
        return found
