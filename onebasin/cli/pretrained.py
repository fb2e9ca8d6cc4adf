"""Folders of ``save_pretrained`` (transformers): the model, an example input, and a folder for a merged network.

Only classes of transformers itself are built. Code that lies in such a folder is never run.
"""

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onebasin.errors import InputError, ModelError, first_line
from onebasin.population import CONFIG, INDEX, is_pretrained, weight_files
from onebasin.state import State
from onebasin.storage import is_taken, read_header, whole_folder, write_tensors

_COPIED = (".json", ".txt", ".model", ".jinja", ".tiktoken")  # configuration and tokenizer
_NOT_COPIED = (INDEX, "trainer_state.json")
_BATCH, _TOKENS, _SIDE, _SAMPLES = 2, 7, 64, 4000  # of an example input where the configuration does not say


def load_pretrained(folder: Path) -> tuple[nn.Module, Callable[[], Any]]:
    """The model of a folder, with its weights if they are there, and a function that gives an example input.

    Raises:
        ModelError: there is no ``config.json``, transformers is not installed, does not know the class, or refuses.
    """
    if not (folder / CONFIG).is_file():
        raise ModelError(
            f"expected {CONFIG} in {folder}, as save_pretrained of transformers writes it, found none: give such a "
            "folder, path/to/file.py:factory or package.module:factory"
        )
    try:
        import transformers
    except ImportError as error:
        raise ModelError(
            f"{folder} holds a model of transformers, which is not installed: pip install 'onebasin[transformers]'"
        ) from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = _build(transformers, folder)
    except ModelError:
        raise
    except Exception as error:  # whatever transformers says about a folder it cannot read
        raise ModelError(
            f"transformers cannot build the model in {folder} ({type(error).__name__}: {first_line(error)}); code of "
            "the folder itself is never run, so write a factory, path/to/file.py:factory, if it has some"
        ) from error
    return model, lambda: example_input(model)


def _build(transformers: Any, folder: Path) -> nn.Module:
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    name = str((getattr(config, "architectures", None) or [""])[0])
    kind: Any = getattr(transformers, name, None) if name.isidentifier() else None
    known = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    if not known:
        raise ModelError(
            f"expected architectures in {folder / CONFIG} to name a model class of transformers, found {name!r}: write "
            "it again with save_pretrained"
        )
    config.use_cache = False  # a cache is no output of the function
    if not is_pretrained(folder):
        if pickles := sorted(folder.glob("pytorch_model*.bin")):
            raise ModelError(
                f"expected model.safetensors in {folder}, found the pickle {pickles[0].name}, which is not loaded: "
                "write the folder again with save_pretrained"
            )
        model: nn.Module = kind(config)
        return model
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        model, told = kind.from_pretrained(
            folder, config=config, local_files_only=True, use_safetensors=True, output_loading_info=True
        )
    finally:
        transformers.logging.set_verbosity(level)
    if missing := sorted(told["missing_keys"]):
        raise ModelError(f"expected all weights of {name} in {folder}, found no {missing[0]}: save it again")
    return model


def example_input(model: Any) -> dict[str, Tensor]:
    """Token ids, pixel values or features, drawn at random in the sizes that the configuration names.

    Raises:
        InputError: the model takes something else.
    """
    config, main = model.config, model.main_input_name
    generator = torch.Generator().manual_seed(0)

    def number(name: str, otherwise: int) -> int:
        value = getattr(config, name, None)
        value = value[0] if isinstance(value, list | tuple) and value else value
        return value if isinstance(value, int) and value > 0 else otherwise

    if main == "pixel_values":
        side = number("image_size", _SIDE)
        inputs = {main: torch.randn(_BATCH, number("num_channels", 3), side, side, generator=generator)}
    elif main == "input_features":
        frames = 2 * number("max_source_positions", _SAMPLES // 2)
        inputs = {main: torch.randn(_BATCH, number("num_mel_bins", 80), frames, generator=generator)}
    elif main == "input_values":
        inputs = {main: torch.randn(_BATCH, _SAMPLES, generator=generator)}
    elif main == "input_ids":
        inputs = {main: _ids(config, number, generator)}
    else:
        raise InputError(f"Which example input runs through {type(model).__name__}? Give --input {main}=SIZE.")
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = _ids(config, number, generator)
    return inputs


def _ids(config: Any, number: Callable[[str, int], int], generator: torch.Generator) -> Tensor:
    """Ids (examples, tokens) without those that a model treats in a special way, where there are others."""
    special = {getattr(config, f"{kind}_token_id", None) for kind in ("pad", "bos", "eos", "decoder_start")}
    every = range(number("vocab_size", 2))
    plain = torch.tensor([token for token in every if token not in special] or list(every))
    tokens = max(1, min(_TOKENS, number("max_position_embeddings", _TOKENS * 2) // 2))
    return plain[torch.randint(len(plain), (_BATCH, tokens), generator=generator)]


def check_free(folder: Path, force: bool) -> None:
    """Refuse a folder that holds something; before the work, not after it.

    Raises:
        InputError: it does, and a folder is not replaced.
    """
    if is_taken(folder):
        hint = "; --force replaces files, and no folder" if force else ""
        raise InputError(f"expected a new or empty folder, but {folder} holds something: choose another --output{hint}")


def write_pretrained(folder: Path, state: State, like: Path, facts: dict[str, Any]) -> None:
    """Write a folder that ``from_pretrained`` opens: weights under the names of `like`, whose other files are copied.

    ``save_pretrained`` writes tied weights once, so that the names of `like` are those to write.
    """
    names = {name for path in weight_files(like) for name in read_header(path).entries}
    kept = {name: value for name, value in state.items() if name in names} or state
    with whole_folder(folder) as temporary:
        for file in sorted(like.iterdir()):
            if file.is_file() and file.suffix in _COPIED and file.name not in _NOT_COPIED:
                shutil.copyfile(file, temporary / file.name)
        write_tensors(temporary / "model.safetensors", kept, {"format": "pt", "onebasin": json.dumps(facts)})
