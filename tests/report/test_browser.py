"""The pages in a real browser, headless Chromium: charts and hover texts, in light and dark and on a phone."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.cli.main import main
from tests.report.chromium import BROWSER, PACKAGES, Browser, chromium
from tests.report.folders import write_run

pytestmark = pytest.mark.skipif(
    BROWSER is None, reason=f"no Chromium here: install Debian's {PACKAGES.read_text().strip()}"
)
DRAWN = "[...document.querySelectorAll('.chart')].every(chart => chart.dataset.drawn === 'true')"


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    """A page of one run, one of two, one of a plan."""
    folder = tmp_path_factory.mktemp("pages")
    first, second = write_run(folder / "first"), write_run(folder / "second", more=0.03125)
    both, plan = folder / "both.html", folder / "plan.html"
    assert main(["report", str(first)]) == 0
    assert main(["report", str(first), str(second), "--output", str(both)]) == 0
    recipe = str(Path(__file__).parents[2] / "recipes" / "qwen2.5_7b_ppo_gsm8k.yaml")
    assert main(["plan", "step", recipe, "--without-sync", "--html", str(plan)]) == 0
    return {"one": first / "report.html", "two": both, "plan": plan}


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("profile")) as found:
        yield found


def draw_all(browser: Browser) -> None:
    """Scroll through the page: a chart is drawn when it comes into view."""
    for number in range(browser.run("document.querySelectorAll('.chart').length")):
        browser.run(f"document.querySelectorAll('.chart')[{number}].scrollIntoView({{behavior: 'instant'}})")
        browser.until(f"document.querySelectorAll('.chart')[{number}].dataset.drawn === 'true'")


def plot(title: str) -> str:
    """A JavaScript expression for the plot of the chart with a title."""
    of_title = f"chart => chart.querySelector('h3').textContent === {json.dumps(title)}"
    return f"[...document.querySelectorAll('.chart')].find({of_title}).querySelector('.plot')"


@pytest.mark.parametrize("which", ["one", "two", "plan"])
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)], ids=["light", "phone, dark"])
def test_every_chart_is_drawn_and_nothing_is_fetched(browser, pages, which, width, dark):
    browser.open(pages[which], width=width, dark=dark)
    draw_all(browser)
    assert browser.run(DRAWN)
    assert browser.problems() == []
    assert browser.requests() == [pages[which].as_uri()]
    assert "EVIL" not in browser.run("document.title")
    assert browser.run("document.documentElement.scrollWidth") == width
    light, text = browser.run(
        "['backgroundColor', 'color'].map(name => getComputedStyle(document.body)[name].match(/\\d+/g)[0] > 127)"
    )
    assert (light, text) == (not dark, dark)
    marks = "['.scatterlayer .trace', '.barlayer .point']"
    drawn = browser.run(
        f"[...document.querySelectorAll('.chart .plot')].map(plot => {marks}.map(mark => plot.querySelectorAll(mark).length))"
    )
    assert len(drawn) >= 1 and all(curves + bars for curves, bars in drawn)


def test_tiles_are_the_numbers_of_the_metrics(browser, pages):
    browser.open(pages["one"])
    steps = [
        json.loads(line)
        for line in (pages["one"].parent / "metrics.jsonl").read_text().splitlines()
        if line.endswith("}")
    ]
    tiles = browser.run(
        "Object.fromEntries([...document.querySelectorAll('.tile')].map(tile => [tile.querySelector('.label').textContent, "
        "[tile.querySelector('.value').textContent, Number(tile.querySelector('.value').dataset.value)]]))"
    )
    assert tiles["Validation score"] == ["86.7%", steps[-1]["val/score/mean"]]
    assert tiles["Training score"] == ["75.0%", steps[-1]["critic/score/mean"]]
    assert tiles["Steps"] == ["5", 5] and tiles["Training time"] == ["50.0 s", 50.0]
    assert tiles["Tokens/s"] == ["150", 150.0]
    points = browser.run(f"(({plot('Validation score')}).scrollIntoView(), 1)")
    browser.until(f"{plot('Validation score')}.data !== undefined")
    points = browser.run(f"{plot('Validation score')}.data.map(trace => [trace.x, trace.y])")
    assert points == [[[1, 5], [0.125, 0.867188]]]


def test_hovering_shows_exact_values(browser, pages):
    browser.open(pages["one"])
    browser.run(f"{plot('Clip fraction')}.id = 'hovered'")
    browser.run("document.getElementById('hovered').scrollIntoView({block: 'center'})")
    browser.until("document.getElementById('hovered').querySelector('.nsewdrag') !== null")
    browser.hover("#hovered .nsewdrag", across=0.99)
    browser.until("document.querySelector('#hovered .hoverlayer').textContent !== ''")
    assert re.sub(r"\s+", " ", browser.run("document.querySelector('#hovered .hoverlayer').textContent")) == (
        "step 5policy : 5%"
    )


def test_zooming_one_chart_zooms_all_and_smoothing_adds_curves(browser, pages):
    browser.open(pages["one"])
    draw_all(browser)
    score, entropy = plot("Training score"), plot("Entropy")
    browser.run(f"Plotly.relayout({score}, {{'xaxis.range[0]': 2, 'xaxis.range[1]': 4}}).then(() => 1)")
    browser.until(f"JSON.stringify({entropy}.layout.xaxis.range) === '[2,4]'")
    low, high = browser.run(f"{score}.layout.yaxis.range")
    assert 0.4 < low < 0.45 and 0.65 < high < 0.7  # the values of steps 2 to 4
    browser.click("#reset")
    assert browser.run(f"{entropy}.layout.xaxis.autorange")
    assert browser.run(f"{score}.data.length") == 1
    browser.run(
        "const slider = document.getElementById('smoothing'); slider.value = 0.5; slider.dispatchEvent(new Event('input'))"
    )
    raw, smooth = browser.run(f"{score}.data.map(trace => trace.y)")
    weights = [0.5 ** (4 - place) for place in range(5)]
    assert raw[4] == 0.75
    assert smooth[4] == pytest.approx(
        sum(weight * value for weight, value in zip(weights, raw, strict=True)) / sum(weights)
    )
    assert smooth[0] == raw[0]
    assert browser.run(f"{plot('Validation score')}.data.length") == 1  # is not smoothed


def test_runs_and_curves_can_be_hidden_and_the_theme_switched(browser, pages):
    browser.open(pages["two"])
    draw_all(browser)
    clips = plot("Clip fraction")
    names = browser.run(f"{plot('Validation score')}.data.map(trace => trace.name)")
    assert names == ["first", "second"]
    browser.click("#runs button")
    assert browser.run(f"{plot('Validation score')}.data.map(trace => trace.name)") == ["second"]
    assert browser.run(f"{clips}.data.map(trace => trace.line.color)") == [
        browser.run("getComputedStyle(document.documentElement).getPropertyValue('--c1')")
    ]
    assert browser.run("document.querySelector('#runs button').getAttribute('aria-pressed')") == "false"
    before = browser.run(f"{clips}.layout.font.color")
    browser.click("#theme")
    assert browser.run("document.documentElement.dataset.theme") == "dark"
    assert browser.run(f"{clips}.layout.font.color") != before
    assert browser.problems() == []


def test_any_metric_can_be_picked(browser, pages):
    browser.open(pages["one"])
    draw_all(browser)
    browser.run(
        "const pick = document.getElementById('pick'); pick.value = 'perf/tokens_per_s'; pick.dispatchEvent(new Event('change'))"
    )
    assert browser.run("document.querySelector('#picked .plot').data[0].y") == [50, 100, 150, 200, 250]
