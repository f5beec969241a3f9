"""Reasons why something waits, cannot run, or is out of service: typed data, and their one renderer to text.

Other modules decide *what* the reason is and return a `Reason`; only this module has its wording. Clients can branch on
the kind (`JobInfo.reason_kind`) instead of parsing English.
"""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from enum import Enum
from functools import cache
from typing import Any

from attrs import field, frozen

from fray.model.resources import Capacity, Demand
from fray.model.text import byte_size_text, list_text, plural

_SLICE_HINT = (
    "give each host the attributes slice (one name for all of them) and tpu_worker (0, 1, …): TPU VMs detect them, "
    "for others write them under [attributes] in the file of fray-node --config"
)


class ReasonKind(Enum):
    """Kind of a reason, with its text.

    The text has fields as `str.format`, with the format specs of `_render`. Kinds that are counted over machines or
    slices have a second text, with ``{has}`` and ``{is}`` for the verb.
    """

    def __init__(self, text: str, counted: str = "") -> None:
        self.text, self.counted = text, counted

    @property
    def code(self) -> str:
        """The kind for programs: ``quota_exceeded``."""
        return self.name.lower()

    # A job in the queue
    NEEDS_CAPACITY = "needs {members:?%d times }{demands}{group:? (with its group %s)}; {details}"
    QUEUE_POSITION = "number {number} of {total} in the queue"
    PREEMPTING = "preempts {names}, and starts when {left} {left:#has|have} ended: their capacity is held for it"
    PREEMPTED = "preempts {names}, and starts as soon as all its machines are free: their capacity is held for it"
    HELD_FOR_EARLIER = "held back for {subject}, which came first and has waited for {waited_s:.0f} s or more"
    CAPACITY_CLAIMED = "the free capacity of {subject} is held for {applicant}, which preempts {names}"
    CAPACITY_PLANNED = (
        "the free capacity of {subject} is held for {applicant}, which starts there in {in_s:.0f} s at the latest"
    )
    START_PLANNED = "planned to start in {in_s:.0f} s at the latest on {names}, which later jobs may use until then"
    MACHINES_HELD = "it has waited so long that the machines it could use are held for it"
    QUOTA_EXCEEDED = "over the quota of {whose} {subject} ({used} in use of {limit})"
    QUOTA_TOO_SMALL = "asks for more than the quota of {whose} {subject} ever allows ({limit})"
    RESERVATION_EMPTY = "waits for reservation {subject}, which is {phase} and holds {units} of {max_units} units"
    RESERVATION_FULL = (
        "waits for room in reservation {subject}: needs {members:?%d times }{demands}; it holds {units} of "
        "{max_units} units{leaving:?, %d of which are being released}, and {others} other {others:#job|jobs}"
    )
    # A job that may not be placed yet
    BACKOFF = "restarts in {wait_s:.1f} s{crash_loop:? (crash loop: it %s)}, after {end}"
    NAME_TAKEN = "waits for the end of {names}, which {names:#has its name and is|have its name and are} being ended"
    SIBLINGS_ENDING = "restarts with its siblings once {names} {names:#has|have} ended"
    GROUP_ENDING = "restarts with its group once {names} {names:#has|have} ended"
    WAITS_WITH_GROUP = "waits with its group {subject}, which {details}"
    RELEASED = "is about to enter the queue"
    # A placed job
    STARTING = "starting on {names}"
    WAITS_FOR_STAGE = "is placed on {nodes}, and starts when {names} of its group {names:#runs|run}"
    CONSTRUCTING = "its constructor has not returned yet"
    ENDING = "ending {living} of {members} members ({cause})"
    MACHINES_SILENT = "silent machines: {names} (given up after {lease_s:.0f} s, or on proof)"
    MACHINE_SILENT = "its machine {subject} is silent"
    # A job group
    GROUP_NEEDS_ROOM = "needs room for all of its {jobs} jobs at once{same:?, in one %s}"
    GROUP_WAITS_FOR = "waits for {names}"
    GROUP_ENDS = "ending {jobs} of its jobs"
    # All machines
    NO_MACHINE = "no machine is connected"
    MACHINES = "of the machines {counts:counts}"
    SLICES = "of the {total} slices of {subject} (of {hosts} hosts) {counts:counts}"
    NO_SLICE = "there is no slice of {subject} (of {hosts} hosts)"
    HOSTS_WITHOUT_SLICE = "{names} {names:#has|have} no slice attribute: " + _SLICE_HINT
    SLICE_HINT = _SLICE_HINT
    # One machine, for one member
    MACHINE = "{subject} {details:and}{names:? (held by %s)}{busy:?; unavailable devices: %s}"
    HAS_ROOM = "has room for a member", "{has} room for a member"
    TOO_SMALL = "has {whole} in all", "{has} too {whole.shortage}"
    IN_USE = "has {free.number} of {whole} free", "{has} too {whole.shortage} free"
    NO_PORTS = "offers no ports", "{has} too few ports free"
    PORTS_IN_USE = "has {free} of the ports {ports} free", "{has} too few ports free"
    LACKS_DEVICES = "has no {subject}", "{is} without {subject}"
    FEW_DEVICES = "has {have:and} in all", "{has} too few {subject}"
    DEVICES_IN_USE = "has {have:and} free", "{has} too few {subject} free"
    OTHER_REGION = "{place:?is in region %s|has no region}", "{is} in another region"
    OTHER_ZONE = "{place:?is in zone %s|has no zone}", "{is} in another zone"
    PREEMPTIBLE = "is preemptible", "{is} preemptible"
    NO_CONTAINERS = "has neither a docker daemon that answers nor podman", "{is} without docker or podman"
    CONSTRAINT = "has {value}", "{is} without {subject}"
    # One machine, for all
    SILENT = "has been silent for {silent_s:.0f} s", "{is} silent"
    CORDONED = "is cordoned by {by}{why:? (%s)}{left_s:?; jobs have %.0f s left to end by themselves}", "{is} cordoned"
    DRAINING = (
        "is being drained by {by}{why:? (%s)}{left_s:?; jobs have %.0f s left to end by themselves}",
        "{is} draining",
    )
    DRAINED = "is drained by {by}{why:? (%s)}", "{is} drained"
    LEAVING = "is leaving: {why}", "{is} leaving"
    RETURNING = "is being returned to its provider", "{is} leaving"
    QUARANTINED = (
        "is in quarantine ({why}){last:?; the last probe reported: %s}; {next_s:?next probe in %.0f s|being probed}",
        "{is} quarantined",
    )
    STRAY_ATTEMPTS = "is still ending {names}", "{is} not ready yet"
    NOT_REPORTED = "has not reported what it holds yet", "{is} not ready yet"
    # One TPU slice
    SLICE_FREE = "", "{is} free"
    SLICE_INCOMPLETE = "", "{is} without {missing} of its hosts"
    SLICE_CLOSED = "", "{is} with hosts that are not available"
    SLICE_AMBIGUOUS = "", "{is} several under one name, or with two hosts of one number"
    SLICE_REFUSED = "", "{is} not where it may run"
    SLICE_IN_USE = "", "{is} in use"
    SLICE_SMALL = "", "{is} with too little CPU, memory, disk or ports free on a host"
    # Machines of providers
    MACHINES_REQUESTED = "on their way: {groups}"
    GROUP_STOPPED = "group {subject} is stopped until the policy is reloaded: {error}"
    PROVIDER_UNLISTED = "provider {subject} has not listed its machines yet{error:?: %s}"
    ZONE_BACKOFF = "group {subject}{zone:? in %s} is in back-off for {left_s:.0f} s after {cause}: {message}"
    GROUP_AT_MAX = "group {subject} is at its max"
    REQUEST_LIMIT = "this plan's limit of requested units is reached; the next plan requests more"
    SPEND_LIMIT = "the spend limit is reached: a unit of {subject} costs {price:g} an hour, {left:g} is left"
    # No machine could ever hold it
    CLUSTER_EMPTY = "it needs {demands}, and there is no machine"
    CLUSTER_SMALL = "it needs {members} members of {demands} each, and all machines together hold {held}"
    CLUSTER_SLICES = "it needs {slices:#a slice|%d whole slices} of {demands} a host; {details}"
    CLUSTER_LACKS = "it needs {demands}; {details}"
    LARGEST_MACHINE = "it needs {demands}; the largest machine is {subject}: {capacity}"
    NO_LOCALITY = "no machine is in {key} {places:or}{names:?; there is %s}"
    NO_ATTRIBUTE = "no machine meets {subject}{names:?; there is %s}{keys:?; attributes are %s}"
    NO_DEVICE = "no machine has {subject}{names:?; there is %s}"
    CONTRADICTION = "{details:and}, and regions={regions}: write zones of those regions, or leave out one of the two"
    ZONE_IN_REGION = "zone {subject} is in region {names:or}"


