"""Records for tests of the report: one with everything that a study can show, and one that means harm."""

import math

from onebasin.reporting.record import Axis, Claim, Column, Figure, Number, Panel, Record, Rule, Section, Series, Table

HOSTILE = (
    "<script>alert(1)</script></style></title>\"'&<img src=x onerror=alert(2)> a|b $x^2$ \x00\x0b\ud800 漢字 "
    + "w" * 90
)


def _curve(name: str, rise: float, *, dashed: bool = False, points: int = 41) -> Series:
    x = tuple(place / (points - 1) for place in range(points))
    y = tuple(0.08 + rise * 4 * place * (1 - place) for place in x)
    error = tuple(0.02 + 0.05 * rise * place for place in x)
    low = tuple(value - wide for value, wide in zip(y, error, strict=True))
    high = tuple(value + wide for value, wide in zip(y, error, strict=True))
    return Series(name, x, y, () if dashed else low, () if dashed else high, dashed)


def _bell(name: str, centre: float, width: float) -> Series:
    edges = tuple(-6 + 0.25 * place for place in range(41))
    middles = [edge + 0.125 for edge in edges[:-1]]
    return Series(name, edges, tuple(1000 * math.exp(-(((place - centre) / width) ** 2)) for place in middles))


def _barriers() -> Figure:
    where, loss = Axis("Position between the two networks", low=0, high=1), Axis("Test loss (nats)", low=0)
    before = (_curve("before alignment", 0.9), _curve("published", 0.8, dashed=True))
    after = (_curve("after alignment", 0.1), _curve("with balanced scales", 0.04))
    rules = (Rule("loss of the ensemble", 0.05),)
    return Figure(
        "barriers",
        "Does the barrier between two networks fall after alignment?",
        "It falls from 0.98 ± 0.05 to 0.18 ± 0.02 nats. Bands: one standard error over 5 pairs.",
        (
            Panel("lines", "Independent trainings", where, loss, before, rules),
            Panel("lines", "The same, aligned", where, loss, after, rules),
        ),
    )


def _pruning() -> Figure:
    kept = tuple(2.0**-place for place in range(8))
    criteria = ("signal to noise", "magnitude", "random")
    curves = tuple(
        Series(name, kept, tuple(0.97 - slope * place**2 for place in range(8)))
        for name, slope in zip(criteria, (0.001, 0.004, 0.012), strict=True)
    )
    return Figure(
        "pruning",
        "How many weights can go?",
        "Nine of ten, when they are ranked by `signal to noise`.",
        (
            Panel("lines", "Accuracy", Axis("Weights kept", "log"), Axis("Accuracy"), curves),
            Panel(
                "histogram",
                "Deviations",
                Axis("log₁₀ of the deviation"),
                Axis("Weights"),
                (_bell("hidden layer", -2, 0.8), _bell("output layer", -1, 0.6), _bell("prior", 0.5, 0.3)),
                (Rule("deviation of the prior", 0.5, "vertical"),),
            ),
        ),
    )


def _methods() -> Figure:
    short, long = (
        ("HMC", "ensemble", "VI"),
        ("dropout", "variational", "SWAG", "Laplace (last layer)", "SGHMC, 8 modes"),
    )
    bars = (
        Series("full", (0, 1, 2), (0.95, 0.96, 0.93), (0.94, 0.955, 0.92), (0.96, 0.965, 0.94)),
        Series("compact", (0, 1, 2), (0.94, 0.95, 0.91), (0.93, 0.94, 0.90), (0.95, 0.96, 0.92)),
        Series("published", (0, 1, 2), (0.97, 0.98, 0.9), dashed=True),
    )
    distances = (0.9, 0.5, 0.42, None, 0.04)
    lows, highs = (0.8, 0.45, 0.4, None, 0.03), (1, 0.55, 0.44, None, 0.05)
    spread = (Series("distance", (0, 1, 2, 3, 4), distances, lows, highs),)
    return Figure(
        "methods",
        "Which method comes closest?",
        "Several modes do; a method that was not run leaves a gap.",
        (
            Panel("bars", "Accuracy", Axis("", names=short), Axis("Accuracy", low=0, high=1), bars),
            Panel(
                "bars", "Distance to the reference", Axis("", names=long), Axis("MMD"), spread, (Rule("chance", 0.6),)
            ),
        ),
    )


