"""The report page: its values are read back from the drawings and the tables."""

from __future__ import annotations

import math
import re
import tomllib
import xml.etree.ElementTree as ElementTree
from html import unescape
from pathlib import Path

import pytest

from internsp.app.report.page import Report, _charts, communication_rows, waits_by_place
from internsp.app.report.svg import (
    MAX_BARS,
    Series,
    downsample,
    draw_timeline,
    line_chart,
    number,
    smooth,
    ticks,
)
from internsp.base.trace import Event
from tests.support import metrics


def step(number, loss, eval_loss=None, **changes):
    values = {"tokens": 100, "tokens_per_second": 200.0, "exposed_comm_seconds": 0.1}
    return metrics.step(number, loss, eval_loss=eval_loss, **{**values, **changes})


def trace(origin=0.0, longer=0.0):
    """Milliseconds: gather 0-4 waited for, reduction 6-10 (+ longer) with a wait from 9 on."""

    def event(kind, start, end, phase, nbytes=0, unit="layers.<0>"):
        start, end = origin + start * 1e-3, origin + end * 1e-3
        return Event(kind, unit, f"{unit}.wq", phase, start, end, nbytes)

    return [
        event("AG", 0, 4, "forward", 2048),
        event("WAIT", 0, 4, "forward"),
        event("USE", 4, 4, "forward"),
        event("RS", 6, 10 + longer, "backward", 1024),
        event("WAIT", 9, 10 + longer, "backward"),
        event("STEP", 10 + longer, 20, "optimizer"),
    ]


def report(**changes):
    values = {
        "title": "demo",
        "config_toml": "[train]\nsteps = 3\n",
        "metrics": [step(1, 4.0), step(2, 3.0), step(3, 2.0, eval_loss=2.5)],
        "mesh": {"world": 4, "weight": 2, "sequence": 2},
        "memory": [("slots", 3 << 20), ("optimizer", 6 << 20)],
        "timeline": {0: trace(), 1: trace()},
        "notes": ("a note",),
    }
    return Report(**{**values, **changes})


def page(**changes):
    return report(**changes).render()


def svg(text, kind="chart"):
    """The first drawing of a kind, parsed; this also proves that it is well formed."""
    found = re.search(rf'<svg class="{kind}".*?</svg>', text, re.S)
    assert found, f"no {kind} in the page"
    return ElementTree.fromstring(found.group())


def path_points(element):
    return [(float(x), float(y)) for x, y in re.findall(r"([\d.-]+),([\d.-]+)", element.get("d"))]


def axis(root, anchor, unit=""):
    """Value -> position on an axis, fitted to its first and last label."""
    at = "x" if anchor == "middle" else "y"
    labels = [t for t in root.iter("text") if t.get("class") == "tick" and t.text != "step"]
    marks = [
        (
            float(t.text.removesuffix(unit).replace("k", "e3")),
            float(t.get(at)) - (4 if at == "y" else 0),
        )
        for t in labels
        if t.get("text-anchor") == anchor
    ]
    (v0, p0), (v1, p1) = min(marks), max(marks)
    return lambda place: v0 + (place - p0) / (p1 - p0) * (v1 - v0)


def tables(text, kind):
    """The cells of each table of a kind, line by line."""
    return [
        [
            [unescape(re.sub("<.*?>", "", cell)).strip() for cell in cells]
            for cells in (
                re.findall(r"<t[dh].*?</t[dh]>", line, re.S)
                for line in re.findall(r"<tr.*?</tr>", table, re.S)
            )
        ]
        for table in re.findall(rf'<table class="{kind}.*?</table>', text, re.S)
    ]


def test_the_page_fetches_nothing_and_runs_nothing():
    text = page()
    assert (
        re.search(r"https?:|//[a-z]|<script|<link|<img|src=|url\(|@import|@font-face", text) is None
    )
    assert "default-src 'none'" in text


def test_every_file_of_the_page_is_shipped_with_the_package():
    root = Path(__file__).parents[2]
    setup = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = setup["package-data"]["internsp"]
    shipped = {file for p in patterns for file in (root / "internsp").glob(p)}
    assert {p.name for p in shipped} >= {"report.html.j2", "report.css"}
    assert shipped >= set((root / "internsp/app/report/templates").iterdir())


