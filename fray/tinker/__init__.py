"""Training as a service: OpenTinker's protocol and the Tinker API over `fray.rl`. See docs/tinker.md.

Upwards, each may import those above it:

- `wire`: codecs of what travels, as pure functions. `core`: what decides, without Trio, clocks and files.
- `http_client`: JSON over HTTP. `tinker_client`: client of the Tinker API, of remote trainers.
- `store`, `api_store`: what is on disk. `rewards`: uploaded code, reward servers. `environments`: episodes with the
  environment servers of users. `game`: such a server.
- `training_runner`, `engine`, `adapter_runner`, `adapter_engine`: the process that has the model.
- `kept_engine`: an actor that is started again; `replaced_engine`: answers of one that may be lost.
- `engine_runner`: engine of one job; `job_runner`: training, with a ledger; `inference_runner`: inference.
- `service_jobs`: users and jobs. `opentinker`: routes and client. `tinker_api`: the Tinker API.
- `service`: the actor with the HTTP server.

Importing this package loads neither torch nor Trio; a name loads its module.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fray.tinker.core.engine_scale import EngineRange
    from fray.tinker.opentinker.client import (
        HTTPTrainingClient,
        InferenceSchedulerClient,
        SchedulerClient,
        SchedulerClientLifecycleManager,
        ServiceClient,
    )
    from fray.tinker.service import serve
    from fray.tinker.wire.dataproto import DataProto

_MODULES = {
    "DataProto": "wire.dataproto",
    "EngineRange": "core.engine_scale",
    "HTTPTrainingClient": "opentinker.client",
    "InferenceSchedulerClient": "opentinker.client",
    "SchedulerClient": "opentinker.client",
    "SchedulerClientLifecycleManager": "opentinker.client",
    "ServiceClient": "opentinker.client",
    "serve": "service",
}
"""Module of each public name, in `fray.tinker`."""

__all__ = [
    "DataProto",
    "EngineRange",
    "HTTPTrainingClient",
    "InferenceSchedulerClient",
    "SchedulerClient",
    "SchedulerClientLifecycleManager",
    "ServiceClient",
    "serve",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'fray.tinker' has no attribute {name!r}; it has {', '.join(__all__)}")
    try:
        module = import_module(f"fray.tinker.{_MODULES[name]}")
    except ModuleNotFoundError as error:
        raise ImportError(f"fray.tinker.{name} needs {error.name}: pip install 'fray[tinker]'") from None
    return getattr(module, name)
