"""Transcripts of the scheduler: each file of ``transcripts/`` is played and compared with what the scheduler answers.

Lines beginning with ``#`` are comments. ``> TIME EVENT …`` is an event (``TIME`` in seconds; see `EVENTS`),
``? …`` is a question (see `QUESTIONS`), and the lines after it, ``< …`` and ``= …``, are the complete answer.
With ``FRAY_WRITE_TRANSCRIPTS=1`` in the environment the answers are written instead of compared.
"""

from __future__ import annotations

import os
import shlex
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from fray.model.actors import ActorInfo
from fray.model.constraints import parse_constraints
from fray.model.job_groups import JobGroupInfo, JobRole
from fray.model.messages.client import Jobs, Names, Reservations
from fray.model.messages.machine_groups import GroupInfo
from fray.model.messages.maintenance import NodesMarked
from fray.model.messages.node import NodeHello
from fray.model.policy.machine_groups import (
    ErrorKind,
    MachineState,
    SeenMachine,
    read_group,
)
from fray.model.policy.parser import read_policy
from fray.model.policy.policy import Policy
from fray.model.policy.priority import Band
from fray.model.reservations import ReservationInfo
from fray.model.resources import Demand
from fray.model.specs import (
    ActorConfig,
    EndReason,
    EntryKind,
    ExitRule,
    JobInfo,
    JobSpec,
    Outcome,
    Phase,
    SupervisedGroup,
    SupervisionStrategy,
)
from fray.model.topology import tpu_topology
from fray.scheduler.autoscaler.view import list_groups, list_machines
from fray.scheduler.effects import (
    CloseSession,
    DeleteBlobs,
    DesiredAttemptsChanged,
    Effect,
    EventRecorded,
    FleetChanged,
    HistoryRecorded,
    JobInfoChanged,
    MachineAnswered,
    MachinesListed,
    NamesChanged,
    PolicyChanged,
    ProbeWanted,
    Refusal,
    Reply,
    ReservationInfoChanged,
    TerminateRequested,
)
from fray.scheduler.explain.explain import explain
from fray.scheduler.explain.forecast import what_if
from fray.scheduler.explain.queue_view import queue_info, usage_info
from fray.scheduler.nodes.view import nodes_info
from fray.scheduler.reservations.view import explain_reservation, reservation_info
from fray.scheduler.state.machine_groups import zone_suffix
from fray.scheduler.state.rows import StoredCheckpoint
from fray.scheduler.state.unit_rows import UnitPhase
from fray.scheduler.views import list_actors
from tests.support.scheduler import Cluster, capacity, demand, ended, job

TRANSCRIPTS = sorted((Path(__file__).parents[1] / "transcripts").glob("*.txt"))

# Events: the words after the time ------------------------------------------------------------------------------------


def options(words: list[str]) -> tuple[list[str], dict[str, str]]:
    """Plain words, and ``key=value`` ones."""
    plain = [word for word in words if "=" not in word]
    return plain, dict(word.split("=", 1) for word in words if "=" in word)


def do_driver(scheduler: Cluster, words: list[str]) -> list[Effect]:
    """``driver SESSION [grace=S]``"""
    plain, more = options(words)
    return scheduler.driver(plain[0], grace_s=float(more.get("grace", 30)))


def do_lost(scheduler: Cluster, words: list[str]) -> list[Effect]:
    """``lost SESSION``: no goodbye"""
    return scheduler.lose(words[0])


def do_bye(scheduler: Cluster, words: list[str]) -> list[Effect]:
    """``bye SESSION``: and tell it when all has ended"""
    return scheduler.close(words[0], ref=scheduler.ref())


def do_process(scheduler: Cluster, words: list[str]) -> list[Effect]:
    """``process ATTEMPT``: it connects, as session ``s-ATTEMPT``"""
    return scheduler.process(words[0])


def do_node(scheduler: Cluster, words: list[str]) -> list[Effect]:
    """``node NAME [INCARNATION] [cpu=N] [gpu=h100*2] [region=R]``"""
    plain, more = options(words)
    size = {key: float(value) if key == "cpu" else value for key, value in more.items()}
    return scheduler.node(plain[0], *plain[1:], **size)


