"""Import: a population folder of networks from wherever they are."""

from pathlib import Path

import click
import torch

from onebasin.cli.networks import build, is_plain
from onebasin.cli.options import check_writable, remove_before
from onebasin.cli.progress import progress_bar
from onebasin.examples import PUBLISHED
from onebasin.population import UNFINISHED, Population, import_networks
from onebasin.storage import real_path


def import_(*, source: str, output: Path, model: str | None, dtype: str | None, force: bool) -> None:
    """Stream the networks of SOURCE into a population folder, which opens at once and stays on the disk."""
    output = output if output.name not in ("", "..") else real_path(output)  # what stands beside it needs a name
    unfinished = output.with_name(output.name + UNFINISHED)
    check_writable(output)
    if force:
        for folder in (output, unfinished):
            remove_before(folder, is_plain(folder), "a population", needed=[Path(source)])
    if unfinished.exists():
        click.echo(f"going on with the import that left {unfinished}", err=True)
    spec = None if model is None else build(model, seed=0)
    try:
        with progress_bar(f"importing {source}") as show:
            wanted = None if dtype is None else getattr(torch, dtype)
            import_networks(source, output, spec=spec, dtype=wanted, progress=show)
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
