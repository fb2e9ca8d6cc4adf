"""Methods are values: defaults in one place, options checked where they are written, any object with the protocol."""

from dataclasses import FrozenInstanceError, dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import onebasin as ob
from onebasin.errors import InputError
from onebasin.inference import METHODS, ChainPlan, Draws, Stage
from onebasin.inference.job import job_of, options_of

X = torch.linspace(-1, 1, 12)[:, None]
DATA = (X, 2 * X)


def test_a_word_stands_for_the_method_with_its_defaults() -> None:
    for name, method in METHODS.items():
        assert method().name == name
        assert getattr(ob, method.__name__) is method
    named, given = (
        ob.sample(nn.Linear(1, 1), DATA, method, noise=0.5, compile=False) for method in ("ensemble", ob.Ensemble())
    )
    assert torch.equal(named.tensor("weight"), given.tensor("weight"))
    assert named.provenance == given.provenance
    assert named.provenance["options"]["epochs"] == 100


def test_methods_are_values() -> None:
    assert ob.HMC(draws=5) == ob.HMC(draws=5) != ob.HMC()
    with pytest.raises(FrozenInstanceError):
        ob.HMC().draws = 3  # type: ignore[misc]
    with pytest.raises(InputError, match="HMC takes no argument by place"):
        ob.HMC(5)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("method", "options", "sentence"),
    [
        ("hmc", {"draws": 5}, r"draws is an option of the method, not of sample: give onebasin.HMC\(draws=5\)"),
        (ob.SWAG(), {"rank": 5}, r"give onebasin.SWAG\(rank=5\)"),
        ("hmc", {"pior": 1.0}, "sample has no option 'pior': did you mean 'prior'?"),
        ("hcm", {}, "expected a method out of hmc, .*, found 'hcm': give 'hmc'"),
        (ob.HMC, {}, r"found the class HMC: give an object such as onebasin.HMC\(draws=100\)"),
        (3, {}, "expected a method with a name and a plan, found 3"),
    ],
)
def test_misplaced_options_get_a_sentence(method: Any, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        ob.sample(nn.Linear(1, 1), DATA, method, noise=0.5, **options)


def test_approximate_says_the_same() -> None:
    with pytest.raises(InputError, match=r"not of approximate: give onebasin.VI\(epochs=3\) as method"):
        ob.approximate(nn.Linear(1, 1), DATA, "vi", epochs=3)  # type: ignore[arg-type]


class StillState(NamedTuple):
    position: Tensor
    buffers: dict[str, Tensor]


@dataclass(frozen=True)
class Still:
    """A method of a user: networks stay where they start, a little noise is added to each draw."""

    spread: float = 0.1
    draws: int = 3
    name: str = "still"

    def plan(self, target: Any) -> ChainPlan:
        return ChainPlan((Stage("nothing", StillKernel(target, self.spread), 0),), self.draws, (1,))


@dataclass(frozen=True, eq=False)
class StillKernel:
    target: Any
    spread: float

    def init(self, start: Draws, streams: Any) -> StillState:
        return StillState(start.position, start.buffers)

    def step(self, state: StillState, step_index: Any, streams: Any) -> tuple[StillState, dict[str, Tensor]]:
        return state, {}

    def draw(self, state: StillState, streams: Any) -> Draws:
        position = state.position + self.spread * streams.gaussian("noise", state.position)
        return Draws(position, state.buffers, self.target.log_density(position, state.buffers))


def test_an_object_of_a_user_is_a_method(tmp_path: Any) -> None:
    settings: dict[str, Any] = {"noise": 0.5, "chains": 4, "compile": False}
    here = ob.sample(nn.Linear(1, 1), DATA, Still(), **settings)
    apart = ob.sample(nn.Linear(1, 1), DATA, Still(), path=tmp_path / "run", workers=2, **settings)
    assert len(here) == 12 and torch.equal(here.tensor("weight"), apart.tensor("weight"))
    assert here.provenance["options"] == {"spread": 0.1, "draws": 3, "name": "still"}
    more = ob.sample(nn.Linear(1, 1), DATA, Still(draws=5), path=tmp_path / "run", **settings)
    assert len(more) == 20
    with pytest.raises(InputError, match=r"another spread: 0.1, found 0.2"):
        ob.sample(nn.Linear(1, 1), DATA, Still(spread=0.2), path=tmp_path / "run", **settings)


def test_an_object_without_fields_is_known_by_its_attributes() -> None:
    class Plain:
        name = "plain"

        def __init__(self) -> None:
            self.draws = 2

        def plan(self, target: Any) -> ChainPlan:
            return Still(draws=self.draws).plan(target)

    assert options_of(Plain()) == {"draws": 2}
    job = job_of(nn.Linear(1, 1), DATA, Plain(), density={"noise": 0.5})
    assert job.definition()["options"] == {"draws": 2}
    assert job.defaults()["options"] == {}