def do_silent(scheduler: Cluster, words: list[str]) -> list[Effect]:
    """``silent NODE``: its connection is gone"""
    return scheduler.silence(words[0])


def do_died(scheduler: Cluster, words: list[str]) -> list[Effect]:
    """``died NODE``: proof"""
    return scheduler.die(words[0])


def do_cordon(scheduler: Cluster, words: list[str]) -> list[Effect]:
    """``cordon SESSION NODE … [reason=…]``"""
    plain, more = options(words)
    return scheduler.cordon(*plain[1:], session=plain[0], reason=more.get("reason", ""))


def do_drain(scheduler: Cluster, words: list[str]) -> list[Effect]:
    """``drain SESSION NODE … [finish=S] [reason=…]``"""
    plain, more = options(words)
    how = {"finish_s": float(more.get("finish", 0)), "reason": more.get("reason", "")}
    return scheduler.cordon(*plain[1:], session=plain[0], drain=True, **how)


def do_uncordon(scheduler: Cluster, words: list[str]) -> list[Effect]:
    """``uncordon SESSION NODE …``"""
    return scheduler.uncordon(*words[1:], session=words[0])


def do_leave(scheduler: Cluster, words: list[str]) -> list[Effect]:
    """``leave NODE [finish=S]``: its process has been asked to end"""
    plain, more = options(words)
    return scheduler.leave(plain[0], float(more.get("finish", 0)))


def do_probed(scheduler: Cluster, words: list[str]) -> list[Effect]:
    """``probed NODE [TROUBLE]``: what it has found"""
    return scheduler.probed(*words)


def do_report(scheduler: Cluster, words: list[str]) -> list[Effect]:
    """``report NODE[#INCARNATION] [all] ATTEMPT:PHASE-or-CAUSE[=CODE or =constructing][:MESSAGE] …``"""
    node, _, incarnation = words[0].partition("#")
    seen = [_seen(word) for word in words[1:] if word != "all"]
    return scheduler.report(node, seen, full="all" in words[1:2], incarnation=incarnation)


def _seen(word: str) -> tuple[str, Phase | Outcome]:
    job_id, generation, member, what, *message = word.split(":", 4)
    cause, mark, code = what.partition("=")  # failure=75: with an exit code
    more: dict[str, Any] = (
        {"constructing": True} if code == "constructing" else {"exit_code": int(code)} if mark else {}
    )
    seen = Phase(what) if what in [phase.value for phase in Phase] else ended(EndReason(cause), *message, **more)
    return f"{job_id}:{generation}:{member}", seen


def do_launch(scheduler: Cluster, words: list[str]) -> list[Effect]:
    """``launch SESSION JOB [cpu=N] [gpu=N] [any=h100+a100] [tpu=TYPE] [must=C] [members=N] [failure=N] [preemption=N]
    [loss=N] [memory=N] [backoff=S]
    [exits=CODE:RULE,…] [band=B] [user=U] [limit=S] [wait=S] [fixed] [actor] [, JOB …]``

    Of an actor also ``restarts=N [period=S] [backoff=S] [overlap] [must_start]``, ``get`` (if it exists), ``detached``,
    and for the members of a supervised group ``group=STRATEGY``.
    """
    specs: list[list[str]] = [[]]
    for word in words[1:]:
        specs[-1].append(word.rstrip(","))
        if word.endswith(","):
            specs.append([])
    return scheduler.ask_launch(*(_spec(words, index) for index, words in enumerate(specs)), session=words[0])


def do_job_group(scheduler: Cluster, words: list[str]) -> list[Effect]:
    """``job_group SESSION NAME [same=region|zone|anywhere] [success=…] [restart=group] [absorb] : JOB [role=R]
    [stage=N] [auxiliary] … [, JOB …]``: a job group; of each job as in ``launch``"""
    at = words.index(":")
    plain, more = options(words[2:at])
    same = more.pop("same", "region")
    config = {"same_region": same == "region", "same_zone": same == "zone", **more}
    if "absorb" in plain:
        config["auxiliary_failure"] = "absorb"
    specs: list[list[str]] = [[]]
    for word in words[at + 1 :]:
        specs[-1].append(word.rstrip(","))
        if word.endswith(","):
            specs.append([])
    return scheduler.ask_group(words[1], *map(_member, specs), session=words[0], **config)


