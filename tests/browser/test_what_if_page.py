"""what-if.html in Chromium: its model is Python's at random points; sliders, words, price; a desktop and a phone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from testbed.predict.calibrate import calibrate
from testbed.predict.page import NODES, write
from testbed.predict.scale import Point, Predictor
from testbed.predict.step import ELEMENT_BYTES, Work
from testbed.spec.mode import SyncMode
from testbed.spec.topology import Topology
from tests.support.command import chromium
from tests.support.synthetic import Conditions, make_run

pytestmark = pytest.mark.browser
POINTS = 1000
RACKED_NODES = 16  # making the rounds of more in racks takes long
EXACT = 1e-6  # relative
SIZES = {"desktop": (1280, 900), "phone": (400, 800)}
LINK: dict[str, Any] = {"link": {"rate": "500mbit"}, "node": {"cpus": 0.4}, "experiment": "quick"}
MODES = [
    *("none", "ring", "allreduce", "gather", "ring/bucket:2MiB/overlap", "ddp", "ddp/bucket:5MiB/fp16", "ring/every:8"),
    *("ring/bucket:2MiB/pipeline", "ring/pipeline", "direct/int8", "halving/bucket:1MiB", "direct/topk:0.01"),
]


@pytest.fixture(scope="module")
def predictor(tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    folder = tmp_path_factory.mktemp("quick")
    for seed, mode in enumerate(("none", "ring", "gather", "allreduce", "ddp", "ring/bucket:2MiB/pipeline")):
        conditions = Conditions(compute=1.6, seed=seed, noise=0.05, buckets=6)
        make_run(folder / mode.replace("/", "_").replace(":", "_"), conditions, mode=mode, **LINK)
    return Predictor(calibrate([folder]))


@pytest.fixture(scope="module")
def path(predictor: Predictor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(predictor, [SyncMode.parse(text) for text in MODES], tmp_path_factory.mktemp("page"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(params=SIZES)
def page(request: pytest.FixtureRequest, browser: Any, path: Path) -> Iterator[Any]:
    """The opened page, offline. Console messages, errors and requests are collected; there must be none."""
    width, height = SIZES[request.param]
    context = browser.new_context(viewport={"width": width, "height": height}, offline=True)
    opened = context.new_page()
    problems: list[str] = []
    opened.on("console", lambda message: problems.append(message.text))
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("request", lambda request: None if request.url == path.as_uri() else problems.append(request.url))
    opened.goto(path.as_uri())
    yield opened
    context.close()
    assert problems == []


def random_points() -> list[dict[str, Any]]:
    chance = random.Random(7)
    return [
        {
            "mode": chance.choice(MODES),
            "nodes": chance.choice([n for n in NODES if n > 1]),
            "rate": chance.choice([None, 10 ** chance.uniform(7, 11)]),
            "delay": chance.choice([None, 0.0, 10 ** chance.uniform(-4, -1)]),
            "speed": 10 ** chance.uniform(-1, 2),
            "size": chance.choice([1.0, 10 ** chance.uniform(-1, 1)]),
            "bucket": chance.choice([None, 1 << chance.randint(18, 25)]),
            "draw": chance.choice([None, *range(16)]),
        }
        for _ in range(POINTS)
    ]


def resized(work: Work, factor: float) -> Work:
    def size(each: int) -> int:
        return max(ELEMENT_BYTES, int(each * factor / ELEMENT_BYTES + 0.5) * ELEMENT_BYTES)

    return work if factor == 1.0 else replace(work, tensors=tuple((size(s), layer) for s, layer in work.tensors))


def in_python(predictor: Predictor, point: dict[str, Any]) -> float:
    mode = SyncMode.parse(point["mode"])
    if point["bucket"] and (mode.granularity == "bucket" or mode.is_reference):
        mode = replace(mode, bucket=point["bucket"])
    own = copy(predictor)
    own.work = resized(predictor.work, point["size"])
    draw = None if point["draw"] is None else predictor.draws[point["draw"]]
    return own.step(mode, Point(point["nodes"], point["rate"], point["delay"], point["speed"]), draw).seconds


IN_THE_PAGE = """(points) => points.map((point) => {
  const mode = data.modes.find((each) => each.name === point.mode);
  const place = { ...point, work: model.resized(data.work, point.size) };
  return model.at(mode, point.nodes, place, point.draw === null ? undefined : data.draws[point.draw]).seconds; })"""


def racked(predictor: Predictor) -> Predictor:
    """The same in racks with slow uplinks, with lost packets, on emulated nodes."""
    own = predictor.calibration
    racks = {"topology": Topology(racks=((0, 1), (2, 3)), uplink="200mbit")}
    wire = replace(own.wire, uplink=23e6, uplink_latency=0.002, loss=1e-4)
    node = replace(own.node, sleeps=True)
    return Predictor(replace(own, base=own.base.model_copy(update=racks), wire=wire, node=node))


@pytest.mark.parametrize("network", ["one switch", "racks"])
def test_the_page_computes_what_python_computes_at_random_points(
    browser: Any, predictor: Predictor, tmp_path: Path, network: str
) -> None:
    own = predictor if network == "one switch" else racked(predictor)
    points = [each for each in random_points() if network == "one switch" or each["nodes"] <= RACKED_NODES]
    page = browser.new_page()
    page.goto(write(own, [SyncMode.parse(text) for text in MODES], tmp_path).as_uri())
    found = page.evaluate(IN_THE_PAGE, points)
    page.close()
    off = [
        (there / here - 1, point)
        for point, there, here in zip(points, found, (in_python(own, each) for each in points), strict=True)
    ]
    worst = max(off, key=lambda each: abs(each[0]))
    assert len(off) >= (POINTS if network == "one switch" else 100) and abs(worst[0]) < EXACT, worst


def test_every_mode_has_a_curve_a_row_and_a_band(page: Any) -> None:
    last_band = page.locator("#plot path.band").nth(len(MODES) - 1)
    last_band.wait_for(state="attached", timeout=60_000)  # bands come one mode after the other
    assert page.locator("#plot path.line").count() == len(MODES)
    rows = page.locator("#modes tbody tr")
    assert rows.count() == len(MODES)
    bands = page.locator("#modes tbody tr td:nth-child(3)").all_inner_texts()
    assert all(" to " in band for band in bands)
    assert page.locator("#plot circle").count() == 6  # the measured points
    assert "extrapolated" in page.locator("#plot").inner_html()


def test_the_page_is_not_wider_than_the_window(page: Any) -> None:
    assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]


def slide(page: Any, name: str, value: float) -> None:
    page.evaluate(
        "([name, value]) => { const s = document.getElementById(name); s.value = value;"
        " s.dispatchEvent(new Event('input', { bubbles: true })); }",
        [name, value],
    )


def seconds(page: Any, mode: str) -> float:
    row = page.locator("#modes tbody tr", has=page.locator("th", has_text=mode).filter(has_text=mode)).first
    return float(row.locator("td").first.inner_text())


def test_sliders_move_the_figures(page: Any) -> None:
    usual = seconds(page, "gather")
    slide(page, "rate", 7.0)
    assert page.locator("#rate-text").inner_text() == "10 Mbit/s" and seconds(page, "gather") > 10 * usual
    assert page.locator("#plot circle").count() == 0  # no point was measured there
    page.click("#reset")
    assert seconds(page, "gather") == usual
    slide(page, "delay", 75)
    assert page.locator("#delay-text").inner_text() == "100 ms" and seconds(page, "gather") > usual
    page.click("#reset")
    slide(page, "speed", 1)
    assert seconds(page, "none") < 0.2 * usual
    slide(page, "nodes", 0)
    assert page.locator("#headline").inner_text().startswith("One node takes")


@pytest.mark.parametrize(
    ("modes", "said"),
    [
        (["none", "ring", "ring/every:8"], "ring is the fastest exact mode, "),
        (["ring/every:8", "direct/int8"], " is the fastest mode (none is exact), "),
        (["none"], "No mode of this page that synchronises can be computed for "),
    ],
)
def test_the_headline_names_an_exact_mode_only_if_one_is_there(
    browser: Any, predictor: Predictor, tmp_path: Path, modes: list[str], said: str
) -> None:
    page = browser.new_page()
    page.goto(write(predictor, [SyncMode.parse(text) for text in modes], tmp_path).as_uri())
    headline = page.locator("#headline").inner_text()
    page.close()
    assert said in headline and "none is the" not in headline


def test_a_price_and_words(page: Any) -> None:
    page.fill("#samples", "50000")
    page.fill("#cost", "2")
    prices = [float(text) for text in page.locator("#modes tbody tr td:last-child").all_inner_texts()]
    assert len(prices) == len(MODES) and min(prices) > 0
    page.locator("#sentences li").first.wait_for()  # words come when the sliders rest
    said = page.locator("#sentences").inner_text()
    assert "gather" in said and ("stops gaining at" in said or "never faster" in said)


def test_a_click_hides_a_curve_and_the_metric_changes(page: Any) -> None:
    page.locator("#modes tbody tr").first.click()
    assert page.locator("#plot path.line").count() == len(MODES) - 1
    page.select_option("#metric", "efficiency")
    assert "Efficiency" in page.locator("#chart-title").inner_text()
