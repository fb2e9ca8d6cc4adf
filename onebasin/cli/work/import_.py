"""Import: a population folder of networks from wherever they are."""

import json
from pathlib import Path

import click
import torch
from torch import nn

from onebasin.cli.networks import build, is_plain
from onebasin.cli.options import check_output, check_writable, remove_before
from onebasin.cli.progress import progress, progress_bar
from onebasin.errors import InputError, SpecError
from onebasin.examples import PUBLISHED
from onebasin.inference import NothingImplicitError, implicit_kind, unroll
from onebasin.population import MANIFEST, UNFINISHED, Population, import_networks
from onebasin.posterior import Posterior, is_posterior, load_posterior
from onebasin.storage import check_same_run, real_path


def import_(
    *, source: str, output: Path, model: str | None, dtype: str | None, draws: int | None, seed: int, force: bool
) -> None:
    """Stream the networks of SOURCE into a population folder, which opens at once and stays on the disk."""
    output = output if output.name not in ("", "..") else real_path(output)  # what stands beside it needs a name
    unfinished = output.with_name(output.name + UNFINISHED)
    replaces = is_posterior(output)  # only a posterior takes the place of one
    if (replaces or draws is not None) and model is None:
        what = f"{output}, a posterior," if replaces else "--draws"
        raise InputError(f"{what} needs an implicit ensemble, which is read with its base module: give --model")
    check_output(output, force) if replaces else check_writable(output)
    if force:
        for folder in (unfinished,) if replaces else (output, unfinished):
            remove_before(folder, is_plain(folder), "a population", needed=[Path(source)])
    if unfinished.exists():
        click.echo(f"going on with the import that left {unfinished}", err=True)
    spec = None if model is None else build(model, seed=0)
    wanted = None if dtype is None else getattr(torch, dtype)
    refusal: SpecError | None = None
    if draws is None and not replaces:
        refusal = _stream(source, output, spec, wanted)
    if spec is not None and (draws is not None or replaces or refusal):
        try:
            with progress(f"unrolling {source}"):
                found = unroll(spec, source, draws=draws, seed=seed)
        except NothingImplicitError as error:
            raise refusal or error from None
        _save(found, source, output, wanted)
    if is_posterior(output):
        click.echo(load_posterior(output))
        return
    networks = Population.open(output)
    click.echo(networks)
    if spec is None and (kind := implicit_kind(networks.names)):
        click.echo(f"\nby their names these are layers of {kind}: --model makes ordinary networks of them")
    if hint := _hint(source, output):
        click.echo(hint)


def _stream(source: str, output: Path, model: nn.Module | None, dtype: torch.dtype | None) -> SpecError | None:
    """Import ordinary networks; a file of other tensors than the model's is returned as the refusal that it is."""
    unfinished = output.with_name(output.name + UNFINISHED)
    try:
        with progress_bar(f"importing {source}") as show:
            import_networks(source, output, spec=model, dtype=dtype, progress=show)
    except KeyboardInterrupt:
        state = f"{unfinished} keeps what was reached" if unfinished.exists() else "nothing was written yet"
        click.echo(f"{state}; give the same command again to go on", err=True)
        raise
    except SpecError as error:
        if model is None or not Path(source).is_file():
            raise
        return error
    return None


def _save(found: Population | Posterior, source: str, output: Path, dtype: torch.dtype | None) -> None:
    """Write what an implicit ensemble is: a population folder, or the file of a posterior."""
    click.echo(f"{source} holds an implicit ensemble: {found.provenance['unrolled']}", err=True)
    if isinstance(found, Posterior):
        if output.suffix != ".safetensors" or dtype is not None:
            raise InputError(
                f"{source} holds mean and deviation of each weight, which are a posterior and no networks: give "
                "-o FILE.safetensors without --dtype, and draw networks from it in Python (ob.load_posterior)"
            )
        found.save(output)
    elif is_posterior(output):
        raise InputError(f"{source} holds networks, and {output} is a posterior: choose another --output")
    elif (output / MANIFEST).exists():
        check_same_run(output, Population.open(output).provenance, json.loads(json.dumps(dict(found.provenance))))
    else:
        (found if dtype is None else found.to(dtype=dtype)).save(output)


def _hint(source: str, output: Path) -> str:
    """What to do next with networks whose architecture is known by the name of their folder or archive."""
    for name, published in sorted(PUBLISHED.items(), key=lambda item: -len(item[0])):
        if any(part == name or part.startswith(f"{name}-") for part in Path(source).parts):
            size = "x".join(map(str, published.inputs))
            model = f"--model onebasin.examples:{published.build.__name__} --input {size}"
            return f"\nby their name these are of a known architecture: onebasin align {output} -o aligned/ {model}"
    return ""
