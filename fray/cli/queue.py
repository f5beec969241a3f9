"""``fray queue`` and ``fray usage``: waiting jobs, and usage by user."""

from __future__ import annotations

import argparse

from fray.api.cluster import Cluster
from fray.cli.formatting import (
    amount,
    fields,
    span,
    table,
)
from fray.cli.jobs import namespace_text
from fray.cli.output import (
    note,
    say,
    say_json,
    width,
)
from fray.model.messages.usage import (
    QueueEntry,
    QueueInfo,
    TenantUsage,
    UsageInfo,
)
from fray.model.text import byte_size_text


async def queue(cluster: Cluster, options: argparse.Namespace) -> int:
    """Run ``fray queue``."""
    found = await cluster.queue(limit=options.limit, user=options.user)
    if options.json:
        say_json(found)
    else:
        say(queue_table(found, width()))
    return 0


def queue_table(found: QueueInfo, max_width: int | None) -> list[str]:
    """Return one line per waiting entry, in scheduling order."""
    if not found.total:
        return ["the queue is empty"]
    heads = ["#", "ID", "KIND", "USER", "NAMESPACE", "BAND", "TIME", "REQUEST", "REASON"]
    rows = [
        [
            str(entry.position),
            entry.id,
            entry.kind,
            entry.user,
            namespace_text(entry.namespace, max_width),
            entry.band,
            span(entry.waiting_s) if entry.kind != "growth" else "",
            entry.request,
            _why(entry),
        ]
        for entry in found.entries
    ]
    users = ", ".join(f"{user or '(no user)'} {count}" for user, count in sorted(found.by_user.items()))
    more = f"{len(found.entries)} of {found.total} shown; " if len(found.entries) < found.total else ""
    optional = ("NAMESPACE", "KIND", "BAND", "REASON", "REQUEST", "USER", "TIME")
    return [*table(heads, rows, max_width, optional=optional), "", f"{more}waiting by user: {users}"]


def _why(entry: QueueEntry) -> str:
    states = {"borrows": "beyond its quota", "grows": "one more unit, if no other job can use it"}
    return "; ".join(text for text in (states.get(entry.standing, ""), entry.reason) if text)


async def usage(cluster: Cluster, options: argparse.Namespace) -> int:
    """Run ``fray usage``."""
    if options.plot is not None:
        from fray.cli.plot import check_plot, plot

        check_plot(options.plot)
        found = await cluster.usage(samples=True)
        plot(found, options.plot)
        if options.json:
            say_json({"file": options.plot, "samples": len(found.samples)})
        else:
            note(f"{len(found.samples)} samples plotted to {options.plot}")
        return 0
    found = await cluster.usage()
    if options.json:
        say_json(found)
    else:
        say(described(found, width()))
    return 0


def described(found: UsageInfo, max_width: int | None) -> list[str]:
    """Return totals of the cluster, then users with their namespaces, in the order in which they are served."""
    heads = ["USER", "NAMESPACE", "WEIGHT", "SHARE", "MEAN", "SCORE", "WAITING", "USED", "QUOTA", "LIMIT", "BORROWED"]
    rows = [
        _row(tenant) for user in found.users for tenant in (user, *(n for n in found.namespaces if n.user == user.user))
    ]
    # To a user, others are one line, but what they use of a namespace that is shared is not hidden.
    shown = {user.user for user in found.users}
    rows += [[tenant.user, *_row(tenant)[1:]] for tenant in found.namespaces if tenant.user not in shown]
    optional = ("SCORE", "BORROWED", "MEAN", "WEIGHT", "LIMIT", "QUOTA", "WAITING")
    return [
        *fields(totals(found)),
        "",
        *(table(heads, rows, max_width, optional=optional) if rows else ["no usage yet"]),
    ]


def totals(found: UsageInfo) -> list[tuple[str, str]]:
    """Return what is in use of the whole cluster, and how its controller keeps up, as names and values."""
    lines = [(_named(name), _in_use(name, found)) for name in found.capacity]
    lines.append(("half-life", span(found.half_life_s)))
    if found.loop_delay.counts:
        delay = found.loop_delay
        p99_ms, longest_ms = delay.quantile_s(0.99) * 1e3, delay.longest_s * 1e3
        lines.append(("controller", f"loop delay p99 up to {p99_ms:.3g} ms, longest {longest_ms:.3g} ms"))
    return lines


def _named(name: str) -> str:
    """Return the name of a resource as `fray nodes` and `fray explain` show it."""
    return {"cpu": "CPUs", "gpu": "GPUs", "tpu": "TPU chips"}.get(name, name)


def _in_use(name: str, found: UsageInfo) -> str:
    used, capacity = found.used.get(name, 0.0), found.capacity[name]
    if name == "memory":
        return f"{byte_size_text(round(used))} of {byte_size_text(round(capacity))} in use"
    return f"{amount(used)} of {amount(capacity)} in use"


def _row(tenant: TenantUsage) -> list[str]:
    return [
        (tenant.user or "(no user)") if tenant.namespace is None else "",
        "" if tenant.namespace is None else tenant.namespace,
        amount(tenant.weight),
        f"{tenant.share:.1%}",
        f"{tenant.mean:.1%}",
        f"{tenant.score:.4f}",
        str(tenant.waiting),
        _amounts(tenant.used),
        "" if tenant.quota is None else _amounts(tenant.quota),
        "" if tenant.limit is None else _amounts(tenant.limit),
        _amounts(tenant.borrowed),
    ]


def _amounts(found: dict[str, float]) -> str:
    return ", ".join(_amount_text(name, have) for name, have in found.items())


def _amount_text(name: str, have: float) -> str:
    if name == "cpu":
        return f"{amount(have)} CPU{'s' * (have != 1)}"
    return f"{byte_size_text(round(have))} memory" if name == "memory" else f"{amount(have)} {name}"
