"""What is asked of an alignment: its options, checked."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from onebasin.align.board import Board
from onebasin.align.crowd.journal import fingerprint, journal_of
from onebasin.align.pair.match import check_network
from onebasin.cluster import Places
from onebasin.errors import InputError
from onebasin.options import refuse_unknown
from onebasin.population import Population
from onebasin.population.durable import is_taken
from onebasin.population.mapping import missing_shards
from onebasin.state import as_state
from onebasin.symmetry import Symmetry

REFERENCES = ("consensus", "first", "medoid")
SCALES = ("balanced", "reference", "keep")
Reference = str | Mapping[str, Tensor] | nn.Module


class Options(Places, total=False):
    """The finer points of `align`, all optional; where it runs is said as in `Places`.

    Attributes:
        scale: "balanced" gives every member its lightest scales, "reference" those of the reference, "keep" none.
            The default is "reference" where a network is given as reference, else "balanced".
        sweeps: of the consensus, at most (50).
        tolerance: stop when a sweep gains less than this part of the overlap (1e-3); 0 goes on until nothing moves.
        progress: called with (members done in this sweep, members, what is being done).
        finish: called with the Alignment when the moved networks are written. The run is over only when it returns: if
            it is interrupted, the same call goes on and finishes too.
        model: for by="activations", the model ...
        inputs: ... the inputs it is run on ...
        kind: ... and "uncentred" (as paper 1), "centred" or "correlation".
    """

    scale: str
    sweeps: int
    tolerance: float
    progress: Callable[[int, int, str], None]
    finish: Callable[[Any], None]
    model: nn.Module
    inputs: Any
    kind: str


SWEEPS, TOLERANCE = 50, 1e-3  # when nothing else is said


class Plan:
    """The options of one alignment, all of them known and usable.

    Attributes:
        reference: "consensus", "first" or "medoid", or None where a network is given.
        fixed: that network.
        scale: "balanced", "reference" or "keep".
        by: "weights" or "activations".
        options: all others.
    """

    def __init__(self, reference: Reference, by: str, options: Options) -> None:
        """Refuse what nobody knows or nobody can use."""
        refuse_unknown(options, [*Options.__annotations__, "reference", "by", "path"], "align")
        self.reference = reference if isinstance(reference, str) else None
        self.fixed = None if isinstance(reference, str) else as_state(reference)
        self.scale = options.get("scale", "balanced" if self.fixed is None else "reference")
        self.by, self.options = by, options
        self.sweeps, self.tolerance = options.get("sweeps", SWEEPS), options.get("tolerance", TOLERANCE)
        self._check_words()
        if not (self.sweeps >= 1 and self.tolerance >= 0 and math.isfinite(self.tolerance)):
            raise InputError(
                f"expected at least 1 sweep and a tolerance of at least 0, found {self.sweeps} and {self.tolerance}"
            )

    def _check_words(self) -> None:
        if self.reference is not None and self.reference not in REFERENCES:
            raise InputError(f"reference must be one of {', '.join(REFERENCES)}, or a State; found {self.reference!r}")
        if self.scale not in SCALES or (self.scale == "reference" and self.reference == "consensus"):
            raise InputError(
                f"scale must be one of {', '.join(SCALES)}, and a consensus has no reference scale; "
                f"found {self.scale!r}"
            )
        if self.scale == "reference" and self.reference == "medoid":
            raise InputError('the scale of a medoid is not known beforehand: use scale="balanced" or reference="first"')
        if self.by not in ("weights", "activations"):
            raise InputError(f'by must be "weights" or "activations", found {self.by!r}')
        given = [name for name in ("model", "inputs", "kind") if name in self.options]
        if self.by == "weights" and given:
            raise InputError(f'{", ".join(given)} belong to by="activations": leave them out, or compare activations')
        if self.by == "activations" and not {"model", "inputs"} <= set(given):
            raise InputError('by="activations" runs the networks: give model= and inputs=')

    def check(self, population: Population, symmetry: Symmetry, path: str | os.PathLike[str] | None) -> None:
        """Refuse networks and places that do not fit."""
        if not isinstance(population, Population):
            raise InputError(
                f"expected a Population, found {type(population).__name__}: make one with Population.from_models or "
                "Population.from_states"
            )
        if not len(population):
            raise InputError("expected at least one network to align, found an empty population")
        if self.fixed is not None:
            check_network(Board.of(symmetry, statistics=True), self.fixed, where="the reference")
        if path is None or journal_of(Path(path)).exists():
            return  # of an interrupted run, which may have written its networks already: the journal decides
        if is_taken(Path(path)) and not missing_shards(population, Path(path)):  # one that has lost some is completed
            raise InputError(f"expected a new or empty folder for the result, but {path} is not: choose another path")

    def settings(self) -> dict[str, Any]:
        """All that the result depends on, besides the members."""
        return {
            **{"reference": self.reference or fingerprint(self.fixed), "by": self.by, "scale": self.scale},
            **{"sweeps": self.sweeps, "tolerance": self.tolerance, "kind": self.options.get("kind", "uncentred")},
            **{"inputs": fingerprint(self.options.get("inputs"))},
        }
