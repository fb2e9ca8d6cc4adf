"""Write what the documentation says about the program, so that it cannot fall behind.

docs/cli.md comes from ``--help``, docs/results.md from the records in docs/results/, the sample output in README.md
and its picture from its first example, the list of files in docs/architecture.md from their first lines. ``python -m
docs.generate`` rewrites them; with ``--check`` it only reports what is out of date (exit code 1).
"""

import ast
import contextlib
import io
import sys
import tempfile
from pathlib import Path

import click

from onebasin.cli.main import group
from onebasin.errors import OnebasinError
from onebasin.functional import global_seed
from onebasin.reporting.markdown import markdown
from onebasin.reporting.record import read_record
from tests.page_blocks import blocks, commands, drawn, run_command, run_python, shape

ROOT = Path(__file__).resolve().parent.parent
_BEGIN, _END = "<!-- output of the example: begin (make docs) -->", "<!-- output of the example: end -->"


def cli_reference() -> str:
    """Return the whole of docs/cli.md."""
    parts = [
        "# Command line",
        "Written by `make docs` from `--help`; do not edit.",
        _help(group, "onebasin", None),
    ]
    parts += [_help(group.commands[name], f"onebasin {name}", group) for name in sorted(group.commands)]
    rows = [(0, "done"), (1, "a bug of ours; please report it"), (2, "wrong usage: an unknown option or command")]
    rows += sorted((kind.exit_code, _question(kind)) for kind in [OnebasinError, *OnebasinError.__subclasses__()])
    rows += [(130, "interrupted"), (141, "the reader of the output closed it")]
    table = ["| code | meaning |", "| --- | --- |", *(f"| {code} | {meaning} |" for code, meaning in rows)]
    parts += ["## Exit codes", "\n".join(table)]
    return "\n\n".join(parts) + "\n"


def results() -> str:
    """Return the whole of docs/results.md."""
    parts = [
        "# Results",
        "Written by `make docs` from the records in `docs/results/`, which the commands below made; do not edit. "
        "`onebasin report docs/results/compact.json -o page/` shows a record with its figures.",
    ]
    parts += [markdown(read_record(path)).rstrip() for path in sorted((ROOT / "docs" / "results").glob("*.json"))]
    return "\n\n".join(parts) + "\n"


def readme(page: Path, picture: Path | None = None) -> str:
    """Return README.md with the output of its first Python block between the two markers.

    Other digits alone are no change: another machine has others.

    Args:
        page: README.md; what stands above the block is run, too.
        picture: a file for the picture that the block draws.
    """
    text, names, captured = page.read_text(encoding="utf-8"), {"__name__": "readme"}, io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), global_seed(0):
        for block in blocks(page):
            captured = io.StringIO()
            with contextlib.redirect_stdout(captured):
                if block.language == "python":
                    run_python(block, names)
                    break
                for words in commands(block):
                    run_command(words)
    for figure in drawn():
        if picture is not None:
            figure.savefig(picture, dpi=100, metadata={"Software": None})
    head, _, rest = text.partition(_BEGIN)
    old, _, tail = rest.partition(_END)
    output = "\n".join(line.rstrip() for line in captured.getvalue().rstrip().splitlines())
    new = f"\n```text\n{output}\n```\n"
    return f"{head}{_BEGIN}{old if shape(old) == shape(new) else new}{_END}{tail}"


def architecture(text: str) -> str:
    """Return docs/architecture.md with the first line of every source file below its heading "Files"."""
    lines = []
    for folder in ("onebasin", "onebasin_papers"):
        for path in sorted((ROOT / folder).rglob("*.py"), key=lambda path: (path.parent, path.name)):
            module = ast.parse(path.read_text(encoding="utf-8"))
            if path.name == "__init__.py" and path.parent.name == folder:
                lines += ["", f"### {folder}", "", "| file | about |", "| --- | --- |"]
            summary = (ast.get_docstring(module) or "").split("\n")[0].replace("|", "\\|")
            lines.append(f"| {path.relative_to(ROOT / folder).as_posix()} | {summary} |")
    head, _, rest = text.partition("\n## Files\n")
    _, _, tail = rest.partition("\n## ")
    intro = "First lines of all files, written by `make docs`."
    return "\n".join([f"{head}\n## Files\n", intro, *lines, "", f"## {tail}"])


def pages(picture: Path | None = None) -> dict[Path, str]:
    """Return each generated page with the text it should have, and draw the picture of README.md."""
    front, map_page = ROOT / "README.md", ROOT / "docs" / "architecture.md"
    return {
        map_page: architecture(map_page.read_text(encoding="utf-8")),
        ROOT / "docs" / "cli.md": cli_reference(),
        ROOT / "docs" / "results.md": results(),
        front: readme(front, picture),
    }


def main(arguments: list[str]) -> int:
    """Rewrite the pages, or only compare them."""
    picture = None if "--check" in arguments else ROOT / "docs" / "barrier.png"
    stale = {
        path: text for path, text in pages(picture).items() if not path.is_file() or path.read_text("utf-8") != text
    }
    for path, text in stale.items():
        if "--check" not in arguments:
            path.write_text(text, encoding="utf-8")
        print(f"{path.relative_to(ROOT)} {'is out of date: run make docs' if '--check' in arguments else 'written'}")
    return 1 if stale and "--check" in arguments else 0


def _help(command: click.Command, name: str, parent: click.Command | None) -> str:
    outer = None if parent is None else click.Context(parent, info_name="onebasin", terminal_width=80)
    context = click.Context(command, info_name=name.split()[-1], parent=outer, terminal_width=80)
    context.help_option_names = ["-h", "--help"]
    return f"## {name}\n\n```text\n{command.get_help(context).rstrip()}\n```"


def _question(kind: type[OnebasinError]) -> str:
    first = (kind.__doc__ or "").strip().splitlines()[0]
    return f"`{kind.__name__}`: {first}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
