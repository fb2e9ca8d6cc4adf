"""``onebasin check``: what under a path is whole, what is damaged, and which networks can be saved."""

from pathlib import Path
from typing import Any

import click

from onebasin.cli.options import debug


@click.command()
@click.argument("path", metavar="PATH", type=click.Path(path_type=Path))
@click.option(
    "--save",
    "goal",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Write the networks that are whole into this new population folder.",
)
@click.option("--json", "as_json", is_flag=True, help="Print everything that was looked at as JSON, and nothing else.")
@click.option("--force", is_flag=True, help="Replace the population that --save names.")
@debug
def check(**options: Any) -> int:
    """Read everything under PATH, compare it with its checksums, and say what is whole.

    PATH is whatever onebasin writes: a population, the folder of sample, the journal of an interrupted align, a
    posterior, the folder of a study; or files of networks of other programs, which have no checksums of ours, so that
    only their form is judged. Nothing under PATH is changed.

    The exit code is 0 if everything is whole, and 5 if something is damaged. What a writer left unfinished when it was
    killed is named, and is no damage: it was never part of the networks.

    \b
      onebasin check chain/
      onebasin check chain/ --save rescued/
      onebasin check chain/ --json
    """  # noqa: D301 - click reads the backspace: keep these lines apart
    from onebasin.cli.work.check import check as work

    return work(**options)
