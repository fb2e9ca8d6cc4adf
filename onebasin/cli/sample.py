"""``onebasin sample``: a model and data -> networks drawn from the posterior over its weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from onebasin.cli.options import data_options, debug, likelihood_options, places
from onebasin.cli.words import METHODS, RECIPES

_Command = TypeVar("_Command", bound=Callable[..., Any])


class MethodName(click.ParamType):  # type: ignore[type-arg]  # generic in some versions only
    """The name of a method, or FILE:METHOD for an object of the user's file."""

    name = "method"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Check the name."""
        if value not in METHODS and ":" not in value:
            self.fail(f"{value!r} is not one of {', '.join(METHODS)}, nor a FILE:METHOD.", param, ctx)
        return value

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Offer the names that begin so."""
        return [CompletionItem(name) for name in METHODS if name.startswith(incomplete)]


def _show(context: click.Context, parameter: click.Parameter, chosen: Any) -> None:
    """Print the options of one method or of all, and stop."""
    if chosen and not context.resilient_parsing:
        from onebasin.cli.work.sample import option_page

        click.echo(option_page(METHODS if chosen is True else (chosen,)))
        context.exit()


def _count(name: str, text: str, least: int = 1) -> Callable[[_Command], _Command]:
    return click.option(name, type=click.IntRange(min=least), metavar="N", help=text)


@click.command()
@click.argument("model", metavar="MODEL")
@click.argument("data", metavar="DATA")
@click.option(
    "-o", "--output", required=True, type=click.Path(path_type=Path), help="Folder of the draws, and of the run."
)
@click.option(
    "--method",
    type=MethodName(),
    default="hmc",
    show_default=True,
    metavar="NAME",
    help=f"{', '.join(METHODS)}; or FILE:METHOD. --list tells about them.",
)
@click.option(
    "--recipe",
    type=click.Choice(RECIPES),
    metavar="NAME",
    help=f"Train as published networks were trained: {', '.join(RECIPES)}. Without --method an ensemble.",
)
@_count("--chains", "Independent chains, trainings or fits that are pooled. Default: 1.")
@_count("--draws", "Networks from each of them.")
@_count("--members", "Networks that one training gives, of methods that train several at once.", 2)
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
    "--set",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    help="Any other option of the method, several values as in augment=crop,flip; see --list.",
)
@click.option(
    "--options",
    type=click.Choice(list(METHODS)),
    is_eager=True,
    expose_value=False,
    callback=_show,
    help="Show all options of a method, and stop.",
)
@click.option(
    "--list",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show,
    help="Show all methods with all their options and defaults, and stop.",
)
@click.option(
    "--force", is_flag=True, help="Begin anew: remove the run that OUTPUT holds, instead of going on with it."
)
@_count("--limit", "Only the first N examples of the data.")
@data_options
@places
@_count("--chunk", "Chains that a worker takes at once; draws do not depend on it.")
@debug
def sample(**options: Any) -> None:
    """Draw networks from the posterior of MODEL given DATA.

    MODEL is path/to/file.py:factory or package.module:factory, as for discover. Draws are written while they are made:
    given again, the same command goes on with a run that was interrupted, as if nothing had happened, and with more
    --draws a finished one makes more.

    DATA is a word, a file, a folder or a function. Words: digits, for 1,797 handwritten digits, which need no file;
    mnist, fashion-mnist, cifar10, cifar100 and uci/NAME, which lie in --data-dir; openml/NAME or openml/NUMBER. A word
    alone is the training part, NAME:test the test part, NAME:all both, and NAME#3 is division number 3, as in
    uci/boston#3:test; what comes undivided, as digits and OpenML do, is divided at random, three quarters to one.
    Files: .npz or .safetensors with inputs (or x, X; inputs.NAME for each of several) and targets (or y, Y); x.npy, if
    y.npy lies beside it. Folders:
    of IDX files or of CIFAR batches. Functions: path/to/file.py:function or package.module:function without arguments,
    which returns (inputs, targets), or two such pairs for training and test. Undivided files and functions are taken
    whole; data.npz#0:train and data.npz#0:test divide them at random.

    \b
      onebasin sample onebasin.examples:digits_mlp digits --method hmc -o chain/
      onebasin sample model.py:net train.npz --noise 0.1 --chains 4 --workers 2 -o chains/
      onebasin sample model.py:net train.npz --method swag --set rank=10 -o draws/
      onebasin sample model.py:net cifar10 --recipe resnet18-cifar10 --set milestones=40,60 -o networks/
      onebasin sample --list
    """  # noqa: D301 - click reads the backspace: keep these lines apart
    from onebasin.cli.work.sample import sample as work

    given = click.get_current_context().get_parameter_source("method") is not ParameterSource.DEFAULT
    if options["recipe"] is not None and not given:
        options["method"] = "ensemble"
    work(**options)
