"""Names of networks: files in their natural order, tensors without the prefixes of wrappers."""

import re
from collections.abc import Iterable, Mapping
from pathlib import PurePath

_WRAPPERS = ("module.", "_orig_mod.")  # DataParallel and torch.compile


def natural_key(path: PurePath) -> list[list[tuple[int, str]]]:
    """Sort `net10` after `net9`, in every folder of the path.

    >>> sorted([PurePath("net10.pt"), PurePath("net9.pt")], key=natural_key)[0].name
    'net9.pt'
    """
    return [[*map(_piece_key, re.split(r"(\d+)", part)), (-1, part)] for part in path.parts]  # net1, then net01


def _piece_key(piece: str) -> tuple[int, str]:
    """Numbers by value, however long they are; text before them."""
    digits = piece.lstrip("0")
    return (len(digits), digits) if piece.isdecimal() else (-1, piece)


def strip_prefix(names: Iterable[str], expected: Iterable[str] | None = None) -> dict[str, str]:
    """Map clean names to stored ones: a wrapper's prefix that all names share is stripped.

    With `expected` names, any shared prefix is stripped that makes them agree, and none if they agree already.

    >>> strip_prefix(["module.fc.weight", "module.fc.bias"])
    {'fc.weight': 'module.fc.weight', 'fc.bias': 'module.fc.bias'}
    """
    names = list(names)
    wanted = None if expected is None else set(expected)
    if wanted is not None and wanted:
        first = min(wanted)
        for name in names:
            prefix = name.removesuffix(first)
            if name.endswith(first) and {prefix + other for other in wanted} == set(names):
                return {other.removeprefix(prefix): other for other in names}
    prefix = ""
    while True:
        wrappers = [item for item in _WRAPPERS if names and all(name.startswith(prefix + item) for name in names)]
        if not wrappers:
            return {name.removeprefix(prefix): name for name in names}
        prefix += wrappers[0]


def add_tied(stored: Mapping[str, str], tied: Mapping[str, str]) -> dict[str, str]:
    """Add names of tied tensors that a file holds under another of their names, as `save_pretrained` writes them.

    Args:
        stored: clean name -> name in the file.
        tied: every name of the architecture -> the first name of the same tensor.

    >>> add_tied({"embed.weight": "embed.weight"}, {"embed.weight": "embed.weight", "head.weight": "embed.weight"})
    {'embed.weight': 'embed.weight', 'head.weight': 'embed.weight'}
    """
    held = {tied[name]: stored[name] for name in stored if name in tied}
    missing = {name: held[first] for name, first in tied.items() if name not in stored and first in held}
    return {**stored, **missing}
