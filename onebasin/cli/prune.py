"""``onebasin prune``: a posterior or a network -> the same network with only its most valuable weights."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from torch import Tensor, nn

from onebasin.cli import data as examples
from onebasin.cli.data import loss_option
from onebasin.cli.networks import (
    Architecture,
    Known,
    build,
    example_options,
    know,
    numbered,
    one_network,
    posterior_in,
    shapes_of,
)
from onebasin.cli.options import check_absent, debug, progress
from onebasin.errors import InputError, StorageError
from onebasin.functional import loss_of_targets, refreshed_one, warn_stale
from onebasin.population import is_there
from onebasin.posterior import CRITERIA, SCOPES, Masks, Posterior, PruningCurve, pruning_curve, transfer
from onebasin.posterior import prune as choose
from onebasin.state import State
from onebasin.storage import make_folder, publish, real_path, write_tensors

FORMAT = "onebasin pruning 1"
_WITHOUT_STD = ("magnitude", "random")


@click.command()
@click.argument("model", metavar="MODEL")
@click.argument("source", metavar="POSTERIOR")
@click.option(
    "--keep",
    type=click.FloatRange(min=0, max=1, min_open=True),
    default=0.2,
    show_default=True,
    metavar="X",
    help="Part of the weights to keep.",
)
@click.option(
    "--by",
    type=click.Choice(CRITERIA),
    help="What decides. Default: snr; magnitude for a network, which has no standard deviations (or random).",
)
@click.option(
    "--per", type=click.Choice(SCOPES), default="global", show_default=True, help="One ranking, or one in every tensor."
)
@click.option("--names", multiple=True, metavar="NAME", help="Prune only these tensors; names or patterns. Repeat it.")
@click.option(
    "--onto",
    metavar="PATH",
    help="Prune this network instead of the mean of the posterior, whose standard deviations are moved into its basis. "
    "PATH#3 is number 3 of several.",
)
@example_options
@click.option(
    "--data",
    metavar="DATA",
    help=f"Judge on these examples, by all criteria at twelve levels: {examples.GRAMMAR}.",
)
@click.option(
    "--statistics",
    metavar="DATA",
    help="Inputs, such as those of training, on which the running statistics of norms are measured for each pruned "
    "network.",
)
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Only the first N examples of the data.")
@examples.data_options
@loss_option
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File for the pruned network, .safetensors; a record goes beside it as .json.",
)
@click.option(
    "--masks",
    "masks_file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="File for the masks, .safetensors: true where a weight is kept.",
)
@click.option("--force", is_flag=True, help="Replace files that exist.")
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, metavar="N", show_default=True, help="Seed of random orders."
)
@click.option("--json", "as_json", is_flag=True, help="Print the record instead of tables.")
@debug
def prune(
    *,
    model: str,
    source: str,
    data: str | None,
    limit: int | None,
    loss: str | None,
    as_json: bool,
    force: bool,
    **options: Any,
) -> None:
    """Keep the most valuable weights of POSTERIOR, and set the others to zero.

    MODEL is path/to/file.py:factory or package.module:factory, as for discover. POSTERIOR is the file of a posterior,
    or of a network, which has no standard deviations and is pruned by magnitude unless --by says random. The pruned
    network is the mean of the posterior, or the network given as --onto. Nothing that is read is changed.

    \b
      onebasin prune model.py:net posterior.safetensors --keep 0.2 --by snr -o pruned.safetensors
      onebasin prune model.py:net posterior.safetensors --data test.npz
      onebasin prune model.py:net network.safetensors --by magnitude --per tensor --names '*.weight'
      onebasin prune model.py:net posterior.safetensors --onto other.safetensors --masks masks.safetensors
    """  # noqa: D301 - click reads the backspace: keep these lines apart
    output, masks_file, seed = options["output"], options["masks_file"], options["seed"]
    for path in (output, masks_file):
        _check_output(path, force)
    if loss is not None and data is None:
        raise InputError("--loss says how networks are judged on data, found no --data: give it, or leave --loss out")
    if output is not None and masks_file is not None and real_path(output) == real_path(masks_file):
        raise InputError(f"expected two files, found {output} as --output and as --masks: give each its own name")
    known = _known(model, onto=options["onto"], texts=options["texts"], vocabulary=options["vocabulary"], seed=seed)
    posterior = _read(source, known)
    if options["onto"] is not None:
        posterior = _moved(posterior, options["onto"], known)
    network = posterior.mean if isinstance(posterior, Posterior) else posterior
    chosen = {"per": options["per"], "names": options["names"] or None, "seed": seed}
    by = options["by"] or ("snr" if isinstance(posterior, Posterior) else "magnitude")
    masks = choose(posterior, options["keep"], by, **chosen)
    left, seen = masks.apply(network), _statistics(options, limit)
    constant = posterior.constant_statistics if isinstance(posterior, Posterior) else frozenset()
    if seen is not None and seen is not False:
        left, _ = refreshed_one(_model(known), left, seen, constant=constant)
    elif seen is None and isinstance(posterior, Posterior) and posterior.own_statistics and data is None:
        warn_stale("pruned means of this posterior", posterior.own_statistics, "give --statistics")
    chosen["statistics"] = seen
    curve = None
    if data is not None:
        curve = _curve(known, posterior, examples.read_pair(data, limit, options["sources"]), loss=loss, **chosen)
    facts = {"model": model, "posterior": source, "onto": options["onto"], "data": data}
    facts["statistics"] = options["statistics"]
    record = _record(masks, curve, facts | {"output": None if output is None else str(output)})
    if output is not None:
        write_tensors(output, left, {"format": "pt", "onebasin": json.dumps(masks.facts)})
        publish(output.with_suffix(".json"), lambda file: file.write(f"{record}\n".encode()), replace=True)
    if masks_file is not None:
        masks.save(masks_file)
    click.echo(record if as_json else _page(masks, curve, [path for path in (output, masks_file) if path]))


def _statistics(options: dict[str, Any], limit: int | None) -> Any:
    """Inputs for running statistics; False for a network that was given, because it has its own."""
    if options["statistics"] is not None:
        return examples.read(options["statistics"], limit=limit, targets=False, sources=options["sources"]).inputs
    return None if options["onto"] is None else False


def _check_output(path: Path | None, force: bool) -> None:
    """Raise before the work where a file cannot be written."""
    if path is None:
        return
    if path.suffix != ".safetensors":
        raise InputError(f"networks and masks are written as .safetensors, found {path}: name it so")
    for file in (path, path.with_suffix(".json")):
        check_absent(file, force, "name")
    make_folder(path.parent)


def _known(model: str, *, onto: str | None, texts: tuple[str, ...], vocabulary: int | None, seed: int) -> Known:
    """The model; its symmetry only where something has to be moved."""
    if onto is not None:
        return know(Architecture(model, texts, vocabulary, None, seed))
    return shapes_of(build(model, seed))


def _read(source: str, known: Known) -> Posterior | State:
    """A posterior, or a network where the file holds one."""
    path = Path(source)
    posterior = posterior_in(path, _model(known))
    if posterior is not None:
        return posterior
    if not is_there(numbered(source)[0]):
        raise StorageError(f"there is no file {source}: check the path of the posterior")
    return one_network(source, known)


def _model(known: Known) -> nn.Module:
    return known.runs("prune")


def _moved(posterior: Posterior | State, onto: str, known: Known) -> Posterior:
    """The network to prune, with the standard deviations of the posterior in its basis."""
    if not isinstance(posterior, Posterior):
        raise InputError("--onto takes standard deviations from a posterior, found a network: prune that one directly")
    network = one_network(onto, known)
    with progress(f"matching the posterior to {onto} ..."):
        return transfer(posterior, network, known.symmetry)


def _curve(known: Known, posterior: Posterior | State, pair: tuple[Any, Tensor], **chosen: Any) -> PruningCurve:
    criteria = CRITERIA if isinstance(posterior, Posterior) else _WITHOUT_STD
    chosen["loss"] = chosen["loss"] or loss_of_targets(pair[1])
    with progress("pruning by all criteria ..."):
        return pruning_curve(_model(known), posterior, pair, by=criteria, **chosen)


def _record(masks: Masks, curve: PruningCurve | None, facts: Mapping[str, Any]) -> str:
    tensors = {name: {"kept": int(mask.sum()), "size": mask.numel()} for name, mask in masks.items()}
    content = {
        "format": FORMAT,
        **facts,
        **masks.facts,
        "kept": masks.kept,
        "size": masks.size,
        "tensors": tensors,
        "curve": None if curve is None else curve.as_dict(),
    }
    return json.dumps(content, indent=1)


def _page(masks: Masks, curve: PruningCurve | None, files: list[Path]) -> str:
    parts = [f"{masks.kept:,} of {masks.size:,} weights kept, by {masks.facts['by']}", str(masks)]
    if curve is not None:
        what = "% right" if all(None not in curve.accuracy(by) for by in curve.points) else "loss"
        parts.append(f"{what} on {curve.examples:,} examples, by the part that is kept and by what decides\n\n{curve}")
    parts += [", ".join(map(str, files))] if files else []
    return "\n\n".join(parts)
