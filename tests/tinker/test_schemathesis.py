"""Schemathesis over every route: each request is answered as documented, none with an error of the server."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import trio

from fray import tinker
from fray.tinker.core.limits import UserLimits
from fray.tinker.opentinker.inference_routes import inference_routes
from fray.tinker.opentinker.scheduler_routes import scheduler_routes
from fray.tinker.opentinker.training_routes import training_routes
from fray.tinker.operations.routes import operator_routes
from fray.tinker.tinker_api.openai_routes import openai_routes
from fray.tinker.tinker_api.routes import tinker_routes
from tests.tinker.api_schema import openapi_of
from tests.tinker.services import REWARD, running
from tests.tinker.test_malformed_requests import CONFIG, bodies_of, routes_of
from tests.tinker.test_tinker_api import Api

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]
COMMAND = ROOT / ".venv-schemathesis/bin/st"
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "missing_required_header",
    "allow_header_conformance",
)
SECONDS = 30
"""Time for its requests."""
JOB = "/jobs/{address}/"
"""Beginning of routes that are there with ``api/v1/`` after it, too."""


@pytest.mark.within(200)
async def test_every_route_answers_what_schemathesis_sends_as_it_is_described(tmp_path: Path) -> None:
    if not COMMAND.is_file():
        pytest.skip("no environment with schemathesis: tools/venv schemathesis makes it")
    async with running(tmp_path / "service", auth=True, user_limits=UserLimits(jobs=1)) as (_, service):
        key = await service.create_key("root", is_admin=True)

        def prepare() -> dict[str, object]:
            api = Api(service.url, key.replace("otk_", "tml-"))
            model = api.model()
            saving = api.post("save_weights", model_id=model, seq_id=1, path="here")
            saved = api.result(saving)["path"]
            scheduler = tinker.SchedulerClient(service.url, key)
            job = scheduler.submit_job({})
            training = tinker.HTTPTrainingClient(scheduler.wait_until_running(job["job_id"])["server_url"])
            training.upload_reward_function("share", REWARD)
            training.set_config(CONFIG)
            training.init_workers(2)
            routes = [
                each
                for made in (scheduler_routes, training_routes, inference_routes)
                for each in routes_of(list(made(None)))  # type: ignore[arg-type]
            ]
            for made in (operator_routes, tinker_routes, openai_routes):
                routes += routes_of(list(made(None, None)))  # type: ignore[arg-type]
            longer = {(method, path.replace(f"{JOB}api/v1/", JOB)) for method, path in routes if f"{JOB}api" in path}
            routes = [each for each in routes if each not in longer]
            bodies = bodies_of(model, model.split(":")[0], saving["request_id"], saved)
            paths = {
                "address": training.server_url.rpartition("/")[2],
                **dict.fromkeys(("job_id", "job", "name", "session_id", "sampler_id", "token"), "none"),
                "run_id": model,
                "path:path": "none",
                "checkpoint_id:path": "weights/here",
                "checkpoint_id": "weights/here",
                "model:path": "tiny",
            }
            return openapi_of(routes, bodies, paths)

        described = await trio.to_thread.run_sync(prepare)
        schema = tmp_path / "openapi.json"
        schema.write_text(json.dumps(described))
        # The same requests each time; after those that cover the schema, others for as long as there is time.
        options = ("--generation-deterministic", "--phases", "coverage,fuzzing", "--max-time", f"{SECONDS}")
        options += ("--request-timeout", "20", "--no-shrink", "--continue-on-failure")
        keys = ("-H", f"Authorization: Bearer {key}", "-H", f"X-API-Key: {key.replace('otk_', 'tml-')}")
        done = await trio.run_process(
            [str(COMMAND), "run", str(schema), "--url", service.url, *options, *keys, "--checks", ",".join(CHECKS)],
            capture_stdout=True,
            stderr=subprocess.STDOUT,
            check=False,
            cwd=tmp_path,
        )
    assert done.returncode == 0, done.stdout.decode()[-8_000:]
