"""Wrong inputs all over the public interface: each is refused in one sentence, before the work where that counts."""

import inspect
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import onebasin as ob

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(5))
Y = torch.arange(12) % 2
CALLS: list[int] = []


class Net(nn.Sequential):
    """Notes the number of examples of each call: wrong labels should be found before all networks run."""

    def __init__(self, hidden: int = 4) -> None:
        super().__init__(nn.Linear(3, hidden), nn.Tanh(), nn.Linear(hidden, 2))

    def forward(self, input: Tensor) -> Tensor:
        CALLS.append(len(input))
        return super().forward(input)


def networks(count: int = 6) -> ob.Population:
    models = []
    for seed in range(count):
        with ob.global_seed(seed):
            models.append(Net())
    return ob.Population.from_models(models, chain=torch.arange(count) % 2)


def deeper() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))


MODEL, P = Net(), networks()
NORMED = deeper()
NORMS = ob.Population.from_models([NORMED, deeper()])
PIXELS = nn.Conv2d(3, 2, 1)
MASKS = ob.Population.from_models([PIXELS, nn.Conv2d(3, 2, 1)])
IMAGES = torch.rand(12, 3, 4, 4, generator=torch.Generator().manual_seed(7))
CLASSES = torch.arange(12 * 16).reshape(12, 4, 4) % 2
UNKNOWN = CLASSES.clone()
UNKNOWN[0, 0, 0] = 255
VALUES = torch.randn(12, generator=torch.Generator().manual_seed(8))
HEAVY = nn.Linear(3, 3)
HEAVIES = ob.Population.from_models([HEAVY, nn.Linear(3, 3)])
SYMMETRY = ob.discover(MODEL, X[:2])
Q = ob.fit(P)
DATA = (X, Y)
CONV = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(2, 2))
ROW = tuple[str, Callable[[], Any], str]


