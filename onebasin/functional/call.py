"""Calls of a model: its arguments cut into batches, its weights handed over, and afterwards the module as it was.

A module is only the function here; weights come from a State. A forward pass may still leave traces in the module
(counters, caches, running statistics), and tables that it keeps from other weights may enter the result. So each call
stands inside of `Inventory.undisturbed`, which puts everything back and makes such tables be computed anew. The cost is
one walk over the modules for an `Inventory`, and a comparison of its containers for each call.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_leaves, tree_map

from onebasin.errors import InputError, SlowWarning, SpecError, first_line
from onebasin.functional.output import one_tensor
from onebasin.state import State, TensorSpec, as_spec, check_spec, shared_names, spec_of

Inputs = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]
Call = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments


def call_arguments(inputs: Inputs) -> Call:
    """Split `inputs` into positional and keyword arguments.

    >>> call_arguments({"x": 1})
    ((), {'x': 1})
    """
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    if isinstance(inputs, tuple | list):
        return tuple(inputs), {}
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    raise InputError(
        f"inputs must be a tensor, a tuple of positional or a dict of keyword inputs, found {type(inputs).__name__}; "
        "wrap several inputs as (x, y) or {'x': x, 'y': y}."
    )


@contextlib.contextmanager
def global_seed(seed: int) -> Iterator[None]:
    """Seed torch's global generator inside the block and restore it afterwards.

    Constructors of layers draw their weights from there, and so does dropout; neither takes a generator.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


Container = dict[Any, Any] | list[Any] | set[Any] | deque[Any]
CONTAINERS = (dict, list, set, deque, tuple)
HOOKS = frozenset(name for name in vars(nn.Module()) if name.endswith(("_hooks", "_with_kwargs", "_always_called")))


def containers(model: nn.Module) -> list[Container]:
    """The attributes of every module, as the dict that holds them, and all dicts, lists and sets inside of these."""
    listed: dict[int, Any] = {}
    todo: list[Any] = []
    for module in model.modules():
        held = vars(module)
        listed[id(held)] = held
        todo += [item for name, item in held.items() if isinstance(item, CONTAINERS) and name not in HOOKS]
    while todo:
        held = todo.pop()
        if id(held) not in listed:
            listed[id(held)] = held
            todo += [
                item for item in (held.values() if isinstance(held, dict) else held) if isinstance(item, CONTAINERS)
            ]
    return [held for held in listed.values() if not isinstance(held, tuple)]


@contextlib.contextmanager
def attributes_kept(model: nn.Module, listed: list[Container] | None = None) -> Iterator[None]:
    """On exit all attributes of all modules, and what their dicts, lists and sets hold, are the objects they were.

    `listed` is `containers(model)`, where that is known already.
    """
    listed = containers(model) if listed is None else listed
    before: list[Any] = [dict(each) if isinstance(each, dict) else list(each) for each in listed]
    try:
        yield
    finally:
        for each, content in zip(listed, before, strict=True):
            _put_back(each, content)


def _put_back(held: Any, content: Any) -> None:
    keyed = isinstance(held, dict)
    if keyed and len(held) == len(content):
        pairs = zip(held.items(), content.items(), strict=True)
        same = all(key == other and item is old for (key, item), (other, old) in pairs)
    else:
        same = len(held) == len(content) and all(item is old for item, old in zip(held, content, strict=True))
    if not same:
        held.clear()
        held.update(content) if keyed or isinstance(held, set) else held.extend(content)


