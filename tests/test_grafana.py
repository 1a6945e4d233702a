"""The dashboard asks only for what ``/metrics`` has, and a reader finds out what each panel shows."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any, Final

import pytest
from prometheus_client.samples import Sample

import supervisor
from supervisor.lifecycle import State
from supervisor.metrics import DECLARED
from tests.test_metrics import everything, parsed

BOARD: Final[dict[str, Any]] = json.loads((Path(supervisor.__file__).with_name("grafana.json")).read_text())
PANELS: Final[list[dict[str, Any]]] = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS: Final = [(panel["title"], target["expr"], target["legendFormat"]) for panel in PANELS for target in panel["targets"]]
SAMPLES: Final[list[Sample]] = [sample for family in parsed(*everything()).values() for sample in family.samples]
NAMES: Final = {sample.name for sample in SAMPLES}
WORDS: Final = {"sum", "by", "rate", "increase", "histogram_quantile", "on", "ignoring", "group_left"}
"""Of PromQL, that the dashboard uses."""
TARGET: Final = {"job", "instance"}
"""Labels that Prometheus adds itself."""


def bare(expression: str) -> str:
    """Without selectors, ranges and lists of labels: operators, functions and names of metrics are left."""
    without = re.sub(r"\{[^}]*\}|\[[^\]]*\]", "", expression)
    return re.sub(r"\b(by|on|ignoring|group_left)\s*\([^)]*\)", r"\1", without)


def metrics_in(expression: str) -> set[str]:
    return set(re.findall(r"[a-zA-Z_]\w*", bare(expression))) - WORDS


def selectors(expression: str) -> list[tuple[str, dict[str, tuple[str, str]]]]:
    """Each metric with its matchers: operator and value by label."""
    found = re.findall(r"([a-zA-Z_]\w*)\{([^}]*)\}", expression)
    return [
        (name, {label: (how, value) for label, how, value in re.findall(r'(\w+)(=~|!~|!=|=)"([^"]*)"', inside)})
        for name, inside in found
    ]


def listed(expression: str) -> set[str]:
    """Labels that it groups or joins by."""
    lists = re.findall(r"\b(?:by|on|ignoring|group_left)\s*\(([^)]*)\)", expression)
    return {label.strip() for each in lists for label in each.split(",") if label.strip()}


def labels_of(name: str) -> set[str]:
    return {label for sample in SAMPLES if sample.name == name for label in sample.labels}


def test_it_is_a_dashboard_of_a_known_schema_with_one_source_and_the_preset() -> None:
    assert BOARD["schemaVersion"] >= 39
    variables = {each["name"]: each for each in BOARD["templating"]["list"]}
    assert list(variables) == ["datasource", "preset"]
    assert variables["datasource"]["query"] == "prometheus"
    asked = re.fullmatch(r"label_values\((\w+), (\w+)\)", variables["preset"]["query"]["query"])
    assert asked
    assert asked[2] in labels_of(asked[1])
    sources = [panel["datasource"] for panel in PANELS] + [
        target["datasource"] for panel in PANELS for target in panel["targets"]
    ]
    assert {source["uid"] for source in [*sources, variables["preset"]["datasource"]]} == {"${datasource}"}
    used = set(re.findall(r"\$(\w+)", json.dumps([expression for _, expression, _ in EXPRESSIONS])))
    assert used == {"preset", "__rate_interval"}


@pytest.mark.parametrize(("title", "expression", "legend"), EXPRESSIONS)
def test_an_expression_asks_for_what_is_there(title: str, expression: str, legend: str) -> None:
    asked = metrics_in(expression)
    assert asked, title
    assert asked <= NAMES
    for name, matchers in selectors(expression):
        assert set(matchers) <= labels_of(name)
        wanted = {label: value for label, (how, value) in matchers.items() if how == "="}
        assert any(wanted.items() <= sample.labels.items() for sample in SAMPLES if sample.name == name), (name, wanted)
        assert all(value == "$preset" for how, value in matchers.values() if how != "=")
    known = set().union(*map(labels_of, asked))
    assert listed(expression) <= known | TARGET
    assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= known | TARGET


@pytest.mark.parametrize(("title", "expression", "legend"), EXPRESSIONS)
def test_a_counter_is_shown_as_a_rate_and_a_gauge_never(title: str, expression: str, legend: str) -> None:
    counted = {name for name in NAMES if name.endswith(("_total", "_bucket"))}
    rated = set(re.findall(r"\b(?:rate|increase)\((\w+)", expression))
    assert rated <= counted
    assert metrics_in(expression) & counted <= rated | {"llmctl_records_lost_total"}, "of which even one is to be seen"


OF_ALL: Final = "Energy per token"
"""A card doesn't say for which preset."""


@pytest.mark.parametrize("expression", [expression for title, expression, _ in EXPRESSIONS if title != OF_ALL])
def test_what_has_a_preset_heeds_the_one_that_is_chosen(expression: str) -> None:
    for name in metrics_in(expression):
        if "preset" in labels_of(name):
            assert all(matchers.get("preset") == ("=~", "$preset") for each, matchers in selectors(expression) if each == name)
            assert len(re.findall(rf"\b{name}\b", expression)) == sum(each == name for each, _ in selectors(expression))


def test_every_metric_is_shown() -> None:
    shown = set().union(*(metrics_in(expression) for _, expression, _ in EXPRESSIONS))
    of = {name.removesuffix("_bucket") for name in shown}
    assert set(DECLARED) - of == {"process_resident_memory_bytes"}


def test_no_panel_overlaps_another_or_stands_out() -> None:
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        assert 0 <= place["x"] <= place["x"] + place["w"] <= 24, panel["title"]
    for one, other in combinations(BOARD["panels"], 2):
        a, b = one["gridPos"], other["gridPos"]
        beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        below = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert beside or below, (one["title"], other["title"])
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: f"{panel['title']} {panel['id']}")
def test_a_panel_has_a_unit_and_says_what_it_shows(panel: dict[str, Any]) -> None:
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["description"].endswith(".")
    assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


def test_the_states_are_told_by_their_names() -> None:
    panel = next(each for each in PANELS if each["type"] == "state-timeline")
    told = {value["text"]: int(number) for number, value in panel["fieldConfig"]["defaults"]["mappings"][0]["options"].items()}
    weights = re.findall(r'(\d+) \* llmctl_preset_state\{[^}]*state="(\w+)"\}', panel["targets"][0]["expr"])
    assert {state: int(weight) for weight, state in weights} == told
    assert set(told) == {state.value for state in State}