def _member(words: list[str]) -> JobSpec:
    plain, more = options(words)
    role = JobRole(more.get("role", plain[0]), int(more.get("stage", 0)), "auxiliary" in plain)
    return evolve(_spec(words, 0), role=role)


def do_stop_job_group(scheduler: Cluster, words: list[str]) -> list[Effect]:
    """``stop_job_group SESSION NAME``"""
    reason = "terminated on request"
    return scheduler.tell(
        TerminateRequested(session=words[0], ref=scheduler.ref(), jobs=(), reason=reason, group=words[1])
    )


def _actor(plain: list[str], more: dict[str, str]) -> ActorConfig | None:
    if "restarts" not in more:
        return None
    period = float(more["period"]) if "period" in more else None
    return ActorConfig(
        max_restarts=int(more["restarts"]),
        restart_period_s=period,
        backoff_s=float(more.get("backoff", 0)),
        may_overlap="overlap" in plain,
        must_start="must_start" in plain,
    )


def _spec(words: list[str], index: int) -> JobSpec:
    plain, more = options(words)
    strategy = more.get("group")
    need, *others = _choices(plain, more)
    return job(
        plain[0],
        need,
        alternatives=tuple(others),
        job_id=more.get("id", plain[0]),
        members=int(more.get("members", 1)),
        max_retries_failure=int(more.get("failure", 0)),
        max_retries_preemption=int(more.get("preemption", 0)),
        max_retries_machine_loss=int(more["loss"]) if "loss" in more else None,
        max_retries_out_of_memory=int(more["memory"]) if "memory" in more else None,
        exit_codes=_rules(more.get("exits", "")),
        backoff_s=float(more.get("backoff", 0)),
        entry=EntryKind.ACTOR if "actor" in plain else EntryKind.CALLABLE,
        detached="detached" in plain,
        wait_limit_s=float(more["wait"]) if "wait" in more else None,
        actor=_actor(plain, more),
        reservation_id=more.get("in", ""),
        siblings=SupervisedGroup(group_id="g", strategy=SupervisionStrategy(strategy), index=index)
        if strategy
        else None,
        get_if_exists="get" in plain,
        band=Band(more["band"]) if "band" in more else None,
        user=more.get("user", ""),
        time_limit_s=float(more["limit"]) if "limit" in more else None,
    )


def _choices(plain: list[str], more: dict[str, str]) -> list[Demand]:
    """Return the demands of one member: ``any`` of several types of GPU, ``tpu``: all chips of a host of each type."""
    size: dict[str, Any] = {"constraints": parse_constraints(more.get("must")), "preemptible": "fixed" not in plain}
    if "tpu" in more:
        types = [tpu_topology(one) for one in more["tpu"].split("+")]
        chips = [(one.variant, one.chips_per_host) for one in types]
        return [Demand(1000, device_kind="tpu", device_variant=v, device_count=n, **size) for v, n in chips]
    kinds, gpus = more.get("any", "auto").split("+"), int(more.get("gpu", 0))
    return [demand(float(more.get("cpu", 1)), gpu=gpus, variant=kind, **size) for kind in kinds]


def _rules(text: str) -> dict[int, ExitRule]:
    return {int(code): ExitRule(rule) for code, _, rule in (part.partition(":") for part in text.split(",") if part)}


def do_reserve(scheduler: Cluster, words: list[str]) -> list[Effect]:
    """``reserve SESSION NAME [cpu=N] [gpu=N] [min=N] [max=N] [ttl=S] [notice=S] [priority=N] [band=B]``"""
    plain, more = options(words)
    least = int(more.get("min", 1))
    return scheduler.ask_reservation(
        plain[1],
        demand(float(more.get("cpu", 1)), gpu=int(more.get("gpu", 0))),
        plain[0],
        min_units=least,
        max_units=int(more.get("max", least)),
        ttl_s=float(more.get("ttl", 3600)),
        notice_s=float(more.get("notice", 0)),
        priority=int(more.get("priority", 0)),
        band=Band(more["band"]) if "band" in more else None,
    )


def do_renew(scheduler: Cluster, words: list[str]) -> list[Effect]:
    """``renew SESSION NAME``"""
    return scheduler.renew(words[1], session=words[0])


