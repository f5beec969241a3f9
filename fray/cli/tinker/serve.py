"""``fray tinker``: serves training over HTTP."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import trio

from fray.api.open import default_spec, open_cluster
from fray.cli.formatting import span_of
from fray.cli.output import explained_missing, note, say_json
from fray.errors import InvalidRequest
from fray.model.resources import ResourceConfig


async def serve(options: argparse.Namespace) -> int:
    """Run ``fray tinker serve``."""
    with explained_missing("fray tinker", "tinker"):
        from fray.tinker.service import serve as serve_training
    if bool(options.tls_cert) != bool(options.tls_key):
        raise InvalidRequest("--tls-cert and --tls-key belong together: the certificate and its key, in PEM")
    engines = _engines(options)
    resources = ResourceConfig.with_cpu(options.engine_cpu, options.engine_memory)
    limits, grace_s = _limits(options.limit), span_of(options.client_grace, "--client-grace")
    spec = options.cluster or default_spec()
    # Threads of one process cannot be engines: on one machine, each is a process.
    async with open_cluster("machine" if spec == "local" else spec) as cluster:
        service = serve_training(
            options.base_model,
            directory=options.directory,
            cluster=cluster,
            host=options.host,
            port=options.port,
            auth=True if options.auth else None,
            open_registration=True if options.open_registration else None,
            virtual_gpus=options.virtual_gpus,
            resources=resources,
            engines=engines,
            user_limits=limits,
            client_grace_s=grace_s or 0.0,
            tls=(options.tls_cert, options.tls_key) if options.tls_cert else None,
            insecure=options.insecure,
        )
        async with service as running:
            keys = {name: await running.create_key(name, is_admin=True) for name in options.create_key}
            if options.json:
                found = {"url": running.url, "directory": str(running.directory), "keys": keys}
                say_json(found | ({"ca_file": str(running.ca_file)} if running.ca_file else {}))
            else:
                note(f"serving {', '.join(running.models)} at {running.url}, from {running.directory}")
                if running.ca_file is not None:
                    note(f"clients need its certificate authority: {running.ca_file}, as ca_file or SSL_CERT_FILE")
                for name, key in keys.items():
                    note(f"key of {name}: {key}")
            await trio.sleep_forever()
    return 0


def _engines(options: argparse.Namespace) -> Any:
    """Return the number of engines of ``--engines``. Raises InvalidRequest."""
    from fray.tinker.core.engine_scale import EngineRange

    least, _, most = options.engines.partition("..")
    if not least.isdecimal() or not (most or least).isdecimal() or options.engines.endswith("."):
        raise InvalidRequest(f"--engines {options.engines}: expected a number, or MIN..MAX as in 1..4")
    queue_s, idle_s = span_of(options.engine_queue, "--engine-queue"), span_of(options.engine_idle, "--engine-idle")
    try:
        return EngineRange(int(least), int(most or least), queue_s or 0.0, idle_s or 0.0)
    except ValueError:
        raise InvalidRequest(
            f"--engines {options.engines}: expected MIN..MAX with MIN of at least 1 and MAX of at least MIN, and "
            "--engine-queue and --engine-idle above 0"
        ) from None


def _limits(pairs: Sequence[str]) -> Any:
    """Return the limits of ``--limit NAME=N``. Raises InvalidRequest for an unknown name or no number."""
    from attrs import fields_dict

    from fray.tinker.core.limits import UserLimits

    found: dict[str, int] = {}
    for pair in pairs:
        name, _, number = pair.partition("=")
        if name not in fields_dict(UserLimits) or not number.isdecimal() or not int(number):
            raise InvalidRequest(
                f"--limit {pair}: expected NAME=N with N of at least 1 and one of {', '.join(fields_dict(UserLimits))}"
            )
        found[name] = int(number)
    return UserLimits(**found)
