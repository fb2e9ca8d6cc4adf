"""The doors that are fuzzed."""

from __future__ import annotations

from functools import partial

from safetensors.torch import save_file

from benchmarks import fuzz_doors as doors
from benchmarks.fuzz_doors import Door
from onebasin.posterior.pruning import Masks
from onebasin.state import state_of


def _run_door(name: str, file: str) -> Door:
    return Door(name, f"run/{file}", doors._build_run, doors._use_run, doors.seal, 0.5)


DOORS = [
    Door("shard", "population/shard-00000-aa.safetensors", doors._build_population, doors._use_folder, doors.seal, 1.5),
    Door("manifest", "population/population.json", doors._build_population, doors._use_folder),
    doors._networks_door(
        "safetensors", "n.safetensors", lambda folder: save_file(state_of(doors.network()), folder / "n.safetensors")
    ),
    doors._networks_door("torch file", "n.pt", lambda folder: doors._save_torch(folder / "n.pt", legacy=False)),
    doors._networks_door("old torch file", "n.th", lambda folder: doors._save_torch(folder / "n.th", legacy=True)),
    doors._networks_door("tgz", "a.tgz", partial(doors._build_archive, packed=True)),
    doors._networks_door("tar", "a.tar", partial(doors._build_archive, packed=False)),
    Door("posterior", "posterior.safetensors", doors._build_posterior, doors._use_posterior, doors.seal, 1.5),
    Door(
        "masks",
        "masks.safetensors",
        lambda folder: Masks.ones(state_of(doors.network())).save(folder / "masks.safetensors"),
        doors._use_masks,
        doors.seal,
    ),
    Door("symmetry", "symmetry.json", doors._build_symmetry, doors._use_symmetry, share=1.5),
    Door("journal", "aligned.journal", doors._build_journal, doors._use_journal, doors.seal, 0.5),
    _run_door("run definition", "run/definition.json"),
    _run_door("run state", "run/state-u000000.safetensors"),
    _run_door("run info", "run/info-u000000-00000.safetensors"),
    Door("record", "record.json", doors._build_record, doors._use_record, share=0.25),
    Door("npz", "d.npz", doors._build_npz, lambda folder: doors._use_data(folder / "d.npz")),
    Door("uci table", "t.npz", doors._build_uci, lambda folder: doors._use_data(folder / "t.npz")),
    Door("idx", "train-images-idx3-ubyte", partial(doors._build_idx, packed=False), doors._use_data),
    Door("idx.gz", "t10k-labels-idx1-ubyte.gz", partial(doors._build_idx, packed=True), doors._use_data),
    Door("cifar", "data_batch_1", doors._build_cifar, doors._use_data),
    Door("cifar protocol 5", "test_batch", doors._build_cifar, doors._use_data),
    Door("cifar bin", "data_batch_1.bin", doors._build_binary, doors._use_data, share=0.3),
    Door("mosaic", "train_1.webp", doors._build_mosaic, doors._use_data, share=0.5),
    Door("mosaic labels", "labels.npz", doors._build_mosaic, doors._use_data, share=0.5),
    Door("openml", "openml/weather.npz", doors._build_openml, doors._use_openml),
    Door("digests", "SHA256SUMS", doors._build_sums, lambda folder: doors._use_data(folder / "d.npz"), share=0.2),
    Door("examples", "d.safetensors", doors._build_examples, doors._use_examples),
]
