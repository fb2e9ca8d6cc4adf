"""The documentation tells the truth: generated pages are current, the example runs, links lead somewhere."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import click
import pytest
from PIL import Image

import onebasin
from onebasin.cli.main import group
from onebasin.functional.call import global_seed
from tests.page_blocks import LANGUAGES, ROOT, appears, blocks, commands, drawn, run_command, run_python, shape

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
SOURCES = [
    path
    for folder in ("onebasin", "onebasin_papers", "tests", "benchmarks", "docs", "examples", ".ci")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.is_file() and path.suffix in {".py", ".md", ".toml", ".txt", ".json", ""}
] + [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("*.t*")), ROOT / "Makefile"]
FRONT = ROOT / "README.md"  # run by its own test
RUN = [page for page in PAGES if page != FRONT and any(block.language in ("python", "sh") for block in blocks(page))]
GALLERY = ROOT / "docs" / "gallery.md"  # its first block prepares, every other one draws a picture
FOREIGN = sorted({(page, block.needs) for page in RUN for block in blocks(page) if block.needs})


def named(value: Path | str) -> str:
    return value.relative_to(ROOT).as_posix() if isinstance(value, Path) else value


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_command_line_page_is_current(generate: ModuleType) -> None:
    assert (ROOT / "docs" / "cli.md").read_text(encoding="utf-8") == generate.cli_reference(), "run make docs"


def test_the_list_of_files_is_current(generate: ModuleType) -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert text == generate.architecture(text), "run make docs"


def test_the_readme_example_is_short_and_makes_the_picture_and_the_output_that_it_shows(
    generate: ModuleType, tmp_path: Path
) -> None:
    page, picture = FRONT, tmp_path / "made.png"
    (example,) = (block for block in blocks(page) if block.language == "python")
    assert all(block.line <= example.line for block in blocks(page) if block.language == "sh")  # all of it is run
    assert len([line for line in example.code.splitlines() if line.strip()]) <= 12  # two imports, and ten lines
    assert page.read_text(encoding="utf-8") == generate.readme(page, picture), "run make docs"
    shown = ROOT / "docs" / "barrier.png"
    assert image_size(picture) == image_size(shown), "run make docs"
    assert shown.stat().st_size < 60_000


def image_size(path: Path) -> tuple[int, int]:
    with Image.open(path) as image:
        return image.size


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restored_imports: None) -> Path:
    """An empty folder with the examples in it, as one has them beside the checkout."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_page(page: Path, capsys: pytest.CaptureFixture[str], package: str = "") -> None:
    """Run the blocks of a page in their order, those for another package only if it is this one."""
    names: dict[str, object] = {"__name__": "page"}
    printed = ""
    entries = 0
    with global_seed(0):
        for block in blocks(page):
            if block.needs not in ("", package):
                continue
            if block.language in ("python", "setup"):
                run_python(block, names)
                figures = len(list(drawn()))
                entries += block.language == "python"
                assert page != GALLERY or figures == (entries > 1), f"line {block.line}: one picture for each entry"
            elif block.language == "sh":
                for words in commands(block):
                    run_command(words)
            elif block.note == "output":
                assert appears(block.code, printed), f"{page.name} line {block.line}: printed was\n{printed}"
            printed = capsys.readouterr().out or printed


