"""Sample: draws from a posterior over weights, their diagnostics, and lists of what methods can be told."""

import difflib
import inspect
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_origin, get_type_hints

import click
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from onebasin.cli import data as examples
from onebasin.cli.load import load, load_object
from onebasin.cli.options import check_writable, remove_before
from onebasin.cli.progress import progress_bar
from onebasin.cli.records import command_line, record_of
from onebasin.cli.tables import short
from onebasin.errors import InputError, OnebasinError
from onebasin.functional import (
    IGNORED,
    ClassLoss,
    Head,
    Inputs,
    Likelihood,
    channels_of,
    global_seed,
    kind_of_targets,
    predictions,
    without,
)
from onebasin.inference import (
    HMC,
    MCLMC,
    METHODS,
    MIXED,
    RECIPES,
    SGHMC,
    Method,
    bernoulli,
    categorical,
    choose,
    diagnose,
    is_run,
    learned_gaussian,
    method_of,
    options_of,
    read_definition,
)
from onebasin.inference import recipe as trained_as
from onebasin.inference import sample as draw
from onebasin.population import Population
from onebasin.reporting import FILE, table, write_record
from onebasin.state import as_state

_EXAMPLES, _MEMBERS, _VALUES = 1000, 100, 20_000_000  # what is cheap to compute, and to hold
_ENOUGH, _FUNCTIONS = 20, 100  # draws per chain to judge mixing by, and examples to judge it on
_CHAINS = ("stuck", "still_falling")  # numbers of chains
_NAMES = {
    "acceptance": "acceptance probability",
    "divergences": "divergences per chain",
    "exp_energy_change": "exp(-dH), 1 if right",
    "ebfmi": "E-BFMI, low below 0.3",
    "final_loss": "loss per example at the end",
    "gradient_norm": "norm of its gradient",
    "loss_fall": "its fall, trained as long again",
    "loss_noise": "how much of this may be noise",
}


def diagnostics_table(diagnostics: Mapping[str, Any]) -> str:
    """The diagnostics of a run over its chains; empty where the method has none.

    >>> print(diagnostics_table({"step_size": [0.01, 0.03], "stuck": [1]}))
               mean  lowest  highest
    --------------------------------
    step size  0.02    0.01     0.03
    chains that hardly move: 1
    """
    rows = [_row(name, values) for name, values in diagnostics.items() if name not in _CHAINS and _numbers(values)]
    parts = [table([("", "mean", "lowest", "highest"), *rows])] if rows else []
    if diagnostics.get("stuck"):
        parts.append(f"chains that hardly move: {', '.join(map(str, diagnostics['stuck']))}")
    parts += [f"note: {text}" for text in diagnostics.get("notes", [])]
    return "\n".join(parts)


def mixing_sentence(model: nn.Module, population: Population, inputs: Inputs) -> str:
    """R-hat and effective sample size of what the chains compute, where there are enough draws to say so."""
    chains = 1 if population.chain is None else len(population.chain.unique())
    if chains < 2 or len(population) < _ENOUGH * chains:
        return ""
    few: Inputs = tree_map(lambda leaf: leaf[:_FUNCTIONS], inputs)
    mixing = diagnose(model, population, few, weights=False).functions
    if mixing is None or not mixing.quantities:
        return ""
    return (
        f"R-hat of outputs: worst {mixing.worst_rhat:.2f}, median {mixing.median_rhat:.2f} (mixed if below {MIXED}); "
        f"effective draws: least {mixing.least_bulk:.0f}, median {mixing.median_bulk:.0f} of {len(population):,}"
    )


def _numbers(values: Any) -> bool:
    return isinstance(values, list) and len(values) > 0 and all(isinstance(value, int | float) for value in values)


def _row(name: str, values: list[float]) -> tuple[str, str, str, str]:
    label = _NAMES.get(name, name.replace("_", " "))
    mean = short(math.fsum(values) / len(values))
    return (label, mean, short(min(values)), short(max(values))) if len(values) > 1 else (label, mean, "", "")


