"""``onebasin reproduce``: the experiments of a paper, or the same on a user's own problem, verdicts, and a report."""

from pathlib import Path
from typing import Any

import click

from onebasin.cli.options import data_options, debug, seed_option
from onebasin.cli.sample import MethodName
from onebasin.cli.words import OWN_EXAMPLES


@click.command()
@click.argument("paper", type=click.Choice(["compact", "symmetry"]))
@click.option(
    "--preset",
    type=click.Choice(["quick", "full"]),
    default="quick",
    show_default=True,
    help="quick: embedded digits, minutes. full: the paper's networks and data, many hours; needs --data-dir.",
)
@click.option("--model", metavar="FILE:FACTORY", help="Own architecture, in place of the paper's.")
@click.option("--data", metavar="DATA", help="Own data with classes, in place of the paper's; see sample.")
@click.option("--ood", metavar="DATA", help="Foreign inputs for symmetry. Default: test inputs of --data, shuffled.")
@click.option(
    "--limit",
    type=click.IntRange(min=2),
    metavar="N",
    help=f"At most N training, test and foreign examples of own data, evenly spread. Default: {OWN_EXAMPLES:,}; with "
    "--preset full all.",
)
@click.option(
    "--method",
    type=MethodName(),
    multiple=True,
    metavar="FILE:METHOD",
    help="Own sampling method, for rows beside the paper's; repeat it for several. Also a name, as mclmc.",
)
@click.option(
    "--set", "settings", multiple=True, metavar="PART.KEY=VALUE", help="Another setting; repeat it. See --list."
)
@click.option("--list", "listed", is_flag=True, help="Show all parts with their settings and defaults, and stop.")
@seed_option
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of networks, record and report. Default: reproduce-PAPER-PRESET, or reproduce-PAPER-own.",
)
@data_options
@click.option("--only", multiple=True, metavar="PART", help="Only this part; repeat it for several. See above.")
@click.option("--fresh", is_flag=True, help="Begin again: remove the parts and networks that OUTPUT holds.")
@debug
def reproduce(**options: Any) -> None:
    """Redo the experiments of PAPER, judge its claims, and write a report.

    \b
    compact   Xiao, Liu & Bamler 2023, compact posteriors by re-basin (arXiv 2401.00611).
              Parts: transpositions, dynamics, table, width, sigma, pruning.
    symmetry  Laurent, Aldea & Franchi 2024, symmetry-aware posteriors (arXiv 2310.08287).
              Parts: two-neurons, marginals, table, implicit, collapse, mass, order, checkpoints.

    Networks and finished parts are kept in OUTPUT: the same command after an interruption goes on. The last lines
    are the verdicts and the path of the report.

    With --model, --data and --method the same tables are made for a problem of one's own, without published numbers.
    Parts that an architecture does not allow are left out with the reason.

    \b
      onebasin reproduce compact
      onebasin reproduce symmetry --only mass
      onebasin reproduce compact --preset full --data-dir data/
      onebasin reproduce symmetry --model cnn.py:cnn --data fashion-mnist --ood mnist --method walk.py:Walk
      onebasin reproduce compact --method mclmc --set table.chains=2 --set table.draws=50
      onebasin reproduce compact --list
    """  # noqa: D301 - click reads the backspace: keep these lines apart
    from onebasin.cli.work.reproduce import reproduce as work

    work(**options)
