"""A record: everything a report shows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from onebasin.errors import InputError
from onebasin.record.claim import Claim
from onebasin.record.figure import Figure
from onebasin.record.table import Table


@dataclass(frozen=True)
class Section:
    """One part of a study.

    Attributes:
        name: a word for addresses, lower case with hyphens; unique in its record.
        title: the question.
        text: paragraphs: the answer first.
        items: tables and figures, in order.
        claims: what was to be checked here.
        command: what makes this section again.
        seconds: how long it took.
    """

    name: str
    title: str
    text: tuple[str, ...]
    items: tuple[Table | Figure, ...] = ()
    claims: tuple[Claim, ...] = ()
    command: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Record:
    """A whole study.

    Attributes:
        name: "demo", "compact", "symmetry", or the user's own.
        title: of the page.
        summary: sentences that a person understands without the rest; about ten.
        sections: in the order of reading.
        command: what makes everything again.
        settings: what was run: preset, seed, sizes, budgets; plain values.
        versions: of the packages.
        terms: word -> definition, for the glossary of the page.
        seconds: how long it took, all parts together.
    """

    name: str
    title: str
    summary: tuple[str, ...]
    sections: tuple[Section, ...]
    command: str
    settings: dict[str, str | int | float | bool | None] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    terms: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        names = [[section.name for section in self.sections], [item.name for item in self.items]]
        twice = sorted({name for kind in names for name in kind if kind.count(name) > 1})
        if twice:
            raise InputError(
                f"sections of a record should have different names, and so should its tables and figures, found "
                f"{', '.join(twice)} twice: rename one"
            )

    @property
    def items(self) -> Iterator[Table | Figure]:
        """All tables and figures."""
        return (item for section in self.sections for item in section.items)

    @property
    def claims(self) -> Iterator[Claim]:
        """All claims."""
        return (claim for section in self.sections for claim in section.claims)
