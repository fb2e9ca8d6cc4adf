"""Words that are no paths: patterns open like folders, in natural order, and a path that exists means itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from onebasin.cli.main import main
from onebasin.errors import InputError, SpecError, StorageError
from onebasin.population.archive import write_archives
from onebasin.population.hub import Address
from onebasin.population.names import natural_key
from onebasin.population.population import Population


def put(path: Path, number: int, size: int = 1) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {"w": torch.full((size,), float(number))}
    torch.save(state, path) if path.suffix == ".pt" else save_file(state, path)
    return path


def values(where: Path | str) -> list[float]:
    return Population.open(where).tensor("w")[:, 0].tolist()


def test_a_pattern_opens_in_natural_order(tmp_path: Path) -> None:
    for number in (10, 9, 1, 100):
        put(tmp_path / f"run{number}" / "best.safetensors", number)
        put(tmp_path / f"run{number}" / "last.safetensors", -number)
    assert values(f"{tmp_path}/*/best.safetensors") == [1, 9, 10, 100]
    assert values(f"{tmp_path}/run1*/best.safetensors") == [1, 10, 100]
    assert values(tmp_path / "**" / "best.safetensors") == [1, 9, 10, 100]
    found = Population.open(f"{tmp_path}/run?/*.safetensors")
    assert found.tensor("w")[:, 0].tolist() == [1, -1, 9, -9]
    assert found.provenance["source"] == f"{tmp_path}/run?/*.safetensors"
    assert found.provenance["files"] == [f"run{n}/{name}.safetensors" for n in (1, 9) for name in ("best", "last")]


def test_a_pattern_may_match_anything_that_opens(tmp_path: Path) -> None:
    put(tmp_path / "a1.pt", 1)
    population = Population.from_stacked({"w": torch.tensor([[2.0], [3.0]])}, chain=[4, 5])
    population.save(tmp_path / "a2")
    (archive,) = write_archives(population, tmp_path, "x-y", dtype=None)
    archive.rename(tmp_path / "a3.tgz")
    put(tmp_path / "a4" / "one.safetensors", 6)
    found = Population.open(f"{tmp_path}/a*")
    assert found.tensor("w")[:, 0].tolist() == [1, 2, 3, 2, 3, 6]
    assert found.chain is not None and found.chain.tolist() == [-1, 4, 5, -1, -1, -1]


def test_a_path_that_exists_means_itself(tmp_path: Path) -> None:
    put(tmp_path / "net[1].safetensors", 7)
    put(tmp_path / "net1.safetensors", 1)
    assert values(tmp_path / "net[1].safetensors") == [7]
    assert values(tmp_path / "net[12].safetensors") == [1]


def test_what_cannot_be_found_or_differs_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"match .*\*\.pt, found none"):
        Population.open(tmp_path / "*.pt")
    with pytest.raises(StorageError, match="does not exist"):
        Population.open(tmp_path / "none.pt")
    put(tmp_path / "1" / "a.safetensors", 1)
    put(tmp_path / "2" / "a.safetensors", 2, size=3)
    with pytest.raises(SpecError, match=r"2/a\.safetensors, compared with a\.safetensors"):
        Population.open(tmp_path / "*" / "a.safetensors")
    with pytest.raises(SpecError, match=r"1/a\.safetensors, compared with the given spec"):
        Population.open(tmp_path / "*" / "a.safetensors", spec={"w": torch.zeros(3)})
    (tmp_path / "2" / "a.safetensors").write_text("a note")
    with pytest.raises(StorageError, match=r"2/a\.safetensors"):
        Population.open(tmp_path / "*" / "a.safetensors")


@given(st.lists(st.integers(0, 10**30), unique=True, max_size=20))
def test_numbers_sort_by_value(numbers: list[int]) -> None:
    paths = [Path(f"run{number}", "net.pt") for number in numbers]
    assert sorted(paths, key=natural_key) == [Path(f"run{number}", "net.pt") for number in sorted(numbers)]


@given(st.permutations(["a", "a0", "a00", "a1", "a01", "a1b", "a2", "a10", "b", "9" * 5000]))
def test_the_order_does_not_depend_on_the_order_of_the_folder(names: list[str]) -> None:
    expected = ["9" * 5000, "a", "a0", "a00", "a01", "a1", "a1b", "a2", "a10", "b"]
    assert [path.name for path in sorted(map(Path, names), key=natural_key)] == expected


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("hf://a/b", Address("model", "a/b")),
        ("hf://models/a/b/c", Address("model", "a/b", path="c")),
        ("hf://a/b@v1.0/c/d.safetensors", Address("model", "a/b", "v1.0", "c/d.safetensors")),
        ("hf://datasets/a/b@refs/pr/3/c/", Address("dataset", "a/b", "refs/pr/3", "c")),
        ("hf://datasets/a/b@one%2Ftwo/*/c", Address("dataset", "a/b", "one/two", "*/c")),
    ],
)
def test_addresses(text: str, address: Address) -> None:
    assert Address.parse(Path(text)) == address
    assert Address.parse(Path(str(address).replace("one/two", "one%2Ftwo"))) == address


@pytest.mark.parametrize("text", ["hf://a", "hf://", "hf:/", "hf://datasets/a", "hf:///"])
def test_half_an_address_is_explained(text: str) -> None:
    with pytest.raises(InputError, match="hf://OWNER/NAME"):
        Population.open(text)


def test_verbs_take_patterns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model.py"
    model.write_text(
        "import torch\nfrom torch import nn\n"
        "def net():\n    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))\n"
        "def example_input():\n    return torch.zeros(2, 2)\n"
    )
    generator = torch.Generator().manual_seed(0)
    for run in range(4):
        shapes = {"0.weight": (4, 2), "0.bias": (4,), "2.weight": (2, 4), "2.bias": (2,)}
        path = tmp_path / f"run{run}" / "net.safetensors"
        path.parent.mkdir()
        save_file({name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}, path)
    pattern, named = f"{tmp_path}/run*/net.safetensors", ["--model", f"{model}:net"]
    data = tmp_path / "data.py"
    data.write_text("import torch\ndef data():\n    return torch.eye(2), torch.arange(2)\n")
    commands = [
        ["align", pattern, "-o", tmp_path / "aligned", *named],
        ["merge", pattern, "-o", tmp_path / "merged.safetensors", *named],
        ["compact", pattern, "-o", tmp_path / "q.safetensors", *named],
        ["compare", f"{pattern}#0", f"{pattern}#3", *named],
        ["compare", pattern, tmp_path / "aligned", *named],
        ["evaluate", f"{model}:net", pattern, f"{data}:data", "--n-resamples", "20"],
        ["prune", f"{model}:net", f"{pattern}#1", "--keep", "0.5"],
    ]
    for command in commands:
        code = main(list(map(str, command)))
        assert code == 0, (command, capsys.readouterr().err)
    assert main(["compare", f"{pattern}#0", f"{tmp_path}/none*#3", *named]) == StorageError.exit_code
