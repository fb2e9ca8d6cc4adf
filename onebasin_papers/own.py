"""A study on a user's own problem: settings that are changed, what its record says, and what it must not show."""

from __future__ import annotations

import difflib
import hashlib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import onebasin as ob
from onebasin_papers.problems import Own, OwnArchitecture, Problem

report = ob.reporting
_Settings = TypeVar("_Settings")


# --- the problem ------------------------------------------------------------------------------------------------------


def own_problem(
    data: ob.data.Dataset,
    architecture: Callable[[int, int], OwnArchitecture],
    *,
    outside: Tensor | None = None,
    outside_name: str = "",
    limit: int | None = None,
) -> Own:
    """Put an architecture and data together, and check that they fit.

    Args:
        data: training and test examples; targets are class numbers.
        architecture: (numbers of an input, classes) -> the architecture.
        outside: foreign inputs, of the shape of the others; None shuffles the entries of every test input.
        outside_name: what they are.
        limit: at most so many examples of each, evenly spread; None for all.

    Raises:
        InputError: targets are values, or the model does not give one output per class.
    """
    if data.classes is None:
        raise ob.errors.InputError(
            f"expected class numbers as targets in {data.name}, found values: the papers' tables are about "
            "classification, give a data set with classes"
        )
    train, test = ((_spread(inputs, limit), _spread(targets, limit)) for inputs, targets in (data.train, data.test))
    if outside is not None and outside.shape[1:] != test[0].shape[1:]:
        raise ob.errors.InputError(
            f"expected foreign inputs of the shape {tuple(test[0].shape[1:])} of {data.name}, found "
            f"{tuple(outside.shape[1:])} in {outside_name}: give others"
        )
    foreign = _shuffled(test[0]) if outside is None else _spread(outside, limit)
    built = architecture(train[0][0].numel(), data.classes)
    if built.is_flat:
        train, test, foreign = (train[0].flatten(1), train[1]), (test[0].flatten(1), test[1]), foreign.flatten(1)
    model = built.build(built.width)
    _check_fits(model, train[0][:2], data)
    name = outside_name or "test inputs with their entries shuffled"
    problem = Problem(data.name, model, train, test, foreign, name, built.described)
    return Own(problem, None if built.width is None else built.build, built.width)