def rows() -> list[ROW]:
    """What is called, and the sentence that it deserves."""
    posterior = "expected a Population, found Posterior: draw networks from it, as posterior.draw"
    symmetry = r"expected a Symmetry, found Net: discover it, as onebasin\.discover\(model, inputs\)"
    order = "the order is model, networks, data"
    hot = r"expected class numbers \(12,\), found one-hot targets \(12, 2\): give targets.argmax\(1\)"
    labels = "expected class numbers from 0 to 1, found 0 to 2"
    wide = r"could not be called with \(float32\[\d+x5\]\): one of its layers expects 3 features and was given 5"
    return [
        # networks
        ("a posterior in discrepancy", lambda: ob.discrepancy(P, Q), posterior),  # type: ignore[arg-type]
        ("a posterior in align", lambda: ob.align(Q, SYMMETRY), posterior),  # type: ignore[arg-type]
        ("a posterior in diagnose", lambda: ob.diagnose(None, Q), posterior),  # type: ignore[arg-type]
        ("a model in discrepancy", lambda: ob.discrepancy(P, MODEL), "several modules with Population.from_models"),
        ("a list in align", lambda: ob.align([MODEL], SYMMETRY), "expected a Population, found list"),
        ("a model for a symmetry", lambda: ob.align(P, MODEL), symmetry),  # type: ignore[arg-type]
        ("a model for a symmetry in match", lambda: ob.match(P[0], P[1], MODEL), symmetry),  # type: ignore[arg-type]
        ("a model for a symmetry in verify", lambda: ob.verify(MODEL, MODEL, X), symmetry),  # type: ignore[arg-type]
        ("a model for a symmetry in merge", lambda: ob.merge(None, P, MODEL), symmetry),  # type: ignore[arg-type]
        ("dicts in from_models", lambda: ob.Population.from_models([P[0]]), "state dicts to Population.from_states"),
        ("numbers in from_models", lambda: ob.Population.from_models([X]), "found Tensor at place 0: give modules"),
        ("modules in from_states", lambda: ob.Population.from_states([MODEL]), "or use Population.from_models"),
        ("vectors in from_states", lambda: ob.Population.from_states([X]), "or use Population.from_flat"),
        ("a factory in from_flat", lambda: ob.Population.from_flat(np.zeros((2, 5)), Net), r"a module, as Net\(\)"),
        ("two architectures", lambda: ob.Population.from_models([Net(), Net(5)]), "member 1, compared with member 0"),
        ("a list of networks", lambda: ob.predict(MODEL, [P[0]], X), "a Population or a Posterior, found list"),
        ("a population as an end", lambda: ob.barrier(MODEL, P, P[0], DATA), r"as population\[0\]"),
        # the order of arguments
        ("swapped in predict", lambda: ob.predict(P, MODEL, X), f"found a Population: {order}"),
        ("swapped in evaluate", lambda: ob.evaluate(P, MODEL, DATA), f"found a Population: {order}"),
        ("swapped in sample", lambda: ob.sample(DATA, MODEL), f"found a tuple: {order}"),
        ("swapped in discover", lambda: ob.discover(X, MODEL), f"found a Tensor: {order}"),
        ("a class for a model", lambda: ob.discover(Net, X), r"found the class Net: call it, as Net\(\)"),
        ("a model for data", lambda: ob.evaluate(MODEL, P, MODEL), f"expected data, found the module Net: {order}"),
        ("a model for inputs", lambda: ob.predict(MODEL, P, MODEL), f"expected inputs, found the module Net: {order}"),
        ("networks for data", lambda: ob.evaluate(MODEL, P, P), f"expected data, found a Population: {order}"),
        # data
        ("a text for data", lambda: ob.sample(MODEL, "digits"), r"found the text 'digits': load data first"),
        ("a text for inputs", lambda: ob.discover(MODEL, "x"), "expected inputs, found the text 'x'"),
        ("numbers in a list", lambda: ob.predict(MODEL, P, [[1.0, 2.0, 3.0]]), r"give torch.tensor\(inputs\)"),
        ("inputs alone", lambda: ob.sample(MODEL, X), r"a pair \(inputs, targets\), found a tensor \(12, 3\)"),
        ("three things", lambda: ob.evaluate(MODEL, P, (X, Y, Y)), "a pair .* found a tuple of 3"),
        ("no examples", lambda: ob.evaluate(MODEL, P, (X[:0], Y[:0])), "the data hold no examples"),
        ("no examples in predict", lambda: ob.predict(MODEL, P, X[:0]), "the data hold no examples"),
        ("no examples in sample", lambda: ob.sample(MODEL, (X[:0], Y[:0])), "the data hold no examples"),
        ("a shorter half", lambda: ob.evaluate(MODEL, P, (X, Y[:7])), "each of 12 examples, found 7 targets"),
        ("a shorter half in barrier", lambda: ob.barrier(MODEL, P[0], P[1], (X, Y[:7])), "of 12 examples, found 7"),
        ("NaN", lambda: ob.evaluate(MODEL, P, (X * torch.nan, Y)), "found NaN or infinity: leave these examples out"),
        ("texts in an array", lambda: ob.predict(MODEL, P, np.array(["a"])), "found an array of <U1"),
        ("one hot", lambda: ob.evaluate(MODEL, P, (X, torch.eye(2)[Y].long())), hot),
        ("one hot, floats", lambda: ob.evaluate(MODEL, P, (X, torch.eye(2)[Y])), hot),
        ("one hot in sample", lambda: ob.sample(MODEL, (X, torch.eye(2)[Y].long())), hot),
        ("one hot in barrier", lambda: ob.barrier(MODEL, P[0], P[1], (X, torch.eye(2)[Y].long())), hot),
        ("a third class", lambda: ob.evaluate(MODEL, P, (X, torch.arange(12) % 3)), labels),
        ("a third class in sample", lambda: ob.sample(MODEL, (X, torch.arange(12) % 3)), labels),
        (
            "a third class far behind",
            lambda: ob.losses(MODEL, P[0], X, torch.tensor([0] * 11 + [2]), batch=2),
            labels,
        ),
        ("five features", lambda: ob.predict(MODEL, P, torch.zeros(4, 5)), wide),
        ("five features in discover", lambda: ob.discover(MODEL, torch.zeros(4, 5)), wide),
        ("five features in sample", lambda: ob.sample(MODEL, (torch.zeros(12, 5), Y)), wide),
        (
            "three colours",
            lambda: ob.predict(CONV, ob.Population.from_models([CONV, CONV]), torch.zeros(2, 3, 3, 3)),
            r"one of its layers expects 1 channels and was given 3",
        ),
        ("bytes", lambda: ob.predict(MODEL, P, X.byte()), r"uint8 and its weights torch.float32; convert .*/ 255"),
        ("bytes in discover", lambda: ob.discover(MODEL, X.byte()), r"as inputs\.float\(\) / 255"),
        ("bytes in sample", lambda: ob.sample(MODEL, (X.byte().numpy(), Y)), r"as inputs\.float\(\) / 255"),
        # metrics
        ("a list in ece", lambda: ob.metrics.ece([[0.5, 0.5]], Y), "a tensor or an array in ece, found a list"),
        ("a text in rhat", lambda: ob.metrics.rhat("x"), "in rhat, found a str"),
        ("logits in ece", lambda: ob.metrics.ece(X.numpy(), Y.numpy()), r"give softmax\(logits\), not logits"),
        # words
        ("an old word", lambda: ob.predict(MODEL, P, X, output="values"), "write quantity='values'"),
        ("no such quantity", lambda: ob.predict(MODEL, P, X, quantity="logit"), "expected quantity to be one of"),
        # calls that do not fit the signature
        (
            "inputs and targets apart",
            lambda: ob.evaluate(MODEL, Q, X, Y),
            r"found two: write evaluate\(model, networks",
        ),
        (
            "the same in barrier",
            lambda: ob.barrier(MODEL, P[0], P[1], X, Y),
            r"write barrier\(model, a, b, \(inputs, tar",
        ),
        ("the same in sample", lambda: ob.sample(MODEL, X, Y), r"a tensor \(12, 3\): give \(x, y\)"),
        ("a misspelt option", lambda: ob.align(P, SYMMETRY, refrence="first"), "'refrence': did you mean 'reference'"),
        ("the same of a method", lambda: ob.HMC(drows=3), "HMC has no option 'drows': did you mean 'draws'"),
        (
            "the same of a metric",
            lambda: ob.metrics.ece(X.softmax(1), Y, bin=3),
            "no option 'bin': did you mean 'bins'",
        ),
        ("the same of facts", lambda: ob.Population.from_models([MODEL], chian=[0]), "'chian': did you mean 'chain'"),
        ("options by place", lambda: ob.HMC(3), r"HMC takes no argument by place, found 1: .*HMC\(epochs=...\)"),
        (
            "too much",
            lambda: ob.diversity(MODEL, P, X, X),
            r"3 arguments by place \(model, networks, inputs\), found 4",
        ),
        ("no data", lambda: ob.evaluate(MODEL, Q), r"needs data, .*: write evaluate\(model, networks, data\)"),
        ("no symmetry", lambda: ob.align(P), r"align needs symmetry, .*: write align\(population, symmetry\)"),
        ("no generator", lambda: Q.draw(5), r"write Posterior.draw\(n, generator\)"),
        ("twice", lambda: ob.predict(MODEL, Q, X, inputs=X), "given inputs twice, by its place and by its name"),
        # one noun for another
        ("a posterior in fit", lambda: ob.fit(Q), "expected a Population as population of fit, found Posterior"),
        (
            "swapped in refine",
            lambda: ob.refine(MODEL, P, Q, X),
            "a Posterior as posterior of refine, found Population",
        ),
        ("a population in distance", lambda: ob.distance(Q, P, SYMMETRY), "a Posterior as q of distance, found Popul"),
        (
            "a symmetry in transpositions",
            lambda: ob.transpositions(SYMMETRY),
            "an Element as element of transpositions",
        ),
        ("a population in apply", lambda: SYMMETRY.apply(P, Q), "an Element as element of Symmetry.apply, found Pop"),
        ("a model in weight_diagnostics", lambda: ob.weight_diagnostics(MODEL), "expected a Population as population"),
        ("swapped in population_map", lambda: ob.population_map(SYMMETRY, P), "population_map, found Symmetry"),
        (
            "a posterior for a path",
            lambda: ob.load_posterior(Q),
            "expected a path as path of load_posterior, found Post",
        ),
        ("a list of paths", lambda: ob.Population.open(["a", "b"]), "a path as path of Population.open, found list"),
        # values of options
        ("a name for a number", lambda: P["0.weight"], r"population.tensor\(name\) is a tensor"),
        ("no such tensor", lambda: P.select("0.wieght"), "names out of 0.weight, .* found '0.wieght'"),
        ("a text for chains", lambda: ob.Population.from_models([MODEL], chain="a"), "chain as one number per member"),
        ("a number for axes", lambda: ob.fit(P).plot(3), "panels, found 0 axes"),
        ("progress", lambda: ob.align(P, SYMMETRY, progress=3), "found 3: give progress=True"),
        # networks of another model, or in another form
        ("a posterior in fold_norms", lambda: ob.fold_norms(NORMED, Q, X), posterior),  # type: ignore[type-var]
        (
            "a module in fold_norms",
            lambda: ob.fold_norms(NORMED, NORMED, X),  # type: ignore[type-var]
            r"found the module Sequential: give module.state_dict\(\)",
        ),
        ("NaN in fold_norms", lambda: ob.fold_norms(NORMED, NORMS, X * torch.nan), "finite inputs .* found NaN"),
        (
            "another symmetry in narrow",
            lambda: ob.narrow(NORMED, SYMMETRY, 0.5),
            r"found one of another, with '2.weight' \(2, 4\) where the network has no such tensor: discover it",
        ),
        (
            "another width in narrow",
            lambda: ob.narrow(Net(3), SYMMETRY, 0.5),
            r"'0.weight' \(4, 3\) where the network has \(3, 3\)",
        ),
        ("modules in calibrate", lambda: ob.calibrate(MODEL, [MODEL], DATA), r"found list: .*from_models\(\["),  # type: ignore[arg-type]
        ("None in evaluate", lambda: ob.evaluate(MODEL, None, DATA), "found None: .* its .why says why"),  # type: ignore[arg-type]
        # likelihoods, classes and pixels
        (
            "a text for ignore_index",
            lambda: ob.evaluate(PIXELS, MASKS, (IMAGES, CLASSES), ignore_index="255"),  # type: ignore[arg-type]
            "a whole class number, found '255': give ignore_index=255",
        ),
        (
            "half a class for ignore_index",
            lambda: ob.evaluate(PIXELS, MASKS, (IMAGES, CLASSES), ignore_index=255.5),  # type: ignore[arg-type]
            "a whole class number, found 255.5",
        ),
        ("no ignore_index", lambda: ob.evaluate(PIXELS, MASKS, (IMAGES, UNKNOWN)), "give ignore_index=255 where"),
        ("the same in sample", lambda: ob.sample(PIXELS, (IMAGES, UNKNOWN)), "found 0 to 255: give ignore_index=255"),
        ("pixels in calibrate", lambda: ob.calibrate(PIXELS, MASKS, (IMAGES, CLASSES)), "judge them with onebasin"),
        ("pixels in conformal", lambda: ob.conformal(PIXELS, MASKS, (IMAGES, CLASSES)), "one for each pixel"),
        ("no likelihood", lambda: ob.evaluate(HEAVY, HEAVIES, (X, VALUES)), "of training, as likelihood='student_t'"),
        (
            "half a word for a likelihood",
            lambda: ob.evaluate(HEAVY, HEAVIES, (X, VALUES), likelihood="student"),
            "found 'student': write 'student_t'",
        ),
        (
            "no word for a likelihood",
            lambda: ob.evaluate(HEAVY, HEAVIES, (X, VALUES), likelihood="xyz"),
            "found 'xyz': write 'gaussian' for values",
        ),
        (
            "a head in conformal",
            lambda: ob.conformal(HEAVY, HEAVIES, (X, VALUES), method="cqr", likelihood="mixture"),
            "conformal reads no distribution heads, found likelihood='mixture'",
        ),
        (
            "a head in calibrate",
            lambda: ob.calibrate(HEAVY, HEAVIES, (X, VALUES), likelihood="student_t"),
            "calibrate reads no distribution heads",
        ),
        ("one class in calibrate", lambda: ob.calibrate(MODEL, P, (X, Y * 0)), "two classes .*, found class 0 alone"),
        # images
        ("a text in shifts", lambda: ob.data.shifts(IMAGES, "contrast"), r"the text 'contrast': give \['contrast'\]"),
        ("bytes in corrupt", lambda: ob.data.corrupt(IMAGES.byte()), r"torch.uint8 .*: give inputs.float\(\) / 255"),
        ("NaN in corrupt", lambda: ob.data.corrupt(IMAGES * torch.nan), "finite pixels, found NaN or infinity"),
        (
            "another size in corrupt",
            lambda: ob.data.corrupt(torch.rand(2, 784), size=(8, 9)),
            r"found 784 numbers: .* as size=\(28, 28\)",
        ),
        ("no shifts", lambda: ob.evaluate(MODEL, P, DATA, shifted={}), "found an empty one: give onebasin.data.shifts"),
        (
            "numbers for shifts",
            lambda: ob.evaluate(MODEL, P, DATA, shifted={1: X}),  # type: ignore[dict-item]
            "found names that are no texts",
        ),
        (
            "ood_mask without ood",
            lambda: ob.evaluate(PIXELS, MASKS, (IMAGES, CLASSES), ood_mask=CLASSES > 0),
            "found no ood: give ood=images",
        ),
        # selective prediction
        ("no examples in aurc", lambda: ob.metrics.aurc(X[:0, 0], X[:0, 0]), "of at least one example, found none"),
        ("two axes in ause", lambda: ob.metrics.ause(X, VALUES), r"expected uncertainty .* found shape \(12, 3\)"),
        ("NaN in ause", lambda: ob.metrics.ause(VALUES, VALUES * torch.nan), "errors without NaN, found 12 NaN among"),
        (
            "members in confidence_and_errors",
            lambda: ob.metrics.confidence_and_errors(X.softmax(1)[None], Y),
            r"found shape \(1, 12, 3\); average over members, as p.mean\(0\)",
        ),
        ("whole probabilities", lambda: ob.metrics.ece(Y[:, None], Y), "in floating point, found torch.int64; give"),
        ("a risk in per cent", lambda: ob.metrics.coverage_at_risk(VALUES, Y.double(), 5), "from 0 to 1, .* found 5;"),
        ("a negative risk", lambda: ob.metrics.coverage_at_risk(VALUES, VALUES.abs(), -1), "from 0 to 1, .* found -1;"),
        (
            "a coverage in per cent",
            lambda: ob.metrics.abstention(VALUES, Y.double(), coverage=80),
            "above 0 and at most 1, found 80",
        ),
        # methods that the data or the model cannot serve
        ("no members", lambda: ob.BatchEnsemble(members=0), "from 2 on, found 0: give members=4"),
        (
            "one layer for mimo",
            lambda: ob.sample(nn.Sequential(nn.Linear(3, 2)), DATA, ob.MIMO(epochs=1)),
            r"at least two layers for mimo, .* found one \('0'\)",
        ),
        (
            "more members than examples",
            lambda: ob.sample(MODEL, (X[:3], Y[:3]), ob.MIMO(members=50, epochs=1)),
            "found 3 for 50 members: give members=3",
        ),
        (
            "more examples than there are",
            lambda: ob.sample(NORMED, DATA, ob.MCBatchNorm(examples=10**6, epochs=1)),
            "at most 12 examples in a batch, .* found examples=1000000",
        ),
        ("raw in diagnose", lambda: ob.diagnose(None, P, quantity="raw"), 'give quantity="values"'),
    ]  # fmt: skip


