"""The dashboard for Grafana: its form, and every query of it at a Prometheus that scrapes a real cluster."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fray.monitoring.exposition import ClusterNumbers, exposition
from tests.monitoring.test_exposition import counts, usage

DASHBOARD = Path(__file__).parents[2] / "deploy/grafana/fray.json"
NAME = re.compile(r"\bfray_\w+")


def dashboard() -> dict[str, Any]:
    found = json.loads(DASHBOARD.read_text())
    assert isinstance(found, dict)
    return found


def queries() -> list[str]:
    return [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]


def test_panels_are_complete_and_do_not_overlap() -> None:
    found = dashboard()
    assert (found["schemaVersion"], found["uid"]) == (39, "fray")
    source = {"type": "prometheus", "uid": "${datasource}"}
    names = {variable["name"] for variable in found["templating"]["list"]}
    assert names == {"datasource", "instance"}
    panels = found["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["type"] in ("stat", "timeseries")
        assert panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"] in ("none", "s", "percentunit")
        assert {panel["datasource"]["uid"], *(one["datasource"]["uid"] for one in panel["targets"])} == {source["uid"]}
        assert len({one["refId"] for one in panel["targets"]}) == len(panel["targets"])
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells


def test_queries_use_metrics_that_the_exporter_has() -> None:
    served = exposition(ClusterNumbers(usage(), (), (), counts())).decode()
    typed = dict(re.findall(r"^# TYPE (\w+) (\w+)$", served, re.MULTILINE))
    parts = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("",), "gauge": ("",)}
    known = {f"{name}{part}" for name, kind in typed.items() for part in parts[kind]}
    asked = {name for query in queries() for name in NAME.findall(query)}
    # The loop's delay is only measured by a controller of its own.
    loop = {"fray_controller_loop_pass_seconds_bucket", "fray_controller_loop_pass_longest_seconds"}
    assert asked - loop <= known
    # What is not on it has no sum over the cluster that would say more.
    assert known - asked - {"fray_up"} == {
        name for name in known - asked if name.startswith(("fray_job_wait_seconds", "fray_created"))
    }


@pytest.mark.parametrize("query", queries())
def test_every_query_names_the_cluster(query: str) -> None:
    assert len(re.findall(r'instance=~"\$instance"', query)) == len(NAME.findall(query))
