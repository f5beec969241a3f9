"""Resources as users write them: both spellings, device alternatives, attributes, and error messages."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

import attrs
import pytest

from fray.api.jobs.job_spec import build_spec
from fray.errors import InvalidRequest
from fray.model.constraints import Constraint
from fray.model.requests import Entrypoint, JobRequest
from fray.model.resources import CpuConfig, GpuConfig, ResourceConfig, TpuConfig
from fray.model.topology import TPU_FAMILIES, find_topology, topology_rows, tpu_topology

GIB = 1024**3
KNOWN = {
    # chips, hosts, chips of a host: from the tables of the cloud's documentation, written down once more by hand
    "v4-8": (4, 1, 4),
    "v4-16": (8, 2, 4),
    "v4-64": (32, 8, 4),
    "v4-128": (64, 16, 4),
    "v4-384": (192, 48, 4),
    "v4-4096": (2048, 512, 4),
    "v5litepod-1": (1, 1, 1),
    "v5litepod-4": (4, 1, 4),
    "v5litepod-8": (8, 1, 8),
    "v5litepod-16": (16, 4, 4),
    "v5litepod-256": (256, 64, 4),
    "v5p-8": (4, 1, 4),
    "v5p-512": (256, 64, 4),
    "v5p-12288": (6144, 1536, 4),
    "v6e-1": (1, 1, 1),
    "v6e-8": (8, 1, 8),
    "v6e-16": (16, 4, 4),
    "v6e-256": (256, 64, 4),
    "tpu7x-8": (4, 1, 4),
    "tpu7x-128": (64, 16, 4),
}


@pytest.mark.parametrize(("variant", "figures"), KNOWN.items())
def test_a_slice_type_implies_its_chips_and_hosts(variant: str, figures: tuple[int, int, int]) -> None:
    found = tpu_topology(variant)
    assert (found.chips, found.hosts, found.chips_per_host) == figures


def test_all_slice_types_are_whole_hosts_of_whole_chips() -> None:
    for family in TPU_FAMILIES:
        for size in family.all_sizes():
            found = family.topology(size)
            assert found.chips * family.cores_per_chip == size
            assert found.chips == found.hosts * found.chips_per_host
            assert find_topology(found.variant) == found


def test_a_type_has_other_spellings() -> None:
    assert tpu_topology("v5e-16") == tpu_topology("V5litepod-16")
    assert ResourceConfig.with_tpu("v5e-16").demand() == ResourceConfig.with_tpu("v5litepod-16").demand()


@pytest.mark.parametrize(
    ("variant", "near"),
    [
        ("v5litepod-17", "v5litepod-16, v5litepod-32, v5litepod-8"),
        ("v5litepod16", "v5litepod-16"),
        ("v5p-100", "v5p-128"),
        ("v4", "v4-8, v4-16, v4-32"),
        ("v6-8", "v6e-8"),
        ("tensor", "v4-8"),
    ],
)
def test_an_unknown_type_names_similar_types(variant: str, near: str) -> None:
    with pytest.raises(InvalidRequest, match=f"unknown TPU type '{variant}'; similar types: .*{near}"):
        ResourceConfig.with_tpu(variant)


def test_ram_is_an_alias_of_memory_and_zone_of_a_single_zone() -> None:
    lite = ResourceConfig(cpu=1, ram="128m", disk="1g", zone="us-central2-b", regions=["us-central2"])
    assert lite == ResourceConfig(cpu=1, memory="128m", disk="1g", zones=["us-central2-b"], regions="us-central2")
    assert (lite.ram, lite.zone) == ("128m", "us-central2-b")
    assert (lite.demand().memory_bytes, lite.demand().disk_bytes) == (GIB // 8, GIB)
    assert ResourceConfig(memory="2g", ram="2g").memory == "2g"
    assert attrs.evolve(lite, memory="1g").ram == "1g"
    assert pickle.loads(pickle.dumps(lite)) == lite
    assert hash(lite) == hash(attrs.evolve(lite))
    assert ResourceConfig(zones=["a", "b"]).zone is None


def test_alternative_devices_are_given_as_a_list() -> None:
    tpu = ResourceConfig.with_tpu(["v5litepod-16", "v6e-16"], slice_count=2, ram="100g")
    assert tpu.devices == (TpuConfig("v5litepod-16"), TpuConfig("v6e-16"))
    (other,) = tpu.alternatives()
    assert attrs.evolve(other, device_variant="v5litepod-16") == tpu.demand()
    gpu = ResourceConfig.with_gpu(["h100", "a100"], count=4)
    assert [one.device_variant for one in (gpu.demand(), *gpu.alternatives())] == ["h100", "a100"]
    mixed = ResourceConfig(GpuConfig("h100", 2), device_alternatives=[GpuConfig("a100", 4), CpuConfig(), "h100"])
    assert [one.device_count for one in mixed.alternatives()] == [4, 0]


class Nowhere:
    namespace, user, rng = "ns", "", random.Random(0)


def test_a_jobs_spec_has_every_choice_with_the_same_ports() -> None:
    resources = ResourceConfig.with_tpu(["v5e-16", "v6e-16"], slice_count=2, constraints="pool == a")
    request = JobRequest(name="j", entrypoint=Entrypoint.from_binary("true"), resources=resources)
    runtime: Any = Nowhere()
    spec, _ = build_spec(request, runtime)
    assert spec.members == 8
    assert spec.gang
    assert [one.device_variant for one in (spec.demand, *spec.alternatives)] == ["v5litepod-16", "v6e-16"]
    assert {one.ports for one in (spec.demand, *spec.alternatives)} == {2}
    assert spec.demand.constraints == (Constraint("pool", "==", "a"),)


@pytest.mark.parametrize(
    ("text", "constraint"),
    [
        ("pool == a", Constraint("pool", "==", ("a",))),
        ("pool==a", Constraint("pool", "==", ("a",))),
        ("kernel != 5.4", Constraint("kernel", "!=", "5.4")),
        ("disk in ssd, nvme", Constraint("disk", "in", ("ssd", "nvme"))),
        ("nvlink exists", Constraint("nvlink")),
        ("inner == in", Constraint("inner", "==", "in")),
    ],
)
def test_constraints_are_parsed(text: str, constraint: Constraint) -> None:
    assert Constraint.parse(text) == constraint
    assert Constraint.parse(str(constraint)) == constraint
    assert ResourceConfig(constraints=[text]).demand().constraints == (constraint,)


@pytest.mark.parametrize(
    ("text", "attributes", "met"),
    [
        ("pool == a", {"pool": "a"}, True),
        ("pool == a", {"pool": "b"}, False),
        ("pool == a", {}, False),
        ("pool != a", {"pool": "b"}, True),
        ("pool != a", {"pool": "a"}, False),
        ("pool != a", {}, True),
        ("pool in a,b", {"pool": "b"}, True),
        ("pool in a,b", {"pool": "A"}, False),
        ("pool exists", {"pool": "x"}, True),
        ("pool exists", {}, False),
        ("preemptible == false", {}, True),
        ("preemptible == false", {"preemptible": "true"}, False),
    ],
)
def test_attributes_that_satisfy_a_constraint(text: str, attributes: dict[str, str], met: bool) -> None:
    assert Constraint.parse(text).meets(attributes) is met


REFUSED = [
    (lambda: ResourceConfig(cpu=-1), "cpu=-1 must be a number of CPUs, 0 or more"),
    (lambda: ResourceConfig(cpu=float("inf")), "cpu=inf"),
    (lambda: ResourceConfig(cpu=float("nan")), "cpu=nan"),
    (lambda: ResourceConfig(cpu=0, pin_cpus=True), "pin_cpus=True needs whole CPUs"),
    (lambda: ResourceConfig(memory=-1), "memory=-1 is not a valid size"),
    (lambda: ResourceConfig(memory=10**400), "memory=1000"),
    (lambda: ResourceConfig(memory="9" * 400 + "TB"), "memory='9999"),
    (lambda: ResourceConfig(disk=10**5000), "disk=a number of thousands of digits is not a valid size"),
    (lambda: ResourceConfig(cpu=10**400), "cpu=1000"),
    (lambda: ResourceConfig(disk="lots"), "disk='lots' is not a valid size"),
    (lambda: ResourceConfig(memory="1g", ram="2g"), "memory='1g' and ram='2g' mean the same: write one"),
    (lambda: ResourceConfig(zones=["a"], zone="b"), "zone='b' mean the same"),
    (lambda: ResourceConfig(replicas=-1), "replicas=-1 must be a whole number, 1 or more"),
    (lambda: ResourceConfig(replicas=True), "replicas=True"),
    (lambda: ResourceConfig(regions=["us", ""]), "regions=.* must be names"),
    (lambda: ResourceConfig(GpuConfig("h100", 0)), "count=0.* must be a whole number, 1 or more"),
    (lambda: ResourceConfig(TpuConfig("v4-8", count=2)), "the number of slices is set with replicas="),
    (lambda: ResourceConfig("h100"), "must be a CpuConfig, a GpuConfig or a TpuConfig"),
    (lambda: ResourceConfig.with_tpu(["v5e-16", "v4-16"]), "v5e-16 spans 4 hosts and v4-16 2 hosts: .* same number"),
    (lambda: ResourceConfig.with_tpu([]), r"tpu_type=\[\] must be a type or a list of types"),
    (lambda: ResourceConfig(GpuConfig("h100"), device_alternatives="a100"), "must be a list: write"),
    (lambda: ResourceConfig(device_alternatives=["a100"]), "a job without a device has nothing to replace"),
    (lambda: ResourceConfig(constraints="pool = a"), "constraint 'pool = a': invalid syntax; write 'pool == a'"),
    (lambda: ResourceConfig(constraints=["pool =="]), "pool '==' has one value"),
    (lambda: ResourceConfig(constraints=["nvlink exists yes"]), "has no value"),
    (lambda: Constraint("pool", "like", "a"), "there is no operator 'like'"),
    (lambda: Constraint("", "==", "a"), "'': not a valid attribute name"),
]


@pytest.mark.parametrize(("make", "words"), REFUSED)
def test_invalid_resources_are_refused_with_what_to_write_instead(make: Any, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        make()


def test_the_page_shows_all_types() -> None:
    page = (Path(__file__).parents[2] / "docs" / "resources.md").read_text()
    for row in topology_rows():
        assert f"| {' | '.join(row)} |" in page
