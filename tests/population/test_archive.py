"""Archives of networks: the published layout, and archives that should not be trusted."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from torch import nn

from onebasin.errors import InputError, OnebasinError, SpecError, StorageError, UnsafeFileError
from onebasin.population.archive import networks_in, write_archives
from onebasin.population.population import Population
from onebasin.storage.tar_stream import FREE, RATIO

STATE = {"fc.weight": torch.arange(6.0).reshape(2, 3), "fc.bias": torch.ones(2)}


def networks(members: int, seed: int = 0) -> Population:
    generator = torch.Generator().manual_seed(seed)
    return Population.from_stacked(
        {
            "conv.weight": torch.randn(members, 2, 1, 3, 3, generator=generator),
            "norm.num_batches_tracked": torch.arange(members),
            "linear.bias": torch.randn(members, 4, generator=generator),
        }
    )


def archive(path: Path, *files: tuple[str, bytes], change: Callable[[tarfile.TarInfo], None] | None = None) -> Path:
    with tarfile.open(path, "w:gz" if path.suffix == ".tgz" else "w") as made:
        for name, content in files:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            if change is not None:
                change(member)
            made.addfile(member, io.BytesIO(content))
    return path


@settings(max_examples=15, deadline=None)
@given(members=st.integers(1, 25), per=st.integers(1, 9), first=st.integers(0, 1200), half=st.booleans())
def test_what_is_written_is_read_in_order(
    tmp_path_factory: pytest.TempPathFactory, members: int, per: int, first: int, half: bool
) -> None:
    folder, population = tmp_path_factory.mktemp("archives"), networks(members)
    dtype = torch.float16 if half else None
    paths = write_archives(population, folder, "toy-net", per_archive=per, dtype=dtype, first=first)
    assert len(paths) == -(-members // per)
    found = Population.open(folder / "models" / "toy-net", spec=population[:1].to(dtype=dtype).spec)
    for name, tensor in found.stacked().items():
        expected = population.tensor(name)
        assert torch.equal(tensor, expected.to(dtype) if dtype and expected.is_floating_point() else expected)


def test_the_layout_is_the_published_one(tmp_path: Path) -> None:
    paths = write_archives(networks(5), tmp_path, "mnist-optunet", per_archive=3)
    assert [str(path.relative_to(tmp_path)) for path in paths] == [
        "models/mnist-optunet/mnist-optunet-0-2.tgz",
        "models/mnist-optunet/mnist-optunet-3-4.tgz",
    ]
    with tarfile.open(paths[1]) as packed:
        assert packed.getnames() == [f"mnist-optunet-3-4/mnist-optunet-{number}.safetensors" for number in (3, 4)]
    assert {tensor.dtype for _, state in networks_in(paths[0]) for tensor in state.values()} == {
        torch.float16,
        torch.int64,
    }


def test_the_same_networks_give_the_same_bytes(tmp_path: Path) -> None:
    first = write_archives(networks(4), tmp_path / "a", "toy-net")[0].read_bytes()
    assert first == write_archives(networks(4), tmp_path / "b", "toy-net")[0].read_bytes()
    assert first != write_archives(networks(4, seed=1), tmp_path / "c", "toy-net")[0].read_bytes()


def test_numbers_order_networks_and_plain_archives_open_too(tmp_path: Path) -> None:
    files = [(f"nets/net-{number}.safetensors", save({"w": torch.tensor([number])})) for number in (10, 9, 2, 100, 0)]
    for suffix in (".tgz", ".tar"):
        population = Population.open(archive(tmp_path / f"some{suffix}", *files))
        assert population.tensor("w")[:, 0].tolist() == [0, 2, 9, 10, 100]


def test_notes_and_hidden_files_are_passed_over(tmp_path: Path) -> None:
    notes = [("nets/README", b"read me"), ("nets/config.json", b"{}"), ("nets/._0.safetensors", b"mac")]
    assert len(Population.open(archive(tmp_path / "a.tgz", *notes, ("nets/0.safetensors", save(STATE))))) == 1
    with pytest.raises(StorageError, match="found none"):
        Population.open(archive(tmp_path / "b.tgz", *notes))


def test_prefixes_are_stripped(tmp_path: Path) -> None:
    wrapped = {f"model.{name}": value for name, value in STATE.items()}
    path = archive(tmp_path / "a.tgz", ("0.safetensors", save(wrapped)))
    assert set(Population.open(path, spec=STATE).names) == set(STATE)


def test_half_precision_loads_into_the_model(tmp_path: Path) -> None:
    models = [nn.Linear(3, 2) for _ in range(2)]
    population = Population.from_models(models)
    write_archives(population, tmp_path, "a-linear")
    found = Population.open(tmp_path / "models" / "a-linear").to(dtype=torch.float32)
    models[0].load_state_dict(found.member(1))
    rounding = 2**-11  # half the distance of neighbours in half precision, relative
    for name in population.names:
        error = (found.tensor(name) - population.tensor(name)).abs()
        assert bool((error <= rounding * population.tensor(name).abs() + 2**-25).all())


@pytest.mark.parametrize(
    "name", ["/etc/0.safetensors", "../0.safetensors", "a/../../0.safetensors", "C:\\0.safetensors"]
)
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UnsafeFileError, match=r"0\.safetensors"):
        Population.open(archive(tmp_path / "a.tgz", (name, save(STATE))))


@pytest.mark.parametrize(
    ("kind", "word"),
    [
        (tarfile.SYMTYPE, "a link"),
        (tarfile.LNKTYPE, "a link"),
        (tarfile.CHRTYPE, "a device"),
        (tarfile.BLKTYPE, "a device"),
        (tarfile.FIFOTYPE, "a device"),
    ],
)
def test_what_is_no_file_is_refused(tmp_path: Path, kind: bytes, word: str) -> None:
    def change(member: tarfile.TarInfo) -> None:
        member.type, member.linkname, member.size = kind, "/etc/passwd", 0

    with pytest.raises(UnsafeFileError, match=f"weird.safetensors.* is {word}"):
        Population.open(archive(tmp_path / "a.tgz", ("weird.safetensors", b""), change=change))


def test_sparse_files_are_refused(tmp_path: Path) -> None:
    # A kilobyte that claims to be a terabyte of zeros.
    header = tarfile.TarInfo("hole.safetensors")
    header.type, header.size = tarfile.GNUTYPE_SPARSE, 512
    block = bytearray(header.tobuf(tarfile.GNU_FORMAT))
    block[386:410] = b"%011o\0%011o\0" % (0, 512)
    block[483:495] = b"\x80" + (1 << 40).to_bytes(11, "big")
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    path = tmp_path / "a.tar"
    path.write_bytes(bytes(block) + bytes(512) + bytes(1024))
    with pytest.raises(UnsafeFileError, match="sparse"):
        Population.open(path)


@pytest.mark.parametrize("name", ["0.pt", "0.pkl", "train.py", "0.ckpt", "run.sh"])
def test_other_content_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UnsafeFileError, match=name):
        Population.open(archive(tmp_path / "a.tgz", (name, b"\x80\x02.")))


def test_bombs_are_given_up_early(tmp_path: Path) -> None:
    zeros = 4 * (FREE + (1 << 20))
    path = archive(tmp_path / "bomb.tgz", ("0.safetensors", bytes(zeros)))
    assert path.stat().st_size * RATIO < FREE / 2
    with pytest.raises(UnsafeFileError, match="unpacks to far more"):
        Population.open(path)
    with pytest.raises(
        StorageError, match="truncated or corrupt"
    ):  # allowed to unpack it, we see that it is no network
        list(networks_in(path, ratio=1e6))


def test_long_headers_are_bombs_too(tmp_path: Path) -> None:
    # tar reads the header of a long name as a whole, before anybody sees a member.
    header = tarfile.TarInfo("././@LongLink")
    header.type, header.size = tarfile.GNUTYPE_LONGNAME, 4 * FREE
    path = tmp_path / "bomb.tgz"
    with gzip.open(path, "wb") as file:
        file.write(header.tobuf(tarfile.GNU_FORMAT))
        file.write(b"a" * 4 * FREE)
    with pytest.raises(UnsafeFileError, match="unpacks to far more"):
        Population.open(path)


def test_a_declared_header_longer_than_the_file_is_refused(tmp_path: Path) -> None:
    content = (1 << 40).to_bytes(8, "little") + b"{}"
    with pytest.raises(StorageError, match=r"0\.safetensors"):
        Population.open(archive(tmp_path / "a.tgz", ("0.safetensors", content)))


def test_differing_networks_are_named(tmp_path: Path) -> None:
    other = {**STATE, "fc.bias": torch.ones(3)}
    files = (("net-0.safetensors", save(STATE)), ("net-1.safetensors", save(other)))
    with pytest.raises(SpecError, match=r"net-1\.safetensors"):
        Population.open(archive(tmp_path / "a.tgz", *files))
    with pytest.raises(SpecError, match=r"net-0\.safetensors"):
        Population.open(archive(tmp_path / "a.tgz", *files), spec=other)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_no_truncation_goes_unseen(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("cut")
    suffix = data.draw(st.sampled_from([".tgz", ".tar"]))
    files = [(f"{number}.safetensors", save(STATE)) for number in range(3)]
    path = archive(folder / f"a{suffix}", *files)
    whole = path.read_bytes()
    needed = len(whole) if suffix == ".tgz" else 3 * (512 + 512)  # a plain archive ends with padding that may be cut
    path.write_bytes(whole[: data.draw(st.integers(0, needed - 1))])
    with pytest.raises(OnebasinError):
        Population.open(path)


def test_names_are_in_the_order_of_the_files(tmp_path: Path) -> None:
    state = {f"layer{number}.weight": torch.zeros(1) for number in range(40)}
    path = archive(tmp_path / "a.tgz", ("0.safetensors", save(state)), ("1.safetensors", save(state)))
    (tmp_path / "plain.safetensors").write_bytes(save(state))
    assert list(Population.open(path).names) == list(Population.open(tmp_path / "plain.safetensors").names)


@settings(max_examples=60, deadline=None)
@given(place=st.integers(0, 10_000), flip=st.integers(1, 255))
def test_damage_raises_our_errors_or_changes_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, place: int, flip: int
) -> None:
    path = write_archives(networks(3), tmp_path_factory.mktemp("damage"), "toy-net")[0]
    whole, content = Population.open(path).stacked(), bytearray(path.read_bytes())
    content[place % len(content)] ^= flip
    path.write_bytes(bytes(content))
    try:
        found = Population.open(path).stacked()
    except OnebasinError:
        return
    # Some bits say nothing: in the gzip header, and where the packed text may copy its zeros from elsewhere.
    assert list(found) == list(whole)
    assert all(torch.equal(found[name], whole[name]) for name in whole)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    large = Population.from_stacked({"w": torch.tensor([[1.0], [1e6]])})
    with pytest.raises(InputError, match="tensor w of member 1"):
        write_archives(large, tmp_path, "a-b")
    assert not list((tmp_path / "models" / "a-b").iterdir())
    with pytest.raises(InputError, match="at least one"):
        write_archives(large[:0], tmp_path, "a-b")
    for name in ("", "a/b", "..", ".hidden"):
        with pytest.raises(InputError, match="name"):
            write_archives(large, tmp_path, name)


def test_absent_and_foreign_files(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="does not exist"):
        list(networks_in(tmp_path / "no.tgz"))
    (tmp_path / "text.tgz").write_text("this is no archive, but it is long enough to be looked at " * 20)
    with pytest.raises(StorageError, match=r"text\.tgz"):
        Population.open(tmp_path / "text.tgz")
