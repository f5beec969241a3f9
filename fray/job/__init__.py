"""The JobContext of before: functions, objects and actors for sync code, here, on threads or on a cluster.

See docs/job-contexts.md.
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
