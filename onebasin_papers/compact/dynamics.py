"""Part two: what lies between two independent networks while they are trained, before and after rebasin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import onebasin as ob
from onebasin_papers.compact import settings as published
from onebasin_papers.compact.networks import CompactWorkspace, Setting, setting
from onebasin_papers.compact.transpositions import sgd
from onebasin_papers.numbers import mean_line, mean_number, mean_text
from onebasin_papers.study import Part
from onebasin_papers.verdicts import falls

report = ob.reporting

POINTS = 11  # lambda = 0, 0.1, ..., 1


@dataclass(frozen=True)
class Path:
    """What lies between two networks, at `POINTS` places.

    Attributes:
        loss: test loss, in nats.
        swaps: transpositions of the permutation that matches the network there to the first one.
    """

    loss: tuple[float, ...]
    swaps: tuple[int, ...]

    @property
    def midpoint(self) -> float:
        """Loss in the middle over the mean of the ends."""
        return self.loss[POINTS // 2] - (self.loss[0] + self.loss[-1]) / 2

    @property
    def highest(self) -> float:
        """Largest loss over the mean of the ends, as the paper defines a barrier."""
        return max(self.loss) - (self.loss[0] + self.loss[-1]) / 2


@dataclass(frozen=True)
class PairHistory:
    """One pair through training.

    Attributes:
        epochs: when it was looked at.
        before: the path at each of these, as the networks are.
        after: the same to the rebased second network.
    """

    epochs: tuple[int, ...]
    before: tuple[Path, ...]
    after: tuple[Path, ...]


def follow_pair(workspace: CompactWorkspace, pair: int) -> PairHistory:
    """Train two fresh networks and look at the line between them every few epochs, from the start on."""
    here, settings = setting(workspace), workspace.settings
    starts = [here.start(workspace, "pair", pair, end) for end in range(2)]
    looks = settings.epochs // settings.every
    method = replace(sgd(workspace), epochs=0, draws=looks, every=settings.every)
    start = ob.Population.from_states(starts)
    networks = workspace.sample(
        f"pair-{pair}", here.problem.model, here.problem.train, method, chains=2, prior=None, start=start
    )
    pairs = [(starts[0], starts[1]), *((networks.member(look), networks.member(looks + look)) for look in range(looks))]
    before, after = [], []
    for look, (a, b) in enumerate(pairs):
        workspace.progress(pair * len(pairs) + look, settings.pairs * len(pairs), "walking between networks")
        before.append(walk(here, a, b))
        after.append(walk(here, a, here.rebased(a, b)))
    return PairHistory(tuple(settings.every * look for look in range(looks + 1)), tuple(before), tuple(after))


def walk(here: Setting, a: ob.State, b: ob.State) -> Path:
    """Walk from a to b."""
    states = [ob.interpolate(a, b, step / (POINTS - 1)) for step in range(POINTS)]
    return Path(tuple(here.loss(state) for state in states), tuple(here.swaps(a, state) for state in states))


def average(grids: Sequence[Sequence[Sequence[float]]]) -> tuple[tuple[float, ...], ...]:
    """The mean of several grids of numbers, place by place.

    >>> average([[[0.0, 2.0]], [[1.0, 4.0]]])
    ((0.5, 3.0),)
    """
    return tuple(
        tuple(sum(values) / len(values) for values in zip(*rows, strict=True)) for rows in zip(*grids, strict=True)
    )


NAME, TITLE = "dynamics", "Is there a mountain between two independently trained networks, and does rebasin remove it?"
_GRID = tuple(step / (POINTS - 1) for step in range(POINTS))
_LAMBDA = report.Axis("place between the networks (λ)", low=0, high=1)
_HALF = 0.5  # of the barrier that may be left


def run(workspace: CompactWorkspace) -> report.Section:
    """Follow all pairs."""
    here = setting(workspace)
    histories = [follow_pair(workspace, pair) for pair in range(workspace.settings.pairs)]
    return report.Section(
        NAME,
        TITLE,
        _text(here, histories),
        (_table(histories), _last(histories), _loss_map(histories), _swaps_map(histories, here.most)),
        (_claim(histories),),
    )


PART = Part(NAME, TITLE, run, ("units", "pairs", "epochs", "every", "rate"))


def _ends(histories: Sequence[PairHistory], take: Callable[[Path], float]) -> tuple[list[float], list[float]]:
    """One number of each pair after training: before and after rebasin."""
    return [take(history.before[-1]) for history in histories], [take(history.after[-1]) for history in histories]


def _middle(path: Path) -> float:
    return float(path.swaps[POINTS // 2])


def _text(here: Setting, histories: Sequence[PairHistory]) -> tuple[str, ...]:
    before, after = _ends(histories, lambda path: path.midpoint)
    swaps_before, swaps_after = _ends(histories, _middle)
    return (
        f"Halfway between two networks the test loss is {mean_text(before)} nats above that of the ends, and "
        f"{mean_text(after)} "
        f"after the hidden units of the second were permuted to match the first: rebasin takes "
        f"{1 - fmean(after) / fmean(before):.0%} of the barrier away (published: {published.BARRIER_BEFORE} and "
        f"{published.BARRIER_AFTER} nats, on MNIST 784-512-10).",
        f"{len(histories)} pairs of networks ({here.widths}, {here.problem.name}) are trained by SGD from independent "
        "starts. Every few epochs we walk in a straight line from one to the other, and match the network at each of "
        f"{POINTS} places to the first one by activations. Without rebasin the middle is "
        f"{mean_text(swaps_before, 1)} transpositions away from the first network, after it "
        f"{mean_text(swaps_after, 1)}.",
    )


def _table(histories: Sequence[PairHistory]) -> report.Table:
    rows: list[tuple[str, Callable[[Path], float], float | None, float | None]] = [
        (
            "barrier at the midpoint (nats)",
            lambda path: path.midpoint,
            published.BARRIER_BEFORE,
            published.BARRIER_AFTER,
        ),
        ("highest barrier on the path (nats)", lambda path: path.highest, None, None),
        ("test loss at the midpoint (nats)", lambda path: path.loss[POINTS // 2], *_published_middle()),
        ("transpositions to the first network, midpoint", _middle, None, None),
        (
            "transpositions to the first network, far end",
            lambda path: float(path.swaps[-1]),
            published.SWAPS_BEFORE,
            None,
        ),
    ]
    body = []
    for name, take, left, right in rows:
        before, after = _ends(histories, take)
        body.append((name, mean_number(before, left), mean_number(after, right)))
    return report.Table(
        "dynamics-barrier",
        "What rebasin takes away between two trained networks",
        (
            report.Column("after the last epoch"),
            report.Column("as trained", "the second network as it came out of training", "lower"),
            report.Column("rebased", "the second network with its hidden units permuted to match the first", "lower"),
        ),
        tuple(body),
        f"± one standard error over {len(histories)} pairs",
        "Published values are for MNIST 784-512-10, where at most 511 transpositions are possible.",
    )


def _published_middle() -> tuple[float, float]:
    return published.PATH_BEFORE[POINTS // 2], published.PATH_AFTER[POINTS // 2]


def _last(histories: Sequence[PairHistory]) -> report.Figure:
    def ours(name: str, paths: Sequence[Path], shade: int) -> report.Series:
        return mean_line(name, _GRID, list(zip(*(path.loss for path in paths), strict=True)), shade=shade)

    series = (
        ours("as trained", [history.before[-1] for history in histories], 0),
        ours("rebased", [history.after[-1] for history in histories], 1),
        report.Series("as trained, published", _GRID, published.PATH_BEFORE, dashed=True, shade=0),
        report.Series("rebased, published", _GRID, published.PATH_AFTER, dashed=True, shade=1),
    )
    before, after = _ends(histories, lambda path: path.midpoint)
    return report.Figure(
        "dynamics-path",
        "How high is the loss between two trained networks?",
        f"The barrier at the midpoint falls from {mean_text(before)} to {mean_text(after)} nats. Means over "
        f"{len(histories)} pairs, "
        "bands of one standard error; dashed: MNIST 784-512-10 after 50 epochs, read off figure 1 of the paper.",
        (report.Panel("lines", "", _LAMBDA, report.Axis("test loss (nats)", low=0), series),),
    )


def _loss_map(histories: Sequence[PairHistory]) -> report.Figure:
    before = average([[path.loss for path in history.before] for history in histories])
    after = average([[path.loss for path in history.after] for history in histories])
    ends = [value for grid in (before, after) for row in grid for value in row]
    colour = report.Axis("test loss (nats)", scale="log", low=min(ends), high=max(ends))
    return report.Figure(
        "dynamics-loss",
        "When in training does the mountain between two networks appear?",
        f"Test loss along the line between two networks, averaged over {len(histories)} pairs; each row is an epoch. "
        f"Rebased, the middle stays at {after[-1][POINTS // 2]:.3f} nats after the last epoch instead of "
        f"{before[-1][POINTS // 2]:.3f}.",
        tuple(
            _heat(title, histories[0].epochs, grid, colour)
            for title, grid in (("as trained", before), ("rebased", after))
        ),
    )


def _swaps_map(histories: Sequence[PairHistory], most: int) -> report.Figure:
    before = average([[path.swaps for path in history.before] for history in histories])
    after = average([[path.swaps for path in history.after] for history in histories])
    colour = report.Axis("transpositions to the first network", low=0, high=most)
    return report.Figure(
        "dynamics-transpositions",
        "How many units change places on the way from one network to the other?",
        f"Transpositions of the permutation that matches the network on the line to the first one, averaged over "
        f"{len(histories)} pairs; at most {most} are possible. At the far end there are {before[-1][-1]:.1f} as "
        f"trained and {after[-1][-1]:.1f} rebased (published: about {published.SWAPS_BEFORE} of 511, and a scale that "
        f"ends at {published.SWAPS_AFTER}).",
        tuple(
            _heat(title, histories[0].epochs, grid, colour)
            for title, grid in (("as trained", before), ("rebased", after))
        ),
    )


def _heat(title: str, epochs: Sequence[int], grid: tuple[tuple[float, ...], ...], colour: report.Axis) -> report.Panel:
    rounded = tuple(tuple(round(value, 4) for value in row) for row in grid)
    rows = tuple(map(float, epochs))
    return report.Panel(
        "heat", title, _LAMBDA, report.Axis("epoch"), grid=rounded, columns=_GRID, rows=rows, colour=colour
    )


def _claim(histories: Sequence[PairHistory]) -> report.Claim:
    before, after = _ends(histories, lambda path: path.midpoint)
    verdict = falls(before, after, _HALF)
    return report.Claim(
        "Rebasin lowers the loss barrier between independently trained networks.",
        verdict,
        f"{mean_text(before)} nats before, {mean_text(after)} after, over {len(histories)} pairs (criterion: by more "
        "than three "
        f"standard errors, and at most {_HALF:.0%} are left)",
        f"about {published.BARRIER_BEFORE} before, about {published.BARRIER_AFTER} after",
        f"{fmean(after) / fmean(before):.0%} of the barrier are left." if fmean(before) else "",
    )
