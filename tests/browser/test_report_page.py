"""The report page in Chromium: from disk, offline, on a desktop and on a phone, light and dark; and its picture."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testbed.report.page import Report, write
from tests.support.command import chromium
from tests.support.scripted_runs import GATHER_SCATTER, Script, make_script_run, plant_sum
from tests.support.synthetic import Conditions, make_faulted, make_run

pytestmark = pytest.mark.browser
SIZES = {"desktop": (1280, 900), "phone": (400, 800)}
LINK: dict[str, Any] = {"link": {"rate": "500mbit"}, "node": {"cpus": 0.4}}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    folder = tmp_path_factory.mktemp("quick")
    for seed, mode in enumerate(("single", "gather", "allreduce", "ring", "ddp")):
        make_run(folder / mode, Conditions(compute=1.6, seed=seed), mode=mode, experiment="quick", **LINK)
    for nodes in (2, 3):
        make_run(
            folder / f"ddp-{nodes}",
            Conditions(compute=1.6),
            mode="ddp",
            nodes=nodes,
            batch=48,
            experiment="nodes",
            **LINK,
        )
    wrappers = {"DistributedDataParallel": {"bucket_cap_mb": 25, "process_group": "a long option " * 8}}
    script = Script(wrappers=wrappers, sampled=(3, 7), unseen=("<b>watch_waits</b>",), rest=0.05)
    make_script_run(folder / "script", script, experiment="own", **LINK)
    written = {"kind": "files", "count": 2, "bytes": 9_000_000, "names": ["checkpoints/last.pt", "log.txt"]}
    uneven: dict[str, Any] = {"images": 128, "last_images": 96, "threads": 2, "more": (written,)}
    make_script_run(folder / "faulty", Script(GATHER_SCATTER, overlap=False, **uneven), experiment="faulty", **LINK)
    plant_sum(folder / "faulty", site="main.py:48")
    make_run(folder / "dead", mode="tree", experiment="quick", status="failed", reason="<b>rank 2</b> died", **LINK)
    make_faulted(folder / "killed", "kill:rank2@step8", mode="ring", experiment="quick", **LINK)
    return write([folder], folder)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(params=[(size, scheme) for size in SIZES for scheme in ("light", "dark")], ids="-".join)
def page(request: pytest.FixtureRequest, browser: Any, report: Report, tmp_path: Path) -> Iterator[Any]:
    """The opened page. Console messages, errors and requests are collected; there must be none."""
    size, scheme = request.param
    width, height = SIZES[size]
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme, offline=True)
    opened = context.new_page()
    problems: list[str] = []
    opened.on("console", lambda message: problems.append(message.text))
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("request", lambda request: None if request.url == report.page.as_uri() else problems.append(request.url))
    opened.goto(report.page.as_uri())
    yield opened
    opened.screenshot(path=str(tmp_path / f"{size}-{scheme}.png"), full_page=True)
    context.close()
    assert problems == []


def test_every_figure_is_drawn(page: Any, report: Report) -> None:
    figures = page.locator("figure svg")
    assert report.faults and report.faults.plots
    assert figures.count() == sum(len(part.plots) for part in [*report.sections, report.faults]) > 8
    for k in range(figures.count()):
        box = figures.nth(k).bounding_box()
        assert box["width"] > 250 and box["height"] > 80
        assert figures.nth(k).locator("path").count() > 5


def test_the_page_is_not_wider_than_the_window(page: Any) -> None:
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= page.viewport_size["width"]


def test_a_click_sorts_a_table_by_numbers_and_a_second_reverses_it(page: Any) -> None:
    table = page.locator("#quick-modes")
    button = table.locator("thead button", has_text="s/iter")

    def seconds() -> list[float]:
        return [float(text) for text in table.locator("tbody tr td:nth-child(2)").all_inner_texts()]

    before = seconds()
    button.click()
    assert seconds() == sorted(before)
    button.click()
    assert seconds() == sorted(before, reverse=True)
    assert table.locator("th[aria-sort=descending]").count() == 1


def test_a_missing_value_sorts_last_both_ways(page: Any) -> None:
    table = page.locator("#quick-split")
    button = table.locator("thead button", has_text="hidden share")
    for _ in range(2):
        button.click()
        cells = table.locator("tbody tr td:nth-child(8)").all_inner_texts()
        assert cells[-1] == "-" and cells.count("-") == 1


def test_text_has_enough_contrast(page: Any) -> None:
    """WCAG AA: 4.5 to 1 for text, by the colours that the browser computes."""
    contrast = """() => {
      const light = (text) => { const v = text.match(/[\\d.]+/g).slice(0, 3).map((c) => { c /= 255;
        return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; });
        return 0.2126 * v[0] + 0.7152 * v[1] + 0.0722 * v[2]; };
      const ground = (e) => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
        if (c !== "rgba(0, 0, 0, 0)") return c; } return "rgb(255, 255, 255)"; };
      const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
      const html = [...document.querySelectorAll("p, td, th, li, figcaption, h2, h3, dt, dd, summary")];
      const drawn = [...document.querySelectorAll("figure svg text")];
      return [...html.map((e) => [ratio(light(getComputedStyle(e).color), light(ground(e))), e.textContent]),
              ...drawn.map((e) => [ratio(light(getComputedStyle(e).fill), light(ground(e))), e.textContent])]
        .filter(([r]) => r < 4.5); }"""
    assert page.evaluate(contrast) == []


def test_values_from_a_run_folder_are_text(page: Any) -> None:
    assert page.locator("#left-out b").count() == 0
    assert "<b>rank 2</b> died" in page.locator("#left-out").inner_text()


def test_it_prints_with_every_table_open(page: Any, tmp_path: Path) -> None:
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("details:not([open])").count() == 0
    assert len(page.pdf(format="A4")) > 20_000


def test_the_picture_of_the_page_is_a_small_png(report: Report, tmp_path: Path) -> None:
    picture = tmp_path / "report.png"
    command = [sys.executable, "docs/picture.py", str(report.page.parent), str(picture)]
    subprocess.run(command, cwd=Path(__file__).parents[2], check=True)
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and 20_000 < picture.stat().st_size < 200_000


def test_a_script_has_its_section_with_collectives_phases_and_set_up(page: Any) -> None:
    section = page.locator("#own-script-1")
    assert section.locator("h3").first.inner_text() == "What this script does: main.py"
    assert page.locator("#own-script-1-collectives tbody tr").count() == 1
    assert page.locator("#own-script-1-phases tbody tr").count() == 4
    assert "gloo, 4 ranks" in page.locator("#own-script-1-setup").inner_text()
    assert section.locator("b", has_text="watch_waits").count() == 0 and "<b>watch_waits</b>" in section.inner_text()


def test_findings_of_each_severity_have_evidence_line_and_fix(page: Any) -> None:
    items = page.locator("#faulty-script-1 .findings > li")
    assert [items.nth(k).get_attribute("class") for k in range(items.count())] == ["error", "cost", "note"]
    error = items.nth(0)
    assert "summed over 4 ranks" in error.inner_text() and error.locator("code").inner_text() == "main.py:48"
    names = ["Evidence", "Fix", "Certainty", "Refuted by"]
    assert error.locator("dt").all_inner_texts() == names
    assert items.nth(1).locator("dt").all_inner_texts() == [names[0], "Costs", *names[1:]]
    assert (
        "checkpoints/last.pt, log.txt; collected in rank0.files to rank3.files"
        in page.locator("#faulty-script-1").inner_text()
    )
    assert page.locator("#own-script-1 .findings").count() == 0
