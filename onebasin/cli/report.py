"""``onebasin report``: whatever other verbs wrote -> one page to look at."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from onebasin.cli.options import debug, dtype_option
from onebasin.errors import StorageError
from onebasin.reporting import FILE, RECORD_FORMAT, Record, Table, read_record
from onebasin.reporting import report as write_page

_SEVERAL = Path("onebasin-report")
_MANIFEST = "population.json"  # of a population folder
_NETWORKS = (".safetensors", ".pt", ".pth", ".npz", ".npy", ".tgz", ".tar", ".nc")


@click.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help=f"Folder of the page. Default: that of the run, NAME-report beside a file, {_SEVERAL} for several.",
)
@click.option("--title", default="", metavar="TEXT", help="Title of the page. Default: that of what is shown.")
@click.option("--figures/--no-figures", default=True, show_default=True, help="Also save figures as SVG, PDF and PNG.")
@click.option("--model", metavar="MODEL", help="Model of draws in .npz, .npy or .nc files: path/to/file.py:factory.")
@dtype_option
@click.option("--open", "show", is_flag=True, help="Open the page in the browser.")
@debug
def report(
    *,
    runs: tuple[Path, ...],
    output: Path | None,
    title: str,
    figures: bool,
    model: str | None,
    dtype: str | None,
    show: bool,
) -> None:
    """Show what other verbs wrote, on one page.

    RUN is a folder of align, sample or import, the file of a posterior, a symmetry, the .json that evaluate, diagnose,
    compare, prune or compact wrote, the folder of demo or reproduce, or networks in any form that align opens. Several
    become sections of one page. No network is run. The path of the page is printed last.

    \b
      onebasin report aligned/
      onebasin report chain/ aligned/ posterior.safetensors evaluation.json -o page/ --open
      onebasin report reproduce-compact-quick/ reproduce-symmetry-quick/ -o both/
    """  # noqa: D301 - click reads the backspace: keep these lines apart
    opening: dict[str, Any] = {}
    if model is not None or dtype is not None:
        import torch

        from onebasin.cli.networks import build

        opening = {"spec": None if model is None else build(model, seed=0)}
        opening["dtype"] = "stored" if dtype is None else getattr(torch, dtype)
    records = [record for run in runs for record in records_at(run, **opening)]
    shown = list(_each_once(records))
    click.echo(str(write_page(output or _beside(runs), *shown, title=title, figures=figures, open=show)))


def _each_once(records: list[Record]) -> Iterator[Record]:
    """The records, without tables of tensors that an earlier one has shown: populations of one architecture."""
    seen = set[Table]()
    for record in records:
        sections = []
        for section in record.sections:
            again = [item for item in section.items if isinstance(item, Table) and item in seen]
            seen.update(item for item in section.items if isinstance(item, Table) and item.name == "tensors")
            if again:
                items = tuple(item for item in section.items if item not in again)
                section = replace(section, items=items, text=(*section.text, "Its tensors are those shown above."))
            sections.append(section)
        yield replace(record, sections=tuple(sections))


def _beside(runs: tuple[Path, ...]) -> Path:
    if len(runs) > 1:
        return _SEVERAL
    run = runs[0]
    if run.is_dir():
        return run
    return run.parent if run.name == FILE else run.with_name(f"{run.stem}-report")


def records_at(path: Path, **opening: Any) -> list[Record]:
    """What a path holds, as records; `opening` are keywords of `Population.open`.

    Raises:
        StorageError: there is nothing there that can be shown, or it is damaged.
    """
    if path.is_dir():
        records = list(_of_folder(path, opening))
        if records:
            return records
    elif path.suffix == ".json" and path.is_file():
        return [_of_json(path)]
    elif path.suffix in _NETWORKS and path.is_file():
        return [_of_networks(path, opening).record()]
    elif not path.exists():
        raise StorageError(f"there is no {path}: give a folder or a file that a verb of onebasin wrote")
    raise StorageError(
        f"{path} holds nothing that can be shown: give a folder of networks, a record (.json) or a posterior "
        "(.safetensors)"
    )


def _of_folder(path: Path, opening: dict[str, Any]) -> Iterator[Record]:
    """Its records, its networks, and the posteriors beside them; a folder of checkpoints is a population, too."""
    for file in sorted(path.glob("*.json"), key=lambda file: (file.name != FILE, file.name)):
        if file.name == FILE or (file.name != _MANIFEST and _format_of(file) == RECORD_FORMAT):
            yield read_record(file)
    if (path / _MANIFEST).exists():
        yield _of_networks(path, opening).record()
        return
    files = sorted(file for file in path.iterdir() if file.suffix in _NETWORKS)
    if not files:
        return
    from onebasin.posterior import is_posterior

    posteriors = [file for file in files if is_posterior(file)]
    for file in posteriors:
        yield _of_networks(file, opening).record()
    if not posteriors:
        yield _of_networks(path, opening).record()


def _of_json(path: Path) -> Record:
    if _format_of(path) == RECORD_FORMAT:
        return read_record(path)
    from onebasin.errors import SymmetryError
    from onebasin.symmetry import Symmetry

    try:
        result: Any = Symmetry.from_json(path.read_text(encoding="utf-8"))
    except (SymmetryError, ValueError):
        return read_record(path)  # which says what is wrong with it
    record: Record = result.record()
    return record


def _of_networks(path: Path, opening: dict[str, Any]) -> Any:
    from onebasin.population import Population
    from onebasin.posterior import is_posterior, load_posterior

    if is_posterior(path):
        return load_posterior(path)
    return Population.open(path, **opening)


def _format_of(path: Path) -> Any:
    """What a JSON file says of its format; None where it is no such file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return content.get("format") if isinstance(content, dict) else None
