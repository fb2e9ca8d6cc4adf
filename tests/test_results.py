"""Every result shows itself in the same ways: text, HTML, a plot, a data frame and a record that is read back."""

import json
import warnings
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import matplotlib as mpl
import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.alignment import repair, scale_posterior
from onebasin.alignment.repair import blend, unit_statistics
from onebasin.reporting import Figure, Table, read_record

mpl.use("Agg")

MODEL = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
INPUTS = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
TARGETS = (INPUTS.sum(1) > 0).long()
DATA = (INPUTS, TARGETS)


def networks(number: int = 6) -> ob.Population:
    """Networks with random weights."""
    generator = torch.Generator().manual_seed(1)
    states = [
        {name: torch.randn(value.shape, generator=generator) for name, value in MODEL.state_dict().items()}
        for _ in range(number)
    ]
    return ob.Population.from_states(states)


def barrier() -> ob.Result:
    population = networks(2)
    symmetry = ob.discover(MODEL, INPUTS[:2])
    return ob.barrier(MODEL, population[0], population[1], (INPUTS, TARGETS), points=5, symmetry=symmetry)


# One entry per class of results. Each is made once.
RESULTS: dict[str, Callable[[], ob.Result]] = {"Barrier": barrier}


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def chained(draws: int = 8) -> ob.Population:
    population = networks(2 * draws)
    return ob.Population.from_stacked(population.stacked(), chain=[0] * draws + [1] * draws)


def symmetry() -> ob.Symmetry:
    return ob.discover(MODEL, INPUTS[:2])


def chains() -> ob.Population:
    return ob.Population.from_stacked(networks().stacked(), chain=[0, 0, 0, 1, 1, -1])


def repaired() -> ob.Result:
    first, second = networks(2)
    targets = blend([unit_statistics(MODEL, state, INPUTS) for state in (first, second)], [0.5, 0.5])
    return repair(MODEL, ob.interpolate(first, second, 0.5), targets, INPUTS)


def pair() -> tuple[ob.State, ob.State]:
    return networks()[0], networks()[1]


RESULTS |= {
    "Symmetry": symmetry,
    "Proof": lambda: ob.verify(MODEL, symmetry(), INPUTS[:2]),
    "Match": lambda: ob.match(*pair(), symmetry()),
    "ActivationMatch": lambda: ob.match_activations(MODEL, *pair(), symmetry(), INPUTS),
    "Alignment": lambda: ob.align(chains(), symmetry()),
    "Transpositions": lambda: ob.transpositions(symmetry().random(0, members=9), symmetry()),
    "Transpositions of one": lambda: ob.transpositions(symmetry().random(0)),
    "BarrierReport": lambda: ob.barrier_report(MODEL, *pair(), symmetry(), DATA, DATA, points=3),
    "Balanced": lambda: ob.balance(chains(), symmetry()),
    "Canonical": lambda: ob.canonicalise(chains(), symmetry()),
    "Repair": repaired,
    "Exchangeability": lambda: ob.exchangeability(networks(30), symmetry()),
    "Uniformity": lambda: ob.uniformity(torch.tensor([12, 9, 11])),
    "Persistence": lambda: ob.persistence(networks(20).tensor("0.weight"), permutations=99),
    "ScalePosterior": lambda: scale_posterior(networks()[0], symmetry()),
    "Population": chains,
    "PopulationMap": lambda: ob.population_map(chains(), symmetry()),
    "LossPlane": lambda: ob.loss_plane(MODEL, *networks(3), DATA, symmetry=symmetry(), points=4),
}


def diagnosis() -> ob.Result:
    population = chained()
    return ob.diagnose(MODEL, population, INPUTS[:3], aligned=ob.align(population, symmetry()).population)


