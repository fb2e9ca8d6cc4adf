"""``onebasin report``: records of finished runs -> one page to look at."""

from pathlib import Path

import click

from onebasin.cli.options import debug
from onebasin.reporting import read_record, write_report

_SEVERAL = Path("onebasin-report")


@click.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help=f"Folder of the page. Default: that of the run, or {_SEVERAL} for several.",
)
@click.option("--figures/--no-figures", default=True, show_default=True, help="Also save figures as SVG, PDF and PNG.")
@debug
def report(*, runs: tuple[Path, ...], output: Path | None, figures: bool) -> None:
    """Show what finished runs found, on one page.

    RUN is the folder of a run, or its record.json; several become chapters of one page. Nothing is computed anew. The
    path of the page is printed last.

    \b
      onebasin report onebasin-demo/
      onebasin report reproduce-compact-quick/ reproduce-symmetry-quick/ -o both/
    """  # noqa: D301 - click reads the backspace: keep these lines apart
    records = [read_record(run) for run in runs]
    place = runs[0] if runs[0].is_dir() else runs[0].parent
    goal = output or (place if len(runs) == 1 else _SEVERAL)
    click.echo(str(write_report(records, goal, figures=figures)))
