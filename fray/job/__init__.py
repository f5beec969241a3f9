"""Job contexts: functions, objects and actors for sync code, in this thread, on threads or on a cluster.

See docs/job-contexts.md. From the bottom up:

- `default_context`: the context that was set, and the context stored in a runtime.
- `wait_set`: waiting for several references; `context`: the interface `JobContext`, and references.
- `local`: `SyncContext` and `ThreadContext`, which copy nothing.
- `remote_function` (functions as they are sent to workers), `handles` (futures and actors) and `fray_context`
  (`FrayContext`): contexts on a cluster, on top of `fray.blocking`.
- `default`: `get_default_job_ctx` and `create_job_ctx`, which choose among them.
"""

from fray.blocking.bridge.objects import ObjectRef
from fray.blocking.bridge.remote_generators import RemoteGenerator
from fray.errors import ObjectLost
from fray.job.context import JobContext
from fray.job.default import create_job_ctx, get_default_job_ctx, set_default_job_ctx
from fray.job.fray_context import FrayContext
from fray.job.handles import JobActor, RunFuture
from fray.job.local import SyncContext, ThreadContext
from fray.model.actors import ActorStatus

__all__ = [
    "ActorStatus",
    "FrayContext",
    "JobActor",
    "JobContext",
    "ObjectLost",
    "ObjectRef",
    "RemoteGenerator",
    "RunFuture",
    "SyncContext",
    "ThreadContext",
    "create_job_ctx",
    "get_default_job_ctx",
    "set_default_job_ctx",
]
