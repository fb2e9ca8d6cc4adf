"""The report in a real browser: nothing complains, heads sort, everything fits wide and narrow windows."""

import html
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from onebasin.reporting.write import write_report
from tests.sample_record import hostile_record, sample_record

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (apt-get install chromium)")
WIDTHS = (1280, 400)

# Runs in a page around the report, which it holds untouched in frames; its own complaint shows that we would hear one.
PROBE = """
const pages = PAGES, found = {};
const texts = (table) => [...table.tBodies[0].rows].map((row) => row.cells[0].textContent);
const box = (element) => { const b = element.getBoundingClientRect(); return [b.left, b.right, b.width, b.height]; };
const look = (frame) => {
  const page = frame.contentDocument, view = frame.contentWindow;
  const sorts = [], table = page.querySelector("table");
  for (const place of [1, 1, 0, 0, 6]) {
    table.tHead.rows[0].cells[place].querySelector("button").click();
    const marked = [...table.tHead.rows[0].cells].map((head) => head.getAttribute("aria-sort"));
    sorts.push([texts(table), marked]);
  }
  const head = table.tHead.rows[0].cells[2].querySelector("button"), tip = page.querySelector("[role=tooltip]");
  head.dispatchEvent(new FocusEvent("focus"));
  const told = [tip.hidden, tip.textContent, ...box(tip)];
  page.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape" }));
  const themes = [], button = page.querySelector("button.theme");
  for (let turn = 0; turn < 4; turn++) {
    const line = page.querySelector("svg.panel path[style*='--series-0']"), style = view.getComputedStyle(line);
    themes.push([page.documentElement.dataset.theme, view.getComputedStyle(page.body).backgroundColor, style.stroke]);
    button.click();
  }
  return {
    width: view.innerWidth, scroll: page.documentElement.scrollWidth, sorts, told, hidden: tip.hidden, themes,
    panels: [...page.querySelectorAll("svg.panel")].map(box),
    texts: [...page.querySelectorAll("h1, h2, h3, p, dd, .claim, .command, .scroll, .badge")].map(box),
    scripts: page.scripts.length,
    wide: [...page.querySelectorAll(".scroll")].map((part) => [
      part.scrollWidth > part.clientWidth + 1, box(part.nextElementSibling)[3] > 0,
    ]),
  };
};
Promise.all(Object.entries(pages).flatMap(([name, text]) => [1280, 400].map((width) => new Promise((done) => {
  const frame = document.createElement("iframe");
  frame.style = `width:${width}px;height:900px;border:0`;
  frame.srcdoc = text;
  frame.onload = () => { found[`${name}-${width}`] = look(frame); done(); };
  document.body.append(frame);
})))).then(() => {
  console.error("planted");
  const result = document.createElement("pre");
  result.id = "result";
  result.textContent = JSON.stringify(found);
  document.body.replaceChildren(result);
});
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {"sample": [sample_record()], "hostile": [sample_record(), hostile_record()]}
    folder = tmp_path_factory.mktemp("pages")
    return {name: write_report(records, folder / name, figures=False) for name, records in made.items()}


@pytest.fixture(scope="module")
def browse(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(page: Path, *options: str) -> subprocess.CompletedProcess[str]:
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
        profile = tmp_path_factory.mktemp("profile")  # a fresh one each time: the page remembers its theme
        flags += ["--disable-dev-shm-usage", "--enable-logging=stderr", "--v=0", f"--user-data-dir={profile}"]
        command = [str(CHROMIUM), *flags, *options, page.as_uri()]
        return subprocess.run(command, capture_output=True, text=True, timeout=90, check=True)

    return run


def complaints(text: str) -> list[str]:
    return [line for line in text.splitlines() if "CONSOLE" in line]


@pytest.fixture(scope="module")
def seen(pages: dict[str, Path], browse: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the browser measured, by page and width; and what it complained about."""
    contents = json.dumps({name: page.read_text(encoding="utf-8") for name, page in pages.items()})
    script = PROBE.replace("PAGES", contents.replace("<", "\\u003c"))
    probe = tmp_path_factory.mktemp("probe") / "probe.html"
    probe.write_text(f"<!doctype html><meta charset=utf-8><body><script>{script}</script>", encoding="utf-8")
    run = browse(probe, "--virtual-time-budget=20000", "--window-size=1400,1000", "--dump-dom")
    result = re.search(r'<pre id="result">(.*?)</pre>', run.stdout, re.DOTALL)
    assert result, run.stderr[-2000:]
    return {**json.loads(html.unescape(result[1])), "complaints": complaints(run.stderr)}


def both(seen: dict[str, Any], *names: str) -> list[tuple[int, dict[str, Any]]]:
    return [(width, seen[f"{name}-{width}"]) for name in names for width in WIDTHS]


