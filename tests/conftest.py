import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from onebasin.cli import progress
from onebasin.cli.main import main

ROOT = Path(__file__).resolve().parent.parent

# Two pytest workers on two cores, and models too small to share: one thread each is fastest.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of large test data beside the checkout; whoever asks for it is skipped where there is none."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("needs the shared test data (a folder shared/data beside the checkout)")
    return folder


@pytest.fixture
def restored_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a model file puts on the path of imports is taken off again."""
    monkeypatch.setattr(sys, "path", sys.path[:])


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """The command line, called with arguments: exit code, what it printed, what it complained about."""
    monkeypatch.setattr(progress, "EVERY", 1e6)  # no lines of progress, however slow the machine

    def call(*arguments: Any) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call