ROWS = rows()


@pytest.mark.parametrize(("call", "sentence"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_a_wrong_input_gets_its_sentence(call: Callable[[], Any], sentence: str) -> None:
    CALLS.clear()
    with pytest.raises(ob.OnebasinError, match=sentence) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text and 20 < len(text) < 300
    assert not re.search(r"Traceback|object at 0x|NoneType", text)
    assert sum(CALLS) <= 40  # a trial with a few examples, never every network on everything


def test_errors_from_inside_a_function_stay_what_they_are() -> None:
    def broken(left: str, right: object) -> str:
        return left + right  # type: ignore[operator]

    with pytest.raises(TypeError, match="can only concatenate"):
        ob.errors.explained(broken)("a", 1)
    assert inspect.signature(ob.errors.explained(broken)) == inspect.signature(broken)


def test_public_functions_show_their_own_signature_and_can_be_sent() -> None:
    from onebasin.evaluation import evaluate

    assert inspect.signature(ob.evaluate) == inspect.signature(evaluate)
    assert ob.evaluate.__doc__ == evaluate.__doc__
    assert pickle.loads(pickle.dumps(ob.evaluate)) is ob.evaluate
    assert [name for name in inspect.signature(ob.HMC).parameters][:2] == ["epochs", "batch"]


def test_labels_are_checked_before_the_networks_run() -> None:
    """400 networks on all examples would be 4,800 rows; a look at one network takes a few."""
    many = ob.Population.concatenate([networks(2)] * 200)
    for data in ((X, torch.arange(12) % 3), (X, torch.eye(2)[Y].long())):
        CALLS.clear()
        with pytest.raises(ob.OnebasinError):
            ob.evaluate(MODEL, many, data)
        assert sum(CALLS) < 12


def test_files_that_hold_something_else(tmp_path: Path) -> None:
    text = tmp_path / "notes.pt"
    text.write_text("learning rate 0.1, it worked\n" * 3)
    with pytest.raises(ob.errors.StorageError, match=r"expected a torch file, but .*notes.pt is a text: give the file"):
        ob.Population.open(text)
    stored = Q.save(tmp_path / "posterior.safetensors")
    with pytest.raises(ob.errors.StorageError, match=r"found a posterior: open it with ob.load_posterior"):
        ob.Population.open(stored)
    ob.prune(Q, keep=0.5).save(tmp_path / "masks.safetensors")
    with pytest.raises(ob.errors.StorageError, match=r"expected a network in .*masks"):
        ob.Population.open(tmp_path / "masks.safetensors")
    assert len(ob.load_posterior(stored).mean) == 4


def test_metrics_take_arrays_and_give_what_tensors_give() -> None:
    generator = torch.Generator().manual_seed(6)
    p = torch.rand(2, 4, 3, generator=generator, dtype=torch.float64).softmax(-1)
    mean, y, z = p.mean(0), torch.tensor([0, 2, 1, 1]), torch.randn(4, generator=generator, dtype=torch.float64)
    draws = torch.randn(2, 8, generator=generator, dtype=torch.float64)
    m = ob.metrics
    given: dict[str, tuple[Tensor, ...]] = {
        "ece": (mean, y), "ace": (mean, y), "accuracy": (mean, y), "nll": (mean, y), "brier": (mean, y),
        "best_temperature": (mean.log(), y), "agreement": (mean, p[0]), "total_variation": (mean, p[0]),
        "entropy": (mean,), "predictive_entropy": (p,), "expected_entropy": (p,), "mutual_information": (p,),
        "auroc": (z, z + 1), "aupr": (z, z + 1), "fpr95": (z, z + 1), "msp": (mean,), "max_logit": (p,),
        "energy": (p,), "rhat": (draws,), "ess": (draws,), "mcse": (draws,), "ebfmi": (draws,), "pearson": (z, z**2),
        "spearman": (z, z**2), "kendall_tau": (z, z**2), "ranks": (z,), "pairwise_mutual_information": (p,),
        "weighted_mean": (z,), "entropy_score": (mean,),
    }  # fmt: skip
    for name, tensors in given.items():
        function = getattr(m, name)
        expected, found = function(*tensors), function(*(tensor.numpy() for tensor in tensors))
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    again = m.ece(mean.numpy(), targets=y.numpy(), weights=np.ones(4))
    assert again == m.ece(mean, y, weights=torch.ones(4))


def test_a_loader_is_evaluated() -> None:
    loader = DataLoader(TensorDataset(X, Y), batch_size=5)
    assert str(ob.evaluate(MODEL, P, loader)) == str(ob.evaluate(MODEL, P, DATA))


def test_a_calibration_of_logits_wants_the_axis_of_members() -> None:
    found = ob.calibrate(MODEL, P, (X.repeat(2, 1), Y.repeat(2)), n_resamples=5)
    logits = ob.predict(MODEL, P, X, quantity="logits")
    assert found(logits).shape == (12, 2) and found(logits[:1]).shape == (12, 2)
    with pytest.raises(
        ob.OnebasinError, match=r"\(members, examples, classes\), found shape \(12, 2\): give logits\[No"
    ):
        found(logits[0])
    one = nn.Linear(3, 1)
    single = ob.calibrate(one, ob.Population.from_models([one]), (X, Y), likelihood="bernoulli", n_resamples=5)
    assert single(torch.zeros(1, 12)).shape == (12, 2)
    with pytest.raises(ob.OnebasinError, match=r"\(members, examples\), found shape \(12,\): give logits\[None\]"):
        single(torch.zeros(12))


def test_a_risk_above_one_is_one_where_losses_are() -> None:
    """Errors of values have no largest size, so what is refused for shares of wrong classes is a question here."""
    confidence, errors = torch.tensor([3.0, 2.0, 1.0]), torch.tensor([2.0, 6.0, 10.0])
    assert float(ob.metrics.coverage_at_risk(confidence, errors, 4)) == pytest.approx(2 / 3)


def test_the_mean_of_one_shift_is_that_shift() -> None:
    shift = ob.evaluate(MODEL, P, DATA, shifted={"turned": -X}, n_resamples=20).shifted
    assert shift is not None and shift.mean["ece"] == shift.numbers["turned"][1]["ece"]
    several = ob.evaluate(MODEL, P, DATA, shifted={"turned": {1: -X, 2: -2 * X}}, n_resamples=20).shifted
    assert several is not None and "no interval" in str(several.mean["ece"])