# Results of posterior, inference and evaluation.
RESULTS |= {
    "Diagnosis": diagnosis,
    "Discrepancy": lambda: ob.discrepancy(
        networks(6)[:3], networks(6)[3:], symmetry=symmetry(), model=MODEL, inputs=INPUTS, permutations=9, n_resamples=9
    ),
    "Distance": lambda: ob.distance(ob.fit(networks(6)[:3]), ob.fit(networks(6)[3:]), symmetry()),
    "Diversity": lambda: ob.diversity(MODEL, chained(), INPUTS, ood=3 * INPUTS),
    "Evaluation": lambda: ob.evaluate(MODEL, networks(), (INPUTS, TARGETS), ood=3 * INPUTS, n_resamples=20),
    "Evaluation under shift": lambda: ob.evaluate(
        MODEL,
        networks(),
        DATA,
        shifted={"noise": {1: INPUTS + 0.1, 3: INPUTS + 1}, "halved": INPUTS / 2},
        n_resamples=20,
    ),
    "Shift": lambda: (
        ob.evaluate(
            MODEL, networks(), DATA, shifted={"noise": {1: INPUTS + 0.1, 3: INPUTS + 1}}, n_resamples=20
        ).shifted
    ),
    "Calibration": lambda: ob.calibrate(MODEL, networks(), DATA, n_resamples=20),
    "Calibration, isotonic": lambda: ob.calibrate(MODEL, networks(), DATA, "isotonic", n_resamples=20),
    "Conformal": lambda: ob.conformal(MODEL, networks(), DATA),
    "Conformal, too few": lambda: ob.conformal(MODEL, networks(), (INPUTS[:3], TARGETS[:3])),
    "ConformalCoverage": lambda: ob.conformal(MODEL, networks(), DATA).evaluate(DATA, n_resamples=20),
    "ConformalCoverage of intervals": lambda: ob.conformal(
        MODEL, networks(), (INPUTS, INPUTS[:, :2]), method="normalised", noise=1.0
    ).evaluate((INPUTS, INPUTS[:, :2]), n_resamples=20),
    "Evaluation of values": lambda: ob.evaluate(
        MODEL, networks(), (INPUTS, INPUTS[:, :2]), noise=1.0, likelihood="gaussian", n_resamples=20
    ),
    "Fidelities": lambda: ob.fidelity(MODEL, ob.fit(networks()), networks(), INPUTS, draws=4),
    "LayerMap": lambda: ob.layer_map(ob.fit(networks()), "0.weight"),
    "MMDResult": lambda: ob.discrepancy(networks(6)[:3], networks(6)[3:], preset="pooled", n_resamples=0).raw.total,
    "Masks": lambda: ob.prune(ob.fit(networks()), keep=0.5),
    "Mixing": lambda: ob.mixing(torch.randn(2, 8, 5, generator=seeded())),
    "OrbitDensity": lambda: ob.orbit_log_density(
        ob.fit(networks()), networks()[0], symmetry(), samples=10, generator=seeded()
    ),
    "Posterior": lambda: ob.fit(networks()),
    "Posterior, refined": lambda: ob.refine(MODEL, ob.fit(networks()), networks(), INPUTS, steps=4, draws=4),
    "PriorShares": lambda: ob.prior_shares(ob.fit(networks()), 1.0),
    "PruningCurve": lambda: ob.pruning_curve(
        MODEL, ob.fit(networks()), (INPUTS, TARGETS), by=["snr", "random"], levels=[1.0, 0.5]
    ),
    "Removal": lambda: ob.remove_units(networks()[0], symmetry(), keep=0.6),
    "Resampled": lambda: ob.mean_of_pairs(torch.rand(6, 6, generator=seeded()), seeded(), n_resamples=20),
    "Side": lambda: ob.diversity(MODEL, chained(), INPUTS).in_distribution,
}


@pytest.fixture(scope="module", params=sorted(RESULTS))
def result(request: pytest.FixtureRequest) -> ob.Result:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return RESULTS[request.param]()


def test_the_text_is_a_table_and_no_dataclass(result: ob.Result) -> None:
    text = str(result)
    assert "tensor(" not in text and f"{type(result).__name__}(" not in text
    assert len(text.splitlines()) > 2 and max(map(len, text.splitlines())) < 400
    assert repr(result) == text


