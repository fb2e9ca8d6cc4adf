"""`reproduce` on a user's own model, data, methods and settings."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.cli.main import main
from onebasin.errors import InputError, ModelError
from onebasin.reporting import Figure, Number, Record, Table, read_record
from onebasin_papers import compact, study, symmetry
from onebasin_papers.compact.networks import Setting, setting
from onebasin_papers.own import changed_settings, own_problem, own_titles, without_published
from onebasin_papers.problems import Own, OwnArchitecture, Problem, digits_problem
from onebasin_papers.study import LEFT_OUT, Workspace, answer

ROOT = Path(__file__).resolve().parent.parent.parent
Run = Callable[..., tuple[int, str, str]]
PAPERS: dict[str, ModuleType] = {"compact": compact, "symmetry": symmetry}
SET = {
    "compact": "transpositions.planted=1,3,6 transpositions.runs=2 transpositions.epochs=1 dynamics.pairs=2 "
    "dynamics.every=1 transpositions.rates=1,10 table.seeds=2 table.hmc_runs=2 table.chains=2 table.warmup=2 "
    "table.draws=4 table.leapfrog=2 table.members=2 width.widths=2,4 table.ensemble_epochs=1 table.vi_epochs=1 "
    "table.posterior_draws=4 table.refine_steps=1 table.workers=1",
    "symmetry": "table.reference_networks=6 table.epochs=1 table.groups=2 table.runs=2 table.singles=1 table.draws=6 "
    "table.chains=4 table.chain_draws=5 table.warmup=2 table.leapfrog=2 table.vi_epochs=1 table.swag_collect=3 "
    "table.sghmc_warmup=1 table.workers=1 table.permutations=19 mass.mass_decays=0,0.005 mass.mass_networks=2 "
    "mass.mass_epochs=1 order.order_networks=2 order.order_rates=0.2,0.002 order.order_epochs=2 "
    "table.members=2 implicit.rank_one=3 implicit.refine_steps=2",
}


@dataclass(frozen=True)
class Whole:
    """A whole run of a paper on the example's problem, and the settings that each part has read."""

    paper: str
    file: Path
    folder: Path
    record: Record
    read: dict[str, set[str]]

    def words(self, **others: str) -> list[str]:
        given = {"model": f"{self.file}:cnn", "data": f"{self.file}:images", "limit": "40"}
        given |= {"method": f"{self.file}:Langevin", "output": str(self.folder)} | others
        options = [word for name, value in given.items() for word in (f"--{name}", value)]
        return ["reproduce", self.paper, *options, *(w for text in SET[self.paper].split() for w in ("--set", text))]

    def table(self, name: str) -> dict[str, tuple[Any, ...]]:
        found = next(item for item in self.record.items if item.name == name)
        assert isinstance(found, Table)
        return {" ".join(cell for cell in row[:2] if isinstance(cell, str)): row for row in found.rows}


@pytest.fixture(scope="module", params=PAPERS)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    place = tmp_path_factory.mktemp("own")
    file = shutil.copy(ROOT / "examples" / "own_problem.py", place / "mine.py")
    read: dict[str, set[str]] = {}
    names: set[str] = set()
    settings = type(PAPERS[request.param].preset_settings("quick", None))
    known, look = {one.name for one in fields(settings)}, object.__getattribute__

    def watched(self: Any, name: str) -> Any:
        if name in known:
            names.add(name)
        return look(self, name)

    def alone(part: study.Part, workspace: Workspace[Any]) -> Any:
        workspace._cache.clear()  # so that nothing an earlier part has read is hidden
        names.clear()
        section = answer(part, workspace)
        read[part.name] = set(names)
        return section

    run = Whole(request.param, Path(file), place / "run", None, read)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "__getattribute__", watched)
        patch.setattr(study, "answer", alone)
        patch.syspath_prepend(str(place))
        assert main(run.words()) == 0
    return replace(run, record=read_record(run.folder))


