"""Data as people have them: every form gives the tensors that were put into it, and every function takes every form."""

from collections.abc import Callable
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import onebasin as ob
from onebasin.errors import InputError
from onebasin.functional import few_of, inputs_of, pair_of
from onebasin.symmetry import Symmetry

ROWS, FEATURES, CLASSES = 21, 3, 2
X = torch.randn(ROWS, FEATURES, generator=torch.Generator().manual_seed(0))
Y = torch.arange(ROWS) % CLASSES


class Items(Dataset[Any]):
    """Map style: arrays in float64 and a Python number."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        return X[index].double().numpy(), int(Y[index])


class Named(Items):
    """Dict items."""

    def __getitem__(self, index: int) -> Any:
        return {"pixels": X[index], "labels": int(Y[index])}


def stacked(rows: list[Any]) -> tuple[Any, ...]:
    return tuple(np.stack(column) for column in zip(*rows, strict=True))


def table() -> Any:
    return datasets.Dataset.from_dict({"pixels": X.tolist(), "label": Y.tolist()})


FORMS: dict[str, Callable[[], Any]] = {
    "tensors": lambda: (X, Y),
    "arrays": lambda: (X.double().numpy(), Y.numpy().astype(np.uint8)),
    "read-only, reversed and foreign arrays": lambda: (X.flip(0).numpy()[::-1].astype(">f8"), Y.numpy()),
    "list of two": lambda: [X, Y],
    "TensorDataset": lambda: TensorDataset(X, Y),
    "Dataset": Items,
    "Subset": lambda: Subset(Items(), range(ROWS)),
    "dict items": Named,
    "DataLoader": lambda: DataLoader(Items(), batch_size=4),
    "DataLoader of dicts": lambda: DataLoader(Named(), batch_size=8),
    "DataLoader of arrays": lambda: DataLoader(Items(), 5, collate_fn=stacked),
    "columns": lambda: {"pixels": X.numpy(), "y": Y.numpy()},
    "rows": table,
    "rows as torch": lambda: table().with_format("torch"),
    "rows as numpy": lambda: table().with_format("numpy"),
    "rows in a loader": lambda: DataLoader(table().with_format("torch"), batch_size=6),
    "named columns": lambda: ob.columns(table(), inputs="pixels", targets="label"),
}
MODEL = nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, CLASSES))


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_examples_that_were_put_into_it(form: str) -> None:
    inputs, targets = pair_of(FORMS[form](), MODEL)
    assert torch.equal(inputs, X) and inputs.dtype == torch.float32
    assert torch.equal(targets, Y) and targets.dtype == torch.int64


@pytest.mark.parametrize("form", [form for form in FORMS if form not in ("list of two", "tensors", "arrays")])
def test_inputs_leave_the_targets_of_a_collection_out(form: str) -> None:
    source = FORMS[form]()
    if not isinstance(source, tuple | dict):
        assert torch.equal(inputs_of(source, MODEL), X)
        few = few_of(source, MODEL)
        assert 0 < len(few) <= ROWS and torch.equal(few, X[: len(few)])


def test_tensors_are_left_as_they_are() -> None:
    wide = X.double()
    assert inputs_of(wide, MODEL) is wide
    inputs, targets = pair_of((wide, Y.int()), MODEL)
    assert inputs is wide and targets.dtype == torch.int32
    nested = {"x": wide, "flag": True}
    assert inputs_of(nested, MODEL)["x"] is wide


def test_floats_of_arrays_get_the_dtype_of_the_parameters_and_others_theirs() -> None:
    double = nn.Linear(FEATURES, 1).double()
    assert inputs_of(X.numpy(), double).dtype == torch.float64
    assert inputs_of(np.arange(6, dtype=np.uint16), double).dtype == torch.int64
    assert inputs_of(np.arange(6, dtype=np.uint8), double).dtype == torch.uint8
    assert pair_of((X, X[:, 0].double().numpy()), MODEL)[1].dtype == torch.float64


def test_several_columns_are_keyword_inputs_and_several_parts_positional_ones() -> None:
    rows = {"input_ids": np.ones((4, 2), dtype=np.int64), "attention_mask": np.ones((4, 2)), "label": np.zeros(4, int)}
    inputs, targets = pair_of(rows, MODEL)
    assert set(inputs) == {"input_ids", "attention_mask"} and targets.shape == (4,)
    assert inputs["attention_mask"].dtype == torch.float32
    one, two = inputs_of(TensorDataset(X, X[:, :1], Y), MODEL)
    assert torch.equal(one, X) and torch.equal(two, X[:, :1])
    both = ob.columns(rows, inputs=["input_ids", "attention_mask"])
    assert set(both) == {"input_ids", "attention_mask"}


def test_the_order_of_a_shuffling_loader_is_read_once_and_kept() -> None:
    numbers = torch.arange(ROWS)
    loader = DataLoader(TensorDataset(numbers[:, None].float(), numbers), batch_size=4, shuffle=True)
    inputs, targets = pair_of(loader)
    assert torch.equal(inputs[:, 0].long(), targets) and sorted(targets.tolist()) == numbers.tolist()


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from ()


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no targets": (
        lambda: {"pixels": X, "age": X[:, 0]},
        r"expected targets.*the columns pixels, age.*onebasin.columns",
    ),
    "two targets": (lambda: {"pixels": X, "y": Y, "label": Y}, "expected one column of targets, found label and y"),
    "only targets": (lambda: {"y": Y}, "expected columns of inputs, found the columns y alone"),
    "texts": (
        lambda: datasets.Dataset.from_dict({"text": ["a", "b"], "label": [0, 1]}),
        "expected numbers in the inputs, found a list of 2 of str",
    ),
    "ragged rows": (
        lambda: datasets.Dataset.from_dict({"ids": [[1, 2], [3]], "label": [0, 1]}),
        r"expected rows of one shape in the inputs, found \(1,\) and \(2,\): pad",
    ),
    "ragged batches": (
        lambda: DataLoader([(torch.zeros(2), 0), (torch.zeros(3), 1)], batch_size=1),  # type: ignore[arg-type]
        "expected batches of one form",
    ),
    "no end": (Endless, "expected a data set with a length, found Endless"),
    "streamed rows": (lambda: table().to_iterable_dataset(), "expected a data set with a length"),
    "empty loader": (lambda: DataLoader(TensorDataset(X[:0], Y[:0])), "the data hold no examples"),
    "empty": (lambda: (X[:0], Y[:0]), "the data hold no examples"),
    "a set of several": (
        lambda: datasets.DatasetDict(train=table(), test=table()),
        r"give one of them, as data\['train'\]",
    ),
    "a set of onebasin": (lambda: ob.data.load("digits"), "with a train and a test part: give one, as data.train"),
    "unequal": (lambda: (X, Y[:20]), "expected one target for each of 21 examples, found 20 targets"),
    "unequal inputs": (lambda: ((X, X[:5]), Y), r"found \(21, 3\), \(5, 3\)"),
    "NaN": (lambda: (X * torch.nan, Y), "expected finite data, found NaN"),
    "a number for all": (lambda: (X, torch.tensor(1)), "found a single number"),
    "an array of texts": (lambda: (np.array(["a"] * ROWS), Y), "expected numbers in the inputs, found an array of <U1"),
    "a list of numbers": (lambda: ([1.0, 2.0], [0, 1]), "found a list of numbers: give torch.tensor"),
    "a tensor alone": (lambda: X, r"expected data as a pair \(inputs, targets\), found a tensor \(21, 3\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_data_is_refused_in_a_sentence(case: str) -> None:
    make, sentence = REFUSED[case]
    with pytest.raises(InputError, match=sentence) as caught:
        pair_of(make(), MODEL)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_columns_are_named_or_refused() -> None:
    with pytest.raises(InputError, match="expected a column 'pixel', found the columns pixels, label"):
        ob.columns(table().with_format("torch"), inputs="pixel")
    with pytest.raises(InputError, match="expected rows with named columns, found TensorDataset"):
        ob.columns(TensorDataset(X, Y), inputs="x")
    assert torch.equal(ob.columns(DataLoader(Named(), 5), "pixels"), X)


@pytest.fixture(scope="module")
def population() -> ob.Population:
    models = []
    for seed in range(4):
        with ob.global_seed(seed):
            models.append(nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, CLASSES)))
    return ob.Population.from_models(models, chain=[0, 0, 1, 1])


@pytest.fixture(scope="module")
def symmetry() -> Symmetry:
    return ob.discover(MODEL, X[:2])


def calls(population: ob.Population, symmetry: Symmetry) -> dict[str, Callable[[Any], Any]]:
    """Public functions as a function of data, each giving something to compare exactly."""
    a, b = population[0], population[1]
    method = ob.HMC(draws=2, warmup=2, epochs=1, leapfrog=2)
    posterior = ob.fit(population)

    def refined(data: Any) -> Tensor:
        given: dict[str, Any] = {"steps": 2, "draws": 4, "noise": 0.0, "mixed": 0}
        return ob.refine(MODEL, posterior, population, inputs(data), **given).mean["0.weight"]

    def inputs(data: Any) -> Any:
        return data[0] if isinstance(data, tuple) else data

    return {
        "discover": lambda data: ob.discover(MODEL, inputs(data)).to_json(),
        "verify": lambda data: ob.verify(MODEL, symmetry, inputs(data)).passed,
        "sample": lambda data: ob.sample(MODEL, data, method).tensor("0.weight"),
        "approximate": lambda data: ob.approximate(MODEL, data, ob.Laplace(epochs=1)).std["0.weight"],
        "diagnose": lambda data: ob.diagnose(MODEL, population[[0, 1, 2, 3] * 2], inputs(data)).functions,
        "align": lambda data: ob.align(
            population, symmetry, by="activations", model=MODEL, inputs=inputs(data)
        ).population.tensor("0.weight"),
        "match_activations": lambda data: ob.match_activations(MODEL, a, b, symmetry, inputs(data)).after,
        "merge": lambda data: ob.merge(MODEL, population, symmetry, data, variance="repair")["0.weight"],
        "barrier": lambda data: ob.barrier(MODEL, a, b, data, points=3, test=data, variance="repair").loss,
        "barrier_report": lambda data: str(ob.barrier_report(MODEL, a, b, symmetry, data, data, points=3)),
        "refine": refined,
        "predict": lambda data: ob.predict(MODEL, population, inputs(data)),
        "evaluate": lambda data: str(ob.evaluate(MODEL, population, data, ood=inputs(data), n_resamples=20)),
        "diversity": lambda data: ob.diversity(MODEL, population, inputs(data), ood=inputs(data)).matrix,
        "discrepancy": lambda data: (
            ob.discrepancy(
                population[:2], population[2:], model=MODEL, inputs=inputs(data), permutations=0, n_resamples=0
            ).function.squared
        ),
        "fidelity": lambda data: ob.fidelity(MODEL, posterior, population, inputs(data), draws=4),
        "pruning_curve": lambda data: str(ob.pruning_curve(MODEL, posterior, data, by=["snr"], levels=[0.5])),
        "losses": lambda data: ob.losses(MODEL, a, inputs(data), Y),
    }


NAMES = sorted(calls(ob.Population.from_models([MODEL, MODEL]), Symmetry((), {})))


@pytest.mark.filterwarnings("ignore::onebasin.errors.StatisticsWarning")
@pytest.mark.parametrize("name", NAMES)
def test_every_function_takes_arrays_loaders_and_rows(name: str, population: ob.Population, symmetry: Symmetry) -> None:
    call = calls(population, symmetry)[name]
    small = name in ("discover", "verify")
    forms: dict[str, Any] = {form: FORMS[form]() for form in ("arrays", "DataLoader", "rows")}
    expected = call((X[:8] if small else X, Y))
    for form, data in forms.items():
        found = call(data)
        same = torch.equal(found, expected) if isinstance(expected, Tensor) else found == expected
        assert same, (name, form)