def fit_sentence(
    model: nn.Module, population: Population, data: tuple[Inputs, Tensor], likelihood: Any, noise: Any
) -> str:
    """Accuracy or RMSE of the pooled prediction, and log mean_m p(y | x, theta_m) averaged over the examples.

    At most 1,000 examples and 100 networks are looked at; `likelihood` and `noise` are those of the run.
    """
    inputs: Inputs = tree_map(lambda leaf: leaf[:_EXAMPLES], data[0])
    targets = data[1][:_EXAMPLES]
    size = predictions(model, population[:1], inputs).numel()
    members = max(1, min(len(population), _MEMBERS, _VALUES // size))
    chosen = torch.linspace(0, len(population) - 1, members).round().long()
    outputs = predictions(model, population[chosen], inputs)
    goals = targets.to(outputs.dtype) if targets.is_floating_point() else targets
    kind = kind_of_targets(data[1], likelihood, noise)
    density = choose(kind, noise, outputs[0], goals)
    each = torch.stack([density(one, goals).double() for one in outputs])  # (members, examples)
    pooled = f"mean log density {short(float((each.logsumexp(0) - math.log(members)).mean()))}"
    if isinstance(density, Likelihood) and not density.is_density:
        pooled = f"mean loss {short(-float(each.mean()))}"
    right = _rightness(outputs, goals, density)
    return f"{right}, {pooled}, on {len(goals):,} training examples"


def _rightness(outputs: Tensor, targets: Tensor, density: Any) -> str:
    """Accuracy or RMSE of the mean prediction of outputs (members, examples, ...)."""
    known = ~targets.isnan() if targets.is_floating_point() else targets != IGNORED
    if density is categorical or isinstance(density, ClassLoss):
        logits = density.logits(outputs, 2) if isinstance(density, ClassLoss) else outputs
        return _accuracy((logits.softmax(2).mean(0).argmax(1) == targets)[known])
    if density is bernoulli:
        return _accuracy(((outputs.sigmoid().mean(0) > 0.5).reshape(targets.shape) == (targets > 0.5))[known])
    if isinstance(density, Head):
        means = [density.mean(density.parameters(one, channels_of(one, targets))) for one in outputs]
        mean = torch.stack(means).mean(0)
    else:
        mean = outputs.mean(0)
        if density is learned_gaussian:
            mean = mean.chunk(2, dim=1)[0]
    errors = (mean.reshape(targets.shape) - targets)[known]
    return f"RMSE {short(float(errors.double().square().mean().sqrt()))}"


def _accuracy(right: Tensor) -> str:
    return f"accuracy {100 * float(right.double().mean()):.1f} %"


_OF_THE_VERB = {"model", "data", "method", "path", "progress", "misplaced"}  # named otherwise on the command line
_ONLY_IN_PYTHON = {"log_density"}  # a function cannot be written on a command line
KEYWORDS = set(inspect.signature(draw).parameters) - _OF_THE_VERB  # of `sample`, whatever the method


def chosen_method(name: str, options: Mapping[str, Any], recipe: str | None = None) -> Method:
    """The method of this name, or of the user's file, trained as a recipe says, with these options."""
    method: Any = method_of(name if name in METHODS else load_object(name))
    known = {*options_of(method), *KEYWORDS}
    for option in options:
        if option not in known:
            near = difflib.get_close_matches(option, known, n=1)
            remedy = f"did you mean {near[0]!r}?" if near else "leave it out."
            listed = f"onebasin sample --options {name}" if name in METHODS else "the file"
            raise InputError(f"method {method.name} has no option {option!r}: {remedy} See {listed} for all of them")
    if options and not is_dataclass(method):
        raise InputError(f"expected a dataclass to set {', '.join(options)} of, found {name}: set it in the file")
    if recipe is not None:
        method = trained_as(recipe, method)
    changed: Method = replace(method, **_in_tuples(method, options)) if options else method
    return changed


def _in_tuples(method: Method, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with those of several values as tuples, which are written with commas: milestones=25,50."""
    hints = get_type_hints(type(method))
    return {name: _several(value) if get_origin(hints[name]) is tuple else value for name, value in options.items()}


def _several(value: Any) -> tuple[Any, ...]:
    """The values that a text with commas stands for.

    >>> _several("25,50"), _several(25), _several("crop,flip"), _several(None)
    ((25, 50), (25,), ('crop', 'flip'), ())
    """
    if value is None:
        return ()
    return tuple(_value(part) for part in value.split(",")) if isinstance(value, str) else (value,)


def option_page(names: Sequence[str]) -> str:
    """Everything that can be set for methods, in groups: their own options, those of training, those of any method."""
    parts, shown = [], dict[type, str]()
    for name in names:
        method: Any = METHODS[name]
        parts.append(f"{name}: {_first_paragraph(method)}")
        for kind in method.__mro__:
            lines = _documented(kind, "Attributes")
            if not lines:
                continue
            title = f"Options of {name}." if kind is method else _first_paragraph(kind)
            defaults = {one.name: one.default for one in fields(method) if one.name in lines}
            if kind in shown:  # of training, which several methods begin with
                parts.append(f"{title} As for {shown[kind]}{_other_defaults(kind, defaults)}.")
                continue
            shown[kind] = name
            parts.append(f"{title}\n\n{_definitions(lines, defaults)}")
    defaults = {key: one.default for key, one in inspect.signature(draw).parameters.items()}
    lines = {key: line for key, line in _documented(draw, "Args").items() if key in KEYWORDS - _ONLY_IN_PYTHON}
    parts.append(f"Options of every method.\n\n{_definitions(lines, defaults)}")
    return "\n\n".join([*parts, *([_recipes()] if len(names) > 1 else [])])


def _recipes() -> str:
    """The recipes, with what they set and where it was read."""
    formatter = click.HelpFormatter(width=100)
    with formatter.indentation():
        formatter.write_dl([(name, f"{_settings(one.training)}. {one.source}.") for name, one in RECIPES.items()])
    return "Recipes of published networks, for --recipe.\n\n" + formatter.getvalue().rstrip("\n")


def _settings(training: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name}={','.join(map(str, value)) if isinstance(value, tuple) else _word(value)}"
        for name, value in training.items()
    )


def _other_defaults(kind: type, defaults: Mapping[str, Any]) -> str:
    """Defaults that a method has in place of those of the class which it shares with others."""
    before = {one.name: one.default for one in fields(kind)}
    changed = [f"{name}={_word(value)}" for name, value in defaults.items() if value != before[name]]
    return f", with {', '.join(changed)}" if changed else ""


def _first_paragraph(documented: Any) -> str:
    return " ".join((inspect.getdoc(documented) or "").split("\n\n")[0].split())


def _documented(documented: Any, section: str) -> dict[str, str]:
    """Name -> what a section of the docstring says about it."""
    text = inspect.cleandoc(documented.__doc__ or "").partition(f"{section}:\n")[2].partition("\n\n")[0]
    found = re.findall(r"^ {4}(\w+): (.+(?:\n {5,}.+)*)", text, re.MULTILINE)
    return {name: " ".join(line.split()) for name, line in found}


def _definitions(lines: Mapping[str, str], defaults: Mapping[str, Any]) -> str:
    formatter = click.HelpFormatter(width=100)
    with formatter.indentation():
        formatter.write_dl([(name, f"{line} Default: {_word(defaults[name])}.") for name, line in lines.items()])
    return formatter.getvalue().rstrip("\n")


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool | None) else f"{value:g}" if isinstance(value, float) else value


_WITH_FLAGS = {"model", "data", "method", "path", "progress"}  # of `sample`, and what else has an option of its own
_WITH_FLAGS |= {"chains", "seed", "prior", "noise", "likelihood", "ignore_index", "chunk", "workers", "executor"}
_CONSTANTS = {"true": True, "false": False, "none": None}


def sample(
    *, model: str, data: str, output: Path, limit: int | None, method: str, recipe: str | None, seed: int, places: Any,
    sources: Any, force: bool, **options: Any,
) -> None:  # fmt: skip
    """Draw networks from the posterior of MODEL given DATA."""
    chosen = _chosen(**options)
    keywords = {name: chosen.pop(name) for name in KEYWORDS & chosen.keys()}
    own = chosen_method(method, chosen, recipe)
    for name in ("workers", "executor"):
        keywords[name] = places.get(name)
    check_writable(output)
    with global_seed(seed):
        network = load(model).model
    pair = examples.read_pair(data, limit, sources)
    kind = kind_of_targets(pair[1], keywords.get("likelihood"), keywords.get("noise"))
    checked = kind == "categorical" and keywords.get("ignore_index") is None
    examples.check_fit(network, as_state(network), *pair, loss="cross-entropy" if checked else "")
    if force:
        remove_before(output, is_run(output), "a run of sample")
    try:
        with progress_bar(f"sampling with {own.name}") as show:
            draws = draw(network, pair, own, seed=seed, path=output, progress=show, **keywords)
    except KeyboardInterrupt:
        click.echo(_left(output), err=True)
        raise
    chains = 1 if draws.chain is None else len(draws.chain.unique())
    made = f"{_counted(len(draws), 'draw')} by {own.name}, {_counted(chains, 'chain')}"
    click.echo(f"{made}, in {output}")
    diagnostics = draws.provenance["diagnostics"]
    if text := diagnostics_table(diagnostics):
        click.echo(f"\n{text}\n")
    # Only draws that follow each other may have failed to mix.
    mixed = mixing_sentence(network, draws, pair[0]) if isinstance(own, HMC | SGHMC | MCLMC) else ""
    shown = pair[0], without(pair[1], keywords.get("ignore_index"))
    fit = fit_sentence(network, draws, shown, keywords.get("likelihood"), keywords.get("noise"))
    click.echo("\n".join(filter(None, (mixed, fit))))
    values = {"draws": len(draws), "chains": chains, "method": own.name, "diagnostics": _means(diagnostics)}
    told = [f"{made}.", *(f"{sentence}." for sentence in (fit, mixed) if sentence), *diagnostics.get("notes", [])]
    write_record(record_of("sample", f"Draws of {model} on {data}", told, values), output / FILE)


def _means(diagnostics: Mapping[str, Any]) -> dict[str, float]:
    """The mean of each diagnostic over chains."""
    return {
        _NAMES.get(name, name): math.fsum(values) / len(values)
        for name, values in diagnostics.items()
        if name not in _CHAINS and _numbers(values)
    }


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _chosen(*, prior: tuple[str, ...], noise: str | None, settings: tuple[str, ...], **options: Any) -> dict[str, Any]:
    """The options that were given, of the method and of `onebasin.sample`, by their names in Python."""
    chosen = {name: value for name, value in options.items() if value is not None}
    if prior:
        chosen["prior"] = _prior(prior)
    if noise is not None:
        chosen["noise"] = _value(noise)
    for text in settings:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise InputError(f"expected --set NAME=VALUE, found {text!r}: write it as in --set thin=5")
        if name in chosen or name in _WITH_FLAGS:
            raise InputError(f"found {name} in --set, but it has an option of its own or was given twice: give it once")
        chosen[name] = _value(value)
    return chosen


def _prior(texts: tuple[str, ...]) -> Any:
    """One standard deviation, None for a flat prior, or a dict of them by name."""
    if len(texts) == 1 and "=" not in texts[0]:
        return None if texts[0] == "flat" else _value(texts[0])
    parts = [text.partition("=") for text in texts]
    if any(not equals for _, equals, _ in parts):
        raise InputError(
            f"expected one --prior X, or only --prior NAME=X, found {', '.join(texts)}: name the others too, as in *=1"
        )
    return {name: float("inf") if value == "flat" else _value(value) for name, _, value in parts}


def _value(text: str) -> bool | int | float | str | None:
    """What a text on the command line means.

    >>> [_value(text) for text in ("3", "1e-3", "none", "True", "cosine")]
    [3, 0.001, None, True, 'cosine']
    """
    if text.lower() in _CONSTANTS:
        return _CONSTANTS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _left(output: Path) -> str:
    """What an interrupted run leaves behind."""
    if read_definition(output) is None:
        return "too early to have kept anything; nothing was written"
    try:
        kept = len(Population.open(output))
    except OnebasinError:  # before the first draw there is no population
        kept = 0
    return f"{output} keeps {_counted(kept, 'draw')}; go on with\n  {command_line(click.get_current_context())}"
