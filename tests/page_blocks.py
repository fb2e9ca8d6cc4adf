"""The code of a page of documentation: python and sh blocks in their order, run in one namespace and one folder.

A page can say more about the block that follows in a comment:

    <!-- setup: ... -->      python that is run and not shown: preparations, and whether what the text claims holds
    <!-- needs: blackjax --> the block is run only where this package is installed
    <!-- output -->          the text block shows what the code before it printed, up to the digits of numbers
    <!-- output of F.py -->  the same for an example
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from onebasin.cli.main import group, main

ROOT = Path(__file__).resolve().parent.parent
LANGUAGES = {"python", "sh", "text", "setup", ""}
LONG = {"demo", "reproduce"}  # verbs that take minutes: their options are looked at, and they are not run
_PIECE = re.compile(
    r"^<!-- setup:\n(?P<setup>.*?)^-->"
    r"|(?:^<!-- (?P<note>[^\n]*) -->\n+)?^```(?P<language>\S*)\n(?P<code>.*?)^```",
    re.DOTALL | re.MULTILINE,
)
_NUMBER = re.compile(r"[-−+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")


@dataclass(frozen=True)
class Block:
    """One piece of code, or of text that is shown.

    Attributes:
        page: its file.
        line: lines of the page before its first.
        language: "python", "sh", "text", "setup", or "".
        code: what stands in it.
        note: the comment before it.
    """

    page: Path
    line: int
    language: str
    code: str
    note: str = ""

    @property
    def needs(self) -> str:
        """The package without which it cannot run."""
        return self.note.removeprefix("needs: ") if self.note.startswith("needs: ") else ""


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in _PIECE.finditer(text):
        kind = "setup" if found["setup"] is not None else found["language"]
        group_name = "setup" if kind == "setup" else "code"
        line = text.count("\n", 0, found.start(group_name))
        yield Block(page, line, kind, found[group_name], found["note"] or "")


def run_python(block: Block, names: dict[str, object]) -> None:
    """Errors name the page and the line in it."""
    exec(compile("\n" * block.line + block.code, str(block.page), "exec"), names)


def drawn() -> Iterator[Figure]:
    """The figures that code has left open, each closed afterwards."""
    for number in plt.get_fignums():
        figure = plt.figure(number)
        yield figure
        plt.close(figure)


def commands(block: Block) -> Iterator[list[str]]:
    """The commands of a sh block as lists of words; comments are left out, lines that end in \\ go on."""
    for line in block.code.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            yield words


def run_command(words: list[str]) -> None:
    """Run a command of ours; of others, look whether it exists."""
    program, *rest = words
    if program == "onebasin" and rest[0] in LONG and "--help" not in rest:
        parse(rest)
    elif program == "onebasin":
        assert main(rest) == 0, f"{shlex.join(words)} failed"
    elif program == "make":
        rules = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert all(re.search(rf"^{target}:", rules, re.MULTILINE) for target in rest), shlex.join(words)
    elif program == "python":
        file = Path(*rest[1].split(".")).with_suffix(".py") if rest[0] == "-m" else Path(rest[0])
        assert (ROOT / file).is_file(), shlex.join(words)
    else:
        assert words[:2] in (["pip", "install"], ["git", "clone"], ["cd", "onebasin"]), shlex.join(words)


def parse(words: list[str]) -> None:
    """Check a command without running it: the verb, its options, and words that must be one of a few."""
    command = group.commands[words[0]]
    command.make_context(words[0], list(words[1:]))


def shape(text: str) -> list[str]:
    """What stays the same on another machine: lines with # for every number, and single spaces and hyphens.

    >>> shape("loss  3.25 -> 0.01 in 4 sweeps\\n-------")
    ['loss # -> # in # sweeps', '-']
    """
    marked = (_NUMBER.sub("#", line) for line in text.strip().splitlines())
    return [re.sub(r"-{2,}", "-", re.sub(r"\s+", " ", line)).strip() for line in marked]


def appears(shown: str, printed: str) -> bool:
    """Whether the lines of `shown` stand in `printed` in this order; a page may leave lines out."""
    rest = iter(shape(printed))
    return all(any(line == other for other in rest) for line in shape(shown))
