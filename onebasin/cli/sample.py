"""``onebasin sample``: a model and data -> networks drawn from the posterior over its weights."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from onebasin.cli import data as examples
from onebasin.cli.likelihood import likelihood_options
from onebasin.cli.load import load
from onebasin.cli.methods import KEYWORDS, MethodName, WithMethods, chosen_method, option_page
from onebasin.cli.options import debug, progress_bar
from onebasin.cli.options import places as where_it_runs
from onebasin.cli.sample_report import diagnostics_table, fit_sentence, mixing_sentence
from onebasin.errors import InputError, OnebasinError
from onebasin.functional import global_seed
from onebasin.inference import HMC, MCLMC, METHODS, SGHMC, read_definition
from onebasin.inference import sample as draw
from onebasin.population import Population

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