class Inventory:
    """The modules of a model and the containers in their attributes, listed once for many calls.

    It stays right as long as nothing but such calls changes the model, since each of them puts back what it changed.
    """

    def __init__(self, model: nn.Module) -> None:
        """Walk over all modules."""
        self.model = model
        self._modules, self._containers = list(model.modules()), containers(model)
        self._remembers: bool | None = None

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """On exit the model is as it was, with all that it remembers.

        Attributes are restored one by one because torch.export puts back equal tuples and lists instead of the same
        ones; the values of buffers and other tensors that are no parameters, because a forward pass may count steps or
        average.
        """
        with attributes_kept(self.model, self._containers):
            values = [(tensor, tensor.detach().clone()) for tensor in _unregistered(self._containers)]
            try:
                yield
            finally:
                with torch.no_grad():
                    for tensor, value in values:
                        if not torch.equal(tensor, value):
                            tensor.copy_(value)

    @contextlib.contextmanager
    def evaluation_mode(self) -> Iterator[None]:
        """Every submodule in evaluation mode; on exit the model is as it was.

        Flags of the mode are set directly: a `train()` override may do more than flip a flag, and must not run.
        """
        with self.restored():
            for module in self._modules:
                vars(module)["training"] = False
            yield

    @contextlib.contextmanager
    def training_mode(self) -> Iterator[None]:
        """The model in training mode; on exit it is as it was, running statistics too.

        A model that is in training mode already keeps the flag of every submodule: parts may be held in evaluation mode
        on purpose, as frozen batch norms are.
        """
        with self.restored():
            if not self.model.training:
                for module in self._modules:
                    vars(module)["training"] = True
            yield

    @contextlib.contextmanager
    def undisturbed(self, call: Call) -> Iterator[None]:
        """Evaluation mode, without gradient, for one call with the weights of some network.

        On exit every module and the global generator are as before. A model that keeps tables derived from its own
        weights computes them anew inside, so that a network is never evaluated with the tables of another.
        """
        with self.evaluation_mode(), torch.no_grad(), torch.random.fork_rng(devices=[]), self.own_tables(call):
            yield

    @contextlib.contextmanager
    def own_tables(self, call: Call) -> Iterator[None]:
        """Inside, a call computes what the model would keep from other weights anew; most models keep nothing."""
        if self._remembers is None:
            self._remembers = _remembers(self.model, call)
        if not self._remembers:
            yield
            return
        with nothing_remembered(self.model, call):
            yield