@frozen
class Quantity:
    """Amount of CPU (thousandths), memory, disk (bytes) or ports."""

    resource: str
    amount: int

    def __str__(self) -> str:
        if self.resource == "cpu":
            return cpus_text(self.amount)
        return f"{self.number} {self.resource}"

    @property
    def number(self) -> str:
        """The amount without the resource: ``1.5``, ``3 GB``."""
        if self.resource == "cpu":
            return f"{self.amount / 1000:g}"
        return byte_size_text(self.amount) if self.resource in ("memory", "disk") else str(self.amount)

    @property
    def shortage(self) -> str:
        """``few CPUs``, ``little memory``."""
        return {"cpu": "few CPUs", "ports": "few ports"}.get(self.resource, f"little {self.resource}")


@frozen(init=False)
class Reason:
    """A reason, as data.

    Attributes:
        kind: what the reason is.
        subject: the machine, job, group, quota or resource it is about; empty: the job itself.
        names: others that are involved.
        details: reasons behind this one.
        amounts: numbers, quantities and other values, by their name in the text of the kind.
    """

    kind: ReasonKind
    subject: str
    names: tuple[str, ...]
    details: tuple[Reason, ...]
    amounts: Mapping[str, Any] = field(hash=False)
    _text: str | None = field(default=None, init=False, eq=False, repr=False)

    def __init__(
        self,
        kind: ReasonKind,
        subject: str = "",
        names: Iterable[str] = (),
        details: Iterable[Reason] = (),
        **amounts: Any,
    ) -> None:
        self.__attrs_init__(kind, subject, tuple(names), tuple(details), amounts)

    def __str__(self) -> str:
        if self._text is None:  # the counts of all machines are shared by all jobs with the same demand
            object.__setattr__(self, "_text", self._format(self.kind.text))
        assert self._text is not None
        return self._text

    def count_text(self, count: int) -> str:
        """Return the reason as that of ``count`` machines or slices: ``2 have too few CPUs free``."""
        verbs = {"is": "is" if count == 1 else "are", "has": "has" if count == 1 else "have"}
        return f"{count} {self._format(self.kind.counted, **verbs)}"

    def _format(self, template: str, **verbs: str) -> str:
        values = {"subject": self.subject, "names": self.names, "details": self.details, **self.amounts, **verbs}
        return _render(template, values)


