"""Life of a node: one membership after the other, ending the attempts of each before the next begins."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable

import trio

from fray.errors import ChannelClosed, ConnectionFailed, FrayError, NodeNameInUse, ProtocolMismatch, Unauthorized
from fray.model.ids import mint
from fray.model.messages.node import NodeGoodbye, NodeLeaves
from fray.net.channel.public import Channel, RedialPolicy, run_dialed
from fray.net.cluster_token import ClusterToken
from fray.net.transport import Credential, CredentialSource, Network
from fray.node.certificate import NodeCertificate
from fray.node.config import NodeConfig
from fray.node.handover.state import NodeHandover
from fray.node.joining import find_credential, with_machine_attribute
from fray.node.launcher import Launcher
from fray.node.linux.process_wait import wait_process_end
from fray.node.membership import ClusterMembership

REMIND_S = 10.0
"""Seconds between warnings that the controller is not reachable."""
REPORTED_S = 5.0
"""Seconds that a leaving node tries to report the last outcomes."""
REJOIN_FIRST_S, REJOIN_MOST_S = 0.5, 10.0

log = logging.getLogger("fray.node")


class _MembershipProxy:
    """Callbacks of the launcher, passed on to the current membership."""

    def __init__(self, config: NodeConfig, launcher: Launcher, certificate: NodeCertificate | None) -> None:
        self.member = ClusterMembership(config, launcher, "")
        self.certificate = certificate
        self.is_adopted = False
        """True if ``member`` continues that of the program before, and is the first one to be run."""
        self.on_member: Callable[[ClusterMembership], None] = lambda member: None
        # The launcher outlives each membership, so its callbacks look up the current one with each call.
        launcher.on_observed = lambda observed, value: self.member.on_observed(observed, value)
        launcher.on_log = lambda attempt_id, chunk: self.member.log_pusher.push(attempt_id, chunk)
        launcher.on_report = lambda attempt_id, report: self.member.on_report(attempt_id, report)
        launcher.on_busy = lambda: self.member.on_busy()
        launcher.in_doubt = lambda: self.member.in_doubt
        launcher.request = lambda message, blobs=(): self.member.request(message, blobs)


async def run_node(
    config: NodeConfig,
    network: Network,
    launcher: Launcher,
    *,
    rng: random.Random,
    leave: trio.Event | None = None,
    certificate: NodeCertificate | None = None,
    adopted: NodeHandover | None = None,
    on_member: Callable[[ClusterMembership], None] = lambda member: None,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run a node until cancelled, until ``leave`` is set, or until the parent process of the config ends.

    Started once it has joined the cluster. Cancelled, or without its parent, it ends its attempts at once. On ``leave``
    it ends them by their termination policies and reports them as preempted; before that, attempts that end by
    themselves have `NodeConfig.drain_s` to do so, while the controller moves the others to other nodes. Without a
    connection it keeps dialing; after `NodeConfig.patience_s` it ends its attempts and joins as a new incarnation.

    Args:
        certificate: of this node, kept valid while it is a member. None: there is no TLS.
        adopted: state of the program that ran in this process before; its membership is continued.
        on_member: called with each membership, before it is dialed.

    Raises:
        NodeNameInUse, Unauthorized, ProtocolMismatch: the controller rejects the node.
        LaunchFailed: the launcher could not start.
    """
    if config.join_token:
        config = with_machine_attribute(config)
    proxy, leave = _MembershipProxy(config, launcher, certificate), trio.Event() if leave is None else leave
    if adopted is not None:
        # Before the launcher runs, which reports what ends from then on.
        proxy.member = ClusterMembership(config, launcher, adopted.incarnation, certificate)
        proxy.member.adopt(adopted)
        proxy.is_adopted = True
    proxy.on_member = on_member
    error: FrayError | None = None
    async with trio.open_nursery() as nursery:
        try:
            await nursery.start(launcher.run)
            if config.parent_pid is not None:
                nursery.start_soon(_end_with, config.parent_pid, nursery.cancel_scope)
            await _run_memberships(proxy, config, network, launcher, rng, leave, task_status)
        except FrayError as reason:
            # Raised outside of the nursery, which would wrap it in an ExceptionGroup.
            error = reason
        nursery.cancel_scope.cancel()
    if error is not None:
        raise error


async def _run_memberships(
    proxy: _MembershipProxy,
    config: NodeConfig,
    network: Network,
    launcher: Launcher,
    rng: random.Random,
    leave: trio.Event,
    task_status: trio.TaskStatus[None],
) -> None:
    """Run one membership after the other, until the node leaves."""
    joined, pause_s, is_started = proxy.is_adopted, REJOIN_FIRST_S, False
    credential = await _find_credential(config, network, rng, leave)
    while credential is not None and not leave.is_set():
        # A new incarnation: the controller may have placed the attempts of the last one elsewhere.
        if not proxy.is_adopted:
            proxy.member = ClusterMembership(config, launcher, mint(rng), proxy.certificate)
        member, proxy.is_adopted = proxy.member, False
        proxy.on_member(member)
        error = await _run_membership(member, credential, network, rng, leave, None if is_started else task_status)
        is_started = is_started or member.channel is not None
        if leave.is_set():
            return
        joined_now = member.channel is not None
        # Also after the first membership has ended: the token was replaced while this machine was away, and comes back
        # into its file.
        if is_final(error, joined_now or (joined and bool(error.details.get("key_refused")))):
            raise error
        log.error(
            "node %s is no longer a member of the cluster and ends its %d attempts: %s",
            config.name,
            len(member.held),
            error,
            extra={"node": config.name, "attempts_ended": len(member.held)},
        )
        # Before the next membership begins: two incarnations must never run attempts at the same time.
        await member.end_all(kill=True)
        member.forget_all()
        pause_s = REJOIN_FIRST_S if joined_now else min(pause_s * 2, REJOIN_MOST_S)
        joined = joined or joined_now
        with trio.move_on_after(pause_s):
            await leave.wait()


