"""What a proof looks at: training mode, every freedom, fresh integers; and what is named when it cannot look."""

import functools
import inspect
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onebasin as ob
from onebasin.errors import InputError, SymmetryError
from onebasin.functional.call import global_seed
from onebasin.state import state_of
from onebasin.symmetry.group import independent_factors
from onebasin.symmetry.verify import DRAWS, moving_elements
from tests.models import BATTERY


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def made(build: type[nn.Module], *options: object) -> nn.Module:
    with global_seed(0):
        return build(*options)


def spaces(symmetry: ob.Symmetry) -> list[tuple[int, tuple[str, ...]]]:
    return [(space.size, space.freedoms) for space in symmetry.spaces]


# ------------------------------------------------------------------ training mode


class Mimo(nn.Module):
    """Three inputs and three answers at a time; at test time one input is repeated and the answers are averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(9, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        slots = x if self.training else x[:, None].repeat(1, 3, 1)
        answers = self.last(torch.relu(self.first(slots.flatten(1)))).view(-1, 3, 2)
        return answers if self.training else answers.mean(1)


def test_symmetries_of_evaluation_alone_are_removed_when_training_is_shown() -> None:
    model, x = made(Mimo), numbers(4, 3)
    assert len(ob.discover(model, x, training=False).spaces) == 3
    unproved = ob.discover(model, x)
    assert len(unproved.spaces) == 3 and any("training mode was not tried" in text for text in unproved.unexplained)
    symmetry = ob.discover(model, x, training=numbers(4, 3, 3))
    assert spaces(symmetry) == [(6, ("permutation", "scale"))]
    assert sum("not in training mode" in text for text in symmetry.unexplained) == 2
    with pytest.raises(InputError, match="give the inputs of a training call"):
        ob.discover(model, x, training=True)
    assert not ob.verify(model, unproved, x, training=numbers(4, 3, 3)).passed
    assert ob.verify(model, unproved, x).passed and ob.verify(model, unproved, x).notes


def test_batch_norms_keep_their_freedoms_in_training_mode() -> None:
    with global_seed(0):
        model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.4), nn.Linear(5, 2))
    expected = [(5, ("permutation", "scale", "norm-scale", "norm-sign"))]
    for batch in (1, 4):  # one example has no batch statistics: two are made of it
        symmetry = ob.discover(model, numbers(batch, 3))
        assert spaces(symmetry) == expected and symmetry.unexplained == ()


class Masked(nn.Module):
    """Dropout with a mask from outside, so that all masks can be tried."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.mask = nn.Linear(3, 4), nn.Linear(4, 2), torch.ones(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)) * self.mask.to(x))


def test_under_dropout_a_moved_network_is_the_same_in_distribution() -> None:
    """Oracle: the outputs under all 16 masks are the same set. So dropout is replaced by its mean in a proof."""
    model = made(Masked).double()
    with global_seed(0):
        dropped = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 2)).double()
    symmetry = ob.discover(dropped, numbers(2, 3).double(), training=True)
    assert spaces(symmetry) == [(4, ("permutation", "scale"))] and symmetry.unexplained == ()
    names = {"0.weight": "first.weight", "0.bias": "first.bias", "3.weight": "last.weight", "3.bias": "last.bias"}
    x = numbers(3, 3, seed=1).double()

    def outcomes(state: dict[str, Tensor]) -> list[list[float]]:
        found = []
        for mask in itertools.product((0.0, 2.0), repeat=4):
            model.mask = torch.tensor(mask)
            out = torch.func.functional_call(model, {names[name]: value for name, value in state.items()}, (x,))
            found.append([round(value, 9) for value in out.flatten().tolist()])
        return sorted(found)

    state = state_of(dropped)
    assert outcomes(state) == outcomes(symmetry.apply(symmetry.random(1), state))


