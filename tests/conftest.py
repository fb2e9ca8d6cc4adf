from pathlib import Path

import pytest
import torch

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
