"""Architectures of the real trained weights in the shared data, and how to load them."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from .convolution import bn
from .expect import Case, Expected, numbers, seeded

ANI_WIDTHS = {"H": (160, 128, 96), "C": (144, 112, 96), "N": (128, 112, 96), "O": (128, 112, 96)}


def data_dir() -> Path | None:
    """The shared data beside the project, or None where it is not there."""
    found = Path(__file__).resolve().parents[2].parent / "shared" / "data"
    return found if found.is_dir() else None


def checkpoint(name: str) -> Path:
    """A file under checkpoints; raises FileNotFoundError with the place it should be at."""
    root = data_dir()
    if root is None or not (root / "checkpoints" / name).exists():
        raise FileNotFoundError(f"{name} not found under ../shared/data/checkpoints beside the project")
    return root / "checkpoints" / name


class Basic(nn.Module):
    """Basic block; where the width doubles the shortcut takes every second pixel and pads channels with zeros."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.stride, self.pad = (1, 0) if width == out else (2, out // 4)
        self.conv1, self.bn1 = nn.Conv2d(width, out, 3, self.stride, padding=1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, padding=1, bias=False), nn.BatchNorm2d(out)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.pad:
            x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.pad, self.pad))
        return F.relu(hidden + x)


class ResNet20(nn.Module):
    """ResNet-20 for CIFAR-10 as published by akamaster (option A); `width` 16 there, smaller for tests."""

    def __init__(self, width: int = 16, blocks: int = 3) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.layer1 = nn.Sequential(*(Basic(width, width) for _ in range(blocks)))
        self.layer2 = nn.Sequential(*(Basic(width * (1 if i == 0 else 2), 2 * width) for i in range(blocks)))
        self.layer3 = nn.Sequential(*(Basic(width * (2 if i == 0 else 4), 4 * width) for i in range(blocks)))
        self.linear = nn.Linear(4 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x))))))
        return self.linear(F.avg_pool2d(x, x.shape[3]).flatten(1))


