"""The documentation tells the truth: generated pages are current, the example runs, links lead somewhere."""

import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType

import click
import pytest

import onebasin
from onebasin.calling import global_seed
from onebasin.cli.main import group

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
SOURCES = [
    path
    for folder in ("onebasin", "tests", "benchmarks", "docs", "examples", ".ci")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.is_file() and path.suffix in {".py", ".md", ".toml", ".txt", ".json", ""}
] + [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("*.t*")), ROOT / "Makefile"]


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


def test_the_readme_example_runs_and_prints_what_the_readme_shows(generate: ModuleType) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    example = generate.readme_example(text)
    assert len([line for line in example.splitlines() if line.strip()]) <= 12
    fresh = generate.readme(text)
    assert "same function: True" in fresh
    assert text == fresh, "run make docs"


def test_the_examples_about_metrics_run(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 4
    names: dict[str, object] = {"__name__": "page"}
    with global_seed(0):
        for block in blocks:
            exec(compile(block, "docs/metrics.md", "exec"), names)
    assert "auroc" in capsys.readouterr().out.lower()


def test_the_check_mode_reports_a_stale_page(
    generate: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    monkeypatch.setattr(generate, "pages", lambda: {page: "new\n"})
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
    assert name in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_public_nouns_stand_in_the_glossary() -> None:
    glossary = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    nouns = [name for name in onebasin.__all__ if name[0].isupper() and not name.endswith("Error")]
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
