"""A data set: training and test examples, their division, their scaling, and how stored numbers become inputs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from onebasin.errors import InputError

Pair = tuple[Tensor, Tensor]


def split(inputs: Tensor, targets: Tensor, *, test: float = 0.25, seed: int = 0) -> tuple[Pair, Pair]:
    """Divide examples at random into training and test; class numbers keep their shares in both.

    >>> train, test = split(torch.arange(8.0), torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]), test=0.5)
    >>> train[1], test[1]
    (tensor([0, 0, 1, 1]), tensor([0, 0, 1, 1]))

    Args:
        inputs: (examples, ...).
        targets: (examples, ...). With one whole number per example, no class gets a test example more or less than its
            share.
        test: the share of test examples, in (0, 1); round(test * examples) are taken.
        seed: the same seed gives the same division.

    Returns:
        (training inputs, training targets), (test inputs, test targets); both in the order of the given examples.
    """
    examples = len(targets)
    count = round(test * examples) if 0 < test < 1 else 0
    if len(inputs) != examples or not 0 < count < examples:
        raise InputError(
            f"expected one target per input and a share that leaves examples on both sides, found {len(inputs)} "
            f"inputs, {examples} targets and test={test}: give others"
        )
    order = torch.randperm(examples, generator=torch.Generator().manual_seed(seed))
    if targets.dim() == 1 and not targets.is_floating_point():
        order = order[torch.argsort(targets.cpu()[order], stable=True)]
    reached = torch.arange(examples + 1) * count // examples  # test examples among the first so many: evenly spread
    chosen = torch.zeros(examples, dtype=torch.bool)
    chosen[order] = reached.diff() == 1
    rows = [mask.nonzero().flatten() for mask in (~chosen, chosen)]
    first, second = ((inputs[row.to(inputs.device)], targets[row.to(targets.device)]) for row in rows)
    return first, second


TEST_SHARE = 0.25  # of a set that comes without a division of its own


@dataclass(frozen=True, eq=False)
class Scaling:
    """Mean and standard deviation of every column in the training part; the deviation of a constant column is 1.

    Attributes:
        input_mean, input_std: (features...).
        target_mean, target_std: (outputs...) of values; 0 and 1 for classes, which are left as they are.
    """

    input_mean: Tensor
    input_std: Tensor
    target_mean: Tensor
    target_std: Tensor

    def apply(self, pair: Pair) -> Pair:
        """Examples in units of the training part; their dtypes stay."""
        inputs, targets = pair
        scaled = (inputs - self.input_mean) / self.input_std
        return scaled, (targets - self.target_mean) / self.target_std if targets.is_floating_point() else targets


@dataclass(frozen=True, eq=False)
class Dataset:
    """Examples to train and to test with.

    Attributes:
        name: name of the set, for messages.
        train: (inputs, targets): float32 (n, ...), pixels in [0, 1]; int64 class numbers (n,) or float32 values
            (n, outputs). Empty where the files hold test examples only.
        test: the same. Empty where the files hold training examples only.
        classes: number of classes; None for values.
    """

    name: str
    train: Pair
    test: Pair
    classes: int | None

    def scaling(self) -> Scaling:
        """The constants that give every column of the training part mean 0 and standard deviation 1.

        >>> pair = torch.tensor([[1.0, 5.0], [3.0, 5.0]]), torch.tensor([[0.0], [4.0]])
        >>> scaling = Dataset("two rows", pair, pair, None).scaling()
        >>> scaling.input_mean, scaling.input_std, scaling.target_std
        (tensor([2., 5.]), tensor([1., 1.]), tensor([2.]))
        """
        inputs, targets = self.train
        if not len(inputs):
            raise InputError(f"scaling needs training examples, found none in {self.name}: load a set that has some")
        if not targets.is_floating_point():
            return Scaling(*_moments(inputs), torch.zeros(()), torch.ones(()))
        return Scaling(*_moments(inputs), *_moments(targets))

    def standardised(self) -> Dataset:
        """The set in units of its training part."""
        scaling = self.scaling()
        return replace(self, train=scaling.apply(self.train), test=scaling.apply(self.test))


def _moments(values: Tensor) -> tuple[Tensor, Tensor]:
    wide = values.double()
    spread = wide.std(0, correction=0)
    return wide.mean(0).to(values), torch.where(spread > 0, spread, 1.0).to(values)


@dataclass(frozen=True, eq=False)
class Parts:
    """What a source holds, before anything is divided.

    Attributes:
        name: name of the source, for messages.
        train: as in `Dataset`; None where there are test examples only.
        test: as in `Dataset`; None where the source has no division of its own.
        classes: where the source tells; otherwise the largest class number tells.
        splits: how many divisions into training and test the source has, of which this is one.
    """

    name: str
    train: Pair | None
    test: Pair | None
    classes: int | None = None
    splits: int = 1

    def dataset(self, number: int = 0) -> Dataset:
        """Both parts; a source without a division is divided at random, three quarters to one, by `number`."""
        train, test, classes = self.train, self.test, self.checked_classes()
        if train is not None and test is None:
            train, test = split(*train, test=TEST_SHARE, seed=number)
        train, test = train or _empty(test), test or _empty(train)
        return Dataset(self.name, train, test, classes)

    def checked_classes(self) -> int | None:
        """The number of classes, after a look at every example.

        Raises:
            InputError: inputs and targets differ in number, or training and test in kind; or they are not finite, or
                a class number is out of range.
        """
        pairs = [pair for pair in (self.train, self.test) if pair is not None]
        for inputs, targets in pairs:
            if not len(inputs) or len(inputs) != len(targets):
                raise InputError(
                    f"expected one target per input in {self.name}, found {len(inputs):,} inputs and "
                    f"{len(targets):,} targets: look where they were made"
                )
            if not all(bool(part.isfinite().all()) for part in (inputs, targets)):
                raise InputError(f"expected finite numbers in {self.name}, found NaN or infinity: leave them out")
        if len({(x.shape[1:], y.shape[1:], y.is_floating_point()) for x, y in pairs}) > 1:
            shapes = " and ".join(f"{tuple(x.shape)} with {y.dtype} {tuple(y.shape)}" for x, y in pairs)
            raise InputError(
                f"expected training and test examples of one kind in {self.name}, found {shapes}: make them alike"
            )
        if any(targets.is_floating_point() for _, targets in pairs):
            return None
        least, most = (min(int(y.min()) for _, y in pairs), max(int(y.max()) for _, y in pairs))
        classes = most + 1 if self.classes is None else self.classes
        if least < 0 or most >= classes:
            raise InputError(
                f"expected class numbers from 0 to {classes - 1} in {self.name}, found {least} to {most}: "
                "number the classes from 0"
            )
        return classes


def _empty(like: Pair | None) -> Pair:
    """No examples of the same kind."""
    assert like is not None
    return like[0][:0], like[1][:0]


_BRIGHTEST = 255
_COLOURS = (1, 3)
_MOST = 1 << 31  # numbers in a table whose categories became columns: 8 GB


def as_inputs(stored: Tensor) -> Tensor:
    """Inputs as float32; bytes are pixels, and go from 0..255 to [0, 1].

    >>> as_inputs(torch.full((2, 4, 4), 255, dtype=torch.uint8)).shape
    torch.Size([2, 1, 4, 4])
    >>> as_inputs(torch.zeros(2, 3, dtype=torch.float64)).dtype
    torch.float32

    Args:
        stored: (n, ...). Bytes (n, h, w) are grey images and become (n, 1, h, w); (n, h, w, 1 or 3) have their colours
            last and become (n, 1 or 3, h, w), unless axis 1 already looks like colours.
    """
    if stored.dtype != torch.uint8:
        return stored.float()
    if stored.dim() == 3:
        stored = stored[:, None]
    elif stored.dim() == 4 and stored.shape[-1] in _COLOURS and stored.shape[1] not in _COLOURS:
        stored = stored.permute(0, 3, 1, 2)
    return stored.float().div_(_BRIGHTEST).contiguous()


def as_targets(stored: Tensor) -> Tensor:
    """Class numbers as int64 (n,), values as float32 (n, outputs): (n,) would broadcast against outputs (n, 1).

    >>> as_targets(torch.tensor([1.5, 2.0])).shape, as_targets(torch.tensor([1, 2], dtype=torch.uint8)).dtype
    (torch.Size([2, 1]), torch.int64)
    """
    if not stored.is_floating_point():
        return (stored[:, 0] if stored.dim() == 2 and stored.shape[1] == 1 else stored).long()
    return (stored[:, None] if stored.dim() == 1 else stored).float()


def check_columns(rows: int, columns: int, where: str) -> None:
    """Refuse a table whose categories need more columns than memory has room for.

    Raises:
        InputError: there are too many.
    """
    if rows * columns > _MOST:
        raise InputError(
            f"expected at most {_MOST:,} numbers with one column per category in {where}, found {rows:,} x "
            f"{columns:,}: join rare categories and give the table as .npz"
        )
