"""Calls of provider ``tpu``: plain functions on Google's client, which block and are run in threads.

Only this file imports ``google`` and ``grpc``, and only with the first call: the import takes a quarter of a second.
Every call has a deadline and is made once: the scheduler decides what to retry.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from attrs import frozen

from fray.controller.providers.base import MachineRequest, ProviderError
from fray.controller.providers.tpu_options import LABEL_CLUSTER, LABEL_GROUP, TpuOptions, labels, metadata
from fray.controller.providers.tpu_states import SeenNode, SeenQueued, kind_of, refusal
from fray.model.policy.machine_groups import ErrorKind
from fray.model.topology import tpu_topology

if TYPE_CHECKING:
    from google.cloud import tpu_v2

T = TypeVar("T")

Client: TypeAlias = "tpu_v2.TpuClient"

PAGE = 100


@frozen
class TpuZone:
    """Place of units that has a list of its own."""

    endpoint: str
    project: str
    zone: str

    @property
    def parent(self) -> str:
        return f"projects/{self.project}/locations/{self.zone}"


def is_installed() -> bool:
    """Return whether Google's client library is installed. Only its parent packages are imported, which are empty."""
    # `find_spec` does not import the module itself, which takes a quarter of a second.
    return all(find_spec(name) is not None for name in ("grpc", "google", "google.cloud", "google.cloud.tpu_v2"))


def translated(function: Callable[..., T], *args: Any) -> T:
    from google.api_core.exceptions import GoogleAPICallError, RetryError
    from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError
    from grpc import RpcError

    try:
        return function(*args)
    except GoogleAPICallError as error:
        # `from None`: the message is complete, and Google's exception repeats the request, with the token in it.
        raise refusal(_status(error), error.message or str(error)) from None
    except DefaultCredentialsError as error:
        raise ProviderError(
            ErrorKind.PERMISSION,
            f"no credentials for Google: run on a VM with a service account, or set GOOGLE_APPLICATION_CREDENTIALS "
            f"({error})",
        ) from None
    except (GoogleAuthError, RetryError, RpcError) as error:
        raise ProviderError(ErrorKind.TRANSIENT, f"Google cannot be reached: {' '.join(str(error).split())}") from None


def _status(error: Any) -> str:
    code = getattr(error, "grpc_status_code", None)
    return code.name if code is not None else "UNKNOWN"


def open_client(endpoint: str) -> Client:
    from google.cloud import tpu_v2

    # At DEBUG the library logs whole requests, and join tokens are in them.
    logging.getLogger("google.cloud.tpu_v2.services.tpu.transports.grpc").setLevel(logging.INFO)
    if not endpoint:
        return tpu_v2.TpuClient()
    import grpc
    from google.cloud.tpu_v2.services.tpu.transports import TpuGrpcTransport

    return tpu_v2.TpuClient(transport=TpuGrpcTransport(channel=grpc.insecure_channel(endpoint)))


def make_node(
    client: Client,
    place: TpuZone,
    request: MachineRequest,
    options: TpuOptions,
    cluster_id: str,
    call_s: float,
) -> str:
    """Create a node; return the name of the operation, empty if the node exists already."""
    from google.api_core.exceptions import AlreadyExists
    from google.cloud import tpu_v2

    create_request = tpu_v2.CreateNodeRequest(
        parent=place.parent, node_id=request.name, node=_node_message(request, options, cluster_id, queued=False)
    )
    try:
        # `retry=None`: the client's own retries would run past the deadline, and the scheduler decides what to try
        # again.
        return str(client.create_node(create_request, timeout=call_s, retry=None).operation.name)
    except AlreadyExists:
        return ""


def make_queued(
    client: Client,
    place: TpuZone,
    request: MachineRequest,
    options: TpuOptions,
    cluster_id: str,
    call_s: float,
) -> str:
    """Create a queued resource; return as `make_node`."""
    from google.api_core.exceptions import AlreadyExists
    from google.cloud import tpu_v2
    from google.protobuf.duration_pb2 import Duration

    spec = tpu_v2.QueuedResource.Tpu.NodeSpec(
        parent=place.parent, node_id=request.name, node=_node_message(request, options, cluster_id, queued=True)
    )
    queued = tpu_v2.QueuedResource(
        tpu=tpu_v2.QueuedResource.Tpu(node_spec=[spec]),
        queueing_policy=tpu_v2.QueuedResource.QueueingPolicy(
            # Google gives the request up when the scheduler does, so no machine starts that is not wanted any more.
            valid_until_duration=Duration(seconds=max(1, round(request.group.boot_timeout_s)))
        ),
    )
    if request.spot:
        queued.spot = tpu_v2.QueuedResource.Spot()
    if options.reservation:
        queued.reservation_name = f"{place.parent}/reservations/{options.reservation}"
    create_request = tpu_v2.CreateQueuedResourceRequest(
        parent=place.parent, queued_resource_id=request.name, queued_resource=queued
    )
    try:
        return str(client.create_queued_resource(create_request, timeout=call_s, retry=None).operation.name)
    except AlreadyExists:
        return ""


