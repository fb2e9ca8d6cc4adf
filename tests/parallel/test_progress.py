"""What `progress=` may be, and the line that `progress=True` shows."""

import inspect
import io

import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.parallel import progress_of
from onebasin.parallel.progress import _Line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def screen(text: str) -> str:
    """What is left to be seen of a line that is written over."""
    line = ""
    for part in text.split("\r"):
        line = part + line[len(part) :]
    return line.rstrip()


def test_the_line_appears_after_two_seconds_and_goes_with_the_work() -> None:
    now, stream = [0.0], Terminal()
    line = _Line(stream, clock=lambda: now[0])
    line(1, 100, "sweep 1")
    assert stream.getvalue() == ""
    now[0] = 3.0
    line(31, 100, "sweep 1, and a long remark")
    now[0] = 3.1
    line(32, 100, "not shown so soon")
    assert screen(stream.getvalue()) == "sweep 1, and a long remark, 31 of 100, 3 s, about 7 s left"
    now[0] = 4.0
    line(41, 100, "sweep 1")
    assert screen(stream.getvalue()) == "sweep 1, 41 of 100, 4 s, about 6 s left"
    del line
    assert screen(stream.getvalue()) == ""


def test_a_log_gets_a_line_every_half_minute() -> None:
    now, stream = [0.0], io.StringIO()
    line = _Line(stream, clock=lambda: now[0])
    for second in range(0, 70, 5):
        now[0] = second
        line(second, 140, "networks")
    del line
    assert stream.getvalue().splitlines() == [
        "networks, 30 of 140, 30 s, about 110 s left".replace("110 s", "2 min"),
        "networks, 60 of 140, 60 s, about 80 s left",
    ]


def test_what_progress_may_be() -> None:
    assert progress_of(None) is progress_of(False) is None
    assert isinstance(progress_of(True), _Line)
    assert progress_of(print) is print
    with pytest.raises(ob.errors.InputError, match="give progress=True"):
        progress_of("yes")  # type: ignore[arg-type]


def test_every_public_function_with_progress_takes_true_and_says_so() -> None:
    functions = {name: getattr(ob, name) for name in ob.__all__ if inspect.isfunction(getattr(ob, name))}
    showing = {name: one for name, one in functions.items() if "progress" in inspect.signature(one).parameters}
    assert len(showing) >= 15
    for name, one in showing.items():
        assert inspect.signature(one).parameters["progress"].annotation == "Progress | bool | None", name
        assert "progress: True for a line" in (one.__doc__ or "") or "as there" in (one.__doc__ or ""), name
        source = inspect.getsource(inspect.unwrap(one))
        assert "progress_of(progress)" in source or "progress=progress" in source, name


def test_true_shows_a_line_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr("onebasin.parallel.progress.PATIENCE", -1.0)
    monkeypatch.setattr("sys.stderr", stream)
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(8, 3)
    population = ob.Population.from_models([model, model])
    shown, silent = (ob.predict(model, population, x, progress=how) for how in (True, False))
    assert torch.equal(shown, silent)
    assert "networks, " in stream.getvalue() and screen(stream.getvalue()) == ""