def evaluation_mode(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """`Inventory.evaluation_mode` of a model, for one call."""
    return Inventory(model).evaluation_mode()


def training_mode(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """`Inventory.training_mode` of a model, for one call."""
    return Inventory(model).training_mode()


def undisturbed(model: nn.Module, call: Call) -> contextlib.AbstractContextManager[None]:
    """`Inventory.undisturbed` of a model, for one call."""
    return Inventory(model).undisturbed(call)


def _unregistered(held: list[Container]) -> list[Tensor]:
    """Tensors that are no parameters: buffers and plain attributes. Only dense ones are written to in place."""
    items = (item for each in held for item in (each.values() if isinstance(each, dict) else each))
    tensors = {id(item): item for item in items if isinstance(item, Tensor) and not isinstance(item, nn.Parameter)}
    return [tensor for tensor in tensors.values() if tensor.layout == torch.strided and not tensor.is_meta]


def examples_in(inputs: Inputs) -> int:
    """Number of examples: the common length of the first axis of all tensors.

    >>> examples_in((torch.zeros(5, 2), torch.zeros(5)))
    5
    """
    tensors = [leaf for leaf in tree_leaves(call_arguments(inputs)) if isinstance(leaf, Tensor) and leaf.dim()]
    lengths = {len(tensor) for tensor in tensors}
    if lengths == {0}:
        raise InputError(f"the data hold no examples, found inputs {tuple(tensors[0].shape)}: give at least one")
    if len(lengths) != 1:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors) or "no tensor"
        raise InputError(
            f"expected input tensors with one and the same number of examples on the first axis, found {shapes}: "
            "give every input one row per example"
        )
    return lengths.pop()


def batches(inputs: Inputs, size: int) -> Iterator[tuple[slice, Call]]:
    """Yield (rows, arguments) with at most `size` examples each.

    The pieces are as equal as can be: a last batch of one example would have no variance.

    >>> [rows for rows, _ in batches(torch.zeros(7), 3)]
    [slice(0, 3, None), slice(3, 5, None), slice(5, 7, None)]
    """
    if size < 1:
        raise InputError(f"a batch has at least 1 example, found {size}: leave batch out for 1000")
    count, call = examples_in(inputs), call_arguments(inputs)
    pieces = -(-count // size)
    start = 0
    for piece in range(pieces):
        stop = start + count // pieces + (piece < count % pieces)
        rows = slice(start, stop)
        yield rows, rows_of(call, rows)
        start = stop


def check_targets(inputs: Inputs, targets: Tensor) -> None:
    """Refuse targets that are not one per example.

    Raises:
        InputError: their number is another.
    """
    examples = examples_in(inputs)
    if not targets.dim() or examples != len(targets):
        found = f"{len(targets)} targets" if targets.dim() else "a single number"
        raise InputError(
            f"expected one target for each of {examples} examples, found {found}: give as many targets as inputs"
        )


def moved(call: Call, device: torch.device, dtype: torch.dtype | None) -> Call:
    """The arguments on a device, floating-point ones in a dtype if one is given."""
    result: Call = tree_map(lambda value: _moved(value, device, dtype), call)
    return result


def _moved(value: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.to(device=device, dtype=dtype if value.is_floating_point() else None)


def rows_of(call: Call, rows: slice | Tensor) -> Call:
    """The arguments of some of the examples."""
    result: Call = tree_map(lambda value: value[rows] if isinstance(value, Tensor) and value.dim() else value, call)
    return result


def check_fits(model: nn.Module, state: Mapping[str, Tensor], *, members: bool = False) -> None:
    """Raise `SpecError` unless names and shapes are those of the model, and shared tensors have one value.

    Dtypes may differ: the same function is worked with in float32 and proved in float64.

    Args:
        model: the module.
        state: one network, or many with a leading member axis.
        members: whether there is such an axis.
    """
    expected = as_spec(model)
    spec = {
        name: TensorSpec(tensor.shape[1:] if members else tensor.shape, expected[name].dtype)
        if name in expected
        else tensor
        for name, tensor in spec_of(state).items()
    }
    check_spec(spec, expected, where=f"as a state of {type(model).__name__}, what was given")
    for name, first in shared_names(model).items():
        if name != first and not torch.allclose(state[name], state[first], rtol=0, atol=0, equal_nan=True):
            raise SpecError(
                f"{name} and {first} are one tensor in {type(model).__name__}, but their values in the state differ: "
                "give both the same value"
            )


def as_seen(model: nn.Module, state: Mapping[str, Tensor]) -> State:
    """The tensors as the model may see them: wide enough to compute with, and copies where it could write."""
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    seen: State = {}
    for name, first in shared_names(model).items():
        if first in seen:
            seen[name] = seen[first]
            continue
        value = state[name].detach()
        if value.is_floating_point() and value.dtype.itemsize < 4:
            value = value.float()
        seen[name] = value.clone() if name in buffers else value
    return seen


def floating_dtype(tensors: Mapping[str, Tensor]) -> torch.dtype | None:
    """The dtype of all floating-point tensors, None if there are several or no such tensors."""
    dtypes = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    return dtypes.pop() if len(dtypes) == 1 else None


def fixed_buffers(model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> State:
    """Copies of all buffers of the module; those outside of its state dict are part of the function."""
    return {
        name: buffer.detach().to(device=device, dtype=dtype if buffer.is_floating_point() else None, copy=True)
        for name, buffer in model.named_buffers(remove_duplicate=False)
    }


def described(call: Call) -> str:
    """Shapes and dtypes of arguments, for messages."""

    def word(value: Any) -> str:
        if isinstance(value, Tensor):
            return f"{str(value.dtype).removeprefix('torch.')}[{'x'.join(map(str, value.shape))}]"
        return type(value).__name__

    arguments, options = call
    return ", ".join([word(value) for value in arguments] + [f"{key}={word(value)}" for key, value in options.items()])


def run_with(model: nn.Module, tensors: Mapping[str, Tensor], call: Call) -> Any:
    """What a model returns with these parameters and buffers, in whatever mode it is.

    Raises:
        InputError: its forward refuses these arguments.
    """
    arguments, options = call
    try:
        return functional_call(model, dict(tensors), arguments, options, tie_weights=False)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise call_error(model, call, error) from error


_SIZES = (  # what torch says of sizes that do not fit, and which of the numbers are the expected and the found one
    (re.compile(r"mat1 and mat2 shapes cannot be multiplied \(\d+x(\d+) and (\d+)x\d+\)"), "features", (2, 1)),
    (re.compile(r"to have (\d+) channels, but got (\d+) channels"), "channels", (1, 2)),
    (re.compile(r"input\.size\(-1\) must be equal to input_size\. Expected (\d+), got (\d+)"), "features", (1, 2)),
)


def call_error(model: nn.Module, call: Call, error: BaseException) -> InputError:
    """The sentence for a call that a model refuses: sizes and dtypes where they can be told, else torch's first line.

    Args:
        model: the module.
        call: the arguments.
        error: what the call ended with.
    """
    where = f"{type(model).__name__} could not be called with ({described(call)})"
    for pattern, what, (expected, found) in _SIZES:
        if match := pattern.search(str(error)):
            return InputError(
                f"{where}: one of its layers expects {match[expected]} {what} and was given {match[found]}; give "
                "inputs of the shape that its forward expects"
            )
    tensors = [leaf for leaf in tree_leaves(call) if isinstance(leaf, Tensor)]
    parameters = {value.dtype for value in model.parameters() if value.is_floating_point()}
    if parameters and any(leaf.dtype == torch.uint8 for leaf in tensors):
        return InputError(
            f"{where}: its inputs are whole numbers of the type uint8 and its weights {min(map(str, parameters))}; "
            "convert pixels to floats, as inputs.float() / 255"
        )
    return InputError(
        f"{where}: {type(error).__name__}: {first_line(error)}; give inputs of the shapes and dtypes that its forward "
        "expects"
    )


# What a model remembers between calls: tensors that one call computes and the next one reads.
#
# Some models keep a table that they derive from a parameter, in a dict at the first call in evaluation mode or in an
# attribute that `train(False)` sets. Moving the parameter does not move the table, so as long as it is kept, the model
# computes with the table of other weights. Here such tables are found and, for a while, computed anew in every call:
# the function that is analysed, proved, or evaluated with the weights of other networks is that of the weights alone.

Kept = dict[str, list[Tensor]]  # the tensors in each attribute of a module
REGISTRIES = HOOKS | {"_parameters", "_modules"}
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


_REMEMBERING: WeakKeyDictionary[nn.Module, tuple[Any, bool]] = WeakKeyDictionary()  # what it held, and the answer


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
    known = _REMEMBERING.get(model)
    if known is None or known[0] != held:
        try:
            with nothing_remembered(model, call) as sentences:
                known = _REMEMBERING[model] = held, bool(sentences)
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
        derived: dict[str, list[str]] = {}
        for path, module in model.named_modules():
            if type(module).train is not nn.Module.train and (names := _set_by_train(module)):
                derived[path] = names
                vars(module)["forward"] = _refreshed(module)
        _clear(model, call)
        for path, names in _derived(model, call):
            derived.setdefault(path, []).extend(names)
        yield tuple(
            f"{path or 'the model'}: {', '.join(names)} is computed from weights and kept between calls; the symmetry "
            "is that of the model that computes it anew, so after other weights are loaded it must be dropped "
            "(model.train() and then model.eval(), or a fresh model)"
            for path, names in derived.items()
        )


def _kept(module: nn.Module, *, empty: bool = False) -> Kept:
    """The tensors that a module holds outside of its state dict, by attribute.

    With `empty`, dicts and lists that hold nothing yet are listed as well.
    """
    tensors: Kept = {}
    for name, value in vars(module).items():
        if not isinstance(value, Tensor | dict | list | tuple) or name in REGISTRIES:
            continue
        if name == "_buffers":
            held = _tensors_in([module._buffers.get(key) for key in module._non_persistent_buffers_set])
        else:
            held = _tensors_in(value)
        if held or (empty and isinstance(value, dict | list) and not value and name not in _OF_EVERY_MODULE):
            tensors[name] = held
    return tensors


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [] if isinstance(value, nn.Parameter) else [value]
    if isinstance(value, dict | list | tuple):
        items = value.values() if isinstance(value, dict) else value
        return [tensor for item in items for tensor in _tensors_in(item)]
    return []


def _copied(tensors: Kept) -> Kept:
    return {name: [tensor.detach().clone() for tensor in held] for name, held in tensors.items()}


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
            derived = _after_train(module)
            same = {name: list(map(id, held)) for name, held in derived.items()} == {
                name: list(map(id, held)) for name, held in before.items()
            }
            if same or not all(map(torch.equal, tensors, weights)):
                return []
            derived = _copied(derived)
            for tensor in tensors:
                tensor.mul_(1.1).add_(0.01)
            return _differing(derived, _after_train(module))
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
        return {path: _copied(tensors) for path, module in model.named_modules() if (tensors := _kept(module))}

    before = {path: _kept(module) for path, module in model.named_modules()}
    held = _after_call(model, call, {}, look)
    if all(not _differing(before[path], tensors) for path, tensors in held.items()):
        return
    changed = {name: tensor * 1.1 + 0.01 for name, tensor in _dense(model.state_dict()).items()}
    with contextlib.suppress(Exception):
        moved = _after_call(model, call, changed, look)
        for path, tensors in moved.items():
            if names := _differing(held.get(path, {}), tensors):
                yield path, names


BATCH = 1000  # examples per forward pass: enough to fill a processor, small against memory


def outputs(model: nn.Module, state: Mapping[str, Tensor], inputs: Inputs, *, batch: int = BATCH) -> Tensor:
    """Return what `model` gives for `inputs` with the weights `state`, in evaluation mode and without gradient.

    >>> layer = nn.Linear(2, 1)
    >>> outputs(layer, {"weight": torch.ones(1, 2), "bias": torch.zeros(1)}, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([[3.],
            [7.]])

    Args:
        model: the function. Neither its weights nor its mode matter, and it is left exactly as it was.
        state: parameters and buffers. They decide device and dtype: floating-point inputs follow. Half precision is
            computed in float32 and given back in its dtype.
        inputs: a tensor, a tuple of positional or a dict of keyword inputs, one example per row of every tensor.
        batch: largest number of examples in one forward pass.

    Raises:
        SpecError: the state is not one of this model.
        InputError: the model cannot be called like this, or gives something else than one tensor.
    """
    return narrowed(wide_outputs(model, state, inputs, batch=batch), state)


def wide_outputs(model: nn.Module, state: Mapping[str, Tensor], inputs: Inputs, *, batch: int = BATCH) -> Tensor:
    """As `outputs`, in the dtype of the computation: float32 for half precision."""
    bound = Bound(model, state)
    return torch.cat([bound(call) for _, call in batches(inputs, batch)])


class Bound:
    """A model tied to the weights of one State: a pure function of its arguments.

    Attributes:
        tensors: state-dict name -> the tensor the model sees; at least float32, buffers copied, one object for all
            names of a shared tensor.
        dtype: the dtype of all floating-point tensors, None if they have several.
        device: where they are.
    """

    def __init__(self, model: nn.Module, state: Mapping[str, Tensor]) -> None:
        """Check that the state is one of this model."""
        check_fits(model, state)
        self.model = model
        self.tensors = as_seen(model, state)
        self.dtype = floating_dtype(self.tensors)
        self.device = next(iter(self.tensors.values()), torch.zeros(())).device
        self._inventory = Inventory(model)
        self._everything = {**fixed_buffers(model, self.device, self.dtype), **self.tensors}

    def __call__(self, call: Call, *, grad: bool = False) -> Tensor:
        """One forward pass; with `grad` it is recorded for what happens to require a gradient."""
        return one_tensor(self.model, self.run(call, grad=grad))

    def run(self, call: Call, *, grad: bool = False) -> Any:
        """The same for a model that may return anything, where only its activations matter."""
        with self._inventory.undisturbed(call), torch.set_grad_enabled(grad):
            return run_with(self.model, self._everything, moved(call, self.device, self.dtype))


def narrowed(result: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    """The result of a wide computation in the dtype of weights in half precision, else as it is."""
    dtype = floating_dtype(tensors)
    return result.to(dtype) if dtype and dtype.itemsize < 4 and result.is_floating_point() else result


Result = TypeVar("Result")
BlockPass = Callable[[Mapping[str, Tensor], Call], Result]
Pass = Callable[[Mapping[str, Tensor], Call], Tensor]  # (stacked members, arguments) -> (members, batch, ...)


class Vectorised(Generic[Result]):
    """Runs members together; once torch has refused that, each alone, with a `SlowWarning`.

    Attributes:
        model: the function, for the warning.
        together: all members of a block in one call.
        alone: each by itself, right for every model.
    """

    def __init__(self, model: nn.Module, together: BlockPass[Result], alone: BlockPass[Result]) -> None:
        """Try `together` first."""
        self.model, self.together, self.alone = model, together, alone
        self._refused = False

    def __call__(self, block: Mapping[str, Tensor], call: Call) -> Result:
        """Outputs of the members (members, batch, ...)."""
        if self._refused:
            return self.alone(block, call)
        try:
            return self.together(block, call)
        except Exception as error:  # vmap refuses in many ways; if the fault is the model's, the plain call says so
            self._refused = True
            result = self.alone(block, call)
            if len(next(iter(block.values()))) > 1:
                warn_loop(self.model, error)
            return result


def warn_loop(model: nn.Module, error: BaseException) -> None:
    """Say that networks of a model run one after the other, and why; Python shows the same sentence once.

    Warns:
        SlowWarning: always.
    """
    error = error.__cause__ if isinstance(error, InputError) and error.__cause__ else error  # what torch said
    warnings.warn(
        f"torch cannot run several networks of {type(model).__name__} in one pass ({type(error).__name__}: "
        f"{first_line(error, 110)}), so they run one after the other: the same numbers, slower",
        SlowWarning,
        stacklevel=2,
    )


def mapped(one: Callable[[State, Any], Result], stacked: Mapping[str, Tensor], call: Any) -> Result:
    """Results of a function of one member for all of them, through `torch.func.vmap`."""
    with warnings.catch_warnings():
        # An operation without a batching rule is looped over by torch, which then warns that this is slow.
        warnings.filterwarnings("ignore", message="There is a performance drop", category=UserWarning)
        result: Result = vmap(one, in_dims=(0, None))(dict(stacked), call)
    return result


def member_by_member(
    model: nn.Module, one: Callable[[State, Any], Result], stacked: Mapping[str, Tensor], call: Any
) -> Result:
    """The same for one member after the other; what one leaves in the model is not for the next."""
    results = []
    for index in range(len(next(iter(stacked.values())))):
        with attributes_kept(model):
            results.append(one({name: value[index] for name, value in stacked.items()}, call))
    joined: Result = tree_map(lambda *members: torch.stack(members), *results)
    return joined
