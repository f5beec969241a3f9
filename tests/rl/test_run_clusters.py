"""A model that is a directory that is missing here is refused before the start, where all machines are this one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import pytest
import trio
from attrs import frozen

import fray
from fray import rl
from fray.cli.main import main
from fray.errors import InvalidRequest
from fray.rl import run as run_module
from fray.rl.nexrl import controller as controller_module
from fray.rl.run_cluster import check_model_of_cluster, check_model_of_spec

MISSING = "/no/such/directory"
REFUSED = f"invalid model '{MISSING}': there is no such directory on this machine"


@frozen
class Node:
    """Machine of a cluster."""

    host: str


@frozen
class ClusterAt:
    """Connection to a cluster at an address."""

    address: str
    hosts: tuple[str, ...] = ()

    async def nodes(self) -> list[Node]:
        return [Node(host) for host in self.hosts]


def run() -> rl.Run:
    trainer = rl.GRPO(groups=1, group_size=2, steps=1)
    return rl.Run(model=MISSING, data=[{"prompt": "1"}], rollout=rl.SimpleRolloutWorker, trainer=trainer)


def guide(**options: str) -> rl.NexRLController:
    service = {"inference_service": {"model": MISSING}}
    return rl.NexRLController({"data": {"type": "mock", "size": 1}, "service": service, **options})


def never_opened(*_: Any) -> NoReturn:
    pytest.fail("a cluster was opened")


@pytest.mark.parametrize("spec", ["", "local", "machine", "machine?nodes=2&cpu=1"])
def test_a_cluster_that_would_be_made_here_is_not_opened(
    spec: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FRAY_CLUSTER_SPEC", spec)
    monkeypatch.setenv("HOME", str(tmp_path))
    for module in (run_module, controller_module):
        monkeypatch.setattr(module, "open_cluster", never_opened)
    for start in (run().main, guide(launch_mode="local").run_async):
        with pytest.raises(InvalidRequest, match=REFUSED):
            trio.run(start)


def test_an_open_cluster_of_this_machine_starts_nothing() -> None:
    async def start() -> None:
        async with fray.open_cluster("local") as cluster:
            for begin in (run().run_on, run().submit):
                with pytest.raises(InvalidRequest, match=REFUSED):
                    await begin(cluster)
            assert await cluster.list_jobs("*") == []

    trio.run(start)


@pytest.mark.parametrize(
    ("cluster", "is_refused"),
    [
        (ClusterAt("memory:controller"), True),
        (ClusterAt("unix:/run/fray.sock", ("127.0.0.1", "localhost")), True),
        (ClusterAt("unix:/run/fray.sock", ("127.0.0.1", "10.0.0.2")), False),
        (ClusterAt("unix:/run/fray.sock"), False),
        (ClusterAt("tls:head:7421", ("127.0.0.1",)), False),
    ],
)
def test_what_machines_elsewhere_have_is_not_known(cluster: Any, is_refused: bool) -> None:
    async def check() -> str:
        try:
            await check_model_of_cluster(MISSING, cluster)
        except InvalidRequest as error:
            return str(error)
        return ""

    assert trio.run(check) == (REFUSED if is_refused else "")


def test_names_and_directories_that_are_there_are_not_refused(tmp_path: Path) -> None:
    for model in ("Qwen/Qwen3-0.6B", str(tmp_path), rl.TinyLlama()):
        check_model_of_spec(model, "machine")
    check_model_of_spec(MISSING, "fray://head:7421")
    check_model_of_spec(MISSING, None)
    with pytest.raises(InvalidRequest, match=REFUSED):
        check_model_of_spec(MISSING, "machine")


def test_a_dry_run_refuses_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("omegaconf")
    monkeypatch.setenv("HOME", str(tmp_path))
    recipes = {
        "run.yaml": f"{{model: {MISSING}, data: rows.jsonl, rollout: 'fray.rl:SimpleRolloutWorker', trainer: {{}}}}",
        "guide.yaml": f"{{data: {{type: mock, size: 1}}, service: {{inference_service: {{model: {MISSING}}}}}}}",
    }
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1"}')
    for name, text in recipes.items():
        (tmp_path / name).write_text(text)
        for spec, is_refused in (("", True), ("fray://head:7421", False)):
            monkeypatch.setenv("FRAY_CLUSTER_SPEC", spec)
            mode = ["launch_mode=cluster"] if spec and name == "guide.yaml" else []
            assert main(["rl", "run", str(tmp_path / name), "--dry", *mode]) == (2 if is_refused else 0)
            assert (REFUSED in capsys.readouterr().err) == is_refused
        assert main(["rl", "run", str(tmp_path / name), "--dry", "--detach"]) == 0
