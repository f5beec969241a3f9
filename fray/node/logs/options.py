"""Command line options of `fray-node` about logs of attempts."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from fray.errors import InvalidRequest
from fray.model.resources import parse_bytes
from fray.node.config import LogRules
from fray.node.logs.writer import SEGMENT_LIMIT_BYTES

FILE_KEYS: dict[str, Any] = {
    "logs_attempt": (int, str),
    "logs_total": (int, str),
    "logs_age_s": (int, float),
    "logs_archive": str,
}
# The segment that is being written is never removed, so a smaller limit could not be kept.
LEAST_BYTES = 2 * SEGMENT_LIMIT_BYTES


def add_log_options(parser: argparse.ArgumentParser) -> None:
    found = LogRules()
    parser.add_argument(
        "--logs-attempt", metavar="SIZE", help="limit for the log of one attempt, as 1GB (default: 256 MiB)"
    )
    parser.add_argument("--logs-total", metavar="SIZE", help="limit for all logs together (default: 10 GiB)")
    parser.add_argument(
        "--logs-age-s",
        type=float,
        metavar="S",
        help=f"retention of logs after an attempt's end (default: {found.age_s:g}, a week)",
    )
    parser.add_argument(
        "--logs-archive", metavar="URL", help="archive logs there, as gs://bucket/logs or file:///shared/logs (fsspec)"
    )


def log_rules(settings: Mapping[str, Any]) -> LogRules:
    """Return the limits. Raises InvalidRequest for an invalid amount."""
    found = LogRules()
    sizes = {
        name: parse_bytes(settings[key], key) if key in settings else default
        for name, key, default in (
            ("attempt_bytes", "logs_attempt", found.attempt_bytes),
            ("total_bytes", "logs_total", found.total_bytes),
        )
    }
    if min(sizes.values()) < LEAST_BYTES:
        raise InvalidRequest(f"logs_attempt and logs_total must be {LEAST_BYTES} bytes or more each")
    age_s = float(settings.get("logs_age_s", found.age_s))
    # Written like this, NaN is refused, too.
    if not age_s > 0:
        raise InvalidRequest(f"logs_age_s={age_s:g} must be more than 0 seconds")
    return LogRules(**sizes, age_s=age_s, archive=settings.get("logs_archive", ""))
