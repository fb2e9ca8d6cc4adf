"""``onebasin sample``: a model and data -> networks drawn from the posterior over its weights."""

import inspect
import math
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import click
import torch
from click.core import ParameterSource
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from onebasin.cli import data as examples
from onebasin.cli.data import likelihood_options
from onebasin.cli.load import load, load_object
from onebasin.cli.options import debug, progress_bar
from onebasin.cli.options import places as where_it_runs
from onebasin.cli.tables import short
from onebasin.errors import InputError, OnebasinError, check_options
from onebasin.functional import Inputs, global_seed, kind_of_targets, predictions
from onebasin.inference import (
    HMC,
    MCLMC,
    METHODS,
    MIXED,
    SGHMC,
    Method,
    bernoulli,
    categorical,
    choose,
    diagnose,
    learned_gaussian,
    method_of,
    options_of,
    read_definition,
)
from onebasin.inference import sample as draw
from onebasin.population import Population
from onebasin.reporting import table

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
    pooled = float((each.logsumexp(0) - math.log(members)).mean())
    right = _rightness(outputs, goals, density)
    return f"{right}, mean log density {short(pooled)}, on {len(goals):,} training examples"


def _rightness(outputs: Tensor, targets: Tensor, density: Any) -> str:
    """Accuracy or RMSE of the mean prediction of outputs (members, examples, ...)."""
    if density is categorical:
        return _accuracy(outputs.softmax(2).mean(0).argmax(1) == targets)
    if density is bernoulli:
        return _accuracy((outputs.sigmoid().mean(0) > 0.5).reshape(targets.shape) == (targets > 0.5))
    mean = outputs.mean(0)
    if density is learned_gaussian:
        mean = mean.chunk(2, dim=1)[0]
    return f"RMSE {short(float((mean.reshape(targets.shape) - targets).double().square().mean().sqrt()))}"


def _accuracy(right: Tensor) -> str:
    return f"accuracy {100 * float(right.double().mean()):.1f} %"


_OF_THE_VERB = {"model", "data", "method", "path", "progress", "misplaced"}  # named otherwise on the command line
_ONLY_IN_PYTHON = {"log_density"}  # a function cannot be written on a command line
KEYWORDS = set(inspect.signature(draw).parameters) - _OF_THE_VERB  # of `sample`, whatever the method


class MethodName(click.ParamType):  # type: ignore[type-arg]  # generic in some versions only
    """The name of a method, or FILE:METHOD for an object of the user's file."""

    name = "method"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Check the name."""
        if value not in METHODS and ":" not in value:
            self.fail(f"{value!r} is not one of {', '.join(METHODS)}, nor a FILE:METHOD.", param, ctx)
        return value


class WithMethods(click.Command):
    """A command whose help ends with the methods."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the methods, one sentence each."""
        with formatter.section("Methods"):
            formatter.write_dl([(name, _first_paragraph(method)) for name, method in METHODS.items()])


def chosen_method(name: str, options: Mapping[str, Any]) -> Method:
    """The method of this name, or of the user's file, with these options."""
    method: Any = method_of(name if name in METHODS else load_object(name))
    check_options(options, {*options_of(method), *KEYWORDS}, f"method {method.name}")
    if options and not is_dataclass(method):
        raise InputError(f"expected a dataclass to set {', '.join(options)} of, found {name}: set it in the file")
    changed: Method = replace(method, **options) if options else method
    return changed


def option_page(name: str) -> str:
    """Everything that can be set for a method, in groups: its own options, those of training, those of any method."""
    method = METHODS[name]
    parts = [f"{name}: {_first_paragraph(method)}"]
    for kind in method.__mro__:
        lines = _documented(kind, "Attributes")
        if lines:
            defaults = {one.name: one.default for one in fields(kind) if one.name in lines}
            title = f"Options of {name}." if kind is method else _first_paragraph(kind)
            parts.append(f"{title}\n\n{_definitions(lines, defaults)}")
    defaults = {key: one.default for key, one in inspect.signature(draw).parameters.items()}
    lines = {key: line for key, line in _documented(draw, "Args").items() if key in KEYWORDS - _ONLY_IN_PYTHON}
    return "\n\n".join([*parts, f"Options of every method.\n\n{_definitions(lines, defaults)}"])


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


_Command = TypeVar("_Command", bound=Callable[..., Any])
_WITH_FLAGS = {"model", "data", "method", "path", "progress"}  # of `sample`, and what else has an option of its own
_WITH_FLAGS |= {"chains", "seed", "prior", "noise", "likelihood", "chunk", "workers", "executor"}
_CONSTANTS = {"true": True, "false": False, "none": None}


def _show_options(context: click.Context, parameter: click.Parameter, method: str | None) -> None:
    if method is not None and not context.resilient_parsing:
        click.echo(option_page(method))
        context.exit()


def _count(name: str, text: str, least: int = 1) -> Callable[[_Command], _Command]:
    return click.option(name, type=click.IntRange(min=least), metavar="N", help=text)