def test_a_notebook_gets_the_same_numbers_as_html(result: ob.Result) -> None:
    html = result._repr_html_()
    HTMLParser().feed(html)
    assert html.count("<table>") == html.count("</table>") == sum(isinstance(i, Table) for i in result.record().items)
    assert "<script" not in html


def test_every_figure_is_drawn_on_new_axes_and_on_ones_of_a_user(result: ob.Result) -> None:
    import matplotlib.pyplot as plt

    figures = [item for item in result.record().items if isinstance(item, Figure)]
    assert figures, f"{type(result).__name__} has no picture"
    for figure in figures:
        drawn = result.plot(figure=figure.name)
        axes = drawn if isinstance(drawn, list) else [drawn]
        assert len(axes) == len(figure.panels)
        assert all(place.has_data() for place in axes)
        assert all(callable(place.figure.savefig) for place in axes)
        _, given = plt.subplots(1, len(figure.panels), squeeze=False)
        again = result.plot(ax=given[0, 0] if len(figure.panels) == 1 else given, figure=figure.name)
        assert (again if isinstance(again, list) else [again]) == list(given.flat)
        plt.close("all")


def test_every_table_is_a_data_frame(result: ob.Result) -> None:
    for item in result.record().items:
        if isinstance(item, Table):
            frame = result.to_dataframe(item.name)
            assert len(frame) == len(item.rows)
            assert [column.name for column in item.columns] == [c for c in frame.columns if c in {
                column.name for column in item.columns}]  # fmt: skip


def test_the_record_is_read_back(result: ob.Result, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    if isinstance(result, ob.Population | ob.Posterior | ob.Masks):  # their files hold tensors
        ob.reporting.write_record(result.record(), path)
    else:
        assert result.save(path) == path
    assert read_record(path) == result.record()
    assert json.loads(path.read_text())["record"]["values"]


def test_a_wrong_name_lists_the_right_ones(result: ob.Result) -> None:
    with pytest.raises(ob.errors.InputError, match="one of '"):
        result.plot(figure="nothing")
    with pytest.raises(ob.errors.InputError, match="one of '"):
        result.to_dataframe("nothing")


def test_results_share_a_page(result: ob.Result, tmp_path: Path) -> None:
    page = ob.report(tmp_path / "page", result, result, title="Two of a kind", figures=False)
    text = page.read_text()
    assert "Two of a kind" in text and text.count('class="question"') == 2


def test_a_page_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ob.errors.InputError, match="found a str as result 0"):
        ob.report(tmp_path, "barrier")  # type: ignore[arg-type]


def test_a_saved_symmetry_is_read_like_its_json(tmp_path: Path) -> None:
    found = symmetry()
    text = found.save(tmp_path / "symmetry.json").read_text()
    assert ob.Symmetry.from_json(text) == ob.Symmetry.from_json(found.to_json()) == found
    with pytest.raises(ob.errors.SymmetryError, match="no Symmetry"):
        ob.Symmetry.from_json(barrier().save(tmp_path / "barrier.json").read_text())


def test_masses_by_tensor_add_up_to_those_of_the_networks() -> None:
    model = nn.Sequential(nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.Linear(24, 2))
    found = ob.discover(model, torch.randn(2, 1, 8))
    population = ob.Population.from_models([model, model])
    for options in ({}, {"biases": False}):
        balanced = ob.balance(population, found, **options)
        single = ob.balance(model.state_dict(), found, **options)
        total = torch.stack(list(balanced.layers.values())).sum(0)
        assert torch.allclose(total[:, 0], balanced.mass_before) and torch.allclose(total[:, 1], balanced.mass_after)
        assert torch.allclose(torch.stack(list(single.layers.values())).sum(0), total[:1])


