"""Verbs that take machines out of service, and return them."""

from __future__ import annotations

import argparse

import trio

from fray.api.cluster import Cluster
from fray.cli.formatting import span_of
from fray.cli.nodes import state_of
from fray.cli.output import note, say, say_json
from fray.errors import DeadlineExceeded
from fray.model.messages.maintenance import NodesMarked


async def cordon(cluster: Cluster, options: argparse.Namespace) -> int:
    """Run ``fray cordon``."""
    return print_drain_result(await cluster.cordon(*options.nodes, reason=options.reason), options)


async def uncordon(cluster: Cluster, options: argparse.Namespace) -> int:
    """Run ``fray uncordon``."""
    return print_drain_result(await cluster.uncordon(*options.nodes), options)


async def drain(cluster: Cluster, options: argparse.Namespace) -> int:
    """Run ``fray drain``."""
    deadline_s = span_of(options.deadline, "--deadline")
    with trio.move_on_after(options.timeout if options.timeout is not None else float("inf")):
        marked = await cluster.drain(
            *options.nodes,
            reason=options.reason,
            let_finish=options.let_finish,
            deadline_s=deadline_s,
            wait=options.wait,
        )
        return print_drain_result(marked, options)
    raise DeadlineExceeded(f"jobs still run there after {options.timeout:g} s; the drain continues")


def print_drain_result(marked: NodesMarked, options: argparse.Namespace) -> int:
    """Print the new state of the machines."""
    for line in marked.notes:
        note(line)
    if options.json:
        say_json(marked)
    else:
        say(
            f"{node.name}  {state_of(node)}" + (f"  {node.standing_reason}" if node.standing_reason else "")
            for node in marked.nodes
        )
    return 0