def _maps() -> Figure:
    fine = tuple(place / 30 for place in range(31))
    grid = tuple(tuple(math.exp(-30 * ((x - 0.3) ** 2 + (y - 0.6) ** 2)) for x in fine) for y in fine)
    names = ("a", "b", "c", "d")
    small = tuple(tuple(None if i == j else round(0.1 * (i + 1) * (j + 1), 2) for j in range(4)) for i in range(4))
    angle = [0.1 * place for place in range(150)]
    cloud = Series(
        "pairs",
        tuple(0.2 + 0.01 * place * abs(math.sin(7 * place)) for place in angle),
        tuple(0.2 + 0.01 * place * abs(math.cos(5 * place)) for place in angle),
    )
    few = Series("means", (0.22, 0.26, 0.31), (0.21, 0.29, 0.3), (0.2, 0.28, 0.29), (0.22, 0.3, 0.31))
    return Figure(
        "maps",
        "Where do the neurons lie?",
        "In one corner, after scale and order are removed.",
        (
            Panel(
                "heat",
                "Density",
                Axis("First weight"),
                Axis("Second weight"),
                grid=grid,
                columns=fine,
                rows=fine,
                colour=Axis("Networks"),
            ),
            Panel(
                "heat",
                "Disagreement",
                Axis("", names=names),
                Axis("", names=names),
                grid=small,
                columns=(0, 1, 2, 3),
                rows=(0, 1, 2, 3),
                colour=Axis("Share of examples", low=0),
            ),
            Panel(
                "points",
                "Both kinds",
                Axis("Inside (nats)"),
                Axis("Outside (nats)"),
                (cloud, few),
                (Rule("equal", 0, "diagonal"),),
            ),
        ),
    )


def _table() -> Table:
    columns = (
        Column("Method"),
        Column("Accuracy", "Share of test examples whose most probable class is the right one.", "higher", 1, "%"),
        Column("NLL", "Mean negative log-probability of the right class.", "lower", 3, "nats"),
        Column("ECE", "Expected calibration error: how far confidence is from accuracy, over 15 bins.", "lower", 3),
        Column("Agreement", "Share of examples on which it decides as the full population does.", "higher", 1, "%"),
        Column("Weights", "Numbers that must be stored.", "", 0),
        Column("Remark"),
    )
    n = Number
    rows = (
        ("HMC, 800 samples", n(95.3, 0.2, 97.1), n(0.152, 0.004, 0.11), n(0.021, 0.002), n(100), n(1_240_000), "all"),
        ("q_r, aligned", n(94.8, 0.3, 96.4), n(0.171, 0.006, 0.14), n(0.024, 0.003), n(97.9, 0.4), n(3_100), ""),
        ("q_d, not aligned", n(21.4, 3.1, 11.9), n(2.34, 0.2, 2.3), n(0.31, 0.05), n(21, 3), n(3_100), "no basin"),
        ("deep ensemble", n(96.1, 0.1, 98.0), n(0.138, 0.0002, 0.08), n(0.019, 0.001), n(98, 0.2), n(15_500), ""),
        ("Laplace", n(None, note="did not converge"), None, None, n(95), n(9_000), None),
    )
    return Table(
        "methods-table",
        "What does a compact posterior keep?",
        columns,
        rows,
        "± one standard error over 5 seeds",
        "Paper: MNIST with 60,000 images; here: 1,797 digits.",
    )


