"""Local gRPC server of Google's `tpu_v2` service, for the real client library.

It simulates the API only. Its answers come from a `fray.testing.tpu_cloud.TpuCloud`; hosts of nodes are real processes
if `fray.testing.tpu_hosts` is used, else they do not exist::

    cloud = TpuCloud(zones={"us-west4-a": Zone(capacity=16)})
    with serve_tpus(cloud) as endpoint:
        ...   # [group.options] endpoint = endpoint
        cloud.advance(60)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from google.cloud import tpu_v2
from google.cloud.tpu_v2.types import cloud_tpu
from google.longrunning import operations_pb2, operations_pb2_grpc
from google.protobuf.empty_pb2 import Empty

from fray.testing.tpu_cloud import ApiRefusal, Operation, TpuCloud

SERVICE = "google.cloud.tpu.v2.Tpu"


@contextmanager
def serve_tpus(cloud: TpuCloud) -> Iterator[str]:
    """Yield the address of a server that answers from ``cloud``, while the block runs."""
    server = grpc.server(ThreadPoolExecutor(8, thread_name_prefix="tpu-server"))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, _methods(cloud)),))
    operations_pb2_grpc.add_OperationsServicer_to_server(_Operations(cloud), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0.2).wait()


def _methods(cloud: TpuCloud) -> dict[str, grpc.RpcMethodHandler]:
    """Return the handlers of the methods that a provider of machines needs."""

    def handler(request: Any, reply: Any, answer: Callable[[Any], Any]) -> grpc.RpcMethodHandler:
        def serve(query: Any, context: grpc.ServicerContext) -> Any:
            return _answered(cloud, lambda: answer(query), context)

        return grpc.unary_unary_rpc_method_handler(
            serve,
            request_deserializer=request.deserialize,
            response_serializer=reply,
        )

    def operation(made: Operation) -> Any:
        return _operation(made)

    wire = operations_pb2.Operation.SerializeToString
    return {
        "CreateNode": handler(
            tpu_v2.CreateNodeRequest, wire, lambda r: operation(cloud.create_node(r.parent, r.node_id, r.node))
        ),
        "DeleteNode": handler(tpu_v2.DeleteNodeRequest, wire, lambda r: operation(cloud.delete_node(r.name))),
        "GetNode": handler(tpu_v2.GetNodeRequest, tpu_v2.Node.serialize, lambda r: _get(cloud, "GetNode", r.name)),
        "ListNodes": handler(tpu_v2.ListNodesRequest, tpu_v2.ListNodesResponse.serialize, lambda r: _nodes(cloud, r)),
        "CreateQueuedResource": handler(
            tpu_v2.CreateQueuedResourceRequest,
            wire,
            lambda r: operation(cloud.create_queued(r.parent, r.queued_resource_id, r.queued_resource)),
        ),
        "DeleteQueuedResource": handler(
            tpu_v2.DeleteQueuedResourceRequest, wire, lambda r: operation(cloud.delete_queued(r.name, r.force))
        ),
        "GetQueuedResource": handler(
            tpu_v2.GetQueuedResourceRequest,
            tpu_v2.QueuedResource.serialize,
            lambda r: _get(cloud, "GetQueuedResource", r.name),
        ),
        "ListQueuedResources": handler(
            tpu_v2.ListQueuedResourcesRequest,
            tpu_v2.ListQueuedResourcesResponse.serialize,
            lambda r: _queued(cloud, r),
        ),
    }


def _answered(cloud: TpuCloud, answer: Callable[[], Any], context: grpc.ServicerContext) -> Any:
    try:
        with cloud.lock:
            return answer()
    except ApiRefusal as refusal:
        context.abort(grpc.StatusCode[refusal.status], refusal.message)


def _get(cloud: TpuCloud, method: str, path: str) -> Any:
    cloud.record_call(method, path)
    there = cloud.nodes if "/nodes/" in path else cloud.queued
    if path not in there:
        raise ApiRefusal("NOT_FOUND", f"Resource '{path}' was not found")
    return there[path].what


def _nodes(cloud: TpuCloud, query: cloud_tpu.ListNodesRequest) -> cloud_tpu.ListNodesResponse:
    nodes, following = cloud.page_of("ListNodes", query.parent, "nodes", query.page_size, query.page_token)
    return tpu_v2.ListNodesResponse(nodes=nodes, next_page_token=following, unreachable=_missing(cloud, query.parent))


def _queued(cloud: TpuCloud, query: cloud_tpu.ListQueuedResourcesRequest) -> cloud_tpu.ListQueuedResourcesResponse:
    queued, following = cloud.page_of(
        "ListQueuedResources", query.parent, "queuedResources", query.page_size, query.page_token
    )
    missing = _missing(cloud, query.parent)
    return tpu_v2.ListQueuedResourcesResponse(queued_resources=queued, next_page_token=following, unreachable=missing)


def _missing(cloud: TpuCloud, parent: str) -> list[str]:
    return [parent] if parent.rpartition("/")[2] in cloud.unreachable else []


# Operations ----------------------------------------------------------------------------------------------------------


class _Operations(operations_pb2_grpc.OperationsServicer):  # type: ignore[misc]
    def __init__(self, cloud: TpuCloud) -> None:
        self.cloud = cloud

    def GetOperation(self, request: Any, context: grpc.ServicerContext) -> Any:
        def answer() -> Any:
            self.cloud.record_call("GetOperation")
            if request.name not in self.cloud.operations:
                raise ApiRefusal("NOT_FOUND", f"Operation '{request.name}' was not found")
            return _operation(self.cloud.operations[request.name])

        return _answered(self.cloud, answer, context)


def _operation(made: Operation) -> Any:
    found = operations_pb2.Operation(name=made.name, done=made.done)
    found.metadata.Pack(
        tpu_v2.OperationMetadata.pb(tpu_v2.OperationMetadata(target=made.target, verb=made.verb, api_version="v2"))
    )
    if made.error is not None:
        status, message = made.error
        found.error.code, found.error.message = grpc.StatusCode[status].value[0], message
    elif made.done:
        found.response.Pack(Empty() if made.result is None else type(made.result).pb(made.result))
    return found
