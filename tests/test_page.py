"""A result's page: whole by itself, well-formed whatever a server said of itself, and pictures that show what the figures say."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser
from itertools import combinations
from xml.etree import ElementTree as Tree

import pytest

from bench import chart, figures, page, plots
from bench.chart import WIDTH, Chart, Scale
from bench.result import Result
from tests import results

VOID = ("meta", "br")
HOSTILE = "</title></svg>\"'><script>alert(1)</script><img src=x onerror=alert(1)>&amp;\x1b[31m\ud800"


class Document(HTMLParser):
    """Its elements, each closed in its turn."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def drawn(text: str) -> list[Tree.Element]:
    """The pictures, each as XML."""
    return [Tree.fromstring(each) for each in re.findall(r"<svg viewBox=\"0 0.*?</svg>", text, re.DOTALL)]


def hostile() -> Result:
    """A result in which every text is an attack."""
    found, _ = results.made(names=(HOSTILE, "b"), flags=(HOSTILE, f"word: {HOSTILE}"))
    subjects = tuple(
        dataclasses.replace(
            each,
            kind=HOSTILE,
            url=HOSTILE,
            model=HOSTILE,
            version=HOSTILE,
            preset=HOSTILE,
            file=HOSTILE,
            sha256=HOSTILE,
            engine=HOSTILE,
            argv=(HOSTILE,),
        )
        for each in found.manifest.subjects
    )
    machine = dataclasses.replace(found.manifest.machine, cpu=HOSTILE, cards=(HOSTILE,), driver=HOSTILE, governor=HOSTILE)
    workload = dataclasses.replace(found.manifest.workload, name=HOSTILE, about=HOSTILE, ask=(HOSTILE,))
    manifest = dataclasses.replace(
        found.manifest,
        subjects=subjects,
        machine=machine,
        workload=workload,
        replayed=HOSTILE,
        salt=HOSTILE,
        generator={HOSTILE: 1.0},
    )
    return dataclasses.replace(found, manifest=manifest)


def test_it_needs_nothing_but_itself() -> None:
    text = page.render(*results.made())
    names = {tag for tag, _ in Document(text).seen}
    assert not names & {"script", "link", "img", "iframe", "object", "base"}
    assert "://" not in text
    assert not re.search(r"url\(|@import|javascript:", text)
    assert all(value.startswith("#") for _, attrs in Document(text).seen if (value := attrs.get("href")) is not None)
    assert "default-src 'none'" in text


def test_whatever_a_server_says_is_text() -> None:
    _, samples = results.made(names=(HOSTILE, "b"), id=HOSTILE)
    samples[3] = dataclasses.replace(samples[3], error=HOSTILE)
    text = page.render(hostile(), samples)
    seen = Document(text).seen
    assert not {"script", "img"} & {tag for tag, _ in seen}
    assert not [name for _, attrs in seen for name in attrs if name.startswith("on")]
    assert drawn(text)
    assert "\x1b" not in text
    assert text.encode()  # a lone surrogate of a JSON file would have no bytes


@pytest.mark.parametrize("names", [("one",), results.SUBJECTS, tuple("abcdefghij")])
def test_every_point_has_its_row_and_all_its_percentiles(names: tuple[str, ...]) -> None:
    found, samples = results.made(names=names, users=(1, 2))
    text = page.render(found, samples)
    assert text.count("<details>") == len(found.points)
    for point in found.points:
        assert (
            f">{point.metrics['request_latency']['p99']:,.0f}" in text
            or f">{point.metrics['request_latency']['p99']:,.1f}" in text
        )
    for name in ("seed", "salt", "argv", "sha256", "kernel", "repetitions", "cpu_share"):
        assert f"<dt>{name}</dt>" in text
    for figure in figures.FIGURES:
        if any(figure.tag in point.metrics for point in found.points):
            assert chart.escaped(figure.formula) in text


def test_without_samples_there_are_the_pictures_of_the_figures() -> None:
    found, samples = results.made()
    with_, without = (len(plots.plots(found, each)) for each in (samples, []))
    assert without == 4
    assert with_ == without + 1 + len(results.SUBJECTS)
    Document(page.render(found, []))


def test_a_run_of_nothing_is_a_page() -> None:
    Document(page.render(dataclasses.replace(results.made()[0], points=()), []))


