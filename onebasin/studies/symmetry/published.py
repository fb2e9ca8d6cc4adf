"""What the paper reports: ResNet-18 on CIFAR-100, foreign images from SVHN, no errors given.

Units: MMD and NS as printed (most likely 10 x squared MMD), ACE in per mille (most likely), mutual information in
hundredths of a nat, the others in per cent.
"""

from __future__ import annotations

MEASURES = ("mmd", "ns", "accuracy", "ece", "ace", "brier", "aupr", "fpr95", "id_mi", "ood_mi")
ONE, MULTI = "one mode", "multi mode"
ENSEMBLE = "Deep ensemble"

_ROWS: dict[tuple[str, str], tuple[float, ...]] = {
    ("Dropout", ONE): (4.5, 7.5, 74.2, 14.7, 3.2, 38.8, 76.4, 47.7, 5.7, 9.1),
    ("viBNN", ONE): (9.0, 10.2, 57.9, 24.6, 3.0, 63.7, 60.9, 79.1, 2.7, 4.2),
    ("SWAG", ONE): (6.7, 7.2, 70.9, 2.3, 1.2, 38.9, 86.2, 48.0, 2.4, 6.3),
    ("Laplace", ONE): (5.7, 7.0, 75.1, 0.9, 0.9, 34.6, 81.3, 42.4, 27.6, 63.3),
    ("SGHMC", ONE): (7.5, 7.9, 73.7, 4.9, 1.0, 36.2, 79.4, 62.3, 0.2, 0.5),
    ("Dropout", MULTI): (0.7, 4.5, 79.5, 4.3, 1.0, 29.2, 78.2, 48.1, 20.5, 46.3),
    ("viBNN", MULTI): (6.1, 5.6, 66.5, 2.8, 2.0, 45.3, 71.9, 71.7, 45.5, 81.1),
    ("SWAG", MULTI): (5.0, 5.4, 72.8, 1.5, 1.1, 36.9, 89.1, 50.6, 6.5, 19.7),
    ("Laplace", MULTI): (0.6, 4.3, 78.9, 6.9, 0.8, 30.3, 82.9, 41.3, 44.1, 98.5),
    (ENSEMBLE, MULTI): (0.0, 0.0, 79.5, 1.6, 0.6, 28.7, 81.1, 45.6, 22.5, 58.0),
}
PAIR_INFORMATION = {"inside": 0.1075, "outside": 0.222}  # nats: the most frequent values over 499,500 pairs
UP_OF_ALL = {"CIFAR-100": (8, 9), "TinyImageNet": (2, 7)}  # rows, ensembles left out, where NS is above MMD


def published(method: str, form: str, measure: str) -> float | None:
    """A printed number, None where the paper has none.

    >>> published("SWAG", "multi mode", "accuracy"), published("SGHMC", "multi mode", "accuracy")
    (72.8, None)
    """
    row = _ROWS.get((method, form))
    return None if row is None or measure not in MEASURES else row[MEASURES.index(measure)]


def column(measure: str) -> list[float]:
    """A printed column, all rows."""
    return [row[MEASURES.index(measure)] for row in _ROWS.values()]