def test_the_browser_complains_about_nothing(seen: dict[str, Any]) -> None:
    assert len(seen["complaints"]) == 1, seen["complaints"]
    assert "planted" in seen["complaints"][0]  # so complaints are heard


def test_the_page_by_itself_complains_about_nothing(pages: dict[str, Path], browse: Any, tmp_path: Path) -> None:
    shot = tmp_path / "shot.png"
    run = browse(pages["hostile"], "--window-size=1280,2000", f"--screenshot={shot}")
    assert shot.is_file()
    assert complaints(run.stderr) == []


def test_frames_have_the_width_that_was_asked_for(seen: dict[str, Any]) -> None:
    assert [found["width"] for _, found in both(seen, "sample", "hostile")] == [*WIDTHS, *WIDTHS]


def test_nothing_is_wider_than_the_window(seen: dict[str, Any]) -> None:
    for width, found in both(seen, "sample", "hostile"):
        assert found["scroll"] <= width
        for left, right, _, _ in found["texts"]:
            assert left >= 0 and right <= width + 0.5
        assert len(found["texts"]) > 30


def test_tables_that_are_wider_than_the_page_say_so(seen: dict[str, Any]) -> None:
    for _, found in both(seen, "sample", "hostile"):
        assert all(hidden == hinted for hidden, hinted in found["wide"])
    assert any(hidden for hidden, _ in seen["sample-400"]["wide"])


def test_every_figure_is_visible(seen: dict[str, Any]) -> None:
    for width, found in both(seen, "sample", "hostile"):
        assert len(found["panels"]) in (9, 15)
        for left, right, wide, high in found["panels"]:
            assert left >= 0 and right <= width + 0.5
            assert wide >= 300 and high >= 180


def test_heads_sort_by_value_then_the_other_way(seen: dict[str, Any]) -> None:
    rows = ["HMC, 800 samples", "q_r, aligned", "q_d, not aligned", "deep ensemble", "Laplace"]
    falling = [rows[3], rows[0], rows[1], rows[2], rows[4]]  # what has no value stays last, either way
    rising = [rows[2], rows[1], rows[0], rows[3], rows[4]]
    by_name = sorted(rows, key=str.lower)
    for _, found in both(seen, "sample"):
        orders = [order for order, _ in found["sorts"]]
        marks = [[mark for mark in marked if mark] for _, marked in found["sorts"]]
        assert orders[:4] == [falling, rising, by_name, by_name[::-1]]
        assert orders[4][:2] == ["HMC, 800 samples", "q_d, not aligned"]  # "all", "no basin", then empty ones
        assert marks == [["descending"], ["ascending"], ["ascending"], ["descending"], ["ascending"]]


def test_a_head_tells_what_its_column_means(seen: dict[str, Any]) -> None:
    for width, found in both(seen, "sample"):
        hidden, text, left, right, _, _ = found["told"]
        assert not hidden and text.startswith("Mean negative log-probability")
        assert "lower is better" in text.lower()
        assert left >= 0 and right <= width
        assert found["hidden"]  # after escape


def test_the_theme_can_be_chosen_and_figures_follow(seen: dict[str, Any]) -> None:
    for _, found in both(seen, "sample"):
        themes = {name: (paper, line) for name, paper, line in found["themes"]}
        assert set(themes) == {"auto", "light", "dark"}
        assert themes["light"] == ("rgb(255, 255, 255)", "rgb(0, 114, 178)")
        assert themes["dark"] == ("rgb(21, 24, 29)", "rgb(90, 176, 238)")


def test_hostile_words_run_nothing(seen: dict[str, Any]) -> None:
    for _, found in both(seen, "hostile"):
        assert found["scripts"] == 1


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_screenshots_show_something(pages: dict[str, Path], browse: Any, tmp_path: Path, dark: bool) -> None:
    shot = tmp_path / "shot.png"
    mode = ["--force-dark-mode"] if dark else []
    browse(pages["sample"], "--window-size=1280,5000", f"--screenshot={shot}", *mode)
    with Image.open(shot) as picture:
        pixels = np.asarray(picture.convert("RGB")).astype(float)
    assert pixels.shape[:2] == (5000, 1280)
    paper = np.median(pixels.reshape(-1, 3), axis=0)
    assert (paper.max() < 60) if dark else (paper.min() > 240)
    for part in np.array_split(pixels, 4):  # text and figures all the way down
        assert 0.01 < (np.abs(part - paper).max(axis=2) > 40).mean() < 0.6


def test_it_can_be_printed(pages: dict[str, Path], browse: Any, tmp_path: Path) -> None:
    goal = tmp_path / "page.pdf"
    browse(pages["sample"], "--no-pdf-header-footer", f"--print-to-pdf={goal}")
    content = goal.read_bytes()
    assert content.startswith(b"%PDF-")
    assert 3 <= len(re.findall(rb"/Type\s*/Page\b(?!s)", content)) <= 12
