"""A cluster over TLS on an address of this machine beyond loopback: daemons, drivers and actors as processes."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

import fray
from fray.errors import InvalidRequest, Unauthorized
from fray.model.join_tokens import split_pins
from fray.net.transport import Credential
from fray.net.transports.websocket import WebSocketNetwork
from fray.node.environments import overlay
from fray.runtime.calls.wire import CALLER_KEY_ID
from tests.processes.lab import SMALL, Lab


def own_address() -> str:
    """An address of this machine that is not loopback; empty if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return ""
        return str(probe.getsockname()[0])


HOST = own_address()
pytestmark = pytest.mark.skipif(not HOST, reason="this machine has no address but loopback")


class TlsLab(Lab):
    """The daemons, listening for other machines, with the token that the controller makes."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.spec = f"fray://{HOST}:{self.port}"

    @property
    def token(self) -> str:
        return (self.directory / "store" / "token").read_text().strip()

    def start(self, name: str, module: str, *arguments: str) -> None:
        token = {} if name == "controller" else {"FRAY_TOKEN": self.token}
        environ = {key: value for key, value in os.environ.items() if key != "FRAY_TOKEN"} | token
        environ["FRAY_JOB_UIDS"] = "none"
        with (self.directory / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [sys.executable, "-m", module, *arguments], stdout=log, stderr=log, env=environ, start_new_session=True
            )

    def start_controller(self, *arguments: str) -> None:
        store, listen = str(self.directory / "store"), f"{HOST}:{self.port}"
        self.start("controller", "fray.controller.main", "--listen", listen, "--store", store, *arguments)

    def wait_for(self, name: str, text: str) -> None:
        """Wait until the log of a daemon contains this."""
        give_up_at = time.monotonic() + 60
        while text not in (self.directory / f"{name}.log").read_text():
            assert time.monotonic() < give_up_at, (self.directory / f"{name}.log").read_text()
            time.sleep(0.05)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[TlsLab]:
    lab = TlsLab(tmp_path)
    try:
        lab.start_controller()
        lab.wait_for("controller", "controller started")
        yield lab
    finally:
        lab.close()


class Counter:
    def __init__(self) -> None:
        self.n = 0

    def add(self, k: int) -> int:
        self.n += k
        return self.n


async def call_twice(counter: object) -> int:
    """A job that calls an actor in another process."""
    await counter.add(1)  # type: ignore[attr-defined]
    return int(await counter.add(1))  # type: ignore[attr-defined]


@pytest.mark.promise("P9")
async def test_jobs_actors_and_rotation_over_tls(lab: TlsLab, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("n1", "n2"):
        lab.start_node(name)
        lab.wait_for(name, "issued a certificate")
    monkeypatch.delenv("FRAY_CA_FINGERPRINT", raising=False)
    secret, pins = split_pins(lab.token)
    with pytest.raises(InvalidRequest, match="the fingerprint of its certificate authority is missing"):
        async with fray.open_cluster(lab.spec, token=secret):
            pass
    with pytest.raises(Unauthorized, match="is not the expected server"):
        async with fray.open_cluster(f"{lab.spec}#{'ab' * 32}", token=secret):
            pass
    with trio.fail_after(100):
        async with fray.open_cluster(lab.spec, token=lab.token) as cluster, cluster.open_scope() as scope:
            counter = await scope.create_actor(Counter, name="counter", resources=SMALL)
            assert await counter.add(1) == 1
            endpoint = counter._connection_route().endpoint
            assert endpoint is not None
            direct = [address for address in endpoint.addresses if address.startswith(("tls:", "tcp:"))]
            assert len(direct) == 1
            assert direct[0].startswith(f"tls:{HOST}:")
            # The entry has the fingerprint of the host's own certificate, and another one is not accepted.
            network, credential = WebSocketNetwork(), Credential(CALLER_KEY_ID, endpoint.key)
            (await network.dial(direct[0], credential, timeout_s=5)).abort()
            with pytest.raises(Unauthorized, match="is not the expected server"):
                await network.dial(f"{direct[0].partition('#')[0]}#{pins[0]}", credential, timeout_s=5)
            assert await scope.run(call_twice, counter, resources=SMALL) == 3
            # The authority is replaced; the driver and the actor that exist continue, and new ones come.
            command = [sys.executable, "-m", "fray.cli", "ca", "rotate", "--store", str(lab.directory / "store")]
            replaced = await trio.run_process(command, capture_stdout=True)
            assert pins[0] in replaced.stdout.decode()
            await trio.to_thread.run_sync(lab.wait_for, "controller", "authority was replaced")
            assert await counter.add(1) == 4
            async with fray.open_cluster(f"{lab.spec}#{pins[0]}", token=secret) as late:
                assert len(await late.nodes()) == 2
            async with fray.open_cluster(lab.spec, token=lab.token) as late:
                assert len(await late.nodes()) == 2


async def test_a_machine_joins_by_a_token_with_the_fingerprint(lab: TlsLab, tmp_path: Path) -> None:
    async with fray.open_cluster(lab.spec, token=lab.token) as cluster:
        join = await cluster.join_token("gpu-7")
        assert split_pins(join)[1] == split_pins(lab.token)[1]
        (tmp_path / "join").write_text(join)
        lab.start_node("gpu-7", "--join-token-file", str(tmp_path / "join"))
        with trio.fail_after(60):
            await cluster.wait_for_nodes(1)
        await trio.to_thread.run_sync(lab.wait_for, "gpu-7", "issued a certificate")
    log = (tmp_path / "controller.log").read_text()
    assert "issued a certificate for node gpu-7" in log


def fray_command(environ: dict[str, str], *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fray.cli", *words]
    return subprocess.run(command, env=environ, input=stdin, capture_output=True, text=True, check=False, timeout=60)


def test_a_person_logs_in_with_the_printed_line_and_no_impostor_gets_the_key(lab: TlsLab, tmp_path: Path) -> None:
    added = fray_command(lab.environ(FRAY_TOKEN=lab.token), "user", "add", "ada", "--role", "user")
    assert added.returncode == 0, added.stderr
    printed = re.search("`fray (login [^`]+)`", added.stderr)
    assert printed is not None, added.stderr
    ada = {name: value for name, value in os.environ.items() if not name.startswith("FRAY_")}
    ada |= {"PYTHONPATH": os.getcwd(), "XDG_CONFIG_HOME": str(tmp_path / "ada")}
    login = fray_command(ada, *printed[1].split(), stdin=added.stdout)
    assert login.returncode == 0, login.stderr
    assert login.stdout.startswith(f"logged in to {lab.spec} as ada (user) until ")
    jobs = fray_command(ada, "jobs")
    assert jobs.returncode == 0, jobs.stderr
    checked = fray_command(ada, "doctor").stdout
    assert "ok       identity     ada (user), by the key of a login that is valid for 30 days\n" in checked
    assert "ok       certificates accepted: TLS 1.3\n" in checked
    # Another authority answers at the same address.
    lab.kill("controller", signal.SIGTERM)
    (tmp_path / "impostor").mkdir()
    impostor = TlsLab(tmp_path / "impostor")
    impostor.port = lab.port
    try:
        impostor.start_controller()
        impostor.wait_for("controller", "controller started")
        jobs = fray_command(ada, "jobs")
        assert jobs.returncode == 1
        assert "is not the expected server" in jobs.stderr
        elsewhere = ada | {"XDG_CONFIG_HOME": str(tmp_path / "elsewhere")}
        login = fray_command(elsewhere, *printed[1].split(), stdin=added.stdout)
        assert login.returncode == 1
        assert "is not the expected server" in login.stderr
        checked = fray_command(ada, "doctor").stdout
        assert "failed   certificates " in checked
        assert "is not the expected server" in checked
        assert checked.endswith(": compare with `fray ca show` on the controller's machine\n")
        assert "controller   cluster" not in checked
    finally:
        impostor.close()


class Gate:
    """An actor with a call that ends when a file appears."""

    async def wait(self, file: str) -> str:
        while not await trio.Path(file).exists():  # noqa: ASYNC110 (the file is made by another process)
            await trio.sleep(0.05)
        return "open"


async def wait_at(gate: object, file: str) -> str:
    """A job with a call to an actor in another process under way."""
    return str(await gate.wait(file))  # type: ignore[attr-defined]


async def test_the_token_is_replaced_under_a_job_and_calls_in_flight(
    lab: TlsLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def rotate(*more: str) -> str:
        command = [
            sys.executable,
            "-m",
            "fray.cli",
            "key",
            "rotate-token",
            "--store",
            str(lab.directory / "store"),
            *more,
        ]
        return (await trio.run_process(command, capture_stdout=True)).stdout.decode()

    old, copy, opened = lab.token, tmp_path / "copy", tmp_path / "opened"
    copy.write_text(old)
    lab.start_node("n1", "--token-file", str(copy))
    monkeypatch.delenv("FRAY_TOKEN", raising=False)
    monkeypatch.setenv("FRAY_TOKEN_FILE", str(copy))
    with trio.fail_after(150):
        async with fray.open_cluster(lab.spec) as cluster, cluster.open_scope() as scope:
            await cluster.wait_for_nodes(1)
            gate = await scope.create_actor(Gate, name="gate", resources=SMALL)
            waiting = fray.Entrypoint.from_callable(wait_at, args=(gate, str(opened)))
            job = await scope.launch(fray.JobRequest(name="waits", entrypoint=waiting, resources=SMALL))
            call = gate.wait.start(str(opened))
            assert "a new token, and the previous one" in await rotate()
            await trio.to_thread.run_sync(lab.wait_for, "controller", "the cluster's token was replaced")
            new = lab.token
            assert split_pins(new.splitlines()[0])[0] != split_pins(old)[0]
            for token in (old, new):
                async with fray.open_cluster(lab.spec, token=token) as late:
                    assert len(await late.nodes()) == 1
            driver, node = await cluster.previous_token_users()
            assert driver.startswith("driver of ")
            assert node.startswith(f"node n1 (tcp:{HOST}:")
            await trio.Path(copy).write_text(new)
            while await cluster.previous_token_users():  # noqa: ASYNC110 (each dials again within 10 s)
                await trio.sleep(0.2)
            await rotate("--finish")
            await trio.to_thread.run_sync(lab.wait_for, "controller", "a previous token of the cluster is accepted no")
            with pytest.raises(Unauthorized, match="check the token, which may have been replaced"):
                async with fray.open_cluster(lab.spec, token=old):
                    pass
            opened.touch()
            assert await call == "open"
            assert await job == "open"
            assert not job.info.retries
            records = [(one.action, one.outcome) for one in await cluster.audit_records(limit=10_000)]
            assert ("connect", "refused: wrong proof") in records
            assert records.count(("token", "done")) == 2
    log = (lab.directory / "n1.log").read_text()
    assert "no longer a member" not in log


def other_python() -> Path | None:
    """An interpreter of another version beside this one's, as in a directory of pyenv or uv."""
    for minor in range(11, 20):
        found = sorted(Path(sys.base_prefix).parent.glob(f"*3.{minor}.*/bin/python3.{minor}"))
        if minor != sys.version_info.minor and found:
            return found[0]
    return None