def test_each_request_is_a_dot_and_each_failed_one_a_cross() -> None:
    found, samples = results.made(users=(1,))
    spread = [dataclasses.replace(each, ttft_ms=10.0 * at) for at, each in enumerate(samples)]
    spread[5] = dataclasses.replace(spread[5], error="500 no", ttft_ms=None, e2e_ms=None)
    dots = next(each for each in plots.plots(found, spread) if each.title.startswith("Each request"))
    assert dots.svg.count('class="dot') == len(spread) - 1
    assert dots.svg.count('class="fault"') == 1
    assert "500 no" in dots.svg


def test_of_many_requests_those_are_drawn_that_others_would_hide_and_every_outlier() -> None:
    found, few = results.made(users=(1,))
    many = [dataclasses.replace(few[0], number=at, sent_s=at / 100, ttft_ms=50 + at * 7919 % 100) for at in range(20_000)]
    many[700] = dataclasses.replace(many[700], ttft_ms=5000.0)
    dots = next(each for each in plots.plots(found, many) if each.title.startswith("Each request"))
    assert 0 < dots.svg.count('class="dot') <= plots.MOST_DOTS
    assert "TTFT 5.0 s" in dots.svg
    assert "of 20,000 are drawn" in dots.about


def test_a_timeline_is_of_the_slowest_repetition() -> None:
    found, samples = results.made(names=("t",), users=(2,))
    point, slowest = found.points[0], 1
    repetitions = tuple(
        dataclasses.replace(each, duration_s=99.0 if each.number == slowest else 9.0) for each in point.repetitions
    )
    timeline = plots.plots(dataclasses.replace(found, points=(dataclasses.replace(point, repetitions=repetitions),)), samples)[-1]
    assert f"number {slowest + 1}:" in timeline.about
    assert timeline.svg.count('class="answer') == 2 * results.REQUESTS
    assert f"repetition {slowest + 1}, request 1:" in timeline.svg


@pytest.mark.parametrize("most", [0.003, 1, 7, 42.5, 99.9, 1234, 2.5e6])
def test_an_axis_begins_at_zero_and_holds_all(most: float) -> None:
    scale = Scale.zero([most / 3, most], 300, 10)
    ticks = scale.ticks()
    assert scale(0) == 300
    assert ticks[0] == (300, ticks[0][1])
    assert float(ticks[0][1].rstrip("k")) == 0
    assert scale.high >= most
    assert 2 <= len(ticks) <= 8
    assert len({told for _, told in ticks}) == len(ticks)


def test_an_axis_of_differences_has_zero_in_its_middle() -> None:
    scale = Scale.around([-0.1, 0.2], 5, 200, 0)
    assert scale(0) == 100
    assert scale.high == -scale.low == 5
    assert Scale.around([-12.0, 3.0], 5, 200, 0).high >= 12


def test_nothing_lies_outside_of_its_picture() -> None:
    for found in (results.made(), results.made(names=("a", "b", "c", "d"), users=(1, 2, 4, 8, 16, 32))):
        for plot in plots.plots(*found):
            root = Tree.fromstring(plot.svg)
            height = float(root.attrib["viewBox"].split()[3])
            for each in root.iter("text"):
                if "x" in each.attrib:
                    x, long = float(each.attrib["x"]), len(each.text or "") * chart.LETTER
                    start = x - {"start": 0.0, "middle": long / 2, "end": long}[each.attrib["text-anchor"]]
                    assert -1 <= start <= start + long <= WIDTH + 1, (plot.title, each.text)
                    assert 0 <= float(each.attrib["y"]) <= height


def test_names_do_not_lie_on_each_other() -> None:
    picture = Chart("x")
    for _ in range(3):
        picture.mark(200, 100, 0, "here")
    placed = [picture.name(200, 100, "4 users", 0) for _ in range(20)]
    assert placed[0]
    assert not placed[-1]
    boxes = picture._taken[3:]
    assert len(boxes) == sum(placed)
    assert not any(chart._touch(one, other) for one, other in combinations(boxes, 2))


def test_series_differ_in_colour_or_mark_beyond_the_palette() -> None:
    looks = {(chart.series(number), chart.symbol(number)) for number in range(len(chart.PALETTE) * 3)}
    assert len(looks) == len(chart.PALETTE) * 3


def luminance(colour: str) -> float:
    """WCAG 2.1's relative luminance."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize(("which", "ground"), [(0, "#f6f7f9"), (1, "#1c2024")])
def test_every_colour_stands_out(which: int, ground: str) -> None:
    """3 : 1 for what is no text (WCAG 2.1, 1.4.11)."""
    assert f"--card:{ground}" in page.STYLE
    for colours in chart.PALETTE:
        light, dark = sorted((luminance(colours[which]), luminance(ground)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 3