def test_the_record_says_whose_problem_it_is(whole: Whole) -> None:
    record = whole.record
    assert "on an own problem: cnn on images" in record.title
    assert record.summary[0].startswith("This is not the paper's problem: cnn (666 weights) on images, 40 training")
    assert "Langevin" in record.summary[1] and "table.chains" not in record.summary[0]
    assert record.settings["model"].startswith(f"{whole.file}:cnn ")  # type: ignore[union-attr]
    assert [section.name for section in record.sections] == [part.name for part in PAPERS[whole.paper].STUDY.parts]
    left = [section.name for section in record.sections if section.text[0].startswith(LEFT_OUT)]
    assert left == ([] if whole.paper == "compact" else ["two-neurons"])
    assert all(section.claims for section in record.sections if section.name not in left)


def test_nothing_published_stands_beside_ours(whole: Whole) -> None:
    prose = [*whole.record.summary[1:], whole.record.title]
    for section in whole.record.sections:
        prose += [*section.text, *(claim.caveat for claim in section.claims)]
        assert not any(claim.published for claim in section.claims)
        for item in section.items:
            if isinstance(item, Table):
                prose += [item.title, item.note]
                assert all(cell.published is None for row in item.rows for cell in row if isinstance(cell, Number))
            else:
                prose.append(item.caption)
                names = [one.name for panel in item.panels for one in (*panel.series, *panel.rules)]
                assert not any("published" in name for name in (*names, *(panel.title for panel in item.panels)))
                assert item.panels
    told = [text for text in prose if re.search(r"784-512-10|CIFAR|SVHN|[Pp]ublished (values|:)|\(published", text)]
    assert told == []


def test_parts_read_the_settings_that_they_list(whole: Whole) -> None:
    """What `--set part.key` promises: every key is read, and nothing else is."""
    for part in PAPERS[whole.paper].STUDY.parts:
        read = whole.read[part.name] - {"preset", "data_dir", "architecture"}
        if part.name == "two-neurons":  # left out here
            continue
        assert read <= set(part.keys), part.name
        made_before = {
            "units",
            "vi_epochs",
            "vi_rate",
        }  # with the model, and by earlier parts
        assert set(part.keys) - read <= made_before, part.name


def test_the_own_method_is_a_row_of_every_table_that_compares_methods(whole: Whole) -> None:
    file = ["own_problem", "own-langevin-0" if whole.paper == "compact" else "own-langevin-runs"]
    draws = ob.Population.open(whole.folder / "networks" / file[1])
    model, (inputs, classes) = example_problem()
    if whole.paper == "compact":
        rows = whole.table("compact-table")
        assert {"Langevin samples own", "Langevin q_d own", "Langevin q_r own"} <= set(rows)
        second = ob.Population.open(whole.folder / "networks" / "own-langevin-1")
        right = [accuracy(model, one, inputs, classes) for one in (draws, second)]
        assert rows["Langevin samples own"][5].value == pytest.approx(100 * sum(right) / 2)
        assert {"Langevin q_d", "Langevin q_r"} <= set(whole.table("sigma-table"))
        assert {"Langevin q_r magnitude", "Langevin q_d least uncertain kept (paper)"} <= set(
            whole.table("pruning-table")
        )
        panels = [panel.title for item in whole.record.items if isinstance(item, Figure) for panel in item.panels]
        assert {"Langevin", "mean of Langevin"} <= set(panels)
    else:
        rows = whole.table("methods")
        first = [draws[draws.chain == run] for run in (0, 2)]  # the first run of each group, measured by itself
        right = [accuracy(model, one, inputs, classes) for one in first]
        assert rows["Langevin one mode"][5].value == pytest.approx(100 * sum(right) / 2)
        assert rows["Langevin one mode"][2] == "1 x 6" and rows["Langevin multi mode"][2] == "2 x 3"
        assert {"Langevin one mode", "Langevin multi mode"} <= set(whole.table("hmc"))
        assert "Langevin" in whole.table("runs") and "Langevin, each run" in " ".join(whole.table("marginals-tests"))
        forms = next(item for item in whole.record.items if item.name == "forms")
        assert isinstance(forms, Table) and "Langevin" in [column.name for column in forms.columns]
        verdicts = [claim.found for claim in whole.record.claims]
        assert not any("Langevin" in found for found in verdicts)  # claims are about the paper's methods


