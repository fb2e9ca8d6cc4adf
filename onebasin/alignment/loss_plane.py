"""The loss on the plane through three networks, as given and aligned.

With a, b and c the networks, points of the plane are a + s (b - a) + t (c - a). They are drawn in coordinates of equal
length in all directions: x along b - a, y along what is left of c - a once its part along x is taken off. Lengths count
trained weights; running statistics of batch norms go along with the same s and t.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from onebasin.alignment.barrier import Network, aligned, ends
from onebasin.errors import InputError
from onebasin.functional import BATCH, Data, Loss, OutputPart, losses, pair_of, select_output
from onebasin.parallel import Progress, progress_of
from onebasin.reporting import Axis, Column, Figure, Panel, Record, Result, Series, Table, cells_of, result_record
from onebasin.state import State, trained_parameters
from onebasin.symmetry import Symmetry

NAMES = ("A", "B", "C")
_FLAT = 1e-6  # of the longer side of the triangle: a height below it makes no plane
_RANGE = 20.0  # largest over smallest loss from which on colours are logarithmic


@dataclass(frozen=True, eq=False, repr=False)
class LossPlane(Result):
    """Loss on a grid of the plane through three networks.

    Attributes:
        x: (points,) float64, places along the direction from the first network to the second.
        y: (points,) float64, places across it, towards the third.
        loss: (points, points) float64, a row for each y; NaN where the loss is not a finite number.
        corners: (3, 2) float64, places of the three networks.
        corner_loss: (3,) float64, their losses, as `losses` has them.
        aligned: the plane through the first network and the other two aligned to it, if a symmetry was given.
    """

    x: Tensor
    y: Tensor
    loss: Tensor
    corners: Tensor
    corner_loss: Tensor
    aligned: LossPlane | None = None

    @property
    def planes(self) -> dict[str, LossPlane]:
        """The planes by name: "as given" and, where there is one, "aligned"."""
        return {"as given": self} if self.aligned is None else {"as given": self, "aligned": self.aligned}

    @property
    def middle(self) -> tuple[int, int]:
        """Row and column of the grid point nearest to the mean of the three networks."""
        x, y = self.corners.mean(0)
        return int((self.y - y).abs().argmin()), int((self.x - x).abs().argmin())

    def record(self) -> Record:
        """A table of losses, and a heat map of each plane."""
        parts = [f"{float(plane.loss[plane.middle]):.4g} {name}" for name, plane in self.planes.items()]
        corners = ", ".join(f"{float(loss):.4g}" for loss in self.corner_loss)
        text = [f"The loss of the three networks is {corners}; near their mean it is {' and '.join(parts)}."]
        left = sum(int((~plane.loss.isfinite()).sum()) for plane in self.planes.values())
        text += [f"At {left:,} points of the grid the loss is not finite; they are left white."] if left else []
        rows = tuple(
            cells_of(
                name,
                *plane.corner_loss.tolist(),
                _number(plane.loss[plane.middle]),
                *(_number(pick(plane.loss[plane.loss.isfinite()])) for pick in (torch.amin, torch.amax)),
            )
            for name, plane in self.planes.items()
        )
        return result_record(
            "loss-plane",
            "Loss on the plane through three networks",
            text,
            (
                Table("losses", "How large is the loss?", _LOSSES, rows),
                Figure("plane", "What is the loss around the three networks?", " ".join(text), self._panels()),
            ),
            values={
                name: {what: getattr(plane, what).tolist() for what in ("x", "y", "loss", "corners", "corner_loss")}
                for name, plane in self.planes.items()
            },
        )

    def _panels(self) -> tuple[Panel, ...]:
        values = torch.cat([torch.cat([plane.loss.flatten(), plane.corner_loss]) for plane in self.planes.values()])
        values = values[values.isfinite()]
        low, high = float(values.min()), float(values.max())
        colour = Axis("loss", "log" if low > 0 and high > _RANGE * low else "linear", low, high)
        return tuple(
            Panel(
                "heat",
                name if self.aligned is not None else "",
                Axis("distance along A to B"),
                Axis("distance across, towards C"),
                (
                    Series(
                        "",
                        tuple(map(float, plane.corners[:, 0])),
                        tuple(map(float, plane.corners[:, 1])),
                        shade=1,
                        labels=NAMES,
                    ),
                ),
                grid=tuple(tuple(map(_number, row)) for row in plane.loss),
                columns=tuple(plane.x.tolist()),
                rows=tuple(plane.y.tolist()),
                colour=colour,
            )
            for name, plane in self.planes.items()
        )


_LOSSES = (
    Column("plane"),
    *(Column(f"network {name}", digits=4) for name in NAMES),
    Column("near their mean", digits=4),
    Column("least", "on the grid", digits=4),
    Column("largest", "on the grid", digits=4),
)


def _number(value: Tensor) -> float | None:
    return float(value) if bool(value.isfinite()) else None


def loss_plane(
    model: nn.Module,
    a: Network,
    b: Network,
    c: Network,
    data: Data,
    *,
    symmetry: Symmetry | None = None,
    points: int = 21,
    margin: float = 0.25,
    loss: Loss = "cross-entropy",
    batch: int = BATCH,
    output: OutputPart = None,
    progress: Progress | bool | None = None,
) -> LossPlane:
    """Measure the loss on a grid of the plane through three networks; nothing is changed.

    Args:
        model: the function.
        a: the network at the origin, a State or a module.
        b: the network that the x axis points to.
        c: the third one.
        data: (inputs, targets), a Dataset or a DataLoader, as in `losses`.
        symmetry: also measure the plane through `a` and the other two aligned to it, see `LossPlane.aligned`.
        points: places of the grid along each axis.
        margin: how far the grid reaches beyond the triangle on each side, as a part of its width and height.
        loss: "cross-entropy", "mse" or a function, see `losses`.
        batch: largest number of examples in one forward pass.
        output: which part of what the model returns counts, where that is no tensor: a key or attribute, as "logits",
            or a place.
        progress: True for a line on stderr with the time left, or a function that is called with (networks measured,
            networks in all, what is being done).

    Raises:
        SpecError: the networks are not three of this model.
        InputError: the networks lie on a line, or data, targets or options do not fit.
    """
    if points < 2 or not 0 <= margin < math.inf:
        raise InputError(f"expected points >= 2 and margin >= 0, found {points} and {margin}: give points=21")
    model = select_output(model, output)
    data = pair_of(data, model)
    (first, second), (_, third) = ends(a, b), ends(a, c)
    names = trained_parameters(first, frozen=() if symmetry is None else symmetry.frozen)
    listener = progress_of(progress)
    total = (points * points + 3) * (1 if symmetry is None else 2)

    def plane(triangle: tuple[State, State, State], done: int) -> LossPlane:
        def told(count: int) -> None:
            if listener is not None:
                listener(done + count, total, "measuring the loss on a plane")

        corners, inverse = _coordinates(triangle, names)
        exact = []
        for number, state in enumerate(triangle):
            exact.append(losses(model, state, *data, loss=loss, batch=batch).loss)
            told(number + 1)
        x, y = (_grid(corners[:, axis], points, margin) for axis in (0, 1))
        values = torch.full((points, points), torch.nan, dtype=torch.float64)
        for number in range(points * points):
            row, column = divmod(number, points)
            s, t = (torch.stack([x[column], y[row]]) @ inverse).tolist()
            with suppress(InputError):  # the three networks have passed: where a point does not, its loss is not finite
                values[row, column] = losses(model, _point(triangle, s, t), *data, loss=loss, batch=batch).loss
            told(number + 4)
        return LossPlane(x, y, values, corners, torch.tensor(exact, dtype=torch.float64))

    given = plane((first, second, third), 0)
    if symmetry is None:
        return given
    moved = (first, aligned(first, second, symmetry), aligned(first, third, symmetry))
    return replace(given, aligned=plane(moved, total // 2))


def _coordinates(triangle: tuple[State, State, State], names: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    """Places of three networks (3, 2), and the matrix that turns a place into (s, t)."""
    a, b, c = triangle
    products = torch.zeros(2, 2, dtype=torch.float64)
    for name in names:
        sides = [_wide(other[name]) - _wide(a[name]) for other in (b, c)]
        flat = torch.stack([side.reshape(-1).cpu() for side in sides])
        products += flat @ flat.T
    (bb, bc), (_, cc) = products.tolist()
    width = math.sqrt(bb)
    height = math.sqrt(max(0.0, cc - bc * bc / bb)) if bb else 0.0
    if not height > _FLAT * math.sqrt(max(bb, cc)):
        raise InputError(
            "expected three networks that span a plane, found them on one line or two of them equal: give others"
        )
    legs = torch.tensor([[width, 0.0], [bc / width, height]], dtype=torch.float64)
    return torch.cat([torch.zeros(1, 2, dtype=torch.float64), legs]), torch.linalg.inv(legs)


def _wide(value: Tensor) -> Tensor:
    value = value.detach()
    return (torch.view_as_real(value) if value.is_complex() else value).double()


def _grid(places: Tensor, points: int, margin: float) -> Tensor:
    low, high = float(places.min()), float(places.max())
    reach = margin * (high - low)
    return torch.linspace(low - reach, high + reach, points, dtype=torch.float64)


def _point(triangle: tuple[State, State, State], s: float, t: float) -> State:
    """The network a + s (b - a) + t (c - a), computed in float64; whole numbers come from a."""
    a, b, c = triangle
    return {name: _moved(value, b[name], c[name], s, t) for name, value in a.items()}


def _moved(a: Tensor, b: Tensor, c: Tensor, s: float, t: float) -> Tensor:
    if not (a.is_floating_point() or a.is_complex()):
        return a
    wide = torch.complex128 if a.is_complex() else torch.float64
    start = a.to(wide)
    return (start + s * (b.to(wide) - start) + t * (c.to(wide) - start)).to(a.dtype)