class TutorialCNN(nn.Module):
    """The network of the PyTorch CIFAR-10 tutorial."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2).flatten(1)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


class Element(nn.ModuleList):
    """The network of one chemical element: 384-a-b-c-1 with CELU(0.1)."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        sizes = (384, *widths, 1)
        super().__init__(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        for layer in list(self)[:-1]:
            x = F.celu(layer(x), alpha=0.1)
        return self[len(self) - 1](x)


class ANI(nn.Module):
    """The four element networks of ANI-1x; one environment vector per element, energies summed."""

    def __init__(self) -> None:
        super().__init__()
        for name, widths in ANI_WIDTHS.items():
            self.add_module(name, Element(widths))

    def forward(self, hydrogen: Tensor, carbon: Tensor, nitrogen: Tensor, oxygen: Tensor) -> Tensor:
        vectors = zip(ANI_WIDTHS, (hydrogen, carbon, nitrogen, oxygen), strict=True)
        return torch.stack([self.get_submodule(name)(x) for name, x in vectors]).sum(dim=0)


def blank(kind: type[nn.Module]) -> nn.Module:
    """A network to be loaded into, without touching the global random state."""
    with torch.random.fork_rng(devices=[]):
        return kind()


def resnet20() -> nn.Module:
    """ResNet-20 with its trained weights."""
    stored = torch.load(checkpoint("resnet20-12fca82f.th"), weights_only=True, map_location="cpu")["state_dict"]
    model = blank(ResNet20)
    tracked = {name: buffer for name, buffer in model.named_buffers() if name.endswith("num_batches_tracked")}
    model.load_state_dict({name.removeprefix("module."): t for name, t in stored.items()} | tracked)
    return model.eval()


def tutorial_cnn() -> nn.Module:
    """The tutorial network with its trained weights."""
    model = blank(TutorialCNN)
    model.load_state_dict(
        torch.load(checkpoint("cifar10-tutorial-cnn-captum.pt"), weights_only=True, map_location="cpu")
    )
    return model.eval()


def ani(member: int = 0) -> nn.Module:
    """One of the eight ANI-1x networks with its trained weights."""
    model = blank(ANI)
    model.load_state_dict(load_file(checkpoint(f"ani-1x-ensemble/member_{member}.safetensors")))
    return model.eval()


MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ResNet-20; the tutorial network uses 0.5 and 0.5


def normalised(pictures: np.ndarray, mean: tuple[float, ...] = MEAN, std: tuple[float, ...] = STD) -> Tensor:
    """NHWC uint8 pictures as normalised NCHW float32."""
    x = torch.from_numpy(pictures.copy()).float().div(255)
    return ((x - torch.tensor(mean)) / torch.tensor(std)).permute(0, 3, 1, 2).contiguous()


def cifar10_test() -> tuple[np.ndarray, np.ndarray]:
    """All 10,000 test pictures (NHWC uint8) and labels; needs Pillow for the WebP mosaic, else ImportError."""
    from PIL import Image

    root = data_dir()
    if root is None:
        raise FileNotFoundError("../shared/data is not beside the project")
    mosaic = np.asarray(Image.open(root / "cifar10" / "test.webp").convert("RGB"))
    pictures = mosaic.reshape(-1, 32, 100, 32, 3).swapaxes(1, 2).reshape(-1, 32, 32, 3)
    return pictures, np.load(root / "cifar10" / "labels.npz", allow_pickle=False)["y_test"]


def cifar10_small() -> tuple[np.ndarray, np.ndarray]:
    """1,000 test pictures (NHWC uint8) and labels; needs numpy alone."""
    root = data_dir()
    if root is None:
        raise FileNotFoundError("../shared/data is not beside the project")
    stored = np.load(root / "cifar10" / "cifar10_small.npz", allow_pickle=False)
    return stored["x_test"], stored["y_test"]


def residual_spaces(width: int = 16, blocks: int = 3) -> tuple[Expected, ...]:
    """Stage 2 = [pad | stage 1 | pad], stage 3 = [pad | stage 2 | pad]; the two pads of one stage are alike."""
    w, found = width, []
    places = {
        1: ("u", f"{w // 2}:{3 * w // 2}|u", f"{3 * w // 2}:{5 * w // 2}|u"),
        2: (None, f"0:{w // 2}+{3 * w // 2}:{2 * w}|u", f"{w}:{3 * w // 2}+{5 * w // 2}:{3 * w}|u"),
        3: (None, None, f"0:{w}+{3 * w}:{4 * w}|u"),
    }
    for stage, slots in places.items():
        legs, writers = [], 0
        if stage == 1:
            legs, writers = ["conv1.weight(u)", bn("bn1")], 1
        for layer, where in enumerate(slots, start=1):
            for i in range(blocks if where else 0):
                at, before = f"layer{layer}.{i}.", slots[layer - 2] if i == 0 and layer > 1 else where
                legs += [f"{at}conv1.weight(*,{before})"] if before else []
                legs += [f"{at}conv2.weight({where})", bn(f"{at}bn2", str(where))]
                writers += 1
        legs.append(f"linear.weight(*,{slots[2]})")
        size = w if stage < 3 else 2 * w
        found.append(Expected(size, scales=1, norm_scales=writers, norm_signs=writers, legs=" ".join(legs)))
    for layer in (1, 2, 3):
        for i in range(blocks):
            at = f"layer{layer}.{i}."
            legs = f"{at}conv1.weight(u) {bn(f'{at}bn1')} {at}conv2.weight(*,u)"
            found.append(Expected(w * 2 ** (layer - 1), scales=1, norm_scales=1, norm_signs=1, legs=legs))
    return tuple(found)


TUTORIAL = (
    Expected(6, scales=1, legs="conv1.weight(u)&conv1.bias(u) conv2.weight(*,u)"),
    Expected(16, scales=1, legs="conv2.weight(u)&conv2.bias(u) fc1.weight(*,u.25)"),
    Expected(120, scales=1, legs="fc1.weight(u)&fc1.bias(u) fc2.weight(*,u)"),
    Expected(84, scales=1, legs="fc2.weight(u)&fc2.bias(u) fc3.weight(*,u)"),
)
ELEMENTS = tuple(
    Expected(n, legs=f"{name}.{i}.weight(u)&{name}.{i}.bias(u) {name}.{i + 1}.weight(*,u)")
    for name, widths in ANI_WIDTHS.items()
    for i, n in enumerate(widths)
)

PRETRAINED: tuple[Case, ...] = (
    Case(
        "resnet_option_a",
        seeded(lambda: ResNet20(4, 2), (4, 3, 16, 16)),
        numbers(2, 3, 16, 16),
        residual_spaces(4, 2),
        why="as resnet20_cifar10, small and random",
    ),
    Case(
        "resnet20_cifar10",
        resnet20,
        numbers(2, 3, 32, 32),
        residual_spaces(),
        needs="data",
        why="zero-padded shortcuts carry the stream of stage 1 through all stages (stem + 9 norms), the channels "
        "first padded in "
        "stage 2 through two (6 norms), those of stage 3 through one (3)",
    ),
    Case(
        "tutorial_cnn_cifar10", tutorial_cnn, numbers(2, 3, 32, 32), TUTORIAL, needs="data", why="relu and max pooling"
    ),
    Case(
        "ani_1x",
        ani,
        lambda: tuple(numbers(2, 384, seed=i)() for i in range(4)),
        ELEMENTS,
        needs="data",
        why="CELU passes neither scale nor sign: three hidden widths for each of four elements, permutation only",
    ),
)
