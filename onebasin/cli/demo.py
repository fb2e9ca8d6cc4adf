"""``onebasin demo``: the main job on embedded data, from networks to a report."""

from pathlib import Path

import click

from onebasin.cli.options import debug, seed_option

_WIDTH = 100  # characters in a line of the summary


@click.command()
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("onebasin-demo"),
    show_default=True,
    help="Folder of networks, record and report.",
)
@seed_option
@click.option("--only", multiple=True, metavar="PART", help="Only this part; repeat it for several. See above.")
@click.option("--fresh", is_flag=True, help="Begin again: remove the parts and networks that OUTPUT holds.")
@debug
def demo(*, output: Path, seed: int, only: tuple[str, ...], fresh: bool) -> None:
    """Show the whole idea on handwritten digits, in three minutes.

    Discovers the symmetries of a network and of a few others; samples networks by HMC, variational inference, SWAG
    and as an ensemble; moves them into one basin; keeps them as one compact posterior; evaluates and prunes.
    Parts: symmetries, methods, basin, compact, pruning. Prints a summary, and the path of the report last.
    Interrupted, it goes on where it was.

    \b
      onebasin demo
      onebasin demo --seed 1 --output other/
    """  # noqa: D301 - click reads the backspace: keep these lines apart
    from onebasin.cli.work.reproduce import run_with_progress
    from onebasin.reporting import write_report
    from onebasin_papers.demo import STUDY, preset_settings
    from onebasin_papers.study import Workspace

    record = run_with_progress(
        STUDY, Workspace(preset_settings(), seed, output), f"onebasin demo --seed {seed}", only=only, fresh=fresh
    )
    click.echo()
    for sentence in record.summary:
        click.echo(click.wrap_text(f"- {sentence}", _WIDTH, subsequent_indent="  "))
    click.echo(str(write_report(record, output)))