OTHER = other_python()
DRIVER = """
import sys, trio
import fray

class Host:
    def version(self):
        return sys.version_info[:2]

async def main():
    async with fray.open_cluster() as cluster, cluster.open_scope() as scope:
        resources = fray.ResourceConfig.with_cpu(cpu=0.1, memory="64MB")
        host = await scope.create_actor(Host, name="host", resources=resources)
        print(await host.version() == sys.version_info[:2])
        print([each.partition(":")[0] for each in host._connection_route().endpoint.addresses])

trio.run(main)
"""


@pytest.mark.skipif(OTHER is None, reason="there is no other Python beside this one")
async def test_actors_of_another_python_than_their_node_have_tls(
    lab: TlsLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert OTHER is not None
    # Where the node finds it.
    monkeypatch.setenv("PATH", f"{OTHER.parent}:{os.environ['PATH']}")
    lab.start_node("n1", "--cache-dir", str(tmp_path / "cache"))
    lab.wait_for("n1", "issued a certificate")
    # The driver has of Fray what an environment of that Python has; nothing compiled for this one can be imported.
    overlay.create(tmp_path / "library")
    environ = lab.environ(PYTHONPATH=str(tmp_path / "library"), FRAY_TOKEN=lab.token)
    with trio.fail_after(100):
        ran = await trio.run_process([str(OTHER), "-P", "-c", DRIVER], env=environ, capture_stdout=True)
    assert ran.stdout.decode().splitlines() == ["True", "['unix', 'tls', 'relay']"]