def _node_message(request: MachineRequest, options: TpuOptions, cluster_id: str, *, queued: bool) -> tpu_v2.Node:
    """Build the node. For a queued resource the tier (spot or not) is set on the resource and not on its nodes."""
    from google.cloud import tpu_v2

    node = tpu_v2.Node(
        accelerator_type=tpu_topology(request.group.tpu).variant,
        runtime_version=options.runtime_version,
        network_config=tpu_v2.NetworkConfig(
            network=options.network, subnetwork=options.subnetwork, enable_external_ips=options.external_ips
        ),
        labels=labels(cluster_id, request, options),
        metadata=metadata(request, options),
        tags=list(options.tags),
    )
    if options.service_account:
        node.service_account = tpu_v2.ServiceAccount(email=options.service_account, scope=list(options.scopes))
    if request.spot and not queued:
        node.scheduling_config = tpu_v2.SchedulingConfig(spot=not options.preemptible, preemptible=options.preemptible)
    elif options.reservation and not queued:
        node.scheduling_config = tpu_v2.SchedulingConfig(reserved=True)
    return node


def delete(client: Client, place: TpuZone, name: str, call_s: float) -> None:
    """Delete a queued resource with its node (``force``) or, without one, the node. It is not an error if neither
    exists."""
    from google.api_core.exceptions import NotFound
    from google.cloud import tpu_v2

    # Whatever the policy says by now: the unit may have been made when the group was queued, or was not.
    path = f"{place.parent}/queuedResources/{name}"
    try:
        client.delete_queued_resource(
            tpu_v2.DeleteQueuedResourceRequest(name=path, force=True), timeout=call_s, retry=None
        )
    except NotFound:
        pass
    else:
        return
    try:
        client.delete_node(name=f"{place.parent}/nodes/{name}", timeout=call_s, retry=None)
    except NotFound:
        pass


def list_units(
    client: Client, place: TpuZone, cluster_id: str, call_s: float
) -> tuple[dict[str, SeenNode], dict[str, SeenQueued]]:
    """List what has our label."""
    from google.cloud import tpu_v2

    # Queued resources before nodes: a node that is created in between is in the second list. In the other order its
    # resource would be listed as active without a node.
    queued = {
        seen.name: seen
        for one in _all_pages(
            client.list_queued_resources(
                tpu_v2.ListQueuedResourcesRequest(parent=place.parent, page_size=PAGE), timeout=call_s, retry=None
            ),
            "queued_resources",
        )
        if (seen := _seen_queued(one, place, cluster_id)) is not None
    }
    nodes = {
        one.name.rpartition("/")[2]: _seen_node(one, place)
        for one in _all_pages(
            client.list_nodes(tpu_v2.ListNodesRequest(parent=place.parent, page_size=PAGE), timeout=call_s, retry=None),
            "nodes",
        )
        if one.labels.get(LABEL_CLUSTER) == cluster_id
    }
    return nodes, queued


def _all_pages(pager: Any, what: str) -> Iterable[Any]:
    """Yield every entry of every page; an incomplete list is an error.

    Raises:
        ProviderError: Google could not look everywhere.
    """
    for page in pager.pages:
        if page.unreachable:
            places = ", ".join(page.unreachable)
            raise ProviderError(ErrorKind.TRANSIENT, f"Google cannot list {what.replace('_', ' ')} in {places} now")
        yield from getattr(page, what)


def _seen_node(node: tpu_v2.Node, place: TpuZone) -> SeenNode:
    scheduling = node.scheduling_config
    return SeenNode(
        name=node.name.rpartition("/")[2],
        group=node.labels.get(LABEL_GROUP, ""),
        zone=place.zone,
        state=node.state.name,
        hosts=len(node.network_endpoints),
        spot=scheduling.spot or scheduling.preemptible,
        remark=node.health_description,
    )


def _seen_queued(queued: tpu_v2.QueuedResource, place: TpuZone, cluster_id: str) -> SeenQueued | None:
    """Return None if it is not ours."""
    specs = queued.tpu.node_spec
    if len(specs) != 1 or specs[0].node.labels.get(LABEL_CLUSTER) != cluster_id:
        return None
    state, error, remark = queued.state, None, ""
    if state.state.name == "FAILED":
        status = state.failed_data.error
        error, remark = kind_of(_code_name(status.code), status.message), status.message
    elif state.state.name in ("SUSPENDING", "SUSPENDED"):
        remark = f"by {state.state_initiator.name.lower()}"
    return SeenQueued(
        name=queued.name.rpartition("/")[2],
        group=specs[0].node.labels.get(LABEL_GROUP, ""),
        zone=place.zone,
        state=state.state.name,
        remark=remark,
        error=error,
    )


def poll(client: Client, operation: str, call_s: float) -> tuple[bool, str, str]:
    """Return whether the operation has ended, and its error. An unknown operation has ended."""
    from google.api_core.exceptions import NotFound

    try:
        found = client.transport.operations_client.get_operation(operation, timeout=call_s, retry=None)
    except NotFound:
        return True, "", ""
    if found.done and found.HasField("error"):
        return True, _code_name(found.error.code), found.error.message
    return found.done, "", ""


def _code_name(number: int) -> str:
    from google.rpc.code_pb2 import Code

    return str(Code.Name(number)) if number in Code.values() else "UNKNOWN"


def without(error: ProviderError, token: str) -> ProviderError:
    """Return the error without the join token: Google repeats parts of a request in its errors."""
    secret = token.rpartition(":")[2]
    text = str(error)
    return ProviderError(error.kind, text.replace(secret, "[join token]")) if secret and secret in text else error
