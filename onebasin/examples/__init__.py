"""Models to try things on, and the architectures of published collections.

Each is a factory that needs no arguments, so that ``onebasin discover onebasin.examples:relu_mlp --input 2x16`` works.
"""

from onebasin.examples.pixels import UNet, shapes, unet
from onebasin.examples.published import (
    PUBLISHED,
    Published,
    cifar100_resnet18,
    optunet,
    resnet8,
    resnet18,
    resnet20,
    resnet20_frn_silu,
    tiny_imagenet_resnet18,
)
from onebasin.examples.small import (
    EXAMPLES,
    Example,
    digits_mlp,
    lstm_classifier,
    relu_mlp,
    residual_cnn,
    separable_cnn,
    transformer,
)

__all__ = [
    "EXAMPLES",
    "PUBLISHED",
    "Example",
    "Published",
    "UNet",
    "cifar100_resnet18",
    "digits_mlp",
    "lstm_classifier",
    "optunet",
    "relu_mlp",
    "residual_cnn",
    "resnet8",
    "resnet18",
    "resnet20",
    "resnet20_frn_silu",
    "separable_cnn",
    "shapes",
    "tiny_imagenet_resnet18",
    "transformer",
    "unet",
]