def digest(*tensors: Tensor) -> str:
    """A short text that changes with every number of the tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(repr((tensor.dtype, tuple(tensor.shape))).encode())
        found.update(tensor.contiguous().numpy().tobytes())
    return found.hexdigest()[:12]


def _check_fits(model: nn.Module, inputs: Tensor, data: ob.data.Dataset) -> None:
    try:
        with torch.no_grad():
            outputs = model(inputs)
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ob.errors.InputError(
            f"expected a model that takes inputs of shape {tuple(inputs.shape)} from {data.name}, found that it fails "
            f"({first}): change its first layer, or reshape the inputs in it"
        ) from error
    if not isinstance(outputs, Tensor) or outputs.dim() != 2 or outputs.shape[1] < (data.classes or 1):
        found = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ob.errors.InputError(
            f"expected a model with outputs ({len(inputs)}, {data.classes}), one per class of {data.name}, found "
            f"{found}: change its last layer"
        )


def _spread(values: Tensor, limit: int | None) -> Tensor:
    """At most so many rows, from everywhere: files are often sorted by class."""
    if limit is None or len(values) <= limit:
        return values
    return values[torch.arange(limit) * len(values) // limit]


def _shuffled(inputs: Tensor) -> Tensor:
    """Each input with its entries in an order of its own: the same values, another kind of picture."""
    flat = inputs.flatten(1)
    order = torch.rand(flat.shape, generator=ob.generator(0, "shuffled")).argsort(1)
    return flat.gather(1, order).reshape(inputs.shape)


def own_titles(methods: Iterable[tuple[str, ob.Method]], taken: Iterable[str]) -> dict[str, ob.Method]:
    """Give each method a name for tables: its own, or with its reference behind it where that is taken.

    >>> list(own_titles([("a.py:Long", ob.HMC()), ("a.py:Short", ob.HMC())], ["HMC"]))
    ['hmc (Long)', 'hmc (Short)']

    Args:
        methods: (reference, method) of each.
        taken: names of the study's own rows.

    Raises:
        InputError: two would have the same name.
    """
    found: dict[str, ob.Method] = {}
    for reference, method in methods:
        used = {name.lower() for name in (*taken, *found)}
        title = str(method.name)
        if title.lower() in used:
            title = f"{title} ({reference.rpartition(':')[2]})"
        if title.lower() in used:
            raise ob.errors.InputError(f"found the method {reference} twice: give it once, or another name")
        found[title] = method
    return found


# --- settings ---------------------------------------------------------------------------------------------------------

_TRUE, _FALSE = ("true", "yes", "1"), ("false", "no", "0")


def changed_settings(
    settings: _Settings, parts: Mapping[str, Sequence[str]], texts: Iterable[str], least: Mapping[str, int]
) -> tuple[_Settings, dict[str, str]]:
    """Settings with some of them changed by PART.KEY=VALUE.

    Args:
        settings: of a preset.
        parts: name of a part -> the settings that it reads.
        texts: what the user wrote.
        least: key -> the smallest number that the study can work with, where it is not 0.

    Returns:
        The settings, and key -> text of what was changed.

    Raises:
        InputError: a text is none of this form, or names a part, key or value that does not exist.
    """
    changed: dict[str, str] = {}
    values: dict[str, Any] = {}
    for text in texts:
        part, key, value = _named_setting(text, parts)
        if key in changed and changed[key] != value:
            raise ob.errors.InputError(
                f"found two values for {key}, {changed[key]} and {value}, but parts share their networks: give one"
            )
        changed[key] = value
        values[key] = parsed(value, getattr(settings, key), f"{part}.{key}", least.get(key, 0))
    return replace(settings, **values), changed  # type: ignore[type-var]


def _named_setting(text: str, parts: Mapping[str, Sequence[str]]) -> tuple[str, str, str]:
    """Part, key and value of a text."""
    place, equals, value = text.partition("=")
    part, dot, key = place.strip().partition(".")
    everywhere = sorted({one for keys in parts.values() for one in keys})
    if not equals or not dot:
        first = next((name for name, keys in parts.items() if place.strip() in keys), "table")
        example = f"{first}.{place.strip() if place.strip() in everywhere else everywhere[0]}"
        raise ob.errors.InputError(f"expected --set PART.KEY=VALUE, found {text!r}: write --set {example}={value or 2}")
    if part not in parts:
        near = difflib.get_close_matches(part, parts, n=1)
        hint = f"did you mean {near[0]}.{key}?" if near else "give one of them"
        raise ob.errors.InputError(f"expected a part out of {', '.join(parts)} in --set, found {part!r}: {hint}")
    if key not in parts[part]:
        near = difflib.get_close_matches(key, parts[part], n=1)
        elsewhere = [name for name, keys in parts.items() if key in keys]
        hint = (
            f"did you mean {part}.{near[0]}?"
            if near
            else f"it is a setting of {elsewhere[0]}, write {elsewhere[0]}.{key}"
            if elsewhere
            else "--list shows what they mean"
        )
        raise ob.errors.InputError(f"{part} has the settings {', '.join(parts[part])}, found {key!r}: {hint}")
    return part, key, value.strip()


def parsed(text: str, default: Any, name: str, least: int = 0) -> Any:
    """A text as a value of the type of the default.

    >>> parsed("3", 5, "a"), parsed("1e-3", 0.5, "a"), parsed("4,8", (1, 2), "a"), parsed("no", True, "a")
    (3, 0.001, (4, 8), False)

    Raises:
        InputError: it is of another type, or too small.
    """
    if isinstance(default, tuple):
        words = [word.strip() for word in text.split(",") if word.strip()]
        if not words:
            raise ob.errors.InputError(f"expected numbers with commas for {name}, found {text!r}: write {name}=1,2,4")
        return tuple(parsed(word, default[0], name, least) for word in words)
    if isinstance(default, bool):
        if text.lower() not in (*_TRUE, *_FALSE):
            raise ob.errors.InputError(f"expected true or false for {name}, found {text!r}: write {name}=true")
        return text.lower() in _TRUE
    if isinstance(default, str):
        return text
    kind, words_of = (int, "a whole number") if isinstance(default, int) else (float, "a number")
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not least <= value < float("inf"):
        raise ob.errors.InputError(
            f"expected {words_of} of at least {least} for {name}, found {text!r}: write {name}={shown(default)}"
        )
    return value


def shown(value: Any) -> str:
    """A setting as it is written behind --set.

    >>> shown((1, 2)), shown(True), shown(0.001)
    ('1,2', 'true', '0.001')
    """
    if isinstance(value, tuple):
        return ",".join(map(shown, value))
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def meanings(settings: Any) -> dict[str, str]:
    """Setting -> what the docstring of the settings says about it."""
    text = inspect.cleandoc(type(settings).__doc__ or "").partition("Attributes:\n")[2]
    found = re.findall(r"^ {4}(\w+(?:, \w+)*): (.+(?:\n {5,}.+)*)", text, re.MULTILINE)
    return {name: " ".join(line.split()) for names, line in found for name in names.split(", ")}


# --- the record -------------------------------------------------------------------------------------------------------


def own_title(title: str, own: Own) -> str:
    """The title of a record, which says whose problem it is about."""
    if own.problem is None:
        return title
    return f"{title}, on an own problem: {own.problem.described} on {own.problem.name}"


def own_summary(own: Own) -> tuple[str, ...]:
    """What a reader must know before anything else; nothing for the paper's own problem, methods and settings."""
    sentences = []
    if (problem := own.problem) is not None:
        weights = sum(value.numel() for value in problem.model.parameters())
        sentences.append(
            f"This is not the paper's problem: {problem.described} ({weights:,} weights) on {problem.name}, "
            f"{len(problem.train[0]):,} training and {len(problem.test[0]):,} test examples; foreign inputs, where "
            f"they are needed, are {problem.outside_name}. Verdicts say whether the paper's claims hold here; its "
            "published numbers, which belong to other networks and data, are left out."
        )
    if own.methods:
        several = "methods" if len(own.methods) > 1 else "method"
        sentences.append(f"Rows of the user's own {several}, not the paper's: {', '.join(own.methods)}.")
    if "set" in own.words:
        sentences.append(f"Settings that were changed: {own.words['set']}.")
    return tuple(sentences)


