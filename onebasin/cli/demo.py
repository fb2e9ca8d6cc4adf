"""``onebasin demo``: find and prove the symmetries of the built-in example models, and keep the tables in a report."""

from pathlib import Path

import click

from onebasin.calling import global_seed
from onebasin.cli.options import debug, progress
from onebasin.errors import DiskError, SymmetryError
from onebasin.examples import EXAMPLES, Example
from onebasin.symmetry import discover, verify


@click.command()
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("onebasin-demo"),
    show_default=True,
    help="Directory of the report.",
)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, metavar="N", show_default=True, help="Seed of weights and proofs."
)
@debug
def demo(*, output: Path, seed: int) -> None:
    """Find and prove the symmetries of a few built-in models.

    Prints one table per model, writes them to a report, and prints the report's path last.
    """
    report = output / "report.txt"
    try:
        output.mkdir(parents=True, exist_ok=True)
        report.write_text("", encoding="utf-8")  # fail before the work, not after it
    except OSError as error:
        raise DiskError(f"{report} cannot be written ({error.strerror}); choose another --output.") from error
    sections = []
    for example in EXAMPLES:
        with progress(f"discovering the symmetries of {example.name} ..."):
            section = _section(example, seed)
        click.echo(section)
        sections.append(section)
    report.write_text("\n".join(sections), encoding="utf-8")
    click.echo(str(report))


def _section(example: Example, seed: int) -> str:
    with global_seed(seed):
        model, inputs = example.build(), example.inputs()
    symmetry = discover(model, inputs, seed=seed)
    proof = verify(model, symmetry, inputs)
    if not proof.passed:
        raise SymmetryError(f"The proof failed for the built-in model {example.name}; please report this.")
    title = f"{example.name}: {example.summary}"
    return f"{title}\n{'=' * len(title)}\n{symmetry}\n\n{proof}\n"
