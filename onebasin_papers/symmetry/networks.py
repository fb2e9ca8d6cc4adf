"""The problem and the networks that all parts share: trainings, HMC, and runs of the approximate methods."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import onebasin as ob
from onebasin_papers.problems import Own, OwnArchitecture, Problem, digits_problem, mlp
from onebasin_papers.study import Workspace
from onebasin_papers.symmetry.settings import SymmetrySettings


class Architecture(NamedTuple):
    """A network and its data.

    Attributes:
        title: in words.
        build: makes one.
        data: name of the training and test images, as `load` takes it.
        outside: name of the foreign images.
    """

    title: str
    build: Callable[[], nn.Module]
    data: str
    outside: str


ARCHITECTURES = {
    "optunet": Architecture("OptuNet, a ConvNet of 392 weights", ob.examples.optunet, "mnist", "fashion-mnist"),
    "resnet20": Architecture(
        "ResNet-20 with filter response norm and SiLU", ob.examples.resnet20_frn_silu, "cifar10", "cifar100"
    ),
}
OWN = "own"  # the user's architecture
HIDDEN = (16, 16)  # widths of the network on embedded digits


def described(architecture: str) -> str:
    """What an architecture is, for people.

    >>> described("mlp")
    'a perceptron with hidden layers of 16 and 16 relu units'
    """
    if architecture == "mlp":
        return f"a perceptron with hidden layers of {' and '.join(map(str, HIDDEN))} relu units"
    return ARCHITECTURES[architecture].title


def perceptron(settings: SymmetrySettings, features: int, classes: int) -> OwnArchitecture:
    """The architecture of the quick preset for other data."""
    return OwnArchitecture(described("mlp"), lambda width: mlp(features, *HIDDEN, classes), is_flat=True)


def preset_problem(settings: SymmetrySettings, seed: int) -> Problem:
    """The network and the data of a preset."""
    return problem_of(settings.architecture, settings.data_dir, seed)


def own_settings(settings: SymmetrySettings, own: Own, changed: Collection[str]) -> SymmetrySettings:
    """Settings that fit the user's problem where they were not set by hand.

    Args:
        settings: with what was set by hand.
        own: what the user brings.
        changed: what was set by hand.

    Raises:
        InputError: the architecture has nothing to permute, or an option of a method does not exist.
    """
    for method in METHODS:
        _method(settings, method)  # refuses what no method has
    if min(settings.mass_decays) or not max(settings.mass_decays):
        raise ob.errors.InputError(
            f"expected 0 and a weight decay above it in mass.mass_decays, found {settings.mass_decays}: write "
            "mass.mass_decays=0,0.001"
        )
    if (task := own.problem) is None:
        return settings
    if not any(space.permutable and space.size > 1 for space in ob.discover(task.model, task.train[0][:2]).spaces):
        raise ob.errors.InputError(
            f"expected a model with hidden units that can be permuted, found none in {task.described}: onebasin "
            "discover says why"
        )
    return replace(
        settings,
        architecture=OWN,
        examples=settings.examples if "examples" in changed else len(task.train[0]),
        test_examples=(
            settings.test_examples if "test_examples" in changed else max(len(task.test[0]), len(task.outside))
        ),
    )


def problem_of(architecture: str, directory: str | None, seed: int) -> Problem:
    """The network and its data.

    Args:
        architecture: "mlp" on embedded digits, or a key of `ARCHITECTURES`.
        directory: where data sets are that do not come with the package.
        seed: of the division of the digits.
    """
    if architecture == "mlp":
        return digits_problem(*HIDDEN, seed=seed)
    chosen = ARCHITECTURES[architecture]
    data, outside = (ob.data.load(name, directory=directory) for name in (chosen.data, chosen.outside))
    with ob.global_seed(0):
        model = chosen.build().eval()
    return Problem(chosen.data, model, data.train, data.test, outside.test[0], f"images of {chosen.outside}")


SymmetryWorkspace = Workspace[SymmetrySettings]


def problem(workspace: SymmetryWorkspace, architecture: str = "") -> Problem:
    """Network and data, cut to the sizes of the plan.

    Args:
        workspace: with the plan.
        architecture: that of the plan unless another is named.
    """
    wanted = architecture or workspace.settings.architecture

    def make() -> Problem:
        own = workspace.own.problem if wanted == OWN else None
        whole = own or problem_of(wanted, workspace.settings.data_dir, workspace.seed)
        train, test, most = workspace.settings.examples, workspace.settings.test_examples, len(whole.outside)
        chosen = whole.outside[:: max(1, most // test)][:test]  # from everywhere: neighbours are alike
        (inputs, targets), (held, classes) = whole.train, whole.test
        return replace(
            whole, train=(inputs[:train], targets[:train]), test=(held[:test], classes[:test]), outside=chosen
        )

    return workspace.cached(f"problem/{wanted}", make)


def symmetry(workspace: SymmetryWorkspace, architecture: str = "") -> ob.Symmetry:
    """What leaves the network's function unchanged: discovered, and proved on the spot."""
    task = problem(workspace, architecture)
    name = f"symmetry/{architecture or workspace.settings.architecture}"
    return workspace.cached(name, lambda: ob.discover(task.model, task.train[0][:2]))