@pytest.mark.parametrize("page", RUN, ids=named)
def test_the_blocks_of_a_page_run(page: Path, workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_page(page, capsys)


@pytest.mark.parametrize(("page", "package"), FOREIGN, ids=named)
def test_blocks_for_other_packages_run_where_these_are_installed(
    page: Path, package: str, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(package)
    run_page(page, capsys, package)


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_block_says_what_it_is(page: Path) -> None:
    notes = re.compile(r"(needs: \w+|output|output of examples/\w+\.py|output of the example: begin \(make docs\))?")
    found = list(blocks(page))
    assert {block.language for block in found} <= LANGUAGES
    assert [block.note for block in found if not notes.fullmatch(block.note)] == []
    assert page.read_text(encoding="utf-8").count("\n```") == 2 * sum(block.language != "setup" for block in found)


BROKEN = {
    "a python block": "```python\n1 / 0\n```\n",
    "what is not shown": "<!-- setup:\nassert 1 > 2\n-->\n",
    "a command that fails": "```sh\nonebasin discover nothing.py:model\n```\n",
    "an option of a long command": "```sh\nonebasin reproduce compact --presto quick\n```\n",
    "a part of a paper that is none": "```sh\nonebasin reproduce nothing\n```\n",
    "an unknown program": "```sh\nrm -r all\n```\n",
    "a target that make lacks": "```sh\nmake money\n```\n",
    "a module that is not there": "```sh\npython -m benchmarks.nothing\n```\n",
    "another output": '```python\nprint("loss 3.1")\n```\n\n<!-- output -->\n```text\ngain 3.1\n```\n',
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_page_is_noticed(name: str, workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = workplace / "page.md"
    page.write_text(f"# A page\n\n{BROKEN[name]}", encoding="utf-8")
    with pytest.raises((AssertionError, ZeroDivisionError, click.UsageError)):
        run_page(page, capsys)


def test_blocks_of_a_page_share_names_and_errors_name_their_line(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = workplace / "page.md"
    page.write_text("```python\nx = 3\n```\n\ntext\n\n```python\nprint(x + 1)\nx / 0\n```\n", encoding="utf-8")
    with pytest.raises(ZeroDivisionError) as caught:
        run_page(page, capsys)
    last = caught.traceback[-1]
    assert (str(last.path), last.lineno + 1) == (str(page), 9)


def test_numbers_of_an_output_may_differ_and_words_may_not() -> None:
    assert shape("loss  -3.25 ->  1,000.5 (1e-05)") == ["loss # -> # (#)"]
    assert appears("b 2\nc 3", "a 1\nb 7\nx\nc 9")
    assert not appears("c 3\nb 2", "b 7\nc 9")


def shown_code(page: Path) -> str:
    return "\n".join(block.code for block in blocks(page) if block.language in ("python", "sh"))


def test_one_page_shows_every_public_name_and_every_verb() -> None:
    code = shown_code(ROOT / "docs" / "everything.md")
    shown = [name for name in onebasin.__all__ if name[0].islower() or name.isupper()]  # results are made by functions
    assert [name for name in shown if f"ob.{name}" not in code] == []
    assert [verb for verb in group.commands if f"onebasin {verb} " not in code] == []


def test_the_check_mode_reports_a_stale_page(
    generate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    monkeypatch.setattr(generate, "pages", lambda picture: {page: "new\n"})
    assert generate.main(["--check"]) == 1
    assert not page.exists()
    assert "run make docs" in capsys.readouterr().out
    assert generate.main([]) == 0
    assert page.read_text(encoding="utf-8") == "new\n"
    assert generate.main(["--check"]) == 0


@pytest.mark.parametrize("name", sorted(group.commands))
def test_every_command_has_help_and_is_shown(name: str) -> None:
    command = group.commands[name]
    assert command.help
    assert [option.name for option in command.params if isinstance(option, click.Option) and not option.help] == []
    assert f"onebasin {name}" in (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    """The headings of a page as GitHub names them in addresses."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            goal = page.parent / target if target else page
            assert goal.exists(), f"{page.name} links to {target}"
            assert not anchor or anchor in anchors(goal), f"{page.name} links to {target}#{anchor}"


def test_public_nouns_stand_in_the_glossary() -> None:
    glossary = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    nouns = [
        name for name in onebasin.__all__ if name[0].isupper() and not name.isupper() and not name.endswith("Error")
    ]
    assert [name for name in nouns if f"| **{name}** |" not in glossary] == []


def test_the_changelog_knows_the_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    first = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert first is not None
    assert first[1] == version


def test_no_path_of_a_machine_is_written_down() -> None:
    pattern = re.compile(r"(?<![\w.])/(work|root|home|Users|opt)/\w")
    found = [
        path.relative_to(ROOT).as_posix() for path in SOURCES if pattern.search(path.read_text("utf-8", "replace"))
    ]
    assert found == []


def test_names_in_the_glossary_stand_in_the_source() -> None:
    glossary = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    entries = re.findall(r"^\| \*\*(.+?)\*\*", glossary, re.MULTILINE)
    words = [word for entry in entries for word in entry.split(", ")]
    names = [word for word in words if re.fullmatch(r"[A-Z][a-z]+\w*|[a-z]+_\w+", word)]
    source = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "onebasin").rglob("*.py")))
    assert [name for name in names if not re.search(rf"\b{name}\b", source)] == []
    assert len(names) > 20 and entries == sorted(entries, key=str.lower)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; a warning of mkdocs is an error. The gallery may lack its pictures here."""
    pytest.importorskip("mkdocs", reason="needs the extra onebasin[site]")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_site_needs_no_network(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 35
    loaded = re.compile(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=[\"']?(?:https?:)?//[^>]*>")
    assert [found for page in pages for found in loaded.findall(page.read_text(encoding="utf-8"))] == []
    assert "onebasin" in (site / "search" / "search_index.js").read_text(encoding="utf-8")


def test_the_reference_has_every_public_name(site: Path) -> None:
    headings = {
        name
        for page in sorted((site / "reference").glob("*.html"))
        for name in re.findall(r'class="doc doc-heading">\s*ob\.([\w.]+)', page.read_text(encoding="utf-8"))
    }
    packages = [name for name in onebasin.__all__ if (site / "reference" / f"{name}.html").is_file()]
    assert set(packages) == {"data", "errors", "examples", "metrics", "parallel", "reporting", "storage"}
    expected = set(onebasin.__all__) - set(packages)
    for name in packages:
        names = getattr(getattr(onebasin, name), "__all__", [])
        expected |= {f"{name}.{inner}" for inner in names if inner not in onebasin.__all__}
    assert expected - headings == set()