def reasons_text(reasons: Iterable[Reason]) -> str:
    """Return reasons as one line."""
    return "; ".join(map(str, reasons))


def count_reasons(reasons: Iterable[Reason]) -> tuple[tuple[int, Reason], ...]:
    """Return how many reasons have the same counted text, each with one of them, in the order of the first."""
    firsts: dict[Hashable, Reason] = {}
    numbers: Counter[Hashable] = Counter()
    for reason in reasons:  # perhaps of thousands of machines: a key is cheap, a text is not
        key = (
            reason.kind,
            reason.subject,
            getattr(reason.amounts.get("whole"), "resource", ""),
            reason.amounts.get("missing"),
        )
        firsts.setdefault(key, reason)
        numbers[key] += 1
    found: dict[str, tuple[int, Reason]] = {}
    for same, reason in firsts.items():
        count, first = found.get(text := reason.count_text(1), (0, reason))
        found[text] = count + numbers[same], first
    return tuple(found.values())


# Formatting -----------------------------------------------------------------------------------------------------------


@cache
def _fields(template: str) -> list[tuple[str, list[str], str]]:
    """Return the literals of a template with the name and the format spec of the field behind each."""
    parsed = string.Formatter().parse(template)
    return [(literal, name.split(".") if name else [], spec or "") for literal, name, spec, _ in parsed]


