"""Models that return dicts, dataclasses or tuples: one part counts, and everything else is as for a plain model."""

import copy
import pickle
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onebasin as ob
from onebasin.errors import InputError
from onebasin.functional import select_output
from onebasin.parallel.serialize import pack, unpack

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))
Y = torch.arange(12) % 2
Pair = namedtuple("Pair", ["loc", "scale"])


@dataclass
class Result:
    logits: Tensor
    hidden: Tensor


class Net(nn.Module):
    """A classifier with dropout of its own, which asks for its mode, and one kind of output or another."""

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        self.first, self.second, self.kind = nn.Linear(3, 4), nn.Linear(4, 2), kind

    def forward(self, x: Tensor) -> Any:
        hidden = torch.nn.functional.dropout(self.first(x).tanh(), 0.5, training=self.training)
        logits = self.second(hidden)
        if self.kind == "dict":
            return {"hidden": hidden, "logits": logits}
        if self.kind == "dataclass":
            return Result(logits, hidden)
        if self.kind == "tuple":
            return hidden, logits
        return Pair(logits, hidden) if self.kind == "named tuple" else logits


PARTS = {"dict": "logits", "dataclass": "logits", "tuple": 1, "named tuple": "loc"}


def networks(kind: str) -> ob.Population:
    models = []
    for seed in range(4):
        with ob.global_seed(seed):
            models.append(Net(kind))
    return ob.Population.from_models(models, chain=[0, 0, 1, 1])


@pytest.mark.parametrize("kind", PARTS)
def test_a_part_is_the_output_of_a_plain_model(kind: str) -> None:
    plain, model, population = Net(), Net(kind), networks(kind)
    given: dict[str, Any] = {"output": PARTS[kind]}
    assert torch.equal(ob.predict(model, population, X, **given), ob.predict(plain, population, X))
    assert ob.discover(model, X[:2], **given).to_json() == ob.discover(plain, X[:2]).to_json()
    method = ob.Ensemble(epochs=2)
    trained = [ob.sample(each, (X, Y), method, **more) for each, more in ((plain, {}), (model, given))]
    assert all(torch.equal(trained[0].tensor(name), trained[1].tensor(name)) for name in trained[0].names)
    assert model.training and list(select_output(model, PARTS[kind]).state_dict()) == list(model.state_dict())


def test_every_function_that_looks_at_outputs_has_the_keyword() -> None:
    plain, model, population = Net(), Net("dict"), networks("dict")
    symmetry, posterior = ob.discover(plain, X[:2]), ob.fit(population)
    a, b = population[0], population[1]
    quick: dict[str, Any] = {"steps": 2, "draws": 4, "noise": 0.0, "mixed": 0}
    calls: dict[str, Any] = {
        "verify": lambda m, **k: ob.verify(m, symmetry, X, **k).passed,
        "evaluate": lambda m, **k: str(ob.evaluate(m, population, (X, Y), n_resamples=20, **k)),
        "diagnose": lambda m, **k: ob.diagnose(m, population[[0, 1, 2, 3] * 2], X, **k).functions,
        "approximate": lambda m, **k: ob.approximate(m, (X, Y), ob.Laplace(epochs=1), **k).std["first.bias"].tolist(),
        "barrier": lambda m, **k: ob.barrier(m, a, b, (X, Y), points=3, **k).loss.tolist(),
        "barrier_report": lambda m, **k: str(ob.barrier_report(m, a, b, symmetry, (X, Y), points=3, **k)),
        "diversity": lambda m, **k: ob.diversity(m, population, X, **k).matrix.tolist(),
        "discrepancy": lambda m, **k: (
            ob.discrepancy(
                population[:2], population[2:], model=m, inputs=X, permutations=0, n_resamples=0, **k
            ).function.squared
        ),
        "refine": lambda m, **k: ob.refine(m, posterior, population, X, **quick, **k).mean["first.bias"].tolist(),
        "fit_scales": lambda m, **k: (
            ob.fit_scales(m, posterior, population, X, **quick, **k).mean["first.bias"].tolist()
        ),
        "fidelity": lambda m, **k: ob.fidelity(m, posterior, population, X, draws=4, **k),
        "pruning_curve": lambda m, **k: str(ob.pruning_curve(m, posterior, (X, Y), by=["snr"], levels=[0.5], **k)),
        "losses": lambda m, **k: ob.losses(m, a, X, Y, **k),
    }
    for name, call in calls.items():
        assert call(model, output="logits") == call(plain), name
    for name, call in calls.items():
        if name != "verify":  # the symmetry of all parts may be wanted
            with pytest.raises(InputError, match='found dict with hidden, logits: give output="logits"'):
                call(model)


def test_workers_get_the_part_too() -> None:
    model, population = Net("dataclass"), networks("dataclass")
    here = ob.predict(model, population, X, output="logits", chunk=2)
    assert torch.equal(here, ob.predict(model, population, X, output="logits", chunk=2, workers=2))


def test_a_model_with_a_chosen_part_is_copied_and_sent_like_any_other() -> None:
    chosen = select_output(Net("tuple").eval(), 1)
    for other in (copy.deepcopy(chosen), pickle.loads(pickle.dumps(chosen)), unpack(pack(chosen))):
        assert torch.equal(other(X), chosen(X)) and other.first.weight is not chosen.first.weight
        assert type(other) is type(chosen)
        other.train()
        assert not torch.equal(other(X), other(X)) and not chosen.training
    assert type(chosen).__name__ == "Net[1]"
    assert select_output(chosen) is chosen


def test_the_part_belongs_to_the_definition_of_a_run(tmp_path: Any) -> None:
    model, method = Net("tuple"), ob.Ensemble(epochs=1)
    ob.sample(model, (X, Y), method, output=1, path=tmp_path / "run")
    with pytest.raises(InputError):
        ob.sample(model, (X, torch.arange(12) % 4), method, output=0, path=tmp_path / "run")


@pytest.mark.parametrize(
    ("kind", "output", "sentence"),
    [
        (
            "plain",
            "logits",
            "found one tensor: leave output out .for logits of .* write quantity='logits'.",
        ),
        ("dict", "logit", "Net returns hidden, logits, and no part 'logit': give output=\"logits\""),
        ("tuple", 2, "Net returns 0, 1, and no part 2: give output=0"),
        ("dataclass", None, 'found Result with logits, hidden: give output="logits"'),
        ("dict", 1.5, "expected output as a name or a number, found 1.5"),
        ("dict", True, "expected output as a name or a number, found True"),
    ],
)
def test_a_part_that_is_missing_is_named(kind: str, output: Any, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        ob.predict(Net(kind), networks(kind), X, output=output)


@pytest.fixture(scope="module")
def transformer() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
    with ob.global_seed(0):
        config = transformers.BertConfig(vocab_size=11, max_position_embeddings=6, num_labels=3, **sizes)
        model: nn.Module = transformers.BertForSequenceClassification(config)
    return model.eval()


def test_a_transformer_predicts_its_logits(transformer: nn.Module) -> None:
    rows = {"input_ids": torch.arange(20).view(4, 5) % 11, "attention_mask": torch.ones(4, 5, dtype=torch.int64)}
    population = ob.Population.from_models([transformer, transformer])
    expected = transformer(**rows).logits.detach().softmax(1)
    found = ob.predict(transformer, population, rows, output="logits")
    torch.testing.assert_close(found, expected.expand(2, 4, 3))
    with pytest.raises(InputError, match=r'found SequenceClassifierOutput with .*give output="logits"'):
        ob.predict(transformer, population, rows)