def do_release(scheduler: Cluster, words: list[str]) -> list[Effect]:
    """``release SESSION NAME``: give a reservation back"""
    return scheduler.release(words[1], session=words[0])


def do_terminate(scheduler: Cluster, words: list[str]) -> list[Effect]:
    """``terminate SESSION JOB …``"""
    return scheduler.terminate(*words[1:], session=words[0])


def do_register(scheduler: Cluster, words: list[str]) -> list[Effect]:
    """``register SESSION NAME ACTOR [exclusive]``"""
    session, name, actor = words[:3]
    return scheduler.tell(scheduler.registration(name, actor, session, "exclusive" in words))


def do_checkpoint(scheduler: Cluster, words: list[str]) -> list[Effect]:
    """``checkpoint SESSION NUMBER BLOB``: an actor's process hands in its state"""
    return scheduler.checkpoint(words[0], int(words[1]), words[2])


def do_tick(scheduler: Cluster, words: list[str]) -> list[Effect]:
    """``tick``: all that is due up to this time, each at its own"""
    return scheduler.tick(float(words[0]))


def do_restart(scheduler: Cluster, words: list[str]) -> list[Effect]:
    """``restart``: the controller dies and starts again on its store"""
    return scheduler.restart(**scheduler.restarted)


def do_declare(scheduler: Cluster, words: list[str]) -> list[Effect]:
    """``declare NODE cpu=N …``: start the controller with these machines and no others"""
    plain, more = options(words)
    hello = NodeHello(node=plain[0], incarnation="i1", boot_id="b", capacity=capacity(float(more["cpu"])))
    return scheduler.restart(declares_all_nodes=True, declared=(hello,))


def do_terms(scheduler: Cluster, words: list[str]) -> list[Effect]:
    """``terms LINE …``: the operator writes another policy, a line of TOML a word"""
    scheduler.restarted = {"policy": read_policy(tomllib.loads("\n".join(words)))}
    return scheduler.tell(PolicyChanged(**scheduler.restarted))


def do_policy(scheduler: Cluster, words: list[str]) -> list[Effect]:
    """``policy [spend=N] GROUP [key=value] … [, GROUP …]``: start the controller with these groups of machines"""
    tables: list[dict[str, Any]] = []
    for part in " ".join(words).split(","):
        plain, more = options(shlex.split(part))
        if plain:
            shape = {key: _value(key, value) for key, value in more.items() if key != "spend"}
            tables.append({"name": plain[0], "provider": "tpu"} | shape)
    _, more = options(words)
    spend = float(more["spend"]) if "spend" in more else None
    scheduler.restarted = {
        "policy": Policy(groups=tuple(map(read_group, tables)), spend_limit_per_hour=spend),
        "cluster": "c",
    }
    return scheduler.restart(**scheduler.restarted)


def _value(key: str, value: str) -> object:
    if key == "zones":
        return value.split("+")
    if key in ("min", "max", "buffer", "cpu", "idle_s", "boot_timeout_s", "price_per_hour"):
        return int(value)
    return value == "yes" if key == "spot" else value


def do_answer(scheduler: Cluster, words: list[str]) -> list[Effect]:
    """``answer UNIT made|deleted|stockout|quota|invalid|permission|transient [MESSAGE]``: what came of an order"""
    error = None if words[1] in ("made", "deleted") else ErrorKind(words[1])
    unit = scheduler.state.fleet.units[words[0]]
    deleted = unit.phase is UnitPhase.DELETING
    return scheduler.tell(MachineAnswered(name=words[0], is_delete=deleted, error=error, message=" ".join(words[2:])))


def do_list(scheduler: Cluster, words: list[str]) -> list[Effect]:
    """``list [UNIT[=STATE] …]``: all that the provider has"""
    machines = []
    for word in words:
        name, _, state = word.partition("=")
        unit = scheduler.state.fleet.units.get(name)
        group, zone, hosts = (unit.group, unit.zone, unit.hosts) if unit else (name.split("-")[0], "", 1)
        machines.append(SeenMachine(name, group, zone, MachineState(state or "running"), hosts))
    return scheduler.tell(MachinesListed(provider="tpu", machines=tuple(machines), asked_at=scheduler.now))


EVENTS: dict[str, Callable[[Cluster, list[str]], list[Effect]]] = {
    name.removeprefix("do_"): function for name, function in list(globals().items()) if name.startswith("do_")
}

