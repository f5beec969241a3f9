"""Environment servers of a job: their addresses from the interaction configuration, and the server of an instance."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit
from zlib import crc32

from attrs import frozen

from fray.tinker.core.training_config import ConfigError

SHARDS_LIMIT = 1_024
"""Servers of one environment."""
TIMEOUT_S = 60.0
TRIES = 3
TRIES_LIMIT = 20


@frozen
class EnvironmentSettings:
    """Servers of one environment.

    Attributes:
        name: by which prompts choose it.
        urls: of the servers; an instance belongs to that of `shard_of`.
        timeout_s: for one answer.
        tries: of a request, the first one included.
    """

    name: str
    urls: tuple[str, ...]
    timeout_s: float = TIMEOUT_S
    tries: int = TRIES


def shard_of(instance_id: str, count: int) -> int:
    """Return which of ``count`` servers has an instance."""
    return crc32(instance_id.encode()) % count


def environments_of(config: Any) -> dict[str, EnvironmentSettings]:
    """Return the environments of an interaction configuration, by name.

    Args:
        config: ``{"interaction": [{"name": ..., "config": {...}}, ...]}`` as YAML was read; the keys of each ``config``
            are ``env_endpoint`` (or ``env_host`` and ``env_port``), ``env_shards``, ``env_timeout`` and
            ``max_retries``; others are not used.

    Raises:
        ConfigError: it has another form, or a value that cannot be used; the message names it.
    """
    listed = config.get("interaction") if isinstance(config, Mapping) else config
    if isinstance(listed, Mapping):
        listed = [listed]
    if not isinstance(listed, list) or not listed:
        raise ConfigError("interaction config: expected interaction: [{name: ..., config: {env_endpoint: ...}}]")
    found: dict[str, EnvironmentSettings] = {}
    for index, one in enumerate(listed):
        place = f"interaction[{index}]"
        if not isinstance(one, Mapping) or not isinstance(one.get("config"), Mapping):
            raise ConfigError(f"{place}: expected name and config, a mapping with env_endpoint")
        name = one.get("name", "environment")
        if not isinstance(name, str) or name in found:
            raise ConfigError(f"{place}.name: expected a text that no other has, not {_shown(name)}")
        found[name] = _settings_of(name, one["config"], f"{place}.config")
    return found


def _settings_of(name: str, config: Mapping[str, Any], place: str) -> EnvironmentSettings:
    endpoint = config.get("env_endpoint")
    host, port = config.get("env_host", "localhost"), config.get("env_port")
    if endpoint is None and isinstance(host, str) and isinstance(port, int | str):
        endpoint = f"http://{host}:{port}"
    shards = config.get("env_shards", 1)
    if isinstance(shards, bool) or not isinstance(shards, int) or not 1 <= shards <= SHARDS_LIMIT:
        raise ConfigError(f"{place}.env_shards: expected an integer from 1 to {SHARDS_LIMIT}, not {_shown(shards)}")
    timeout = config.get("env_timeout", TIMEOUT_S)
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
        raise ConfigError(f"{place}.env_timeout: expected seconds above 0, not {_shown(timeout)}")
    tries = config.get("max_retries", TRIES)
    if isinstance(tries, bool) or not isinstance(tries, int) or not 1 <= tries <= TRIES_LIMIT:
        raise ConfigError(f"{place}.max_retries: expected an integer from 1 to {TRIES_LIMIT}, not {_shown(tries)}")
    return EnvironmentSettings(name, _urls_of(endpoint, shards, place), float(timeout), tries)


def _urls_of(endpoint: Any, shards: int, place: str) -> tuple[str, ...]:
    """Return the addresses of servers on consecutive ports."""
    wrong = f"{place}.env_endpoint: expected http://host:port, not {_shown(endpoint)}"
    try:
        parts = urlsplit(endpoint) if isinstance(endpoint, str) else urlsplit("")
        port = parts.port
    except ValueError:
        raise ConfigError(wrong) from None
    # An address with a password would be shown in messages.
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc or parts.query:
        raise ConfigError(wrong)
    path = parts.path.rstrip("/")
    if port is None:
        if shards > 1:
            raise ConfigError(f"{wrong}: env_shards={shards} servers have consecutive ports, of which it is the first")
        return (f"{parts.scheme}://{parts.netloc}{path}",)
    if port + shards - 1 > 65_535:
        raise ConfigError(f"{wrong}: {shards} consecutive ports end at {port + shards - 1}, above 65535")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return tuple(f"{parts.scheme}://{host}:{port + index}{path}" for index in range(shards))


def _shown(value: Any) -> str:
    """Return a value of YAML for a message; of a container its kind, as its text may be of any length."""
    is_simple = value is None or isinstance(value, str | int | float)
    return f"{value!r:.100}" if is_simple else f"a {type(value).__name__}"