async def _find_credential(
    config: NodeConfig, network: Network, rng: random.Random, leave: trio.Event
) -> Credential | CredentialSource | None:
    """Return the credential for dialing; None if ``leave`` was set before the controller granted it."""
    if not config.join_token:
        return ClusterToken(tuple(filter(None, (config.token, config.previous_token))), config.token_file)
    found, refused = None, None
    async with trio.open_nursery() as nursery:

        async def give_up() -> None:
            await leave.wait()
            nursery.cancel_scope.cancel()

        nursery.start_soon(give_up)
        nursery.start_soon(_warn_until_connected, config, trio.CancelScope())
        try:
            found = await find_credential(config, network, rng)
        except FrayError as error:
            refused = error
        nursery.cancel_scope.cancel()
    if refused is not None:
        raise refused
    return found


def is_final(error: FrayError, was_member: bool) -> bool:
    """Return whether the error is permanent, so that joining again cannot succeed."""
    refused = isinstance(error, Unauthorized | ProtocolMismatch) or not isinstance(error, ConnectionFailed)
    # A former member retries after refusals, too: its controller may be in the middle of an upgrade.
    return isinstance(error, NodeNameInUse) or (refused and not was_member)


async def _run_membership(
    member: ClusterMembership,
    credential: Credential | CredentialSource,
    network: Network,
    rng: random.Random,
    leave: trio.Event,
    task_status: trio.TaskStatus[None] | None,
) -> FrayError:
    """Run one membership from dialing to its end. Return why it ended."""
    config = member.config
    async with trio.open_nursery() as nursery:
        reminder = trio.CancelScope()
        nursery.start_soon(_warn_until_connected, config, reminder)
        nursery.start_soon(_leave_in_order, member, leave, nursery.cancel_scope)
        # Before dialing: it ignores attempts that run before it has a nursery.
        await nursery.start(member.health_monitor.run)
        try:
            channel: Channel = await nursery.start(_dial, member, credential, network, rng)
        except FrayError as error:
            nursery.cancel_scope.cancel()
            return error
        reminder.cancel()
        if task_status is not None:
            task_status.started()
        nursery.start_soon(member.report, channel)
        nursery.start_soon(member.metrics.run, channel)
        nursery.start_soon(member.report_details, channel)
        nursery.start_soon(member.tunnels.run)
        nursery.start_soon(member.log_pusher.run, channel)
        nursery.start_soon(member.controller_requests.run, channel)
        if member.certificate is not None:
            nursery.start_soon(member.certificate.run, member.request)
        reason = await channel.wait_ended()
        nursery.cancel_scope.cancel()
        return reason
    return ChannelClosed("the node left the cluster", reason="left")


async def _dial(
    member: ClusterMembership,
    credential: Credential | CredentialSource,
    network: Network,
    rng: random.Random,
    task_status: trio.TaskStatus[Channel] = trio.TASK_STATUS_IGNORED,
) -> None:
    config = member.config
    await run_dialed(
        network,
        [config.controller],
        credential,
        greeting=member.greeting,
        handler=member.attach,
        incarnation=member.incarnation,
        # Time in suspension counts: the controller's lease has run meanwhile.
        policy=RedialPolicy(refused_is_final=False, give_up_s=member.patience_s, excludes_suspension=False),
        rng=rng,
        task_status=task_status,
    )


async def _warn_until_connected(config: NodeConfig, scope: trio.CancelScope) -> None:
    with scope:
        while True:
            await trio.sleep(REMIND_S)
            log.warning(
                "node %s: the controller at %s is not reachable yet; still retrying",
                config.name,
                config.controller,
                extra={"node": config.name, "controller": config.controller},
            )


async def _leave_in_order(member: ClusterMembership, leave: trio.Event, scope: trio.CancelScope) -> None:
    await leave.wait()
    why, drain_s = f"node {member.config.name} leaves the cluster", member.config.drain_s
    # First, so that the controller places nothing here any more and moves what cannot finish.
    member.notify(NodeLeaves(finish_s=drain_s, reason="it was shut down"))
    if drain_s:
        log.info(
            "node %s is draining: %d attempts have %g s to finish or to move to other nodes",
            member.config.name,
            len(member.held),
            drain_s,
            extra={"node": member.config.name},
        )
        with trio.move_on_after(drain_s):
            await member.wait_idle()
    member.leaving = why
    log.info("%s: stopping %d attempts", why, len(member.held), extra={"node": member.config.name})
    await member.end_all(kill=False)
    channel = member.channel
    if channel is not None and channel.error is None:
        with trio.move_on_after(REPORTED_S):
            # Also for a connection, if one is being made again: without a goodbye the controller waits for the lease.
            await member.wait_reported()
            # After the outcomes, which it would otherwise overtake: the controller gives up whatever is left at a
            # goodbye.
            channel.notice(NodeGoodbye(reason=member.leaving))
        await channel.close(member.leaving)
    scope.cancel()


async def _end_with(pid: int, scope: trio.CancelScope) -> None:
    await wait_process_end(pid)
    log.warning("parent process %d exited; stopping all attempts", pid)
    scope.cancel()