def reference(workspace: SymmetryWorkspace) -> ob.Population:
    """Independent trainings, each from its own random start; every member is a run of its own."""
    return trained(workspace, "reference", workspace.settings.reference_networks)


def starts(workspace: SymmetryWorkspace) -> ob.Population:
    """The trained networks that SWAG, Laplace and SGHMC begin with: `runs` for each group; none is in the reference."""
    return trained(workspace, "starts", workspace.settings.groups * workspace.settings.runs)


def hmc(workspace: SymmetryWorkspace) -> ob.Population:
    """Hamiltonian Monte Carlo: several chains, each from a training of its own; warm-up is left out."""
    settings = workspace.settings
    begun = trained(workspace, "hmc-starts", settings.chains)
    method = ob.HMC(
        draws=settings.chain_draws, warmup=settings.warmup, leapfrog=settings.leapfrog, thin=settings.thin, epochs=0
    )
    return sampled(workspace, "hmc", method, chains=settings.chains, start=begun, chains_per_batch=4)


def trained(workspace: SymmetryWorkspace, name: str, networks: int) -> ob.Population:
    """Some independent trainings by SGD, whose weight decay is the prior."""
    return sampled(workspace, name, ob.Ensemble(**training(workspace.settings)), chains=networks)


def training(settings: SymmetrySettings) -> dict[str, Any]:
    """How every network of the study is trained."""
    return {
        "epochs": settings.epochs,
        "batch": settings.batch,
        "lr": settings.rate,
        "optimizer": "sgd",
        "momentum": 0.9,
        "lr_schedule": "cosine",
    }


def sampled(workspace: SymmetryWorkspace, name: str, method: ob.Method, **options: Any) -> ob.Population:
    """`sample` with the posterior of the study, kept under this name."""
    task, chosen = problem(workspace), {**_posterior(workspace.settings), **options}
    return workspace.sample(name, task.model, task.train, method, **chosen)


def _posterior(settings: SymmetrySettings) -> dict[str, Any]:
    """Keywords of `sample` that all methods share."""
    return {
        "chains_per_batch": settings.lanes, "prior": settings.prior, "workers": settings.workers, "compile": False
    }  # fmt: skip


METHODS = {"dropout": "Dropout", "vi": "viBNN", "swag": "SWAG", "laplace": "Laplace", "sghmc": "SGHMC"}  # in tables
_AT_STARTS = ("swag", "laplace", "sghmc")  # explore around networks that are trained already
# Not in the paper: few networks that share most of their weights, or one network with several sets of statistics.
IMPLICIT = {
    "batchensemble": "BatchEnsemble",
    "lpbnn": "LP-BNN",
    "masksembles": "Masksembles",
    "mimo": "MIMO",
    "mcbatchnorm": "MC batch norm",
    "packed": "Packed-Ensembles",
}