class Noisy(nn.Module):
    """Noise of fixed size on hidden units: in training a scale is no symmetry any more, an order is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.last(torch.relu(hidden + torch.randn_like(hidden) if self.training else hidden))


def test_noise_that_is_added_in_training_forbids_scales() -> None:
    assert spaces(ob.discover(made(Noisy), numbers(4, 3))) == [(5, ("permutation",))]
    assert spaces(ob.discover(made(Noisy), numbers(4, 3), training=False)) == [(5, ("permutation", "scale"))]


# ------------------------------------------------------------------ tensors that a call does not read


class Bayesian(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.mu, self.rho = nn.Parameter(torch.randn(outputs, inputs)), nn.Parameter(torch.randn(outputs, inputs) - 1)
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        noise = F.softplus(self.rho) * torch.randn_like(self.mu) if self.training else 0
        return x @ (self.mu + noise).T + self.bias


class Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.other = Bayesian(3, 5), Bayesian(5, 2), nn.Linear(5, 7)

    def forward(self, x: Tensor, task: int = 0) -> Tensor:
        return (self.other if task else self.last)(torch.relu(self.first(x)))


def test_unread_tensors_are_named_and_stay() -> None:
    model, x = made(Variational), numbers(4, 3)
    symmetry = ob.discover(model, x, training=False)
    text = "\n".join(symmetry.unexplained)
    assert "first.rho: it is not read by this call" in text and "has the shape of first.mu, which moves" in text
    assert "other.weight, other.bias: not read by this call" in text
    assert not any(name.endswith("rho") for name, _, _ in symmetry.rigid), "no word of 'as it must be'"
    state = state_of(model)
    moved = symmetry.apply(symmetry.random(0), state)
    assert all(torch.equal(moved[name], state[name]) for name in state if name.endswith("rho") or "other" in name)
    assert spaces(ob.discover(model, x)) == [], "training reads rho, so nothing of the evaluation function is left"


def test_companions_go_along_and_keep_the_predictive_distribution() -> None:
    """Oracle: means and variances of the weights, moved by hand."""
    model, x = made(Variational).double(), numbers(4, 3).double()
    symmetry = ob.discover(model, x, companions={"rho": ("mu", "softplus")})
    assert spaces(symmetry) == [(5, ("permutation", "scale"))]
    assert symmetry.companions["last.rho"] == ("last.mu", "softplus")
    assert ob.Symmetry.from_json(symmetry.to_json()) == symmetry
    state, element = state_of(model), symmetry.random(3)
    moved = symmetry.apply(element, state)
    order, factor = element.orders["first"], element.factors["first"][0]
    std = F.softplus(state["first.rho"])[order] * factor[:, None]
    torch.testing.assert_close(F.softplus(moved["first.rho"]), std)
    torch.testing.assert_close(moved["first.mu"], state["first.mu"][order] * factor[:, None])
    torch.testing.assert_close(
        F.softplus(moved["last.rho"]), F.softplus(state["last.rho"])[:, order] / factor[None], rtol=1e-10, atol=0
    )
    many = symmetry.apply(element, ob.Population.from_states([state, state]))
    torch.testing.assert_close(many.member(1)["first.rho"], moved["first.rho"], rtol=0, atol=0)
    back = symmetry.apply(symmetry.invert(element), moved)
    torch.testing.assert_close(back["last.rho"], state["last.rho"])


@pytest.mark.parametrize(("how", "kept"), [("std", ("permutation",)), ("mask", ("permutation",))])
def test_training_mode_refutes_a_wrong_way_to_go_along(how: str, kept: tuple[str, ...]) -> None:
    symmetry = ob.discover(made(Variational), numbers(4, 3), companions={"rho": ("mu", how)})
    assert spaces(symmetry) == [(5, kept)]


@pytest.mark.parametrize("how", ["value", "std", "log-std", "mask"])
def test_each_way_to_go_along(how: str) -> None:
    with global_seed(0):
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    model[0].beside = nn.Parameter(numbers(5, 3).double())
    symmetry = ob.discover(model, numbers(2, 3).double(), companions={"0.beside": ("0.weight", how)})
    state, element = state_of(model), symmetry.random(0)
    signs, order = element.factors["0"][0][:, None], element.orders["0"]
    moved = symmetry.apply(element, state)["0.beside"]
    expected = state["0.beside"][order] * (signs if how == "value" else 1)
    assert torch.equal(moved, expected) and bool((signs < 0).any())
    if how == "log-std":  # no scale in a tanh network: give the space one by hand
        data = json.loads(symmetry.to_json())
        data["spaces"][0]["generators"] = ["scale"]
        scaled = ob.Symmetry.from_json(json.dumps(data))
        element = scaled.random(0)
        by = element.factors["0"][0].log()[:, None]
        torch.testing.assert_close(
            scaled.apply(element, state)["0.beside"], state["0.beside"][element.orders["0"]] + by
        )


@pytest.mark.parametrize(
    ("companions", "remedy"),
    [
        ({"rho": "mu"}, "write for example"),
        ({"rho": ("mu", "cube")}, "write for example"),
        ({"rho": ("nu", "std")}, "names as in the state dict"),
        ({"last.bias": ("last.mu", "std")}, "which it reads"),
        ({"other.weight": ("first.mu", "std")}, "name another tensor"),
    ],
)
def test_impossible_companions_are_refused(companions: dict[str, tuple[str, str]], remedy: str) -> None:
    with pytest.raises(InputError, match=remedy):
        ob.discover(made(Variational), numbers(2, 3), companions=companions)


def test_there_is_no_exact_spread_of_an_inverse_softplus() -> None:
    symmetry = ob.discover(made(Variational), numbers(2, 3), companions={"rho": ("mu", "softplus")})
    with pytest.raises(SymmetryError, match="without scales"):
        symmetry.apply(symmetry.random(0), state_of(made(Variational)), kind="std")


# ------------------------------------------------------------------ every element moves every freedom


@pytest.mark.parametrize("name", ["mlp_tanh", "bn_mlp_tanh", "grouped", "attention_fused"])
def test_elements_of_a_proof_move_every_unit(name: str) -> None:
    symmetry = discovered(name)
    for seed in range(5):
        drawn = moving_elements(symmetry, torch.Generator().manual_seed(seed))
        assert len(drawn) == DRAWS
        for space in symmetry.spaces:
            for number, kind in enumerate(space.generators):
                factors = torch.stack([element.factors[space.name][number].flatten() for element in drawn])
                assert bool((factors != 1).any(0).all()), f"a {kind} of {space.name} never moves"
                if kind.endswith("sign") and factors.shape[1] < 1 << DRAWS:
                    assert len({tuple(row) for row in factors.T.tolist()}) == factors.shape[1], "two units flip alike"
            if space.permutable:
                orders = torch.stack([element.orders[space.name].view(-1, space.size) for element in drawn])
                moves = orders != torch.arange(space.size)
                assert bool(moves.any(0).all()) and (space.size == 2 or bool(moves.all()))
                assert bool((orders.sort(-1).values == torch.arange(space.size)).all())


class Strided(nn.Module):
    def __init__(self, first: int, step: int, width: int) -> None:
        super().__init__()
        self.part = slice(first, None, step)
        self.stem, self.head = nn.Linear(3, width), nn.Linear(len(range(width)[self.part]), 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.stem(x))[:, self.part])


@pytest.mark.parametrize(("first", "step", "width"), [(1, 2, 12), (2, 3, 12), (1, 2, 7), (1, 3, 7), (2, 3, 10)])
def test_strided_slices_of_hidden_units(first: int, step: int, width: int) -> None:
    """Positions that fit no structure carry no sign; the analysis says so itself, the proof has nothing to remove."""
    model, x = made(Strided, first, step, width).double(), numbers(4, 3).double()
    symmetry = ob.discover(model, x)
    assert not any("proof" in text for text in symmetry.unexplained)
    assert bool(symmetry.unexplained) == (width % step > 0)
    state = state_of(model)
    for seed in range(10):
        moved = torch.func.functional_call(model, symmetry.apply(symmetry.random(seed), state), (x,))
        torch.testing.assert_close(moved, model(x))


# ------------------------------------------------------------------ integers of the example


class Gated(nn.Module):
    """An integer mask, all ones in the example, picks between two readers of the hidden units."""

    def __init__(self, checked: bool) -> None:
        super().__init__()
        self.stem, self.one, self.two, self.checked = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 2), checked

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if self.checked and not torch.compiler.is_compiling() and not bool((mask == 1).all()):
            raise ValueError("only ones")
        hidden = torch.relu(self.stem(x))
        kept = mask[:, None].to(x.dtype)
        return kept * self.one(hidden) + (1 - kept) * self.two(hidden)


def test_integers_of_the_example_are_drawn_anew() -> None:
    """Leave out the reader that the example's mask hides: the proof must notice."""
    x, mask = numbers(6, 3), torch.ones(6, dtype=torch.long)
    model = made(Gated, False)
    symmetry = ob.discover(model, (x, mask))
    assert symmetry.unexplained == ()
    data = json.loads(symmetry.to_json())
    data["spaces"][0]["legs"] = [leg for leg in data["spaces"][0]["legs"] if leg["tensor"] != "two.weight"]
    broken = ob.Symmetry.from_json(json.dumps(data))
    assert not ob.verify(model, broken, (x, mask)).passed
    strict = made(Gated, True)
    assert any("was kept as given for the proof" in text for text in ob.discover(strict, (x, mask)).unexplained)
    assert "was kept as given" in str(ob.verify(strict, symmetry, (x, mask)))


