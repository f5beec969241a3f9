"""``fray forward``: forward a port of a job to this machine, until Ctrl-C or the job's end."""

from __future__ import annotations

import argparse
import sys

from fray.api.cluster import Cluster
from fray.api.port_forward import open_forward
from fray.cli.output import note, say, say_json
from fray.cli.target import find
from fray.errors import InvalidRequest
from fray.model import job_text


async def forward(cluster: Cluster, options: argparse.Namespace) -> int:
    """Run ``fray forward``."""
    if not 0 <= options.local <= 65535:
        raise InvalidRequest(f"{options.local} is not a valid local port; expected 0 (any free one) to 65535")
    info = await find(cluster, options.job, options)
    async with open_forward(
        info.job_id, options.port, options.local, member=options.member, local_host=options.host
    ) as address:
        if options.json:
            say_json({"job_id": info.job_id, "port": options.port, "address": address})
        else:
            say([address])
        sys.stdout.flush()
        ended = await cluster.wait(info.job_id)
    note(f"{ended.job_id} {job_text.state_text(ended)}")
    return 1