def methods_of(workspace: SymmetryWorkspace) -> dict[str, str]:
    """Key -> title of the paper's methods, then of the user's, which are their own keys."""
    return {**METHODS, **{title: title for title in workspace.own.methods}}


AVERAGES = {"swa": "SWA", "ema": "EMA"}  # not in the paper: one network from each run, an average over its training


def implicit_of(workspace: SymmetryWorkspace) -> dict[str, str]:
    """Key -> title of the implicit ensembles that the architecture allows.

    Statistics of batches need a form of the architecture with batch norm, which perceptrons have; a user's model may
    lack the layers that a method needs, which is tried before anything is trained.
    """
    perceptrons = workspace.settings.architecture == "mlp"
    titles = {method: title for method, title in IMPLICIT.items() if perceptrons or method != "mcbatchnorm"}
    if workspace.own.problem is None:
        return titles
    return workspace.cached(
        "implicit", lambda: {method: title for method, title in titles.items() if _allowed(workspace, method)}
    )


def _allowed(workspace: SymmetryWorkspace, method: str) -> bool:
    """Whether an implicit ensemble of the user's model can be made: one is, without training."""
    task, settings = problem(workspace), workspace.settings
    try:
        if method == "packed":
            ob.narrow(task.model, symmetry(workspace), settings.packed_share)
        else:
            untrained: Any = _implicit(settings, method)
            few = (task.train[0][: settings.batch], task.train[1][: settings.batch])
            ob.sample(task.model, few, replace(untrained, epochs=0))
    except ob.errors.OnebasinError:
        return False
    return True


class Narrow(NamedTuple):
    """Narrow networks of a Packed-Ensemble: another architecture, whose weights are at no distance to the others.

    Attributes:
        model: the narrow architecture.
        population: its networks; the chain says which were trained side by side.
    """

    model: nn.Module
    population: ob.Population


