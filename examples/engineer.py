"""An engineer has a folder of CNN checkpoints and one of small vision transformers: can they be averaged?

The convolutional networks nearly can, once they are aligned; the transformers, trained for a second each, cannot, and
the barrier says so before anybody ships their mean.

`python examples/engineer.py` takes some ten seconds and writes the folder engineer/.
"""

from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

import onebasin as ob

FOLDER = Path("engineer")


def cnn() -> nn.Module:
    """His convolutional network for digits of 8 x 8 pixels."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


class ViT(nn.Module):
    """His vision transformer: sixteen patches of 2 x 2 pixels, one encoder layer of two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 16, 2, stride=2)
        self.places = nn.Parameter(0.1 * torch.randn(16, 16))
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (examples, 1, 8, 8) to logits (examples, 10)."""
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.places
        return self.head(self.encoder(tokens).mean(1))


def train_some(build: Callable[[], nn.Module], folder: Path, data: tuple[Tensor, Tensor], steps: int) -> None:
    """What he has already: three trainings from different starts, saved as checkpoints."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed in range(3):
        torch.manual_seed(seed)
        model = build()
        optimiser = torch.optim.Adam(model.parameters(), 5e-3)
        for _ in range(steps):
            rows = torch.randint(len(data[0]), (128,))
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(data[0][rows]), data[1][rows]).backward()
            optimiser.step()
        torch.save({"state_dict": model.state_dict(), "steps": steps}, folder / f"run{seed}.pt")


def main() -> None:
    """Open both folders, align and merge each, and show all of it on one page."""
    (x, y), test = ob.data.split(*ob.data.digits(), test=0.5, seed=0)
    train, test = (x.view(-1, 1, 8, 8), y), (test[0].view(-1, 1, 8, 8), test[1])
    results: list[ob.Result] = []
    for name, build, steps in (("cnn", cnn, 60), ("vit", ViT, 120)):
        train_some(build, FOLDER / name, train, steps)

        model = build().eval()
        networks = ob.Population.open(FOLDER / name, spec=model)
        symmetry = ob.discover(model, train[0][:2])
        aligned = ob.align(networks, symmetry)
        walk = ob.barrier(model, networks[0], networks[1], test, symmetry=symmetry, points=9)
        merged = ob.merge(model, networks, symmetry)
        torch.save(merged, FOLDER / f"{name}-merged.pt")
        mean = {key: networks.tensor(key).mean(0) for key in networks.names}
        for title, state in (("one network", networks[0]), ("the mean", mean), ("the aligned mean", merged)):
            print(f"{name}: {float(ob.losses(model, state, *test).error):.3f} of the digits wrong by {title}")
        results += [symmetry, aligned, walk]

    results[-1].plot()
    plt.savefig(FOLDER / "vit-barrier.png")
    print(ob.report(FOLDER / "page", *results, title="CNN and ViT checkpoints", figures=False))


if __name__ == "__main__":
    main()