# Effects as lines -----------------------------------------------------------------------------------------------------


def effect_line(scheduler: Cluster, effect: Effect) -> str:
    """Return one effect as one line."""
    match effect:
        case EventRecorded(event=event):
            return f"log {event.job or 'cluster'}: {event.what}" + (f": {event.text}" if event.text else "")
        case DesiredAttemptsChanged(node=node, changed=changed, gone=gone):
            return f"desired {node}: " + "; ".join(
                [*(desired_line(scheduler, a) for a in changed), *(f"drop {a}" for a in gone)]
            )
        case Reply(session=session, message=Jobs(jobs=infos)):
            return f"reply {session}: " + ", ".join(f"{info.job_id} {info.state.value}" for info in infos)
        case Reply(session=session, message=NodesMarked(nodes=nodes, notes=lines)):
            marks = ", ".join(f"{node.name} {node.standing or 'in service'}" for node in nodes)
            return f"reply {session}: {marks}" + "".join(f"; {line}" for line in lines)
        case Reply(session=session, message=Reservations(reservations=infos)):
            return f"reply {session}: " + ", ".join(map(reserved_line, infos))
        case ReservationInfoChanged(reservation_id=name):
            return f"reservation {reserved_line(reservation_info(scheduler.state, name))}"
        case Reply(session=session):
            return f"reply {session}: done"
        case Refusal(session=session, error=error):
            return f"refuse {session}: {type(error).__name__}: {error}"
        case JobInfoChanged(job_id=job_id):
            return f"job {info_line(scheduler.info(job_id))}"
        case NamesChanged(key=key):
            return f"names {names_line(scheduler.names(key))}"
        case ProbeWanted(node=node):
            return f"probe {node}"
        case CloseSession(session=session, reason=reason):
            return f"over {session}: {reason}"
        case FleetChanged():
            units = [scheduler.state.fleet.units[name] for name in scheduler.state.fleet.pending_orders]
            lines = (f"{'make' if u.phase is UnitPhase.WANTED else 'delete'} {u.name}{zone_suffix(u)}" for u in units)
            return f"orders: {', '.join(lines)}"
        case DeleteBlobs(blobs=blobs):
            return f"forget {', '.join(blobs)}"


def desired_line(scheduler: Cluster, attempt: str) -> str:
    found = scheduler.state.desired_attempt(attempt)
    if found is None:
        return f"drop {attempt}"
    devices = f" with {','.join(found.devices)}" if found.devices else ""
    return f"stop {attempt} ({found.stop_cause.value})" if found.stop else f"hold {attempt}{devices}"


def info_line(info: JobInfo) -> str:
    why = info.error_message or info.reason
    return f"{info.job_id} {info.state.value}" + (f": {why}" if why else "")


def queue_lines(scheduler: Cluster) -> Iterator[str]:
    for one in queue_info(scheduler.state, 100, None, scheduler.now).entries:
        yield f"{one.position} {one.id} of {one.user} ({one.band}, {one.standing})" + (
            f": {one.reason}" if one.reason else ""
        )


def usage_lines(scheduler: Cluster) -> Iterator[str]:
    for one in usage_info(scheduler.state, scheduler.now).users:
        yield f"{one.user}: share {one.share:.3f}, mean {one.mean:.3f}, score {one.score:.3f}"


def reserved_line(info: ReservationInfo) -> str:
    units = ", ".join("+".join(unit.nodes) + (" (leaving)" if unit.leaving else "") for unit in info.units)
    return f"{info.reservation_id} {info.state.value} [{units}]: {info.reason}"


def names_line(names: Names) -> str:
    actors = ", ".join(f"{e.actor_id}@{e.incarnation}" for e in names.endpoints) or "no actor"
    return f"{names.key}: {actors}" + (f" ({names.ended.cause.value}: {names.ended.message})" if names.ended else "")


def kept_line(kept: StoredCheckpoint | None) -> str:
    return f"{kept.blob}, number {kept.number} of {kept.attempt_id}" if kept else "nothing is kept"


