"""The report: whole, harmless, the same every time, and built without torch."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from onebasin.cli.report import report as verb
from onebasin.errors import DiskError, InputError, StorageError
from onebasin.reporting.drawing import GRADIENT, ROLES, SERIES, variables
from onebasin.reporting.markdown import markdown
from onebasin.reporting.page import inline_svg
from onebasin.reporting.page import page as page_of
from onebasin.reporting.record import (
    Axis,
    Column,
    Figure,
    Number,
    Panel,
    Record,
    Rule,
    Series,
    Table,
    encode,
    write_record,
)
from onebasin.reporting.result import result_record
from onebasin.reporting.text import best_rows, error_text, figure_of, published_text
from onebasin.reporting.write import write_report
from tests.sample_record import HOSTILE, hostile_record, sample_record

ROOT = Path(__file__).resolve().parents[2]
VOID = {"meta", "img", "br", "link", "input", "path", "use", "rect", "image"}


class Reader(HTMLParser):
    """What a browser would see: elements with their attributes, and text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
            self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def tags(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("sample")
    return write_report(sample_record(), folder, figures=False).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def bad_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("hostile")
    return write_report([hostile_record(), sample_record()], folder, figures=False).read_text(encoding="utf-8")


def test_everything_of_the_record_is_on_the_page(page: str) -> None:
    record, text = sample_record(), " ".join("".join(Reader(page).text).split())
    wanted = [record.title, record.command, *record.summary, *record.terms, *record.terms.values(), *record.versions]
    for section in record.sections:
        wanted += [section.title, section.command, *section.text]
        for claim in section.claims:
            wanted += [claim.text, claim.verdict, claim.found, claim.published, claim.caveat]
        for item in section.items:
            wanted.append(item.title)
            if isinstance(item, Table):
                wanted += [item.errors.lstrip("± "), item.note, *(column.help for column in item.columns)]
                wanted += [cell for row in item.rows for cell in row if isinstance(cell, str)]
    assert [part for part in wanted if part and part.replace("`", "") not in text] == []


def test_each_number_has_its_error_and_the_published_one(page: str) -> None:
    cells = re.findall(r'<td class="number" data-value="([^"]+)">(.*?)</td>', page)
    assert len(cells) == 4 * 5 + 2
    first = dict(cells)["95.3"]
    assert re.sub("<[^>]+>", "|", first) == "|95.3| |± 0.2||paper 97.1|"
    best = [value for value, inside in cells if "<strong>" in inside]
    assert best == ["0.021", "100", "96.1", "0.138", "0.019"]  # 0.021 ± 0.002 is as good as 0.019 ± 0.001


def test_elements_are_closed_and_ids_are_unique(page: str, bad_page: str) -> None:
    for text in (page, bad_page):
        found = Reader(text)
        assert found.open == []
        ids = [attributes["id"] for _, attributes in found.elements if "id" in attributes]
        assert len(ids) == len(set(ids))
        targets = {
            value[1:]
            for _, attributes in found.elements
            for name, value in attributes.items()
            if name == "href" and value.startswith("#")
        }
        clips = set(re.findall(r"url\(#([^)]+)\)", text))
        assert targets | clips <= set(ids)
        assert targets and clips


def test_headings_go_down_one_level_at_a_time(page: str) -> None:
    levels = [int(tag[1]) for tag, _ in Reader(page).elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_hostile_words_stay_words(bad_page: str) -> None:
    found = Reader(bad_page)
    assert len(found.tags("script")) == 1 and len(found.tags("style")) == 1 and found.tags("img") == []
    assert not [name for _, attributes in found.elements for name in attributes if name.startswith("on")]
    assert "".join(found.text).count("<script>alert(1)</script>") > 30
    assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff]", bad_page)


def test_the_page_asks_nobody_for_anything(page: str, bad_page: str) -> None:
    for text in (page, bad_page):
        found = Reader(text)
        for tag, attributes in found.elements:
            for name in ("src", "href", "action", "data", "poster", "srcset"):
                value = attributes.get(name, "#")
                assert value.startswith(("#", "data:image/png;base64,")), f"<{tag} {name}={value[:40]}>"
        assert found.tags("link") == []
        assert not re.search(r"@import|url\((?!#)", text)
        policy = next(meta["content"] for meta in found.tags("meta") if "http-equiv" in meta)
        assert policy.startswith("default-src 'none'; script-src 'sha256-")
        assert "http" not in policy


def test_a_dollar_is_a_dollar_and_not_a_formula() -> None:
    panel = Panel("lines", "$x^2$", Axis("a_b"), Axis("y"), (Series("$1", (0, 1), (0, 1)),))
    texts = re.findall("<text[^>]*>([^<]*)</text>", inline_svg(panel, "p", "?"))
    assert {"$x^2$", "$1", "a_b"} <= set(texts)


def test_the_same_record_gives_the_same_bytes(tmp_path: Path) -> None:
    record = sample_record()
    small = replace(record, sections=record.sections[2:])
    first, second = tmp_path / "a", tmp_path / "b"
    write_report(small, first)
    with matplotlib.rc_context({"font.size": 30, "axes.labelpad": 30}):  # the user's own taste
        write_report(small, second)
        assert matplotlib.rcParams["font.size"] == 30
    files_of = {file.relative_to(first) for file in first.rglob("*") if file.is_file()}
    assert {file.as_posix() for file in files_of} == {
        "report.html", "figures/maps.svg", "figures/maps.pdf", "figures/maps.png",
    }  # fmt: skip
    for file in files_of:
        assert (first / file).read_bytes() == (second / file).read_bytes(), file


def test_pictures_are_large_and_not_blank(tmp_path: Path) -> None:
    record = sample_record()
    write_report(replace(record, sections=record.sections[:1]), tmp_path)
    with Image.open(tmp_path / "figures" / "barriers.png") as picture:
        pixels = np.asarray(picture.convert("RGB"))
    assert pixels.shape[1] >= 1700
    assert 0.02 < (pixels < 250).any(axis=2).mean() < 0.6
    assert (tmp_path / "figures" / "barriers.pdf").read_bytes().startswith(b"%PDF-")
    assert ElementTree.parse(tmp_path / "figures" / "barriers.svg").getroot().tag.endswith("svg")


def test_hostile_names_stay_in_the_folder(tmp_path: Path) -> None:
    write_report(hostile_record(), tmp_path / "inside")
    made = sorted(file.relative_to(tmp_path).as_posix() for file in tmp_path.rglob("*") if file.is_file())
    assert made == [f"inside/figures/outside.{ending}" for ending in ("pdf", "png", "svg")] + ["inside/report.html"]


def test_several_records_become_chapters(tmp_path: Path) -> None:
    record = sample_record()
    small = replace(record, sections=record.sections[2:])
    page = write_report([small, small], tmp_path, figures=False).read_text(encoding="utf-8")
    assert page.count("<article") == 2
    assert page.count("<h1>") == page.count(f"<h1>{record.title}</h1>") == 2


def test_the_palette_can_be_told_apart_from_the_gradient() -> None:
    gradient = matplotlib.colormaps[GRADIENT](np.linspace(0, 1, 4096))
    used = {matplotlib.colors.to_hex(colour) for colour in gradient}
    light = [shade.light for shade in variables().values()]
    assert not used & set(light)
    assert len(light) == len(set(light))


def luminance(colour: str) -> float:
    """Relative luminance as WCAG defines it."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return float(np.dot([0.2126, 0.7152, 0.0722], linear))


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("paper", ["paper", "sheet"])
@pytest.mark.parametrize("mode", ["light", "dark"])
def test_text_has_the_contrast_that_wcag_asks_for(mode: str, paper: str) -> None:
    ground = getattr(ROLES[paper], mode)
    for role in ("ink", "muted", "accent", "good", "fair", "bad"):
        assert contrast(getattr(ROLES[role], mode), ground) >= 4.5, role


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_series_are_seen_on_their_paper(mode: str) -> None:
    for shade in SERIES:
        assert contrast(getattr(shade, mode), getattr(ROLES["paper"], mode)) >= 2.2


def test_a_series_is_told_by_more_than_its_colour() -> None:
    curves = tuple(Series(str(number), (0, 1), (0, number)) for number in range(14))
    drawn = inline_svg(Panel("lines", "", Axis("x"), Axis("y"), curves), "p", "?")
    lines = re.findall(r'<path d="M [^"]*L [^"]*" style="([^"]*stroke: var\(--series-\d\)[^"]*)"', drawn)
    assert len(set(lines)) == 14  # each colour comes twice, with other dashes


def test_a_gap_stays_a_gap() -> None:
    series = Series("a", (0, 1, 2, 3), (1.0, None, 2.0, 3.0))
    drawn = inline_svg(Panel("lines", "", Axis("x"), Axis("y"), (series,)), "p", "?")
    line = next(path for path in re.findall(r'<path d="([^"]*)"[^>]*stroke: var\(--series-0\)', drawn) if "L" in path)
    assert (line.count("M"), line.count("L")) == (2, 1)  # the first point stands alone


@pytest.mark.parametrize("kind", ["lines", "points", "bars"])
def test_a_series_without_a_name_has_no_legend(kind: str) -> None:
    for name, seen in (("", 0), ("a name", 1)):
        series = (Series(name, (0, 1), (1.0, 2.0)),)
        drawn = inline_svg(Panel(kind, "title", Axis("x", names=("p", "q")), Axis("y"), series), "p", "?")
        texts = re.findall("<text[^>]*>([^<]*)</text>", drawn)
        assert texts.count("a name") == seen
        assert set(texts) - {"a name"} == {"title", "x", "y", "p", "q"} | {t for t in texts if t[0].isdigit()}


def test_a_rule_widens_the_view_and_one_outside_given_ends_is_left_out() -> None:
    series = (Series("s", (0, 1), (1.0, 2.0)),)
    for high, seen in ((None, True), (3.0, False)):
        panel = Panel("lines", "", Axis("x"), Axis("y", high=high), series, (Rule("far away", 50.0),))
        assert (">far away<" in inline_svg(panel, "p", "?")) is seen


@pytest.mark.parametrize("kind", ["lines", "points", "bars", "histogram", "heat"])
@pytest.mark.parametrize("scale", ["linear", "log"])
def test_every_kind_is_drawn_whatever_the_values(kind: str, scale: str) -> None:
    for values in ((0.0, 0.0), (-1.0, None), (None, None), (1e-30, 1e30)):
        axis = Axis("a", scale)
        places = (1.0, 2.0, 3.0) if kind == "histogram" else (1.0, 2.0)
        if kind == "heat":
            panel = Panel(kind, "t", axis, axis, grid=(values,), columns=(1.0, 2.0), rows=(0.0,), colour=axis)
        else:
            panel = Panel(kind, "t", axis, axis, (Series("s", places, values, values, values),), (Rule("r", 1.0),))
        root = ElementTree.fromstring(inline_svg(panel, "p", "?"))
        assert root.attrib["role"] == "img" and root.attrib["aria-label"] == "? t"


def test_a_number_reads_as_what_it_is() -> None:
    for value in (0.0, 1.5, -2.25, 1234.5, 1e-9, -3e12, 0.0004):
        told = figure_of(value, 3).replace("−", "-").replace(",", "")
        assert float(told) == pytest.approx(value, rel=5e-3, abs=5e-4 if abs(value) >= 5e-4 else 0)


def test_an_error_never_reads_as_none() -> None:
    for error in (0.3, 0.004, 0.0004, 4e-9):
        assert float(error_text(Number(1.0, error), Column("c")).removeprefix("± ")) > 0
    assert error_text(Number(1.0, 0.0), Column("c")) == "± 0.000"
    assert error_text(Number(None, 0.1), Column("c")) == error_text(Number(1.0), Column("c")) == ""


def test_a_published_number_gets_no_digits_that_it_has_not() -> None:
    for published, told in ((0.98, "0.98"), (97.0, "97.0"), (0.1234567, "0.123"), (3e-5, "3.00e-05"), (-1.5, "−1.5")):
        assert published_text(Number(1.0, published=published), Column("c")) == f"paper {told}"


def test_the_best_needs_a_direction_and_a_difference() -> None:
    cells = [Number(1.0), Number(3.0), None, "text", Number(None)]
    assert best_rows(Column("c", better="higher"), cells) == {1}
    assert best_rows(Column("c", better="lower"), cells) == {0}
    assert best_rows(Column("c"), cells) == set()
    assert best_rows(Column("c", better="lower"), [Number(1.0), Number(1.0)]) == set()


def test_nothing_is_best_where_rows_do_not_compete() -> None:
    columns = (Column(""), Column("loss", better="lower"))
    rows = (("a", Number(0.1)), ("b", Number(0.2)))
    for rivals in (True, False):
        table = Table("t", "Which?", columns, rows, rivals=rivals)
        shown = page_of([result_record("r", "R", "text", (table,))])
        assert ("(best)" in shown) is rivals and ("Bold: the best" in shown) is rivals
        assert shown.count('class="sort"') == 1  # a head without a name is none to press


def test_markdown_tells_verdicts_tables_and_commands() -> None:
    record = sample_record()
    text = markdown(record)
    for claim in record.claims:
        assert f"| **{claim.verdict}** | {claim.found}" in text
    section = record.sections[0]
    above, below = text.split("| Method | Accuracy (%) ↑ | NLL (nats) ↓ |")
    assert above.rstrip().endswith(f"Made by `{section.command}`.")
    assert "| 95.3 ± 0.2 (paper 97.1) |" in below and "| **96.1** ± 0.1 (paper 98.0) |" in below
    assert "| – (did not converge) |" in below
    assert "q\\_r, aligned" in below


def test_markdown_tables_stay_rectangular_whatever_the_words() -> None:
    blocks = markdown(hostile_record()).split("\n\n")
    tables = [block.splitlines() for block in blocks if block.startswith("| ")]
    assert len(tables) == 3
    for rows in tables:
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1
    assert not re.search(r"(?<!\\)<", re.sub("`[^`]*`", "", "\n\n".join(blocks)))


def test_no_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="at least one record"):
        write_report([], tmp_path)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(DiskError, match="choose another folder"):
        write_report(sample_record(), tmp_path / "taken")


def test_a_report_needs_no_torch(tmp_path: Path) -> None:
    write_record(sample_record(), tmp_path / "record.json")
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from onebasin.cli.main import main\n"
        f"assert main(['report', {str(tmp_path)!r}, '--no-figures']) == 0\n"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    run = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == str(tmp_path / "report.html")


def test_importing_the_room_is_light() -> None:
    code = "import sys, onebasin.reporting; print([m for m in ('matplotlib', 'numpy') if m in sys.modules])"
    code = f"import sys; sys.modules['torch'] = None; {code}"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.stdout.strip() == "[]", run.stderr


Verb = Callable[..., tuple[int, str]]


@pytest.fixture
def call() -> Verb:
    def run(*arguments: object) -> tuple[int, str]:
        result = CliRunner().invoke(verb, [str(argument) for argument in arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.output

    return run


def tiny() -> Record:
    record = sample_record()
    return replace(record, sections=record.sections[2:])


def test_the_verb_writes_beside_the_record(call: Verb, tmp_path: Path) -> None:
    write_record(tiny(), tmp_path / "record.json")
    code, out = call(tmp_path, "--no-figures")
    assert code == 0
    assert out.splitlines()[-1] == str(tmp_path / "report.html")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["record.json", "report.html"]


def test_the_verb_takes_several_runs(call: Verb, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_record(replace(tiny(), name=name), tmp_path / name / "record.json")
    code, out = call(tmp_path / "a", tmp_path / "b" / "record.json", "-o", tmp_path / "both")
    assert code == 0
    assert Path(out.strip()) == tmp_path / "both" / "report.html"
    names = {file.name for file in (tmp_path / "both" / "figures").iterdir()}
    assert names == {f"{run}-maps.{ending}" for run in "ab" for ending in ("svg", "pdf", "png")}


def test_the_verb_refuses_what_is_no_run(call: Verb, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="holds nothing that can be shown"):
        call(tmp_path)
    with pytest.raises(StorageError, match=r"there is no .*nothing\.json"):
        call(tmp_path / "nothing.json")
    (tmp_path / "record.json").write_text(json.dumps({"format": "x", "record": encode(tiny())}))
    with pytest.raises(StorageError, match="should be a onebasin record"):
        call(tmp_path)
    assert call()[0] == 2


@pytest.mark.parametrize("number", [3, 40])
def test_points_carry_their_names(number: int) -> None:
    """Each point has its label on hover, a gap has none; few are written, too."""
    names = tuple(f"chain {place} <b>" for place in range(number))
    heights = (None, *(float(place) for place in range(1, number)))
    series = Series("networks", tuple(map(float, range(number))), heights, labels=names)
    root = ElementTree.fromstring(inline_svg(Panel("points", "", Axis("x"), Axis("y"), (series,)), "p", "?"))
    assert [title.text for dot in root.iter("use") for title in dot.iter("title")] == list(names[1:])
    written = [text.text for text in root.iter("text") if text.text in names]
    assert written == (list(names[1:]) if number == 3 else [])


def test_labels_are_as_many_as_points() -> None:
    with pytest.raises(InputError, match="1 labels for 2 points"):
        Series("networks", (0.0, 1.0), (0.0, 1.0), labels=("a",))


def test_an_interval_is_shown_instead_of_an_error() -> None:
    number = Number(0.5, low=0.48, high=0.53)
    assert error_text(number, Column("NLL", digits=2)) == "[0.48, 0.53]"
    cells = [number, Number(0.54, low=0.5, high=0.58), Number(0.9, low=0.89, high=0.91)]
    assert best_rows(Column("NLL", better="lower"), cells) == {0, 1}


def test_style_and_script_come_with_the_package() -> None:
    for name in ("page.html", "page.css", "page.js"):
        assert files("onebasin.reporting").joinpath(name).is_file()


def test_the_hostile_text_is_hostile() -> None:
    assert "</script>" in HOSTILE and "\x00" in HOSTILE and '"' in HOSTILE
    assert isinstance(next(iter(hostile_record().items)), Table | Figure)


def test_tensors_of_one_architecture_are_listed_once(tmp_path: Path) -> None:
    columns, rows = (Column("tensor"), Column("numbers")), (("w", Number(3.0)), ("b", Number(1.0)))
    for name, own in (("first", rows), ("second", rows), ("third", rows[:1])):
        table = Table("tensors", "What does each network hold?", columns, own)
        write_record(result_record(name, name, "text", (table,)), tmp_path / f"{name}.json")
    paths = [str(tmp_path / f"{name}.json") for name in ("first", "second", "third")]
    result = CliRunner().invoke(verb, [*paths, "-o", str(tmp_path / "page"), "--no-figures"])
    assert result.exit_code == 0, result.output
    shown = Path(result.output.strip()).read_text()
    assert shown.count("<h3>What does each network hold?</h3>") == 2
    assert shown.count("Its tensors are those shown above.") == 1