def example_problem() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """The example's network and its 40 test images, found without the code under test."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("mine", ROOT / "examples" / "own_problem.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["mine"] = module
    spec.loader.exec_module(module)
    del sys.modules["mine"]
    _, (inputs, classes) = ob.data.split(*module.images(), test=0.25, seed=0)
    rows = [len(classes) * place // 40 for place in range(40)]
    return module.cnn().eval(), (inputs[rows], classes[rows])


def accuracy(model: nn.Module, draws: ob.Population, inputs: torch.Tensor, classes: torch.Tensor) -> float:
    averages = torch.stack(
        [torch.func.functional_call(model, draws.member(k), inputs).softmax(1) for k in range(len(draws))]
    )
    return float((averages.mean(0).argmax(1) == classes).double().mean())


def test_the_same_call_goes_on_and_another_is_refused(whole: Whole, run: Run, restored_imports: None) -> None:
    before = (whole.folder / "record.json").read_bytes()
    code, out, _ = run(*whole.words())
    assert code == 0 and out.splitlines()[-1] == str(whole.folder / "report.html")
    assert read_record(whole.folder).sections == whole.record.sections
    others = [
        (whole.words(limit="41"), "data"),
        (whole.words(method="mclmc"), "method"),
        ([*whole.words(), "--set", "table.prior=2"], "prior 1.0 instead of 2.0, set"),
    ]
    for words, name in others:
        code, _, err = run(*words)
        assert code == InputError.exit_code and name in err and "other settings" in err and err.count("\n") == 1
    source = whole.file.read_text()
    whole.file.write_text(source + "# another\n")
    code, _, err = run(*whole.words())
    whole.file.write_text(source)
    assert code == InputError.exit_code and re.search(r"\(method .*mine.py:Langevin \w+ instead of .*, model ", err)
    assert (whole.folder / "record.json").read_bytes() == before


def test_a_command_without_own_options_is_what_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    """The plan, the title and the command of the records in docs/results, which older versions made."""
    for paper, module in PAPERS.items():
        stored = json.loads((ROOT / "docs" / "results" / f"{paper}.json").read_text(encoding="utf-8"))["record"]
        seen: list[Any] = []

        def pretend(given: Any, workspace: Any, command: str, seen: list[Any] = seen, **options: Any) -> Record:
            seen.extend((workspace.to_record(), command, study.own_title(given.title, workspace.own)))
            return read_record(ROOT / "docs" / "results" / f"{paper}.json")  # noqa: B023 - called at once

        monkeypatch.setattr("onebasin.cli.work.reproduce.run_study", pretend)
        assert run("reproduce", paper, "-o", tmp_path / paper)[0] == 0
        assert seen == [stored["settings"], stored["command"], stored["title"]]
        assert study.own_summary(Own()) == ()
        assert module.STUDY.name == paper


WRONG = {
    "chains=2": "expected --set PART.KEY=VALUE, found 'chains=2': write --set table.chains=2",
    "table.chains": "expected --set PART.KEY=VALUE, found 'table.chains'",
    "tabel.chains=2": "expected a part out of transpositions, dynamics, .*, found 'tabel': did you mean table.chains?",
    "table.chain=2": "table has the settings units, seeds, .*, found 'chain': did you mean table.chains?",
    "sigma.widths=2": "sigma has the settings .*, found 'widths': it is a setting of width, write width.widths",
    "table.draws=many": "expected a whole number of at least 4 for table.draws, found 'many': write table.draws=100",
    "table.draws=3": "expected a whole number of at least 4 for table.draws, found '3'",
    "table.draws=4.5": "expected a whole number of at least 4 for table.draws",
    "table.prior=nan": "expected a number of at least 0 for table.prior, found 'nan'",
    "transpositions.retrained=maybe": "expected true or false for transpositions.retrained, found 'maybe'",
    "width.widths=": "expected numbers with commas for width.widths, found ''",
    "width.widths=8,x": "expected a whole number of at least 2 for width.widths, found 'x'",
    "transpositions.planted=1,64": "expected 1 to 63 planted transpositions, .* found 1 to 64",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_setting_is_one_sentence(text: str, run: Run, tmp_path: Path) -> None:
    code, _, err = run("reproduce", "compact", "--set", text, "-o", tmp_path / "run")
    assert code == InputError.exit_code and err.count("\n") == 1
    assert re.search(WRONG[text].replace("?", r"\?").replace("..*", r".*"), err), err
    assert not (tmp_path / "run").exists()


def test_settings_have_one_value_for_all_parts() -> None:
    parts, quick = {part.name: part.keys for part in compact.STUDY.parts}, compact.preset_settings("quick", None)
    texts = [
        "table.chains=2",
        "sigma.chains=2",
        "width.widths=4,8",
        "table.vi_rate=1e-2",
        "transpositions.retrained=no",
    ]
    settings, changed = changed_settings(quick, parts, texts, compact.LEAST)
    assert settings == replace(quick, chains=2, widths=(4, 8), vi_rate=0.01, retrained=False)
    assert list(changed) == ["chains", "widths", "vi_rate", "retrained"]
    with pytest.raises(InputError, match="two values for chains, 2 and 3"):
        changed_settings(quick, parts, ["table.chains=2", "sigma.chains=3"], compact.LEAST)


@pytest.mark.parametrize("paper", PAPERS)
def test_every_setting_is_listed_with_its_default(paper: str, run: Run) -> None:
    code, out, _ = run("reproduce", paper, "--list")
    settings = PAPERS[paper].preset_settings("quick", None)
    parts = PAPERS[paper].STUDY.parts
    assert code == 0
    names = {one.name for one in fields(settings)} - {"preset", "data_dir", "architecture"}
    assert {key for part in parts for key in part.keys} == names  # every setting can be set
    for part in parts:
        assert all(re.search(rf"^ +{part.name}\.{key}=\S+( +\w|$)", out, re.MULTILINE) for key in part.keys)
    assert "--preset full" not in out and re.search(r"table\.prior=1 +standard deviation", out)


OPTIONS = {
    ("compact", "--ood", "digits"): "expected --data with --ood",
    ("compact", "--limit", "50"): "expected --data with --limit",
    ("compact", "--data", "digits", "--ood", "digits"): "compact has no foreign inputs",
    ("compact", "--data", "digits:test"): "found digits:test, one part of them: write digits",
    ("compact", "--data", "digits", "--preset", "full"): "expected --model with --data and --preset full",
    ("compact", "--model", "m.py:nothing"): "m.py has no nothing",
    ("compact", "--model", "m.py:narrow"): r"takes inputs of shape \(2, 64\) from digits, found that it fails",
    ("compact", "--model", "m.py:few"): r"outputs \(2, 10\), one per class of digits, found \(2, 3\)",
    ("compact", "--model", "m.py:linear"): "hidden units that can be permuted, found none in linear",
    ("symmetry", "--model", "m.py:linear"): "hidden units that can be permuted, found none in linear",
    ("compact", "--model", "m.py:fixed", "--set", "table.units=4"): "a factory with an argument width",
    ("compact", "--data", "m.py:values"): "expected class numbers as targets in values, found values",
    ("symmetry", "--data", "digits", "--ood", "m.py:values"): r"inputs of the shape \(64,\) of digits, found \(3,\)",
    ("compact", "--method", "m.py:fixed"): "a method with a name and a plan",
    ("compact", "--method", "hmc", "--method", "hmc"): "found the method hmc twice",
    ("symmetry", "--set", "mass.mass_decays=0.1"): "expected 0 and a weight decay above it",
    ("symmetry", "--set", "table.laplace_structure=round"): "round",
}  # fmt: skip
MODELS = """
import torch
from torch import nn