def test_long_tables_are_cut_in_print_and_whole_in_a_data_frame() -> None:
    many = ob.align(networks(40), symmetry(), reference="first")
    text, frame = str(many), many.to_dataframe("members")
    assert '... and 10 more rows: to_dataframe("members") has all' in text and len(frame) == 40
    assert frame["squared distance"].is_monotonic_decreasing  # the largest are printed
    wide = nn.Sequential(*[layer for _ in range(35) for layer in (nn.Linear(2, 2), nn.Tanh())])
    found = ob.discover(wide, torch.zeros(1, 2))
    assert "... and 4 smaller spaces" in str(found) and len(found.to_dataframe()) == 34
    figure = next(item for item in found.record().items if isinstance(item, Figure))
    assert len(figure.panels[0].x.names) == 20 and "20 largest of 34" in figure.caption


def test_a_population_is_printed_without_reading_its_weights(tmp_path: Path) -> None:
    path = networks(3).save(tmp_path / "population")
    population = ob.Population.open(path)
    for shard in path.glob("*.safetensors"):
        shard.write_bytes(b"")
    assert "Population of 3 networks" in str(population) and "<table>" in population._repr_html_()


def test_titles_tell_results_of_one_kind_apart(tmp_path: Path) -> None:
    one = barrier()
    text = ob.report(tmp_path / "page", {"before": one, "after": one}, figures=False).read_text()
    assert ">before</h2>" in text and ">after</h2>" in text and "before: The loss rises" in text
    with pytest.raises(ob.errors.InputError, match="folder of the page first"):
        ob.report(one, one)  # type: ignore[arg-type]
    with pytest.raises(ob.errors.InputError, match="figure='path'"):
        one.plot("path")


def test_sentences_of_a_page_say_whose_they_are(tmp_path: Path) -> None:
    text = ob.report(tmp_path / "page", ob.fit(networks()), ob.fit(networks()), networks(), figures=False).read_text()
    for title in ("Posterior", "Posterior (2)", "Population of 6 networks"):
        assert f">{title}</h2>" in text and f"<li>{title}: " in text


def test_scores_are_in_the_glossary_of_the_page(tmp_path: Path) -> None:
    found = ob.evaluate(MODEL, networks(), DATA, ood=3 * INPUTS, n_resamples=2)
    glossary = ob.report(tmp_path / "page", found, figures=False).read_text().split("Glossary</h2>")[1]
    names = [*found.in_distribution, *found.detection, *found.detection["msp"]]
    for name in names:
        assert f"<dt>{name.replace('_', ' ')}</dt>" in glossary
    assert "accuracy" in names and "energy" in names and "fpr95_out" in names


def test_many_tensors_are_rows_of_a_map_and_few_are_outlines() -> None:
    few, many = (ob.Population.from_stacked({f"w{n}": torch.randn(4, 9) for n in range(count)}) for count in (3, 5))
    panels = [next(item for item in one.record().items if isinstance(item, Figure)).panels[0] for one in (few, many)]
    assert [panel.kind for panel in panels] == ["histogram", "heat"]
    assert len(panels[1].grid) == len(panels[1].y.names) == 5
    assert all(max(filter(None, row)) == 1.0 for row in panels[1].grid)


def test_counts_have_no_ticks_between_whole_numbers() -> None:
    import matplotlib.pyplot as plt

    axes = ob.align(networks(5), symmetry()).plot(figure="sweeps")
    assert all(float(tick).is_integer() for tick in axes.get_xticks())
    plt.close("all")


def test_networks_and_posteriors_saved_as_json_are_records(tmp_path: Path) -> None:
    population = networks()
    for number, result in enumerate((population, ob.fit(population))):
        path = result.save(tmp_path / f"{number}.json")
        assert read_record(path) == result.record()


def test_an_alignment_is_no_population_but_says_where_it_is() -> None:
    symmetry = ob.discover(MODEL, INPUTS[:2])
    aligned = ob.align(networks(), symmetry)
    with pytest.raises(ob.errors.InputError, match=r"as alignment\.population"):
        ob.diagnose(MODEL, aligned, INPUTS)  # type: ignore[arg-type]
    population = ob.Population.from_stacked(networks(8).stacked(), chain=torch.arange(8) // 4)
    moved = ob.align(population, symmetry)
    assert ob.diagnose(MODEL, population, INPUTS, aligned=moved).aligned