@click.command(cls=WithMethods)
@click.argument("model", metavar="MODEL")
@click.argument("data", metavar="DATA")
@click.option(
    "-o", "--output", required=True, type=click.Path(path_type=Path), help="Folder of the draws, and of the run."
)
@click.option(
    "--method", type=MethodName(), default="hmc", show_default=True, metavar="NAME", help="See below; or FILE:METHOD."
)
@_count("--chains", "Independent chains, trainings or fits that are pooled. Default: 1.")
@_count("--draws", "Networks from each of them.")
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, metavar="N", show_default=True, help="Seed of all random numbers."
)
@click.option(
    "--prior",
    multiple=True,
    metavar="[NAME=]X",
    help="Standard deviation of the Gaussian prior, or flat. Repeat it with names or patterns of tensors, as in "
    "'*.bias=2'. Default: 1.",
)
@likelihood_options
@click.option(
    "--temperature", type=click.FloatRange(min=0), metavar="T", help="Where the method has one; 1 is the posterior."
)
@_count("--epochs", "Passes over the data in training.", 0)
@_count("--batch", "Examples in a mini-batch.")
@click.option("--lr", type=click.FloatRange(min=0, min_open=True), metavar="X", help="Learning rate of the mean loss.")
@click.option(
    "--set", "settings", multiple=True, metavar="NAME=VALUE", help="Any other option of the method; see --options."
)
@click.option(
    "--options",
    type=click.Choice(list(METHODS)),
    is_eager=True,
    expose_value=False,
    callback=_show_options,
    help="Show all options of a method, and stop.",
)
@_count("--limit", "Only the first N examples of the data.")
@examples.data_options
@where_it_runs
@_count("--chunk", "Chains that a worker takes at once; draws do not depend on it.")
@debug
def sample(
    *, model: str, data: str, output: Path, limit: int | None, method: str, seed: int, places: Any, sources: Any,
    **options: Any,
) -> None:  # fmt: skip
    """Draw networks from the posterior of MODEL given DATA.

    MODEL is path/to/file.py:factory or package.module:factory, as for discover. Draws are written while they are made:
    given again, the same command goes on with a run that was interrupted, as if nothing had happened, and with more
    --draws a finished one makes more.

    DATA is a word, a file, a folder or a function. Words: digits, for 1,797 handwritten digits, which need no file;
    mnist, fashion-mnist, cifar10, cifar100 and uci/NAME, which lie in --data-dir; openml/NAME or openml/NUMBER. A word
    alone is the training part, NAME:test the test part, NAME:all both, and NAME#3 is division number 3, as in
    uci/boston#3:test; what comes undivided, as digits and OpenML do, is divided at random, three quarters to one.
    Files: .npz or .safetensors with inputs (or x, X; inputs.NAME for each of several) and targets (or y, Y). Folders:
    of IDX files or of CIFAR batches. Functions: path/to/file.py:function or package.module:function without arguments,
    which returns (inputs, targets), or two such pairs for training and test. Undivided files and functions are taken
    whole; data.npz#0:train and data.npz#0:test divide them at random.

    \b
      onebasin sample onebasin.examples:digits_mlp digits --method hmc -o chain/
      onebasin sample model.py:net train.npz --noise 0.1 --chains 4 --workers 2 -o chains/
      onebasin sample model.py:net train.npz --method swag --set rank=10 -o draws/
      onebasin sample --options hmc
    """  # noqa: D301 - click reads the backspace: keep these lines apart
    chosen = _chosen(**options)
    keywords = {name: chosen.pop(name) for name in KEYWORDS & chosen.keys()}
    own = chosen_method(method, chosen)
    for name in ("workers", "executor"):
        keywords[name] = places.get(name)
    with global_seed(seed):
        network = load(model).model
    pair = examples.read_pair(data, limit, sources)
    try:
        with progress_bar(f"sampling with {own.name}") as show:
            draws = draw(network, pair, own, seed=seed, path=output, progress=show, **keywords)
    except KeyboardInterrupt:
        click.echo(_left(output), err=True)
        raise
    chains = 1 if draws.chain is None else len(draws.chain.unique())
    click.echo(f"{_counted(len(draws), 'draw')} by {own.name}, {_counted(chains, 'chain')}, in {output}")
    if text := diagnostics_table(draws.provenance["diagnostics"]):
        click.echo(f"\n{text}\n")
    # Only draws that follow each other may have failed to mix.
    if isinstance(own, HMC | SGHMC | MCLMC) and (sentence := mixing_sentence(network, draws, pair[0])):
        click.echo(sentence)
    click.echo(fit_sentence(network, draws, pair, keywords.get("likelihood"), keywords.get("noise")))


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
    return f"{output} keeps {_counted(kept, 'draw')}; go on with\n  {_again(click.get_current_context())}"


def _again(context: click.Context) -> str:
    """The command that was given, which goes on with the run."""
    words = [context.command_path]
    for parameter in context.command.params:
        name = parameter.name or ""
        if context.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            continue
        value = context.params.get(name)
        if value is True:
            words.append(parameter.opts[-1])
            continue
        for one in value if isinstance(value, tuple) else (value,):
            words += [str(one)] if isinstance(parameter, click.Argument) else [parameter.opts[-1], str(one)]
    return f"{words[0]} {shlex.join(words[1:])}"
