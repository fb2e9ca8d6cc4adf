"""What ``onebasin compare`` says where A and B hold several networks each: how far the two populations are apart."""

from dataclasses import dataclass
from typing import Any

from onebasin.cli.data import Examples
from onebasin.cli.networks import Known, numbered, open_networks
from onebasin.cli.tables import short
from onebasin.errors import StorageError
from onebasin.evaluation import Discrepancy, discrepancy
from onebasin.functional import answers, examples_in
from onebasin.metrics import agreement, total_variation
from onebasin.population import Population, is_there
from onebasin.posterior import predict
from onebasin.reporting import table


@dataclass(frozen=True, eq=False)
class PopulationComparison:
    """Two populations, compared.

    Attributes:
        report: distances and MMD of weights and, with data, of functions.
        examples: number of examples; 0 without data.
        agreement: share of examples for which the average predictives have the same class; None without classes.
        total_variation: mean total variation of the average predictives; None without classes.
    """

    report: Discrepancy
    examples: int = 0
    agreement: float | None = None
    total_variation: float | None = None

    def told(self) -> dict[str, Any]:
        """Plain numbers for JSON."""
        predictive = {"agreement": self.agreement, "total_variation": self.total_variation}
        return {"discrepancy": self.report.as_dict(), "examples": self.examples, **predictive}

    def __str__(self) -> str:
        """Tables for people."""
        rows = [("mean squared distance", "within A", "within B", "A to B")]
        rows += [
            (form, short(found.within_first), short(found.within_second), short(found.across))
            for form, found in {"raw": self.report.raw, **self.report.normal_forms}.items()
        ]
        parts = [table(rows), str(self.report)]
        if self.agreement is not None and self.total_variation is not None:
            parts.append(
                f"average predictives on {self.examples:,} examples: agreement {self.agreement:.4f}, "
                f"total variation {self.total_variation:.4f}"
            )
        return "\n\n".join(parts)


def several(text: str, known: Known) -> Population | None:
    """The networks under a path that holds more than one; None for one network, or for PATH#3.

    Raises:
        StorageError: there is no such path.
    """
    path, number = numbered(text)
    if not is_there(path):
        raise StorageError(f"expected networks at {text}, found no such file or folder: correct the path")
    if number is not None:
        return None
    networks = open_networks(path, known)
    return networks if len(networks) > 1 else None


def compare_populations(
    known: Known, a: Population, b: Population, data: Examples | None = None, **options: Any
) -> PopulationComparison:
    """Compare two populations.

    Args:
        known: their symmetry and, where it was given, their model.
        a: one population.
        b: the other.
        data: inputs on which to compare what they compute; targets are not looked at.
        **options: of `discrepancy`: `normal_forms`, `preset`, `output`, `permutations`, `seed`, `workers`, ...
    """
    if data is None:
        return PopulationComparison(discrepancy(a, b, symmetry=known.symmetry, **options))
    model, inputs = known.runs("--data"), data.inputs
    report = discrepancy(a, b, symmetry=known.symmetry, model=model, inputs=inputs, **options)
    found = PopulationComparison(report, examples_in(inputs))
    answer = answers(model, a.member(0), inputs)
    if options.get("output") == "values" or answer.dim() != 2 or answer.shape[1] < 2:
        return found
    execution = {name: options[name] for name in ("workers", "executor") if name in options}
    first, second = (predict(model, population, inputs, average=True, **execution) for population in (a, b))
    return PopulationComparison(
        report, found.examples, float(agreement(first, second)), float(total_variation(first, second))
    )
