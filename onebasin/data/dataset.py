"""A data set: training and test examples."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from onebasin.data.splitting import Pair, split
from onebasin.errors import InputError

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
        name: for people.
        train: (inputs, targets): float32 (n, ...), pixels in [0, 1]; int64 class numbers (n,) or float32 values
            (n, outputs). Empty where the files hold test examples only.
        test: the same. Empty where the files hold training examples only.
        classes: how many; None for values.
    """

    name: str
    train: Pair
    test: Pair
    classes: int | None

    def scaling(self) -> Scaling:
        """The constants that give every column of the training part mean 0 and standard deviation 1.

        >>> pair = torch.tensor([[1.0, 5.0], [3.0, 5.0]]), torch.tensor([[0.0], [4.0]])
        >>> found = Dataset("two rows", pair, pair, None).scaling()
        >>> found.input_mean, found.input_std, found.target_std
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
        name: for people.
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