def packed(workspace: SymmetryWorkspace) -> Narrow:
    """`members` narrow networks for each run, trained independently: with a mean loss, packing them changes nothing."""
    settings, task = workspace.settings, problem(workspace)
    model = workspace.cached("packed/model", lambda: ob.narrow(task.model, symmetry(workspace), settings.packed_share))
    each = settings.members
    options = _posterior(settings) | {"chains": settings.groups * settings.runs * each}
    method = ob.Ensemble(**training(settings))
    narrow = workspace.sample("packed", model, task.train, method, **options)
    return Narrow(model, replace(narrow, chain=chain_of(narrow) // each))


def runs_of(workspace: SymmetryWorkspace, method: str) -> ob.Population:
    """All runs of a method: `groups` x `runs` of them with `draws` networks each, the run being the chain.

    SWAG, Laplace and SGHMC begin at the networks of the deep ensemble, run by run, so that methods differ by what they
    add to it and not by luck of the training. So do methods of the user that do not train. Implicit ensembles have
    `members` networks in each run, or `draws` where they draw them.
    """
    if method == "packed":
        return packed(workspace).population
    if method == "mcbatchnorm":
        return _normalised(workspace)
    settings = workspace.settings
    chains = settings.groups * settings.runs
    if method in workspace.own.methods:
        task = problem(workspace)
        options = {"model": task.model, "data": task.train, "chains": chains, **_posterior(settings)}
        return workspace.sample_own(method, "runs", settings.draws, lambda: starts(workspace), **options)
    start = starts(workspace) if method in _AT_STARTS else "fresh"
    return sampled(workspace, method, _method(settings, method), chains=chains, start=start)


def _method(settings: SymmetrySettings, method: str) -> ob.Method:
    draws = settings.draws
    around = {**training(settings), "epochs": 0}  # of networks that are trained already
    if method == "dropout":
        return ob.Dropout(draws=draws, dropout=settings.dropout_rate, **training(settings))
    if method == "vi":
        return ob.VI(draws=draws, epochs=settings.vi_epochs, batch=settings.batch, lr=settings.vi_rate)
    if method == "swag":
        collect = settings.swag_collect
        return ob.SWAG(draws=draws, step=settings.swag_rate, collect=collect, rank=min(20, collect - 1), **around)
    if method in IMPLICIT:
        return _implicit(settings, method)
    if method == "swa":
        return ob.SWA(step=settings.swag_rate, **training(settings))
    if method == "ema":
        return ob.EMA(**training(settings))
    if method == "laplace":
        return ob.Laplace(draws=draws, layers=settings.laplace_layers, structure=settings.laplace_structure, **around)
    return ob.SGHMC(
        draws=draws, step=settings.sghmc_rate, thin=settings.sghmc_thin, warmup=settings.sghmc_warmup, **around
    )


def _implicit(settings: SymmetrySettings, method: str) -> ob.Method:
    shared: dict[str, Any] = {"members": settings.members, **training(settings)}
    if method == "batchensemble":
        return ob.BatchEnsemble(**shared)
    if method == "lpbnn":
        return ob.LPBNN(draws=settings.draws, **shared)
    if method == "masksembles":
        return ob.Masksembles(scale=settings.mask_scale, **shared)
    return ob.MIMO(**shared)


def _normalised(workspace: SymmetryWorkspace) -> ob.Population:
    """Draws of batch-norm statistics of a perceptron with batch norm, folded into the weights of one without."""
    settings, task = workspace.settings, problem(workspace)
    method = ob.MCBatchNorm(draws=settings.draws, **training(settings))
    model = with_batch_norm(task.model)
    options = _posterior(settings) | {"chains": settings.groups * settings.runs}
    drawn = workspace.sample("mcbatchnorm", model, task.train, method, **options)
    folded = ob.fold_norms(model, drawn, task.train[0][:2])
    names = dict(zip(_linear_names(model), _linear_names(task.model), strict=True))
    tensors = {
        f"{names[layer]}.{kind}": folded.tensor(f"{layer}.{kind}") for layer in names for kind in ("weight", "bias")
    }
    return ob.Population.from_stacked(tensors, chain=chain_of(drawn))


def with_batch_norm(model: nn.Module) -> nn.Sequential:
    """The same perceptron with batch norm behind each hidden linear layer.

    >>> [type(layer).__name__ for layer in with_batch_norm(mlp(4, 3, 2))]
    ['Linear', 'BatchNorm1d', 'ReLU', 'Linear']
    """
    layers = list(model.children())
    normed: list[nn.Module] = []
    with ob.global_seed(0):
        for layer in layers:
            normed.append(copy.deepcopy(layer))
            if isinstance(layer, nn.Linear) and layer is not layers[-1]:
                normed.append(nn.BatchNorm1d(layer.out_features))
    return nn.Sequential(*normed).eval()


def _linear_names(model: nn.Module) -> list[str]:
    return [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]


def one_mode(population: ob.Population, run: int) -> ob.Population:
    """All networks of one run."""
    return population[chain_of(population) == run]


def multi_mode(population: ob.Population, settings: SymmetrySettings, group: int) -> ob.Population:
    """Of each run of a group draws / runs networks, evenly spread over it, or all where a run has fewer."""
    chain = chain_of(population)
    each = int((chain == 0).sum())
    share = min(each, max(1, settings.draws // settings.runs))
    step = max(1, each // share)
    wanted = range(group * settings.runs, (group + 1) * settings.runs)
    return population[torch.cat([(chain == run).nonzero().flatten()[::step][:share] for run in wanted])]


def chain_of(population: ob.Population) -> Tensor:
    """The run of each network (members,)."""
    assert population.chain is not None  # what `sample` makes has chains
    return population.chain