_ASIDE = re.compile(
    r" \([^()]*\b(?:published|paper)\b[^()]*\)"  # (published: 0.28 and 0.012 nats)
    r"|, as it was in the paper \([^()]*\)"
    r"|; (?:dashed: MNIST|published).*?(?=\.(?: |$))"  # ; published values are for MNIST with 784-512-10
    r"|, beside what the paper found on [\w-]+"
)
_SENTENCE = re.compile(r"(?<=[.?!]) (?=[A-Z“])")
_THEIRS = re.compile(r"^Published|784-512-10|Published values|^The paper ran|^Published:")


def without_published(section: report.Section) -> report.Section:
    """A section without the numbers of the paper, which belong to another problem: in tables, figures and sentences."""
    return replace(
        section,
        text=tuple(_clean(text) for text in section.text),
        items=tuple(_table(item) if isinstance(item, report.Table) else _figure(item) for item in section.items),
        claims=tuple(replace(one, published="", caveat=_clean(one.caveat)) for one in section.claims),
    )


def _clean(text: str) -> str:
    """Prose without what it says about published numbers.

    >>> _clean("It is 0.3 (published: 0.2, on MNIST 784-512-10). Published values are for MNIST. It falls.")
    'It is 0.3. It falls.'
    """
    return " ".join(one for one in _SENTENCE.split(_ASIDE.sub("", text)) if not _THEIRS.search(one))


def _table(table: report.Table) -> report.Table:
    def cell(value: report.Cell) -> report.Cell:
        return replace(value, published=None) if isinstance(value, report.Number) else value

    rows = tuple(tuple(map(cell, row)) for row in table.rows)
    return replace(table, title=_clean(table.title), rows=rows, note=_clean(table.note))


def _figure(figure: report.Figure) -> report.Figure:
    panels = tuple(
        replace(
            panel,
            series=tuple(one for one in panel.series if "published" not in one.name),
            rules=tuple(one for one in panel.rules if "published" not in one.name),
        )
        for panel in figure.panels
        if not panel.title.startswith("published")
    )
    return replace(figure, caption=_clean(figure.caption), panels=panels)
