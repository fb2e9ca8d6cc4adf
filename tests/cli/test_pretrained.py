"""Folders of transformers on the command line: discovered without an input, merged into a folder of the same kind."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

import onebasin as ob
from onebasin.cli.load import load
from onebasin.cli.pretrained import example_input
from onebasin.errors import InputError, ModelError
from onebasin.functional.call import global_seed
from onebasin.population import import_networks

transformers = pytest.importorskip("transformers")
Run = Callable[..., tuple[int, str, str]]
TEXT = {"vocab_size": 40, "max_position_embeddings": 20}
IDS = torch.tensor([[3, 7, 1, 9], [2, 2, 30, 11]])


def built(kind: str, config: str, **options: Any) -> Any:
    with global_seed(0):
        return getattr(transformers, kind)(getattr(transformers, config)(**options)).eval()


def gpt2() -> Any:
    return built(
        "GPT2LMHeadModel", "GPT2Config", n_embd=8, n_layer=1, n_head=2, n_inner=12, vocab_size=40, n_positions=20
    )


def bert() -> Any:
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
    return built("BertForSequenceClassification", "BertConfig", **small, **TEXT)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One GPT-2, and the same function with the units of its feed-forward layer in another order."""
    place = tmp_path_factory.mktemp("gpt2")
    first, second = gpt2(), gpt2()
    first.save_pretrained(place / "a")
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    mlp = second.transformer.h[0].mlp
    with torch.no_grad():
        mlp.c_fc.weight.copy_(mlp.c_fc.weight[:, order].clone())
        mlp.c_fc.bias.copy_(mlp.c_fc.bias[order].clone())
        mlp.c_proj.weight.copy_(mlp.c_proj.weight[order].clone())
    second.save_pretrained(place / "b")
    second.to(torch.bfloat16).save_pretrained(place / "half")
    (place / "a" / "vocab.txt").write_text("[PAD]\n")
    (place / "a" / "tokenizer_config.json").write_text("{}")
    torch.save({"state": {}}, place / "a" / "optimizer.pt")
    return place


def test_folders_are_merged_into_a_folder_that_from_pretrained_opens(folders: Path, run: Run) -> None:
    target = folders / "merged"
    code, out, err = run("merge", folders / "a", folders / "b", "-o", target)
    assert code == 0, err
    assert "2 networks merged into one" in out
    model, told = transformers.GPT2LMHeadModel.from_pretrained(target, output_loading_info=True)
    assert told["missing_keys"] == told["unexpected_keys"] == []
    assert model.lm_head.weight is model.transformer.wte.weight
    assert torch.allclose(model(IDS).logits, gpt2()(IDS).logits, atol=1e-5)  # the mean of one function in one basin
    apart = ob.Population.open(folders / "[ab]", spec=gpt2())
    mean = apart.tensor("transformer.h.0.mlp.c_fc.weight").mean(0)
    assert not torch.allclose(model.state_dict()["transformer.h.0.mlp.c_fc.weight"], mean)
    import_networks(folders / "[ab]", folders / "imported", spec=gpt2())
    assert torch.equal(ob.Population.open(folders / "imported").to_flat(), apart.to_flat())
    names = {path.name for path in target.iterdir()}
    assert names == {
        "config.json", "generation_config.json", "model.safetensors", "vocab.txt", "tokenizer_config.json",
        "record.json",
    }  # fmt: skip
    with safe_open(target / "model.safetensors", "pt") as merged, safe_open(folders / "a/model.safetensors", "pt") as a:
        assert merged.metadata()["format"] == "pt" and set(merged.keys()) == set(a.keys())
    code, _, err = run("merge", folders / "a", folders / "b", "-o", target, "--force")
    assert code == 10 and "new or empty folder" in err and len(err.strip().splitlines()) == 1


def test_mixed_precision_is_named_and_converted(folders: Path, run: Run) -> None:
    arguments = ("merge", folders / "a", folders / "half", "--reference", "none")
    code, _, err = run(*arguments, "-o", folders / "plain.safetensors")
    assert code == 4 and "--dtype" in err and "bfloat16" in err
    code, _, err = run(*arguments, "-o", folders / "mean.safetensors", "--dtype", "float64")
    assert code == 0, err
    mean = ob.Population.open(folders / "mean.safetensors").member(0)["transformer.wte.weight"]
    weights = [ob.Population.open(folders / name).member(0)["transformer.wte.weight"] for name in ("a", "half")]
    assert torch.equal(mean, (weights[0].double() + weights[1].double()) / 2)


