"""``fray tinker ls``, ``top``, ``show``, ``explain``, ``cancel`` and ``key`` against a service on real processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trio

from fray import tinker
from fray.cli.main import main
from fray.tinker.core.usage import UsageWindow
from fray.tinker.opentinker.client import TrainingServiceError
from tests.tinker.services import REWARD, running


def test_use_is_that_of_the_last_minute() -> None:
    window = UsageWindow()
    window.add(0.0, "ada", 600, 1.0)
    window.add(50.0, "ada", 120, 1.0)
    window.add(61.0, "bob", 60, 3.0)
    use = window.by_user(61.0)
    assert {name: (used.tokens_per_s, used.share) for name, used in use.items()} == {
        "ada": (2.0, 0.25),
        "bob": (1, 0.75),
    }
    assert not window.by_user(1000.0)


def test_a_command_without_a_service_says_what_it_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("httpx")
    monkeypatch.delenv("FRAY_TINKER_KEY", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for arguments, text in (
        (
            [],
            f"no service given, and none was served from {tmp_path}/fray/tinker: use --url http://host:8765, or "
            "--directory DIR with that of fray tinker serve",
        ),
        (
            ["--directory", str(tmp_path)],
            f"{tmp_path}/operator.json: No such file or directory; expected the directory",
        ),
        (["--url", "http://127.0.0.1:9"], "the service at http://127.0.0.1:9 cannot be reached"),
        (["--url", "http://127.0.0.1:9", "--key-file", f"{tmp_path}/k"], f"--key-file {tmp_path}/k: No such file"),
    ):
        assert main(["tinker", "ls", *arguments]) != 0
        assert text in capsys.readouterr().err


@pytest.mark.torch
async def test_an_operator_sees_jobs_and_gives_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.delenv("FRAY_TINKER_KEY", raising=False)
    # The service and the commands find one another without a directory.
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    directory = tmp_path / "fray" / "tinker"
    key_file = tmp_path / "key"

    async def fray(*arguments: str, status: int = 0, where: tuple[str, ...] = ()) -> Any:
        """Run a command; return its JSON, or its messages if it fails."""
        code = await trio.to_thread.run_sync(main, ["tinker", *arguments, *where, "--json"])
        said = capsys.readouterr()
        assert code == status, said.err
        return said.err if code else json.loads(said.out)

    async with running(None, auth=True, virtual_gpus=1) as (_, service):
        assert (service.directory, service.models) == (directory, ("tiny",))
        at_url = ("--url", service.url, "--key-file", str(key_file))
        ada = await fray("key", "create", "ada")
        assert (ada["api_key"][:4], ada["tinker_api_key"]) == ("otk_", "tml-" + ada["api_key"][4:])
        assert not ada["is_admin"]
        assert "Username 'ada' already exists" in await fray("key", "create", "ada", status=2)
        root = await fray("key", "create", "root", "--admin")
        kept = b"".join(path.read_bytes() for path in directory.iterdir() if path.is_file())
        assert ada["api_key"][4:].encode() not in kept, "keys are kept as hashes"
        assert (directory / "operator.json").stat().st_mode & 0o777 == 0o600

        # An ordinary user, by address and key.
        denied = await fray("ls", status=2, where=("--url", service.url))
        assert denied.strip().endswith("give a key with --key-file FILE or FRAY_TINKER_KEY")
        key_file.write_text(ada["tinker_api_key"] + "\n")
        assert (await fray("ls", where=at_url))["jobs"] == []
        assert "Admin access required" in await fray("key", "list", status=2, where=at_url)

        def work() -> tuple[str, str]:
            scheduler = tinker.SchedulerClient(service.url, ada["api_key"])
            first, second = scheduler.submit_job({}, num_gpus=1), scheduler.submit_job({}, num_gpus=1)
            client = tinker.ServiceClient(scheduler.wait_until_running(first["job_id"])["server_url"])
            client.set_config({"data.max_response_length": 4}, reward=("share", REWARD))
            client.fit([{"non_tensor_batch": {"raw_prompt": ["407>"], "ground_truth": ["407$"]}}])
            client.client.save_checkpoint()
            return first["job_id"], second["job_id"]

        first, second = await trio.to_thread.run_sync(work)
        assert [(job["job_id"], job["status"], job["user"]) for job in (await fray("ls", where=at_url))["jobs"]] == [
            (first, "RUNNING", "ada"),
            (second, "QUEUED", "ada"),
        ]
        for verb in ("show", "cancel"):
            message = await fray(verb, first[:6], status=2)
            assert f"no job '{first[:6]}'; ids that begin so: {first}" in message
        shown = await fray("show", first)
        assert (shown["global_steps"], shown["requests"], shown["executed"]) == (1, 5, 5)
        assert [(each["step"], each["bytes"] > 10_000) for each in shown["checkpoints"]] == [(1, True)]
        assert shown["explanation"] == "waits for its client's next request; 5 executed"
        explained = await fray("explain", second)
        assert explained["explanation"] == (
            "number 1 in the queue: needs 1 GPUs, 0 of 1 are free; "
            "when it starts is not known: jobs that have the GPUs have no planned end, or were not measured yet"
        )
        (used,) = (await fray("top", "--once"))["users"]
        assert (used["user"], used["share"], used["tokens_per_s"] > 0) == ("ada", 1.0, True)
        assert await trio.to_thread.run_sync(main, ["tinker", "top", "--once", "--directory", str(directory)]) == 0
        assert "needs 1 GPUs, 0 of 1 are free" in capsys.readouterr().out
        (by_day,) = (await fray("usage", where=at_url))["usage"]
        assert (by_day["user"], by_day["tokens"] > 0, by_day["busy_s"] > 0) == ("ada", True, True)
        for days in ("0", "401"):
            assert f"days={days}: expected an integer from 1 to 400" in await fray("usage", "--days", days, status=2)

        # Another user sees nothing of it.
        bob = await fray("key", "create", "bob")
        key_file.write_text(bob["api_key"])
        assert f"no job '{first}'" in await fray("show", first, status=2, where=at_url)
        assert (await fray("usage", where=at_url))["usage"] == []
        assert f"no job '{first}'" in await fray("cancel", first, status=2, where=at_url)

        assert (await fray("cancel", second))["status"] == "CANCELLED"
        assert [job["job_id"] for job in (await fray("ls", "--all"))["jobs"]] == [first, second]
        assert [job["job_id"] for job in (await fray("ls"))["jobs"]] == [first]

        # A revoked key is refused in both spellings; the user's next key has the same jobs.
        key_file.write_text(root["api_key"])
        await fray("key", "revoke", "ada", where=at_url)
        assert "no user 'eve'; users: ada, root, bob" in await fray("key", "revoke", "eve", status=2)
        with pytest.raises(TrainingServiceError, match="401: Invalid API key"):
            await trio.to_thread.run_sync(tinker.SchedulerClient(service.url, ada["api_key"]).list_jobs)
        monkeypatch.setenv("FRAY_TINKER_KEY", ada["tinker_api_key"])
        assert "Invalid API key" in await fray("ls", status=2, where=("--url", service.url))
        monkeypatch.delenv("FRAY_TINKER_KEY")
        keys = await fray("key", "list")
        assert [(key["name"], key["is_admin"], key["is_revoked"]) for key in keys] == [
            ("ada", False, True),
            ("root", True, False),
            ("bob", False, False),
        ]
        again = await fray("key", "create", "ada")
        assert again["user_id"] == ada["user_id"]
        key_file.write_text(again["api_key"])
        assert [job["job_id"] for job in (await fray("ls", where=at_url))["jobs"]] == [first]

        # The Tinker API: what there is, who waits for what, sizes and expiry.
        from tests.tinker.test_tinker_api import Api

        def train() -> str:
            api = Api(service.url, again["tinker_api_key"])
            model = api.model()
            api.result(api.forward(model, 1, tuple([1] * 100)).body)
            api.result(api.post("save_weights", model_id=model, seq_id=2, path="here", ttl_seconds=7200))
            session = model.partition(":")[0]
            made = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
            api.post("create_sampling_session", **made)
            api.forward(model, 4)
            return model

        model = await trio.to_thread.run_sync(train)
        used = [each["tokens"] for each in (await fray("usage", where=at_url))["usage"]]
        assert used == [by_day["tokens"] + 100], "those of a shared engine, too, whose account is the service's"
        assert await trio.to_thread.run_sync(main, ["tinker", "usage", "--directory", str(directory)]) == 0
        assert capsys.readouterr().out.split()[:7] == ["DAY", "USER", "TOKENS", "ENGINE", "TIME", by_day["day"], "ada"]
        listed = await fray("ls", where=at_url)
        (found,), (sampler,), (checkpoint,) = (listed[name] for name in ("models", "samplers", "checkpoints"))
        assert (found["model_id"], found["user"], found["base_model"], found["executed"]) == (model, "ada", "tiny", 2)
        assert found["activity"] == "request 4 waits for request 3, which has not come"
        assert sampler["activity"] == "waits for its client's next request"
        assert checkpoint["path"] == f"tinker://{model}/weights/here"
        assert (checkpoint["bytes"] > 1_000, checkpoint["expires_at"] - checkpoint["created_at"]) == (True, 7200)
        while not (await fray("show", model))["place"]:
            pass  # its engine's facts are at most a second old
        shown = await fray("show", model, where=at_url)
        assert (shown["place"], shown["checkpoints"], shown["lora"]["rank"]) == ("resident", [checkpoint], 4)
        assert (await fray("explain", model))["explanation"] == found["activity"]
        status = await fray("top", "--once", where=at_url)
        assert [(each["base_model"], each["is_up"], each["resident"]) for each in status["engines"]] == [
            ("tiny", True, 1)
        ]
        (used,) = status["users"]
        assert (used["user"], used["tokens_per_s"] > 100 / 60, used["busy_s"] > 0) == ("ada", True, True)
        for verb in (["ls"], ["top", "--once"], ["show", model], ["show", sampler["sampler_id"]]):
            assert await trio.to_thread.run_sync(main, ["tinker", *verb, "--directory", str(directory)]) == 0
            said = capsys.readouterr().out
            assert found["activity"] in said or sampler["sampler_id"] == verb[-1]
        assert f"no model or sampler '{model}:9'" in await fray("cancel", f"{model}:9", status=2)
        for name in (model, sampler["sampler_id"]):
            assert (await fray("cancel", name, where=at_url))["message"] == "cancelled; checkpoints stay"
        left = await fray("ls", where=at_url)
        assert [left[name] for name in ("models", "samplers", "checkpoints")] == [[], [], [checkpoint]]
        assert "before" in (await fray("cancel", model))["message"]
        key_file.write_text(bob["api_key"])
        nothing = await fray("ls", where=at_url)
        assert [nothing[name] for name in ("jobs", "models", "samplers", "checkpoints")] == [[], [], [], []]
        assert f"no model or sampler '{model}'" in await fray("show", model, status=2, where=at_url)
