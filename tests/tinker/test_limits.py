"""Limits of users, each one past its edge; clients that are gone; TLS; programs that end."""

from __future__ import annotations

import datetime
import ipaddress
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fray import tinker
from fray.cli.main import main
from fray.errors import InvalidRequest
from fray.rl.http_access.access import load_authority
from fray.tinker.core.ledger import Ledger, LedgerFull
from fray.tinker.core.limits import UserLimits, is_abandoned
from fray.tinker.http_client import JsonConnection
from fray.tinker.opentinker.client import TrainingServiceError
from tests.tinker.services import MODEL, REWARD, running

pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def batch_of(count: int) -> dict[str, Any]:
    return {"non_tensor_batch": {"raw_prompt": ["407>"] * count, "ground_truth": ["407$"] * count}}


def test_a_client_is_gone_when_nothing_is_unfinished_and_it_is_silent_for_the_grace() -> None:
    assert is_abandoned(10.0, 5.0, 0, 5.0)
    assert not is_abandoned(9.9, 5.0, 0, 5.0)
    assert not is_abandoned(100.0, 5.0, 1, 5.0)
    assert not is_abandoned(100.0, 5.0, 0, 0.0)


def test_a_request_that_is_repeated_needs_no_room() -> None:
    ledger = Ledger()
    first = ledger.receive("train_step", "d", request_id="a", room=1)
    assert ledger.receive("train_step", "d", request_id="a", room=0).seq == first.seq
    with pytest.raises(LedgerFull):
        ledger.receive("train_step", "d", request_id="b", room=0)


async def test_what_is_one_past_a_limit_is_refused_with_its_name(tmp_path: Path) -> None:
    limits = UserLimits(body_bytes=4_000, batch_prompts=4, batch_samples=6, queued_requests=2, jobs=2)
    async with running(tmp_path, user_limits=limits, virtual_gpus=1) as (_, service):

        def converse() -> None:
            scheduler = tinker.SchedulerClient(service.url)
            job = scheduler.submit_job({}, num_gpus=1)
            url = scheduler.wait_until_running(job["job_id"])["server_url"]
            connection = JsonConnection(url)
            exact = b'{"function_name": "f", "source_code": "def f(*a, **k): return 0.5 #%s"}'
            fitting = exact % (b"x" * (4_000 - len(exact) + 2))
            assert connection.request("POST", "/upload_reward_function", fitting).status == 200
            reply = connection.request("POST", "/upload_reward_function", exact % (b"x" * (4_001 - len(exact) + 2)))
            assert reply.status == 413
            assert reply.body["detail"] == "the body is too long; the limit body_bytes of this service is 4000"

            client = tinker.ServiceClient(url)
            config = {"data.max_response_length": 2, "actor_rollout_ref.rollout.n": 2}
            client.set_config(config, reward=("share", REWARD))
            assert client.fit([batch_of(3)]), "six samples"
            with pytest.raises(TrainingServiceError, match="4 prompts with 2 samples each; the limit batch_samples of"):
                client.fit([batch_of(4)])
            assert client.client.validate(batch_of(4))["status"] == "success"
            with pytest.raises(TrainingServiceError, match="5 prompts; the limit batch_prompts of this service is 4"):
                client.client.validate(batch_of(5))

            # The second job waits for the accelerator, and its requests for the job.
            second = scheduler.submit_job({}, num_gpus=1)
            with pytest.raises(
                TrainingServiceError, match="400: 2 of your jobs have not ended; the limit jobs of this"
            ):
                scheduler.submit_job({}, num_gpus=0)
            (secret,) = [
                row[0] for row in _rows(tmp_path, f"SELECT secret FROM jobs WHERE job_id='{second['job_id']}'")
            ]
            waiting = f"/jobs/{second['job_id']}-{secret}"
            impatient = JsonConnection(service.url, timeout_s=0.2)
            for number in range(2):
                with pytest.raises(TimeoutError):
                    impatient.request("POST", f"{waiting}/set_config", {"config_overrides": {"a": number}})
            refused = JsonConnection(service.url).request(
                "POST", f"{waiting}/set_config", {"config_overrides": {"a": 2}}
            )
            assert refused.status == 429
            assert refused.body["detail"] == "too many requests wait; the limit queued_requests of this service is 2"

        await trio.to_thread.run_sync(converse)


def _rows(directory: Path, query: str) -> list[Any]:
    import sqlite3

    with sqlite3.connect(directory / "service.sqlite") as database:
        return list(database.execute(query))