def narrow():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 10))


def few():
    return nn.Sequential(nn.Linear(64, 4), nn.ReLU(), nn.Linear(4, 3))


def linear():
    return nn.Linear(64, 10)


def fixed():
    return nn.Sequential(nn.Linear(64, 5), nn.Tanh(), nn.Linear(5, 10))


def values():
    return torch.rand(20, 3), torch.rand(20)


class Broken:
    name = "broken"

    def plan(self, target):
        raise KeyError("nothing here")
"""


@pytest.mark.parametrize("options", OPTIONS, ids=" ".join)
def test_a_wrong_option_is_one_sentence_before_any_work(
    options: tuple[str, ...], run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restored_imports: None
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("m.py").write_text(MODELS)
    code, _, err = run("reproduce", *options, "-o", "run")
    assert code in (InputError.exit_code, ModelError.exit_code) and err.count("\n") == 1, err
    assert re.search(OPTIONS[options], err), err
    assert not Path("run").exists()


def test_a_method_that_fails_is_named(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restored_imports: None
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("m.py").write_text(MODELS)
    words = [
        "--method",
        "m.py:Broken",
        "--only",
        "table",
        "--set",
        "table.ensemble_epochs=1",
        "--set",
        "table.members=2",
    ]
    code, _, err = run("reproduce", "compact", *words, "-o", "run")
    assert code == ModelError.exit_code
    assert "the method broken raised KeyError: 'nothing here'" in err


# --- pieces -----------------------------------------------------------------------------------------------------------


def own(model: nn.Module, width: int | None = None) -> Own:
    dataset = ob.data.load("digits")
    return own_problem(dataset, lambda features, classes: OwnArchitecture("it", lambda width: model, width), limit=20)


def test_parts_that_a_model_does_not_allow_are_left_out_with_the_reason(tmp_path: Path) -> None:
    bounded = own(nn.Sequential(nn.Linear(64, 5), nn.Tanh(), nn.Linear(5, 10)))
    settings = compact.own_settings(compact.preset_settings("quick", None), bounded, ())
    assert (settings.units, settings.planted[-1], bounded.widened) == (5, 4, None)
    width = next(part for part in compact.STUDY.parts if part.name == "width")
    section = answer(width, Workspace(settings, 0, tmp_path, own=bounded))
    assert section.text == (
        "Left out: the model has no width to change; a factory with an argument width, as in cnn(width=8), would have "
        "one.",
    )
    sizes = symmetry.own_settings(symmetry.preset_settings("quick"), bounded, ())
    assert (sizes.examples, sizes.test_examples, sizes.architecture) == (20, 20, "own")
    mass = next(part for part in symmetry.STUDY.parts if part.name == "mass")
    assert "may be rescaled" in answer(mass, Workspace(sizes, 0, tmp_path, own=bounded)).text[0]


def test_planted_transpositions_are_dealt_to_all_layers_exactly(tmp_path: Path) -> None:
    deep = nn.Sequential(nn.Linear(64, 4), nn.ReLU(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 10))
    here = setting(Workspace(compact.preset_settings("quick", None), 0, tmp_path, own=own(deep)))
    assert isinstance(here, Setting) and here.most == 3 + 2
    for swaps in range(6):
        shares = set()
        for seed in range(20):
            found = ob.transpositions(here.planted(swaps, torch.Generator().manual_seed(seed)), here.symmetry)
            assert int(found.total) == swaps
            shares.add(tuple(int(count) for count in found.spaces.values()))
        assert len(shares) == (1 if swaps in (0, 5) else 2 if swaps in (1, 4) else 3)


def test_examples_are_cut_evenly_and_foreign_inputs_are_shuffled() -> None:
    targets = torch.arange(100) // 10  # sorted by class, as files often are
    inputs = torch.rand(100, 3, 2)
    dataset = ob.data.Dataset("sorted", (inputs, targets), (inputs, targets), 10)
    flat = OwnArchitecture("it", lambda width: nn.Linear(6, 10), is_flat=True)
    problem = own_problem(dataset, lambda features, classes: flat, limit=20).problem
    assert isinstance(problem, Problem)
    assert problem.train[1].bincount().tolist() == [2] * 10
    assert problem.test[0].shape == (20, 6)
    assert problem.outside_name == "test inputs with their entries shuffled"
    assert torch.equal(problem.outside.sort(1).values, problem.test[0].sort(1).values)
    assert not torch.equal(problem.outside, problem.test[0])


def test_methods_are_named_by_themselves_unless_the_name_is_taken() -> None:
    names = own_titles([("a.py:Long", ob.HMC()), ("mclmc", ob.MCLMC()), ("b.py:Other", ob.MCLMC())], compact.ROWS)
    assert list(names) == ["hmc (Long)", "mclmc", "mclmc (Other)"]


def test_published_numbers_go_and_ours_stay() -> None:
    stored = read_record(ROOT / "docs" / "results" / "compact.json")
    for section in stored.sections:
        kept = without_published(section)
        for before, after in zip(section.items, kept.items, strict=True):
            if isinstance(before, Table) and isinstance(after, Table):
                for old, new in zip(before.rows, after.rows, strict=True):
                    for a, b in zip(old, new, strict=True):
                        assert b == (replace(a, published=None) if isinstance(a, Number) else a)
        assert len(kept.text) == len(section.text) and all(kept.text)
    assert digits_problem(4).described == ""