def test_what_a_user_or_a_model_wrote_is_escaped():
    evil = "</pre><script>alert('x')</script>&\x00\ud800"
    text = page(title=evil, config_toml=evil, notes=[evil], memory=[(evil, 1)])
    assert "<script" not in text
    assert "\x00" not in text
    shown = re.search(r'<pre class="config">(.*?)</pre>', text, re.S).group(1)
    assert unescape(shown) == "</pre><script>alert('x')</script>&\ufffd\ufffd"
    titles = [t.text for t in svg(text, "timeline").iter("title")]
    assert "gathers layers.<0>.wq · forward · 0.00 to 4.00 ms · 4.00 ms · 2048 B" in titles


def test_advice_stands_after_the_figures_it_comes_from_and_is_escaped():
    text = page(advice=["First <this>.", "Then that."])
    items = "<ul><li>First &lt;this&gt;.</li><li>Then that.</li></ul>"
    assert f"<h2>What to change</h2></div>{items}" in re.sub(r"\n+", "", text)
    assert text.index("Communication hidden and exposed") < text.index("What to change")
    assert "What to change" not in page()


def test_the_first_line_has_steps_tokens_time_and_degrees():
    rows = [step(n, 2.0, step_seconds=45.2, tokens=7) for n in (1, 2)]
    (lead,) = re.findall('<p class="lead">(.*?)</p>', page(metrics=rows))
    assert lead == "2 steps, 14 tokens, 1:30 of training · world 4, weight 2, sequence 2"


def test_the_loss_curve_shows_the_losses_at_their_steps():
    root = svg(page())
    across, down = axis(root, "middle"), axis(root, "end")
    (train, held_out) = (e for e in root.iter("path") if "line" in e.get("class"))
    drawn = [(across(x), down(y)) for x, y in path_points(train)]
    assert drawn == [pytest.approx(p, abs=0.02) for p in [(1, 4.0), (2, 3.0), (3, 2.0)]]
    ((x, y),) = path_points(held_out)
    assert (across(x), down(y)) == pytest.approx((3, 2.5), abs=0.02)


def test_the_timeline_draws_bars_at_their_milliseconds():
    root = svg(page(timeline={0: trace()}), "timeline")
    ms = axis(root, "middle", " ms")
    bars = [
        (r.get("class"), ms(float(r.get("x"))), ms(float(r.get("x")) + float(r.get("width"))))
        for r in root.iter("rect")
        if r.get("class") != "track"
    ]
    expected = [
        ("b wait", 0, 4),
        ("b forward", 4, 9),
        ("b wait", 9, 10),
        ("b forward", 0, 4),
        ("b backward", 6, 10),
        ("b optimizer", 10, 20),
    ]
    assert [b[0] for b in bars] == [e[0] for e in expected]
    assert [b[1:] for b in bars] == [pytest.approx(e[1:], abs=0.02) for e in expected]


def test_every_part_of_a_split_backward_has_its_color():
    parts = [
        Event("BACKWARD", "stage 1", "", part, at, at + 1, 0)
        for at, part in enumerate(("input", "weight", "full"))
    ]
    drawn = re.findall(r'rect class="(b [^"]*)"', draw_timeline({0: parts}).svg)
    assert drawn == ["b backward", "b backward light", "b backward"]


def test_ranks_of_one_clock_show_their_skew_and_foreign_clocks_start_together():
    def starts(origins):
        root = ElementTree.fromstring(draw_timeline(dict(enumerate(map(trace, origins)))).svg)
        ms = axis(root, "middle", " ms")
        return [ms(float(r.get("x"))) for r in root.iter("rect") if r.get("class") == "b wait"][::2]

    assert starts([100.0, 100.005]) == pytest.approx([0, 5], abs=0.05)
    assert starts([100.0, 7e5]) == pytest.approx([0, 0], abs=0.05)


def test_the_communication_table_gives_means_over_ranks_and_the_worst():
    text = page(timeline={0: trace(), 1: trace(longer=2.0), 2: []})
    (table,) = tables(text, "communication")
    assert [row[:7] for row in table[1:]] == [
        ["gathers", "1", "2048 B", "4.00", "0.00", "4.00", "4.00"],
        ["reduce-scatters", "1", "1024 B", "5.00", "3.00", "2.00", "3.00"],
        ["together", "", "", "9.00", "3.00", "6.00", "7.00"],
    ]