async def test_a_job_ends_when_its_client_is_gone(tmp_path: Path) -> None:
    async with running(tmp_path, client_grace_s=0.4) as (_, service):
        scheduler = tinker.SchedulerClient(service.url)
        job = await trio.to_thread.run_sync(lambda: scheduler.submit_job({}))
        # This asks the service itself, which does not count as a request of the job's client.
        while True:
            if (await service.status())["jobs"][0]["status"] == "CANCELLED":
                break
            await trio.sleep(0.05)
        ended = await trio.to_thread.run_sync(lambda: scheduler.job_status(job["job_id"]))
        assert ended["error_message"] == "no request of its client for 0.4 s, the client grace of this service"


PROGRAM = """
import sys
from fray import tinker
scheduler = tinker.SchedulerClient(sys.argv[1])
job = scheduler.submit_job({})
manager = tinker.SchedulerClientLifecycleManager(scheduler, job["job_id"])
manager.add_cleanup(lambda: print("cleaned up", flush=True))
print(job["job_id"], flush=True)
sys.stdin.readline()
"""


async def test_the_end_of_a_program_completes_its_job_and_a_signal_cancels_it(tmp_path: Path) -> None:
    async with running(tmp_path) as (_, service):

        def converse() -> None:
            scheduler = tinker.SchedulerClient(service.url)
            for number, status, code in (
                (None, "COMPLETED", 0),
                (signal.SIGTERM, "CANCELLED", -signal.SIGTERM),
                (signal.SIGINT, "CANCELLED", -signal.SIGINT),
            ):
                program = subprocess.Popen(
                    [sys.executable, "-c", PROGRAM, service.url],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
                assert program.stdout is not None
                job_id = program.stdout.readline().strip()
                if number is not None:
                    os.kill(program.pid, number)
                # Closes its input: without a signal it ends then.
                assert program.communicate(timeout=60)[0] == "cleaned up\n"
                assert program.returncode == code
                assert scheduler.job_status(job_id)["status"] == status

        await trio.to_thread.run_sync(converse)


def _certificate(directory: Path) -> tuple[Path, Path]:
    """Write a certificate for 127.0.0.1, signed by itself, and its key."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=True)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    chain, secret = directory / "service.crt", directory / "service.key"
    chain.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    secret.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return chain, secret


async def test_beyond_loopback_it_is_tls_with_keys_and_closed_registration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chain, secret = _certificate(tmp_path)
    for options, text in (
        ({"auth": False}, "beyond loopback keys are required"),
        ({"tls": (chain, chain)}, "expected a certificate and its key, in PEM"),
        ({"tls": (chain, tmp_path / "none")}, "No such file or directory"),
    ):
        with pytest.raises(InvalidRequest, match=text):
            async with tinker.serve([MODEL], directory=tmp_path / "s", cluster=None, host="0.0.0.0", **options):
                pass
    async with running(tmp_path / "s", host="0.0.0.0", tls=(chain, secret)) as (_, service):
        assert service.url.startswith("https://0.0.0.0:")
        key = await service.create_key("ada")

        def converse() -> None:
            url = service.url.replace("0.0.0.0", "127.0.0.1")
            with pytest.raises(TrainingServiceError, match="403: registration is closed"):
                tinker.SchedulerClient(url, ca_file=str(chain)).register("eve")
            with pytest.raises(TrainingServiceError, match="401: Authorization header required"):
                tinker.SchedulerClient(url, ca_file=str(chain)).list_jobs()
            with pytest.raises(ConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
                tinker.SchedulerClient(url, key, max_retries=0).list_jobs()
            scheduler = tinker.SchedulerClient(url, key, ca_file=str(chain))
            job = scheduler.submit_job({})
            assert job["server_url"].startswith(f"{url}/jobs/")
            assert tinker.HTTPTrainingClient(job["server_url"], ca_file=str(chain)).health() == {"status": "healthy"}
            # The commands find address, key and certificate in the directory.
            assert main(["tinker", "ls", "--directory", str(tmp_path / "s")]) == 0
            assert job["job_id"] in capsys.readouterr().out

        await trio.to_thread.run_sync(converse)


async def test_without_a_certificate_it_has_an_authority_of_its_own(tmp_path: Path) -> None:
    directory, stranger = tmp_path / "s", tmp_path / "other"
    load_authority(stranger)
    async with running(directory, host="127.0.0.2") as (_, service):
        assert service.url.startswith("https://127.0.0.2:")
        key = await service.create_key("ada")

        def converse() -> None:
            own, other = str(service.ca_file), str(stranger / "http" / "ca.pem")
            assert tinker.SchedulerClient(service.url, key, ca_file=own).list_jobs() == []
            with pytest.raises(TrainingServiceError, match="401: Invalid API key"):
                tinker.SchedulerClient(service.url, "other", ca_file=own).list_jobs()
            with pytest.raises(ConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
                tinker.SchedulerClient(service.url, key, max_retries=0, ca_file=other).list_jobs()
            assert main(["tinker", "ls", "--directory", str(directory)]) == 0

        await trio.to_thread.run_sync(converse)
    assert service.ca_file.read_bytes() == load_authority(directory).chain
