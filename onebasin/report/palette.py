"""Colours: one name each, with a value on light and one on dark paper."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shade:
    """One colour: its hex values on light and on dark paper."""

    light: str
    dark: str


# Okabe and Ito's colours, which people with any kind of colour vision tell apart; brighter on dark paper. Their yellow
# is left out: nobody sees it on white.
SERIES = (
    Shade("#0072b2", "#5ab0ee"),  # blue
    Shade("#d55e00", "#ff8f4a"),  # vermillion
    Shade("#009e73", "#35cfa3"),  # bluish green
    Shade("#cc79a7", "#eba3cb"),  # reddish purple
    Shade("#e69f00", "#ffc24d"),  # orange
    Shade("#56b4e9", "#a5dcff"),  # sky blue
    Shade("#3b3f46", "#cfd4da"),  # black, softened
)
ROLES = {
    "paper": Shade("#ffffff", "#15181d"),
    "sheet": Shade("#f6f7f9", "#1d2127"),
    "ink": Shade("#1b1e23", "#e9ecef"),
    "muted": Shade("#5b626c", "#a2aab5"),
    "grid": Shade("#e3e6ea", "#2c323a"),
    "edge": Shade("#d0d5db", "#3a414b"),
    "accent": Shade("#0067a3", "#6cb8f0"),
    "good": Shade("#00694d", "#4fd6b0"),
    "fair": Shade("#8a5a00", "#f5bd4f"),
    "bad": Shade("#a83c00", "#ff9d66"),
}
GRADIENT = "cividis"  # perceptually even, and the same to every kind of colour vision
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def ink(role: str) -> str:
    """The colour of a role in files, which are on white paper.

    >>> ink("paper")
    '#ffffff'
    """
    return ROLES[role].light


def series_colour(number: int) -> str:
    """The colour of a series in files; after the last one the first comes again."""
    return SERIES[number % len(SERIES)].light


def variables() -> dict[str, Shade]:
    """CSS variable -> colour, of all."""
    return {f"--{name}": shade for name, shade in ROLES.items()} | {
        f"--series-{number}": shade for number, shade in enumerate(SERIES)
    }


def style_rule() -> str:
    """The CSS rule that gives every variable its value; ``color-scheme`` of the page chooses the paper."""
    told = "".join(f"{name}:light-dark({shade.light},{shade.dark});" for name, shade in variables().items())
    return f":root{{{told}}}"


def as_variable(colour: str) -> str:
    """The CSS variable for a light colour of the palette; other colours stay.

    >>> as_variable("#0072B2"), as_variable("#123456")
    ('var(--series-0)', '#123456')
    """
    return _VARIABLES.get(colour.lower(), colour)


_VARIABLES = {shade.light: f"var({name})" for name, shade in variables().items()}