def _render(template: str, values: Mapping[str, Any]) -> str:
    """Fill in the fields of a template; ``{names}`` lists values.

    Format specs: ``{x:?…%s…|none}``: this text with the value, or the other one if it is None or empty;
    ``{x:#job|%d jobs}``: by the number; ``{x:and}`` and ``{x:or}``: joined by that word; ``{x:counts}``: pairs of
    `count_reasons`. Others are those of `format`.
    """
    parts = []
    for literal, path, spec in _fields(template):
        parts.append(literal)
        if path:
            value = values[path[0]]
            for attribute in path[1:]:
                value = getattr(value, attribute)
            parts.append(_field_text(value, spec))
    return "".join(parts)


def _field_text(value: Any, spec: str) -> str:
    if spec.startswith("?"):
        some, _, none = spec[1:].partition("|")
        if value is None or value in ("", ()):
            return none
        return some % (value if isinstance(value, int | float) else _value_text(value))
    if spec.startswith("#"):
        one, _, many = spec[1:].partition("|")
        number = value if isinstance(value, int) else len(value)
        return one if number == 1 else many.replace("%d", str(number))
    if spec in ("and", "or"):
        return f" {spec} ".join(map(str, value))
    if spec == "counts":
        return ", ".join(reason.count_text(count) for count, reason in value)
    return format(value, spec) if spec else _value_text(value)


def _value_text(value: Any) -> str:
    if isinstance(value, Capacity):
        return capacity_text(value)
    if not isinstance(value, tuple) or not value:
        return str(value)
    if isinstance(value[0], Demand):
        return demand_text(*value)
    if isinstance(value[0], Reason):
        return reasons_text(value)
    return str(value[0]) if len(value) == 1 else list_text(value)


# Resources ------------------------------------------------------------------------------------------------------------


def cpus_text(milli: int) -> str:
    """Return ``1 CPU``, ``2.5 CPUs``."""
    return f"{milli / 1000:g} CPU" + ("" if milli == 1000 else "s")


def device_text(demand: Demand) -> str:
    """Return the device without its number: ``gpu h100``, ``gpu`` for any variant."""
    return f"{demand.device_kind}" + (f" {demand.device_variant}" if demand.device_variant.lower() != "auto" else "")


def demand_text(demand: Demand, *others: Demand) -> str:
    """Return the demand of one member; with ``others``, any of these devices."""
    parts = [cpus_text(demand.cpu_milli)] if demand.cpu_milli else []
    if demand.memory_bytes:
        parts.append(f"{byte_size_text(demand.memory_bytes)} memory")
    if demand.disk_bytes:
        parts.append(f"{byte_size_text(demand.disk_bytes)} disk")
    if demand.device_count:
        devices = (
            f"{each.device_count} {device_text(each)}" if each.device_count else "none" for each in (demand, *others)
        )
        parts.append(" or ".join(devices))
    if demand.ports:
        parts.append(plural(demand.ports, "port"))
    if demand.regions:
        parts.append(f"region {places_text(demand.regions)}")
    if demand.zones:
        parts.append(f"zone {places_text(demand.zones)}")
    if not demand.preemptible:
        parts.append("a machine that is not preemptible")
    if demand.containers:
        parts.append("docker (a daemon that answers) or podman")
    return ", ".join([*parts, *map(str, demand.constraints)]) or "no resources"


def places_text(places: Sequence[str]) -> str:
    """Return regions or zones as alternatives."""
    return " or ".join(place or "(none)" for place in places)


def capacity_text(capacity: Capacity) -> str:
    """Return the capacity of an empty machine."""
    kinds = Counter(f"{device.kind} {device.variant}" for device in capacity.devices)
    parts = [cpus_text(capacity.cpu_milli), f"{byte_size_text(capacity.memory_bytes)} memory"]
    parts += [f"{count} {kind}" for kind, count in kinds.items()]
    parts += [f"{key} {value}" for key, value in capacity.attributes.items() if key in ("region", "zone")]
    parts += [f"{capacity.ports.count} ports"] if capacity.ports.count else []
    parts += ["preemptible"] if capacity.attributes.get("preemptible", "false").lower() == "true" else []
    return ", ".join(parts)