def test_a_folder_is_discovered_with_inputs_from_its_configuration(tmp_path: Path, run: Run) -> None:
    bert().save_pretrained(tmp_path / "bert")
    code, out, err = run("discover", tmp_path / "bert", "--json")
    assert code == 0, err
    spaces = {space["name"]: space["size"] for space in json.loads(out)["spaces"]}
    assert spaces["bert.encoder.layer.0.intermediate.dense"] == 12


MODELS = {
    "bert": (bert, {"input_ids": (2, 7)}),
    "gpt2": (gpt2, {"input_ids": (2, 7)}),
    "vit": (
        lambda: built(
            "ViTForImageClassification", "ViTConfig", hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=12, image_size=16, patch_size=8, num_channels=1,
        ),
        {"pixel_values": (2, 1, 16, 16)},
    ),
    "t5": (
        lambda: built(
            "T5ForConditionalGeneration", "T5Config", d_model=8, d_ff=12, num_layers=1, num_heads=2, d_kv=4,
            vocab_size=40,
        ),
        {"input_ids": (2, 7), "decoder_input_ids": (2, 7)},
    ),
    "whisper": (
        lambda: built(
            "WhisperForAudioClassification", "WhisperConfig", d_model=8, encoder_layers=1, encoder_attention_heads=2,
            encoder_ffn_dim=12, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=12, num_mel_bins=5,
            max_source_positions=10, vocab_size=40, max_target_positions=20, pad_token_id=0, bos_token_id=1,
            eos_token_id=2, decoder_start_token_id=1, is_encoder_decoder=False,
        ),
        {"input_features": (2, 5, 20)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_example_inputs_run_through_the_model(name: str) -> None:
    build, shapes = MODELS[name]
    model = build()
    inputs = example_input(model)
    assert {key: tuple(value.shape) for key, value in inputs.items()} == shapes
    assert torch.isfinite(model(**inputs).logits).all()
    if "input_ids" in inputs:
        assert model.config.pad_token_id not in inputs["input_ids"].unique().tolist()
    again = example_input(model)
    assert all(torch.equal(again[key], value) for key, value in inputs.items())


def test_weights_of_the_folder_are_loaded_and_a_configuration_alone_is_enough(folders: Path, tmp_path: Path) -> None:
    loaded = load(str(folders / "a")).model
    assert torch.equal(loaded.state_dict()["transformer.wte.weight"], gpt2().state_dict()["transformer.wte.weight"])
    gpt2().config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["GPT2LMHeadModel"]}))
    assert isinstance(load(str(tmp_path)).model, transformers.GPT2LMHeadModel)


def test_what_is_no_folder_of_transformers_gets_one_sentence(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, folders: Path
) -> None:
    def refused(config: dict[str, Any] | None, sentence: str) -> None:
        if config is not None:
            (tmp_path / "config.json").write_text(json.dumps(config))
        code, _, err = run("discover", tmp_path)
        assert code == ModelError.exit_code and sentence in err and len(err.strip().splitlines()) == 1

    refused(None, "expected config.json")
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    own = {"AutoConfig": "own.Config", "AutoModel": "own.Model"}
    refused({"model_type": "own", "auto_map": own, "architectures": ["Model"]}, "never run")
    assert not (tmp_path / "ran").exists()
    refused({"model_type": "gpt2", "architectures": ["pipeline"]}, "found 'pipeline'")
    refused({"model_type": "gpt2"}, "name a model class")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    refused({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "found the pickle pytorch_model.bin")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelError, match=r"pip install 'onebasin\[transformers\]'"):
        load(str(folders / "a"))


def test_a_model_that_takes_something_else_asks_for_an_input() -> None:
    class Other(nn.Module):
        config, main_input_name = transformers.PretrainedConfig(), "video"

    with pytest.raises(InputError, match="--input video=SIZE"):
        example_input(Other())


def test_a_part_of_the_output_is_chosen_behind_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "two.py").write_text(
        "from torch import nn\n\n\nclass Two(nn.Linear):\n    def __init__(self):\n        super().__init__(2, 3)\n\n"
        "    def forward(self, x):\n        return {'logits': super().forward(x), 'hidden': x}\n"
    )
    monkeypatch.chdir(tmp_path)
    inputs = torch.zeros(4, 2)
    assert set(load("two.py:Two").model(inputs)) == {"logits", "hidden"}
    chosen = load("two.py:Two[logits]").model
    assert chosen(inputs).shape == (4, 3) and list(chosen.state_dict()) == ["weight", "bias"]
