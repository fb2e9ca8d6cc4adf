"""Prune: a network with only its most valuable weights, masks, and pruning curves on data."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from torch import Tensor, nn

from onebasin.cli import data as examples
from onebasin.cli.networks import Known, build, discovered, numbered, one_network, posterior_in, prepare, shapes_of
from onebasin.cli.options import Architecture, check_output
from onebasin.cli.progress import progress, progress_bar
from onebasin.cli.records import as_json as text_of_values
from onebasin.cli.records import record_of
from onebasin.errors import InputError, StorageError
from onebasin.functional import loss_of_targets, refreshed_one, warn_stale
from onebasin.population import is_there
from onebasin.posterior import CRITERIA, Masks, Posterior, PruningCurve, pruning_curve, transfer
from onebasin.posterior import prune as choose
from onebasin.reporting import write_record
from onebasin.state import State
from onebasin.storage import real_path, write_tensors

_WITHOUT_STD = ("magnitude", "random")


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
    """Keep the most valuable weights of POSTERIOR, and set the others to zero."""
    output, masks_file, seed = options["output"], options["masks_file"], options["seed"]
    for path in (output, masks_file):
        if path is not None:
            check_output(path, force, "name", suffix=".safetensors")
            check_output(path.with_suffix(".json"), force, "name")
    if loss is not None and data is None:
        raise InputError("--loss says how networks are judged on data, found no --data: give it, or leave --loss out")
    if output is not None and masks_file is not None and real_path(output) == real_path(masks_file):
        raise InputError(f"expected two files, found {output} as --output and as --masks: give each its own name")
    architecture = Architecture(model, options["texts"], options["vocabulary"], None, seed, options["dtype"])
    known = shapes_of(build(model, seed), options["dtype"]) if options["onto"] is None else prepare(architecture)
    posterior = _read(source, known)
    pair = None if data is None else examples.read_pair(data, limit, options["sources"])
    seen = _statistics(options, limit)
    first = posterior.mean if isinstance(posterior, Posterior) else posterior
    if pair is not None:
        loss = loss or loss_of_targets(pair[1])
        examples.check_fit(_model(known), first, *pair, loss=loss)
    if seen is not None and seen is not False:
        examples.check_fit(_model(known), first, seen)
    if options["onto"] is not None:
        posterior = _moved(posterior, options["onto"], discovered(known, architecture))
    network = posterior.mean if isinstance(posterior, Posterior) else posterior
    chosen = {"per": options["per"], "names": options["names"] or None, "seed": seed}
    by = options["by"] or ("snr" if isinstance(posterior, Posterior) else "magnitude")
    masks = choose(posterior, options["keep"], by, **chosen)
    left = masks.apply(network)
    constant = posterior.constant_statistics if isinstance(posterior, Posterior) else frozenset()
    if seen is not None and seen is not False:
        left, _ = refreshed_one(_model(known), left, seen, constant=constant)
    elif seen is None and isinstance(posterior, Posterior) and posterior.own_statistics and data is None:
        warn_stale("pruned means of this posterior", posterior.own_statistics, "give --statistics")
    chosen["statistics"] = seen
    curve = None if pair is None else _curve(known, posterior, pair, loss=loss, **chosen)
    facts = {"model": model, "posterior": source, "onto": options["onto"], "data": data}
    facts["statistics"] = options["statistics"]
    values = _values(masks, curve, facts | {"output": None if output is None else str(output)})
    if output is not None:
        write_tensors(output, left, {"format": "pt", "onebasin": json.dumps(masks.facts)})
        answer = f"{masks.kept:,} of {masks.size:,} weights kept, by {by}."
        record = record_of("pruning", f"Pruning of {source}", answer, values, masks, curve)
        write_record(record, output.with_suffix(".json"))
    if masks_file is not None:
        masks.save(masks_file)
    click.echo(
        text_of_values(values) if as_json else _page(masks, curve, [path for path in (output, masks_file) if path])
    )


def _statistics(options: dict[str, Any], limit: int | None) -> Any:
    """Inputs for running statistics; False for a network that was given, because it has its own."""
    if options["statistics"] is not None:
        return examples.read(options["statistics"], limit=limit, targets=False, sources=options["sources"]).inputs
    return None if options["onto"] is None else False


def _read(source: str, known: Known) -> Posterior | State:
    """A posterior, or a network where the file holds one."""
    path = Path(source)
    posterior = posterior_in(path, known)
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
    with progress(f"matching the posterior to {onto}"):
        return transfer(posterior, network, known.symmetry)


def _curve(known: Known, posterior: Posterior | State, pair: tuple[Any, Tensor], **chosen: Any) -> PruningCurve:
    criteria = CRITERIA if isinstance(posterior, Posterior) else _WITHOUT_STD
    with progress_bar("pruning by all criteria") as show:
        return pruning_curve(_model(known), posterior, pair, by=criteria, progress=show, **chosen)


def _values(masks: Masks, curve: PruningCurve | None, facts: Mapping[str, Any]) -> dict[str, Any]:
    tensors = {name: {"kept": int(mask.sum()), "size": mask.numel()} for name, mask in masks.items()}
    return {
        **facts,
        **masks.facts,
        "kept": masks.kept,
        "size": masks.size,
        "tensors": tensors,
        "curve": None if curve is None else curve.to_dict(),
    }


def _page(masks: Masks, curve: PruningCurve | None, files: list[Path]) -> str:
    parts = [f"{masks.kept:,} of {masks.size:,} weights kept, by {masks.facts['by']}", str(masks)]
    if curve is not None:
        what = "% right" if all(None not in curve.accuracy(by) for by in curve.points) else "loss"
        parts.append(f"{what} on {curve.examples:,} examples, by the part that is kept and by what decides\n\n{curve}")
    parts += [", ".join(map(str, files))] if files else []
    return "\n\n".join(parts)