def test_collectives_of_a_group_of_one_are_no_communication():
    alone = Event("PUBLISH", "small", "", "step", 0.02, 0.021, 0)
    found = communication_rows({0: [*trace(), alone]})
    assert [row["name"] for row in found] == ["gathers", "reduce-scatters", "together"]


def test_the_waits_table_names_phase_kind_and_block():
    text = page(timeline={0: trace(), 1: trace(longer=2.0)})
    (table,) = tables(text, "waits")
    assert table[1:] == [
        ["forward", "gathers", "4.00", "67%", "layers.<0> 4.00"],
        ["backward", "reduce-scatters", "2.00", "33%", "layers.<0> 2.00"],
    ]


def test_memory_bars_are_in_proportion_and_summed():
    text = page(memory=[("slots", 3 << 20), ("optimizer", 6 << 20), ("buffers", 9 << 10)])
    assert re.findall(r'"bar"><i style="width:([\d.]+)%', text) == ["50.00", "100.00", "0.15"]
    shown = re.findall(r'class="value[^>]*>([^<]+)', text)
    assert shown == ["3.0 MiB", "6.0 MiB", "0.0 MiB", "9.0 MiB"]  # all in the unit of the sum
    assert "At its peak" not in page(metrics=[step(1, 2.0, peak_memory_bytes=0)])
    assert "had 3.0 GiB" in page(metrics=[step(1, 2.0, peak_memory_bytes=3 << 30)])


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [step(1, 2.0)],
        [step(1, math.nan, grad_norm=math.inf, tokens_per_second=0.0, step_seconds=0.0)],
        [step(i, math.nan if i % 2 else 1e300) for i in range(1, 5)],
        [step(1, 1.0), step(2, math.nan), step(3, 3.0)],
    ],
    ids=["none", "one", "nan", "huge", "gap"],
)
def test_a_page_without_usable_numbers_is_still_well_formed(rows):
    text = page(metrics=rows, timeline={}, memory=[])
    for drawing in re.findall(r"<svg.*?</svg>", text, re.S):
        root = ElementTree.fromstring(drawing)
        for element in root.iter():
            for key in ("d", "x", "y", "width", "height", "cx", "cy", "x1", "y1"):
                assert not re.search("nan|inf", element.get(key, ""))
    assert "No step was traced." in text


def test_a_value_that_is_not_finite_interrupts_the_line_and_is_counted():
    text = page(metrics=[step(1, 1.0), step(2, 2.0), step(3, math.nan), step(4, 3.0)])
    root = svg(text)
    (line,) = (e.get("d") for e in root.iter("path") if "line" in e.get("class"))
    assert line.count("M") == 2
    assert "Steps without a finite loss: 1." in text
    lone = page(metrics=[step(1, 1.0), *(step(at, math.nan) for at in range(2, 30))])
    assert len([*svg(lone).iter("circle")]) == 1, "a point without neighbors can be seen"


def test_ten_thousand_steps_stay_small_and_keep_a_spike_of_one_step(tmp_path):
    rows = [step(i, 50.0 if i == 7001 else 3.0, eval_loss=3.5) for i in range(1, 10_001)]
    path = report(metrics=rows, timeline={}).write(tmp_path / "run" / "report.html")
    assert path.stat().st_size < 300_000
    root = svg(path.read_text(encoding="utf-8"))
    raw = next(e for e in root.iter("path") if "faint" in e.get("class"))
    x, y = min(path_points(raw), key=lambda p: p[1])
    assert axis(root, "end")(y) == pytest.approx(50.0, abs=0.2)
    assert axis(root, "middle")(x) == pytest.approx(7001, abs=15)
    assert [p.name for p in path.parent.iterdir()] == ["report.html"]


def test_waits_of_no_time_have_no_row_and_no_share():
    wait = Event("WAIT", "layers.0", "w", "forward", 0.3, 0.3, 0)
    assert waits_by_place({0: [Event("FORWARD", "", "", "forward", 0.0, 1.0, 0), wait]}) == []


