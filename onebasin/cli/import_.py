"""``onebasin import``: networks from wherever they are -> a population folder."""

from pathlib import Path

import click

from onebasin.cli.networks import build
from onebasin.cli.options import debug, progress_bar
from onebasin.examples.published import PUBLISHED
from onebasin.population import UNFINISHED, Population, import_networks
from onebasin.state import as_spec
from onebasin.storage import real_path


@click.command("import")
@click.argument("source")
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="New folder for the population.",
)
@click.option(
    "--model",
    metavar="MODEL",
    help="Refuse networks of another architecture, and strip a prefix from their names: path/to/file.py:factory or "
    "package.module:factory.",
)
@debug
def import_(*, source: str, output: Path, model: str | None) -> None:
    """Stream the networks of SOURCE into a population folder, which opens at once and stays on the disk.

    SOURCE is a folder of checkpoints, a file, a .tgz or .tar archive of safetensors files or a folder of them, a
    pattern in quotes, or a name on the Hugging Face hub. Networks are in natural order of their names, as stored.
    Memory is bounded; an interrupted import goes on when the same command is given again.

    \b
      onebasin import models/mnist-optunet -o optunet/
      onebasin import 'runs/*/best.safetensors' -o population/
      onebasin import hf://datasets/torch-uncertainty/Checkpoints/models/mnist-optunet -o optunet/
      onebasin import hf://OWNER/MODEL@revision/folder -o networks/ --model path/to/file.py:factory
    """  # noqa: D301 - click reads the backspace: keep these lines apart
    output = output if output.name not in ("", "..") else real_path(output)  # what stands beside it needs a name
    unfinished = output.with_name(output.name + UNFINISHED)
    if unfinished.exists():
        click.echo(f"going on with the import that left {unfinished}", err=True)
    spec = None if model is None else as_spec(build(model, seed=0))
    try:
        with progress_bar(f"importing {source}") as show:
            import_networks(source, output, spec=spec, progress=show)
    except KeyboardInterrupt:
        state = f"{unfinished} keeps what was reached" if unfinished.exists() else "nothing was written yet"
        click.echo(f"{state}; give the same command again to go on", err=True)
        raise
    click.echo(Population.open(output))
    if hint := _hint(source, output):
        click.echo(hint)


def _hint(source: str, output: Path) -> str:
    """What to do next with networks whose architecture is known by the name of their folder or archive."""
    for name, published in sorted(PUBLISHED.items(), key=lambda item: -len(item[0])):
        if any(part == name or part.startswith(f"{name}-") for part in Path(source).parts):
            size = "x".join(map(str, published.inputs))
            model = f"--model onebasin.examples:{published.build.__name__} --input {size}"
            return f"\nby their name these are of a known architecture: onebasin align {output} -o aligned/ {model}"
    return ""