# ------------------------------------------------------------------ empty pieces, sparse parameters


class Empty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.stem(x))
        joined = torch.cat([hidden[:, :0], torch.cat([x.new_zeros(0), hidden]), hidden[:, 4:]], -1)
        return self.head(joined) + torch.cat([hidden[:, :0], hidden[:, :0]], 1).sum()


class Diagonal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 5)
        self.one, self.two = nn.Parameter(torch.randn(2, 2)), nn.Parameter(torch.randn(1, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.stem(x)) @ torch.block_diag(self.one, self.two).T


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(3).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(self.weight, x.T).T


def test_empty_pieces_and_sparse_parameters() -> None:
    free = ("permutation", "scale")
    assert spaces(ob.discover(made(Empty), numbers(4, 3))) == [(4, free)]
    symmetry = ob.discover(made(Diagonal), numbers(4, 3))
    assert spaces(symmetry) == [(2, free), (3, free)] and symmetry.unexplained == ()
    with pytest.raises(InputError, match="to_dense"):
        ob.discover(Sparse(), numbers(4, 3))


# ------------------------------------------------------------------ how many factors there are


class BatchEnsemble(nn.Module):
    """Members share weights and have vectors of their own before and behind them."""

    def __init__(self, widths: tuple[int, ...] = (3, 5, 2), members: int = 3) -> None:
        super().__init__()
        for number, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
            for name, shape in (("w", (outputs, inputs)), ("r", (members, inputs)), ("s", (members, outputs)),
                                ("b", (members, outputs))):  # fmt: skip
                self.register_parameter(f"{name}{number}", nn.Parameter(torch.randn(shape)))

    def forward(self, x: Tensor) -> Tensor:
        x = x.expand(len(self.r0), *x.shape)
        hidden = torch.relu((x * self.r0[:, None]) @ self.w0.T * self.s0[:, None] + self.b0[:, None])
        return (hidden * self.r1[:, None]) @ self.w1.T * self.s1[:, None] + self.b1[:, None]


def brute_force(symmetry: ob.Symmetry, kind: str) -> int:
    """The rank of what each factor of each unit does to the logarithm, or the sign, of every entry."""
    ones = {name: torch.ones(shape, dtype=torch.float64) for name, shape in symmetry.shapes.items()}
    rows = []
    for space in symmetry.spaces:
        for number, own in enumerate(space.generators):
            for unit in range(space.copies * space.size if own.endswith(kind) else 0):
                element = symmetry.identity()
                element.factors[space.name][number].view(-1)[unit] = -1.0 if kind == "sign" else 2.0
                moved = symmetry.apply(element, ones, kind="value" if kind == "sign" else "std")
                rows.append(torch.cat([tensor.reshape(-1) for tensor in moved.values()]))
    if not rows or kind == "scale":
        return int(torch.linalg.matrix_rank(torch.stack(rows).log2())) if rows else 0
    pivots: dict[int, int] = {}
    for row in rows:
        bits = sum(1 << place for place, value in enumerate(row.tolist()) if value < 0)
        while bits and bits.bit_length() in pivots:
            bits ^= pivots[bits.bit_length()]
        if bits:
            pivots[bits.bit_length()] = bits
    return len(pivots)


@functools.cache
def discovered(name: str) -> ob.Symmetry:
    if name == "ensemble":
        return ob.discover(made(BatchEnsemble), numbers(6, 3), training=False)
    case = next(case for case in BATTERY if case.name == name)
    return ob.discover(case.build(), case.inputs(), training=False)


def generators(symmetry: ob.Symmetry, kind: str) -> int:
    return sum(s.copies * s.size * sum(own.endswith(kind) for own in s.generators) for s in symmetry.spaces)


@pytest.mark.parametrize("kind", ["scale", "sign"])
def test_independent_factors_against_brute_force(kind: str) -> None:
    ensemble = discovered("ensemble")
    assert independent_factors(ensemble, kind) == brute_force(ensemble, kind) < generators(ensemble, kind)
    for case in (
        case for case in BATTERY if case.name in ("bn_mlp_tanh", "bilinear_gate", "attention_fused", "grouped")
    ):
        symmetry = discovered(case.name)
        assert independent_factors(symmetry, kind) == brute_force(symmetry, kind), case.name
        # A space written twice adds generators that act as others do.
        again = [
            {**s, "name": s["name"] + " again"} for s in json.loads(symmetry.to_json())["spaces"] if not s["parents"]
        ]
        data = json.loads(symmetry.to_json())
        twice = ob.Symmetry.from_json(json.dumps({**data, "spaces": [*data["spaces"], *again]}))
        assert generators(twice, kind) >= generators(symmetry, kind)
        assert independent_factors(twice, kind) == brute_force(twice, kind) == independent_factors(symmetry, kind), (
            case.name
        )


def test_scales_per_member_and_unit_are_said_to_be_missed() -> None:
    symmetry = discovered("ensemble")
    assert symmetry.dimensions == independent_factors(symmetry, "scale")
    assert any(
        "s0, b0, r1: a scale for each of 5 x 3 pairs of units would keep the function" in text
        for text in symmetry.unexplained
    )
    model, x = made(BatchEnsemble).double(), numbers(6, 3).double()
    state = state_of(model)
    factor = numbers(3, 5, seed=4).double().exp()  # by hand: what the sentence claims is true
    moved = {**state, "s0": state["s0"] * factor, "b0": state["b0"] * factor, "r1": state["r1"] / factor}
    torch.testing.assert_close(torch.func.functional_call(model, moved, (x,)), model(x))


# ------------------------------------------------------------------ the command line


@pytest.mark.usefixtures("restored_imports")
def test_the_command_line_asks_for_training_and_constants(
    tmp_path: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    text = "import torch\nfrom torch import nn\n" + inspect.getsource(Mimo).replace("Tensor", "torch.Tensor")
    (tmp_path / "mimo.py").write_text(text)
    given = ("discover", f"{tmp_path / 'mimo.py'}:Mimo", "--input", "4x3", "--json")

    def found(*options: str) -> ob.Symmetry:
        code, out, err = run(*given, *options)
        assert code == 0, err
        return ob.Symmetry.from_json(out)

    assert len(found("--evaluation-only").spaces) == 3
    assert len(found("--training-input", "4x3x3").spaces) == 1
    assert set(found("--frozen", "first").frozen) == {"first.weight", "first.bias"}
    code, _, err = run(*given, "--evaluation-only", "--training-input", "4x3x3")
    assert code != 0 and "leave out --training-input" in err


class Replaced(nn.Module):
    """In training mode some units are replaced by ones, whatever their scale."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.inner(x))
        if self.training:
            hidden = torch.where(torch.rand_like(hidden) < 0.3, torch.ones_like(hidden), hidden)
        return self.outer(hidden)


@pytest.mark.parametrize(
    "model",
    [nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.AlphaDropout(0.5), nn.Linear(6, 3)), Replaced()],
    ids=["alpha dropout", "replaced"],
)
def test_noise_does_not_hide_what_fails_in_training_mode(model: nn.Module) -> None:
    """At the mean of the noise a scale passes; at other values of it the function changes."""
    (space,) = ob.discover(model, torch.randn(5, 4, generator=torch.Generator().manual_seed(0))).spaces
    assert space.freedoms == ("permutation",)
