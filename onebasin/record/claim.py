"""Claims of a paper, and whether they held here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from onebasin.errors import InputError

VERDICTS = ("reproduced", "reproduced with a caveat", "not reproduced")


@dataclass(frozen=True)
class Claim:
    """One claim.

    Attributes:
        text: what is claimed, in one sentence.
        verdict: one of `VERDICTS`. It is computed from numbers, never typed in.
        found: our numbers, with their errors.
        published: theirs.
        caveat: what a reader must know; needed for the second verdict.
    """

    text: str
    verdict: str
    found: str
    published: str = ""
    caveat: str = ""

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise InputError(f"a verdict is one of {VERDICTS}, found {self.verdict!r}: give one of these")
        if self.verdict == VERDICTS[1] and not self.caveat:
            raise InputError(f"a claim that is {VERDICTS[1]} needs it in words: give caveat=")


def tally(claims: Iterable[Claim]) -> str:
    """How many claims got which verdict, in words.

    >>> tally([Claim("a", "reproduced", "1"), Claim("b", "not reproduced", "2"), Claim("c", "reproduced", "3")])
    '2 reproduced, 1 not reproduced'
    """
    counts = Counter(claim.verdict for claim in claims)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])