def sample_record(name: str = "sample") -> Record:
    claims = (
        Claim("Alignment removes most of the barrier.", "reproduced", "0.98 ± 0.05 → 0.18 ± 0.02 nats", "1.9 → 0.2"),
        Claim(
            "One Gaussian in one basin predicts as well as HMC.",
            "reproduced with a caveat",
            "94.8 ± 0.3 % against 95.3 ± 0.2 %",
            "96.4 % against 97.1 %",
            "The network is smaller than the paper's, and digits are easier than MNIST.",
        ),
    )
    failed = Claim("Random pruning keeps 90 % of the accuracy.", "not reproduced", "38 ± 4 %", "90 %")
    sections = (
        Section(
            "alignment",
            "Are independent trainings the same network in disguise?",
            (
                "Mostly: after alignment the barrier is 0.18 ± 0.02 nats, before it was 0.98 ± 0.05. That is a fifth.",
                "Each pair of networks was trained from other random numbers, on the same digits, for 30 epochs.",
            ),
            (_barriers(), _table()),
            claims,
            "onebasin reproduce sample --preset quick --seed 0 --only alignment",
            83.2,
        ),
        Section(
            "pruning-section",
            "Which weights matter?",
            ("One in ten: accuracy stays above 95 % with 12 % of the weights.",),
            (_pruning(), _methods()),
            (failed,),
            "onebasin reproduce sample --preset quick --seed 0 --only pruning-section",
            12.0,
        ),
        Section("geometry", "What does the posterior look like?", ("A corner of a cube.",), (_maps(),), (), "", 0.4),
    )
    return Record(
        name,
        "Compact posteriors: one basin is enough",
        (
            "Five networks were trained on 1,347 pictures of digits, each from other random numbers.",
            "As they are, the line between two of them passes a barrier of 0.98 ± 0.05 nats; aligned, 0.18 ± 0.02.",
            "One Gaussian around the aligned networks is right on 94.8 ± 0.3 % of new digits, with 3,100 numbers.",
            "Without alignment the same Gaussian is right on 21.4 ± 3.1 %.",
            "Nine of ten weights can go before accuracy falls below 95 %.",
        ),
        sections,
        "onebasin reproduce sample --preset quick --seed 0",
        {"preset": "quick", "seed": 0, "epochs": 30, "step": 0.05, "fresh": False, "data": None},
        {"onebasin": "0.1.0", "torch": "2.13.0", "python": "3.11.9"},
        {
            "basin": "A region of weights in which a straight line between two networks passes no barrier.",
            "barrier": "The most that the loss on the line between two networks exceeds the mean of its ends.",
        },
        95.6,
    )


def hostile_record() -> Record:
    """Every text is an attack, and every table and figure is empty, missing or out of place."""
    bad = HOSTILE
    axis = Axis(bad, "log", 5.0, 1.0)
    gaps = Series(bad, (0.0, 1.0), (None, None), (None, None), (None, None))
    flat = Series(f"{bad}2", (-1.0, 0.0), (0.0, -3.0), shade=40, dashed=True)
    panels = (
        Panel("lines", bad, axis, axis, (gaps, flat), (Rule(bad, 2.0), Rule(bad, -1.0, "vertical"))),
        Panel("points", bad, Axis(""), Axis(""), (), (Rule(bad, 0.0, "diagonal"),)),
        Panel("bars", bad, Axis("", names=(bad, "")), axis, (Series(bad, (0, 1), (None, 0.0)),)),
        Panel("histogram", bad, axis, axis, (Series(bad, (0.0, 0.0), (0.0,)),)),
        Panel("heat", bad, axis, axis, grid=(), columns=(), rows=()),
        Panel("heat", bad, axis, axis, grid=((None, 3.0),), columns=(1.0, 2.0), rows=(4.0,), colour=axis),
    )
    column = Column(bad, bad, "higher", 2, bad)
    section = Section(
        bad,
        bad,
        (bad, f"`{bad}`"),
        (
            Table(f"{bad} table", bad, (column,), ((Number(None, note=bad),), (bad,), (None,)), bad, bad),
            Table("empty rows", bad, (column, column), ()),
            Table("empty", bad, (), ()),
            Figure("../../outside", bad, bad, panels),
            Figure("no panels", bad, bad, ()),
        ),
        (Claim(bad, "reproduced with a caveat", bad, bad, bad),),
        bad,
        1e9,
    )
    return Record(bad, bad, (bad,), (section,), bad, {bad: bad}, {bad: bad}, {bad: bad})
