"""What a model remembers between calls: tensors that one call computes and the next one reads.

Some models keep a table that they derive from a parameter, in a dict at the first call in evaluation mode or in an
attribute that `train(False)` sets. Moving the parameter does not move the table, so as long as it is kept, the model
computes with the table of other weights. Here such tables are found and, for a while, computed anew in every call:
the function that is analysed, proved, or evaluated with the weights of other networks is that of the weights alone.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from onebasin.calling import HOOKS, Call, attributes_kept, evaluation_mode

Kept = dict[str, list[Tensor]]  # the tensors in each attribute of a module
REGISTRIES = HOOKS | {"_parameters", "_modules"}
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


_FOUND: WeakKeyDictionary[nn.Module, tuple[Any, bool]] = WeakKeyDictionary()  # what a model held, and whether it keeps


@contextlib.contextmanager
def undisturbed(model: nn.Module, call: Call) -> Iterator[None]:
    """Evaluation mode, without gradient, for one call with the weights of some network.

    On exit every module and the global generator are as before. A model that keeps tables derived from its own weights
    computes them anew inside, so that a network is never evaluated with the tables of another.
    """
    with evaluation_mode(model), torch.no_grad(), torch.random.fork_rng(devices=[]), own_tables(model, call):
        yield


@contextlib.contextmanager
def own_tables(model: nn.Module, call: Call) -> Iterator[None]:
    """Inside, a call computes what the model would keep from other weights anew; most models keep nothing."""
    with contextlib.ExitStack() as stack:
        if _remembers(model, call):
            stack.enter_context(nothing_remembered(model, call))
        yield


def _remembers(model: nn.Module, call: Call) -> bool:
    """Whether a model keeps tables, found out once for what it holds.

    Only models that hold tensors outside of their state dict, or empty dicts and lists, or override `train` are tried.
    """
    held = tuple(
        (path, type(module).train is not nn.Module.train, names)
        for path, module in model.named_modules()
        if (names := tuple(name for name in _kept(module, empty=True) if name != "_buffers"))
        or type(module).train is not nn.Module.train
    )
    if not held:
        return False
    known = _FOUND.get(model)
    if known is None or known[0] != held:
        try:
            with nothing_remembered(model, call) as sentences:
                known = _FOUND[model] = held, bool(sentences)
        except Exception:  # with its own weights the model cannot be called like this, so it cannot be found out
            return False
    return known[1]


@contextlib.contextmanager
def nothing_remembered(model: nn.Module, call: Call) -> Iterator[tuple[str, ...]]:
    """Inside, the model computes what it would remember anew in every call; on exit it is as it was.

    Yields:
        A sentence for each module that keeps what it derives from weights.
    """
    with attributes_kept(model):
        found: dict[str, list[str]] = {}
        for path, module in model.named_modules():
            if type(module).train is not nn.Module.train and (names := _set_by_train(module)):
                found[path] = names
                vars(module)["forward"] = _refreshed(module)
        _clear(model, call)
        for path, names in _derived(model, call):
            found.setdefault(path, []).extend(names)
        yield tuple(
            f"{path or 'the model'}: {', '.join(names)} is computed from weights and kept between calls; the symmetry "
            "is that of the model that computes it anew, so after other weights are loaded it must be dropped "
            "(model.train() and then model.eval(), or a fresh model)"
            for path, names in found.items()
        )


def _kept(module: nn.Module, *, empty: bool = False) -> Kept:
    """The tensors that a module holds outside of its state dict, by attribute.

    With `empty`, dicts and lists that hold nothing yet are listed as well.
    """
    found: Kept = {}
    for name, value in vars(module).items():
        if not isinstance(value, Tensor | dict | list | tuple) or name in REGISTRIES:
            continue
        if name == "_buffers":
            held = _tensors_in([module._buffers.get(key) for key in module._non_persistent_buffers_set])
        else:
            held = _tensors_in(value)
        if held or (empty and isinstance(value, dict | list) and not value and name not in _OF_EVERY_MODULE):
            found[name] = held
    return found


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [] if isinstance(value, nn.Parameter) else [value]
    if isinstance(value, dict | list | tuple):
        return [found for item in (value.values() if isinstance(value, dict) else value) for found in _tensors_in(item)]
    return []


def _copied(kept: Kept) -> Kept:
    return {name: [tensor.detach().clone() for tensor in held] for name, held in kept.items()}


def _differing(one: Kept, other: Kept) -> list[str]:
    """Attributes whose tensors have other values."""
    return [
        name
        for name, held in other.items()
        if len(held) != len(one.get(name, ())) or not all(map(torch.equal, held, one[name]))
    ]


def _dense(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {
        name: tensor
        for name, tensor in state.items()
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.layout == torch.strided
    }


def _set_by_train(module: nn.Module) -> list[str]:
    """Attributes that `train(False)` of a module computes from its weights; [] if it also changes weights."""
    tensors = list(_dense(module.state_dict()).values())
    weights = [tensor.detach().clone() for tensor in tensors]
    before = _kept(module)
    with attributes_kept(module), torch.no_grad():
        try:
            own = _after_train(module)
            same = {name: list(map(id, held)) for name, held in own.items()} == {
                name: list(map(id, held)) for name, held in before.items()
            }
            if same or not all(map(torch.equal, tensors, weights)):
                return []
            own = _copied(own)
            for tensor in tensors:
                tensor.mul_(1.1).add_(0.01)
            return _differing(own, _after_train(module))
        except Exception:  # it may want what only its trainer has
            return []
        finally:
            for tensor, value in zip(tensors, weights, strict=True):
                tensor.copy_(value)


def _after_train(module: nn.Module) -> Kept:
    module.train(True)
    module.train(False)
    return _kept(module)


def _refreshed(module: nn.Module) -> Callable[..., Any]:
    """The forward pass of a module behind `train(True)` and `train(False)`, whose traces are removed afterwards."""
    forward = module.forward

    def fresh(*arguments: Any, **options: Any) -> Any:
        with attributes_kept(module):
            module.train(True)
            module.train(False)
            return forward(*arguments, **options)

    return fresh


def _clear(model: nn.Module, call: Call) -> None:
    """Drop what a call computes again when it is missing: attributes are deleted or set to None, containers emptied.

    What is missed is put back, and so is what is not computed again: a model may ask whether it has an attribute.
    """
    for module in list(model.modules()):
        for name in [name for name in _kept(module) if name != "_buffers"]:
            held = vars(module)
            value = held[name]
            if isinstance(value, dict | list):
                content: Any = value.copy()
                value.clear()
                if not _made_again(model, call, module, name):
                    value.update(content) if isinstance(value, dict) else value.extend(content)
                continue
            del held[name]
            if not _made_again(model, call, module, name):
                held[name] = None
                if not _made_again(model, call, module, name):
                    held[name] = value


def _made_again(model: nn.Module, call: Call, module: nn.Module, name: str) -> bool:
    with contextlib.suppress(Exception):
        return bool(_after_call(model, call, {}, lambda: name in _kept(module)))
    return False


def _after_call(model: nn.Module, call: Call, state: Mapping[str, Tensor], look: Callable[[], Any]) -> Any:
    """What is seen after a call with these weights, before the model is put back as it was."""
    arguments, options = call
    with evaluation_mode(model), torch.random.fork_rng(devices=[]), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.func.functional_call(model, dict(state), arguments, options)
        return look()


def _derived(model: nn.Module, call: Call) -> Iterator[tuple[str, list[str]]]:
    """Module paths and attributes that hold, after a call, what other weights would make differ."""

    def look() -> dict[str, Kept]:
        return {path: _copied(kept) for path, module in model.named_modules() if (kept := _kept(module))}

    before = {path: _kept(module) for path, module in model.named_modules()}
    held = _after_call(model, call, {}, look)
    if all(not _differing(before[path], kept) for path, kept in held.items()):
        return
    others = {name: tensor * 1.1 + 0.01 for name, tensor in _dense(model.state_dict()).items()}
    with contextlib.suppress(Exception):
        moved = _after_call(model, call, others, look)
        for path, kept in moved.items():
            if names := _differing(held.get(path, {}), kept):
                yield path, names