def job_group_lines(info: JobGroupInfo) -> Iterator[str]:
    why = info.error_message or info.reason
    at = f" in {info.same} {info.place}" if info.place else ""
    yield f"{info.name} {info.state}{at}" + (f": {why}" if why else "")
    for each in info.members:
        kind = ", auxiliary" if each.auxiliary else ""
        yield f"  {each.name} ({each.role}, stage {each.stage}{kind}) {each.state}" + ", absorbed" * each.absorbed


def actor_line(info: ActorInfo) -> str:
    return f"{info.name} {info.status.value}" + (f": {info.reason}" if info.reason else "")


def group_line(info: GroupInfo) -> str:
    rests = "".join(f"; {r.zone or 'it'} rests {r.remaining_s:.0f} s after {r.kind}" for r in info.backoffs)
    counts = f"wanted {info.wanted}, asked {info.asked}, seen {info.seen}, joined {info.joined}, leaving {info.leaving}"
    return f"{info.name}: {counts}{rests}" + (f"; stopped: {info.stopped}" if info.stopped else "")


# Questions ------------------------------------------------------------------------------------------------------------

QUESTIONS: dict[str, Callable[[Cluster, list[str]], Iterator[str]]] = {
    "explain": lambda scheduler, words: iter(explain(scheduler.state, words[0], scheduler.now).splitlines()),
    "queue": lambda scheduler, words: queue_lines(scheduler),
    "usage": lambda scheduler, words: usage_lines(scheduler),
    "job": lambda scheduler, words: iter([info_line(scheduler.info(words[0]))]),
    "names": lambda scheduler, words: iter([names_line(scheduler.names(words[0]))]),
    "what_if": lambda scheduler, words: iter(what_if(scheduler.state, _spec(words, 0)).text.splitlines()),
    "node": lambda scheduler, words: (
        f"{node.name} {node.standing or 'in service'}"
        + (f": it {node.standing_reason}" if node.standing_reason else "")
        for node in nodes_info(scheduler.state)
        if node.name in words
    ),
    "wanted": lambda scheduler, words: iter(
        [desired_line(scheduler, attempt) for attempt in scheduler.desired(words[0])] or ["nothing"]
    ),
    "actors": lambda scheduler, words: map(actor_line, list_actors(scheduler.state)),
    "state": lambda scheduler, words: iter([kept_line(scheduler.state.jobs[words[0]].checkpoint)]),
    "groups": lambda scheduler, words: map(group_line, list_groups(scheduler.state)),
    "machines": lambda scheduler, words: (f"{m.name} {m.phase}: {m.reason}" for m in list_machines(scheduler.state)),
    "job_group": lambda scheduler, words: job_group_lines(scheduler.group(words[0])),
    "reservation": lambda scheduler, words: iter(explain_reservation(scheduler.state, words[0]).splitlines()),
    "deadline": lambda scheduler, words: iter([f"{scheduler.state.next_deadline()}"]),
}

# Playing --------------------------------------------------------------------------------------------------------------


def play(text: str) -> str:
    """Play a transcript: return its events and questions, each with the answers of the scheduler."""
    scheduler = Cluster()
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith(("<", "=")):
            continue
        lines.append(line)
        if line.startswith(">"):
            lines += [f"< {answer}" for answer in event_answers(scheduler, shlex.split(line[1:]))]
        elif line.startswith("?"):
            verb, *words = shlex.split(line[1:])
            lines += [f"= {answer}" for answer in QUESTIONS[verb](scheduler, words)]
    return "\n".join(lines) + "\n"


def event_answers(scheduler: Cluster, words: list[str]) -> list[str]:
    time, verb, *rest = words
    if verb == "tick":
        rest = [time]
    else:
        scheduler.now = float(time)
    # What is recorded for the history has its own tests (test_history.py).
    effects = (effect for effect in EVENTS[verb](scheduler, rest) if not isinstance(effect, HistoryRecorded))
    return [effect_line(scheduler, effect) for effect in effects] or ["nothing"]


@pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=[transcript.stem for transcript in TRANSCRIPTS])
def test_the_scheduler_replays_the_transcript(transcript: Path) -> None:
    written = transcript.read_text()
    played = play(written)
    if os.environ.get("FRAY_WRITE_TRANSCRIPTS"):
        transcript.write_text(played)
    else:
        assert played.splitlines() == written.splitlines()


def test_there_are_transcripts() -> None:
    assert len(TRANSCRIPTS) >= 10
