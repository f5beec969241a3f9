"""Saved weights that are replaced or not needed any more: samplers keep theirs, and the files of others are removed."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

pytest.importorskip("torch")
pytest.importorskip("google.protobuf")

import fray
from fray.tinker.api_store import TinkerStore
from fray.tinker.tinker_api.base_engine import AdapterPlan
from fray.tinker.tinker_api.tinker_runs import TinkerRuns
from tests.tinker.runs_api import ADA, MODEL, RunsApi

pytestmark = pytest.mark.torch


async def test_a_sampler_keeps_the_weights_that_were_replaced_and_a_new_one_has_the_others(tmp_path: Path) -> None:
    plan = AdapterPlan({"tiny": MODEL}, tmp_path / "engines", threads=1)
    store = TinkerStore(tmp_path)

    def files() -> list[str]:
        found = plan.directory_of("tiny").glob("*/*weights/*/adapter_model.safetensors")
        return sorted(each.parent.name for each in found)

    async with fray.open_cluster("local", logs=False) as cluster, trio.open_nursery() as nursery:
        api = RunsApi(TinkerRuns(store, plan))
        await nursery.start(api.runs.run, cluster)
        model = await api.create(0)
        path = (await api.ask("save_weights", model, 1, path="a"))["path"]
        old = await api.sampler(0, path)
        before = await api.logprobs(old, 0)
        await api.forward(model, 2)
        await api.ask("optim_step", model, 3, adam_params={"learning_rate": 0.3})
        assert (await api.ask("save_weights", model, 4, path="a", overwrite=True))["path"] == path
        new = await api.sampler(1, path)
        after = await api.logprobs(new, 0)
        assert before != pytest.approx(after, abs=1e-3)
        assert await api.logprobs(old, 1) == before
        assert files() == ["a", "a@4"], "a sampler has the first"
        await api.runs.end_sampler(api.runs.sampler(ADA, old))
        assert files() == ["a@4"]
        await api.ask("save_weights", model, 5, path="a", overwrite=True)
        await api.runs.end_sampler(api.runs.sampler(ADA, new))
        assert files() == ["a@5"]
        loaded = await api.create(1, load=path)
        assert (await api.logprobs(await api.sampler(2, path), 0)) == pytest.approx(after, abs=1e-6)
        assert not (await api.forward(loaded, 1)).get("error")
        # For one sampler alone, which ends with its session.
        await api.ask("save_weights_for_sampler", model, 6, sampling_session_seq_id=3)
        assert files() == ["a@5", "ephemeral-000006"]
        await api.runs.end_session(api.runs.sessions[api.session_id])
        assert files() == ["a@5"], "checkpoints stay"
        nursery.cancel_scope.cancel()
    store.close()