@pytest.mark.parametrize("uses_per_block", [10, 1])
def test_a_huge_trace_is_thinned_but_still_covers_the_step(uses_per_block):
    def many(rank):
        events = []
        for i in range(4000):
            at = i * 1e-3
            unit, phase = f"layers.{i // uses_per_block}", ("forward", "backward")[i >= 2000]
            events.append(Event("AG", unit, f"w{i}", phase, at, at + 5e-4, 8))
            events.append(Event("WAIT", unit, f"w{i}", phase, at, at + 2e-4, 0))
            events.append(Event("USE", unit, f"w{i}", phase, at, at, 0))
        return events

    drawing = draw_timeline({rank: many(rank) for rank in range(16)})
    assert (drawing.ranks, drawing.exact) == (2, False)
    assert len(drawing.svg) < 1_200_000
    root = ElementTree.fromstring(drawing.svg)
    ms = axis(root, "middle", " ms")
    bars = [
        (r.get("class"), ms(float(r.get("x"))), float(r.get("width")))
        for r in root.iter("rect")
        if r.get("class") != "track"
    ]
    assert 100 < len(bars) <= MAX_BARS
    assert min(at for style, at, _ in bars if style == "b backward") == pytest.approx(2000, abs=20)
    assert max(at for _, at, _ in bars) == pytest.approx(4000, abs=20)
    # A fifth of the step waits and gathers fly half of it: the few bars show the same parts.
    width = 2 * 968  # two ranks; pixels of the axis, which ends with the step
    parts = {"wait": 0.0, "compute": 0.0, "gathers": 0.0}
    for bar in root.iter("rect"):
        if bar.get("class") != "track":
            kind = bar.find("title").text.split()[0]
            parts["wait" if kind == "waiting" else kind] += float(bar.get("width")) / width
    assert parts == pytest.approx({"wait": 0.2, "compute": 0.8, "gathers": 0.5}, abs=0.02)


def test_downsampling_and_smoothing_by_hand():
    points = [(float(i), math.nan if 40 <= i < 60 else float(i % 7)) for i in range(100)]
    few = downsample(points, buckets=5)
    assert few[0] == points[0]
    assert few[-1] == points[-1]
    assert few[1:3] == [(6.0, 6.0), (7.0, 0.0)]  # the greatest comes before the least
    assert sum(math.isnan(y) for _, y in few) == 1
    line = [(float(i), 2.0 * i) for i in range(120)]
    assert smooth(line)[:118] == line[:118]  # the mean around a point of a line is the point
    assert smooth([(0.0, 1.0), (1.0, math.nan), (2.0, 5.0)])[1] == (1.0, 3.0)


def test_ticks_are_round_and_labels_short():
    assert ticks(0.0, 10.0) == [0, 2, 4, 6, 8, 10]
    assert ticks(-0.03, 0.21, 5) == pytest.approx([0.0, 0.05, 0.1, 0.15, 0.2])
    assert ticks(3.0, 3.0) == [3.0]
    shown = [number(v) for v in (0, 0.25, 3e-4, 9999, 9999.7, 12_500, 2.5e6, -3e9, math.nan)]
    assert shown == ["0", "0.25", "0.0003", "9999", "10k", "12.5k", "2.5M", "-3G", "not finite"]


def test_values_over_several_powers_of_ten_get_a_logarithmic_axis():
    series = Series("norm", [(1.0, 1e-2), (2.0, 1.0), (3.0, 1e2)])
    root = ElementTree.fromstring(line_chart([series], label="norm"))
    (line,) = (e for e in root.iter("path"))
    (_, a), (_, b), (_, c) = path_points(line)
    assert a - b == pytest.approx(b - c, abs=0.11)
    labels = [t.text for t in root.iter("text") if t.get("text-anchor") == "end"]
    assert labels[:-1] == ["0.01", "0.1", "1", "10", "100"]


def test_a_model_with_experts_has_charts_of_their_load_and_of_the_routers() -> None:
    def titles(**changes: float) -> set[str]:
        return {chart.title for chart in _charts([step(n, 2.0, **changes) for n in (1, 2)])}

    more = titles(expert_load=1.5, router_entropy=2.0) - titles()
    busiest = "Tokens of the busiest expert, over the mean"
    assert more == {busiest, "Router entropy (nats per token)"}
    dropped = titles(dropped_tokens=0.0) - titles()
    assert dropped == {"Choices of an expert that its capacity dropped"}
