"""``onebasin reproduce``: the experiments of a paper, verdicts on its claims, and a report."""

import shlex
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from onebasin.cli.options import debug, progress_bar, seed_option
from onebasin.reporting import Record, tally
from onebasin_papers.study import Study, Workspace, run_study


@click.command()
@click.argument("paper", type=click.Choice(["compact", "symmetry"]))
@click.option(
    "--preset",
    type=click.Choice(["quick", "full"]),
    default="quick",
    show_default=True,
    help="quick: embedded digits, minutes. full: the paper's networks and data, many hours; needs --data-dir.",
)
@seed_option
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of networks, record and report. Default: reproduce-PAPER-PRESET.",
)
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path, file_okay=False),
    envvar="ONEBASIN_DATA",
    help="Folder with the data sets of the full preset: mnist/, fashion-mnist/, cifar10/. Also ONEBASIN_DATA.",
)
@click.option("--only", multiple=True, metavar="PART", help="Only this part; repeat it for several. See above.")
@click.option("--fresh", is_flag=True, help="Begin again: remove the parts and networks that OUTPUT holds.")
@debug
def reproduce(
    *,
    paper: str,
    preset: str,
    seed: int,
    output: Path | None,
    data_dir: Path | None,
    only: tuple[str, ...],
    fresh: bool,
) -> None:
    """Redo the experiments of PAPER, judge its claims, and write a report.

    \b
    compact   Xiao, Liu & Bamler 2023, compact posteriors by re-basin (arXiv 2401.00611).
              Parts: transpositions, dynamics, table, width, sigma, pruning.
    symmetry  Laurent, Aldea & Franchi 2024, symmetry-aware posteriors (arXiv 2310.08287).
              Parts: two-neurons, marginals, table, collapse, mass, order, checkpoints.

    Networks and finished parts are kept in OUTPUT: the same command after an interruption goes on. The last lines
    are the verdicts and the path of the report.

    \b
      onebasin reproduce compact
      onebasin reproduce symmetry --only mass
      onebasin reproduce compact --preset full --data-dir data/
    """  # noqa: D301 - click reads the backspace: keep these lines apart
    from onebasin.reporting import write_report

    module = import_module(f"onebasin_papers.{paper}")
    folder = output or Path(f"reproduce-{paper}-{preset}")
    workspace = Workspace(module.preset_settings(preset, None if data_dir is None else str(data_dir)), seed, folder)
    record = run_with_progress(module.STUDY, workspace, _command(paper, preset, seed), only=only, fresh=fresh)
    click.echo(f"\n{verdicts(record)}\n")
    click.echo(str(write_report(record, folder)))


def run_with_progress(
    study: Study, workspace: Workspace[Any], command: str, *, only: tuple[str, ...] = (), fresh: bool = False
) -> Record:
    """Run a study, with a line and a bar for each part on stderr."""
    try:
        return run_study(
            study,
            workspace,
            command,
            only=only,
            fresh=fresh,
            tell=lambda text: click.echo(text, err=True),
            watch=progress_bar,
        )
    except KeyboardInterrupt:
        click.echo(f"what was finished is kept in {workspace.folder}: the same command goes on", err=True)
        raise


def verdicts(record: Record) -> str:
    """One line for each claim, and one with their numbers."""
    lines = [f"{claim.verdict}: {claim.text} Found: {claim.found}." for claim in record.claims]
    return "\n".join([*lines, "", tally(record.claims)])


def _command(paper: str, preset: str, seed: int) -> str:
    """What makes the record again."""
    words = ["onebasin", "reproduce", paper, "--preset", preset, "--seed", str(seed)]
    return shlex.join(words)
