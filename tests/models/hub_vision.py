"""Vision classes from `transformers` with tiny random configurations; spaces worked out from their source (4.57)."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from .convolution import bn
from .expect import Case, Expected, numbers, seeded
from .hub import TINY, attention, hub, row


def vit() -> tuple[Expected, ...]:
    """Pre-norm with a class token; every norm is read by linear maps only."""
    at, found = "model.vit.", []
    stem = f"{at}embeddings."
    stream = [
        f"{stem}cls_token(*,*,u)&{stem}position_embeddings(*,*,u)&{row(f'{stem}patch_embeddings.projection')}",
        row(f"{at}layernorm"),
        "model.classifier.weight(*,u)",
    ]
    for i in range(2):
        layer = f"{at}encoder.layer.{i}."
        own = f"{layer}attention.attention."
        stream += [
            row(f"{layer}layernorm_before"),
            "&".join(f"{own}{n}.weight(*,u)" for n in ("query", "key", "value")),
        ]
        stream += [row(f"{layer}attention.output.dense"), row(f"{layer}layernorm_after")]
        stream += [f"{layer}intermediate.dense.weight(*,u)", row(f"{layer}output.dense")]
        found += attention(f"{own}query", f"{own}key", f"{own}value", f"{layer}attention.output.dense")
        found.append(Expected(11, legs=f"{row(f'{layer}intermediate.dense')} {layer}output.dense.weight(*,u)"))
    return (Expected(6, scales=5, signs=5, legs=" ".join(stream)), *found)


class Reconstruction(nn.Module):
    """ViT-MAE with the noise that chooses the hidden patches as an input, and positions that are trained."""

    def __init__(self) -> None:
        super().__init__()
        import transformers

        settings = transformers.ViTMAEConfig(
            **{**TINY, "hidden_size": 8, "num_hidden_layers": 1}, image_size=8, patch_size=2, decoder_hidden_size=4,
            decoder_num_hidden_layers=1, decoder_num_attention_heads=2, decoder_intermediate_size=7, mask_ratio=0.5,
        )  # fmt: skip
        self.model = transformers.ViTMAEForPreTraining(settings).requires_grad_(True)

    def forward(self, pictures: Tensor, noise: Tensor) -> Tensor:
        return self.model(pictures, noise=noise).logits


def block(layer: str, width: int, heads: int, hidden: int, deep: str = "") -> tuple[list[str], tuple[Expected, ...]]:
    """A pre-norm layer: its legs in the stream, and its spaces; `deep` is a table of positions by head."""
    own, out, size = (
        f"{layer}attention.{'self' if deep else 'attention'}.",
        f"{layer}attention.output.dense",
        width // heads,
    )
    read = [f"{own}{name}" for name in ("query", "key", "value")]
    stream = [row(f"{layer}layernorm_before"), "&".join(f"{name}.weight(*,u)" for name in read), row(out)]
    stream += [row(f"{layer}layernorm_after"), f"{layer}intermediate.dense.weight(*,u)", row(f"{layer}output.dense")]
    blocks = " ".join(
        [
            *[row(name, f"u.{size}") for name in read],
            f"{out}.weight(*,u.{size})",
            *([f"{own}{deep}(*,u)"] if deep else []),
        ]
    )
    inside, qk = f"a{heads}.u", " ".join(row(name, f"a{heads}.u") for name in read[:2])
    return stream, (
        Expected(heads, covered=(2, 2, 0, 0), legs=blocks, note="heads"),
        Expected(size, heads, scales=1, signs=1, legs=qk, note="QK"),
        Expected(size, heads, scales=1, signs=1, legs=f"{row(read[2], inside)} {out}.weight(*,{inside})", note="VO"),
        Expected(hidden, legs=f"{row(f'{layer}intermediate.dense')} {layer}output.dense.weight(*,u)"),
    )


def vit_mae() -> tuple[Expected, ...]:
    """Patches are gathered by position, so units of the stream pass; the decoder has a stream of its own."""
    at, deep = "model.vit.", "model.decoder."
    stem = f"{at}embeddings."
    tokens = f"{stem}cls_token(*,*,u) {stem}position_embeddings(*,*,u) {row(f'{stem}patch_embeddings.projection')}"
    stream, found = block(f"{at}encoder.layer.0.", 8, 2, 11)
    upper, others = block(f"{deep}decoder_layers.0.", 4, 2, 7)
    stream += [tokens, row(f"{at}layernorm"), f"{deep}decoder_embed.weight(*,u)"]
    upper += [f"{row(f'{deep}decoder_embed')} {deep}mask_token(*,*,u) {deep}decoder_pos_embed(*,*,u)"]
    upper += [row(f"{deep}decoder_norm"), f"{deep}decoder_pred.weight(*,u)"]
    return (
        Expected(8, scales=3, signs=3, legs=" ".join(stream)),
        Expected(4, scales=3, signs=3, legs=" ".join(upper)),
        *found,
        *others,
    )


def swin() -> tuple[Expected, ...]:
    """Two stages of 6 and 12 channels; between them four neighbours are normalised and read as 4 x 6 columns."""
    at, table = "model.swin.", "relative_position_bias_table"
    down = f"{at}encoder.layers.0.downsample."
    stream = [row(f"{at}embeddings.patch_embeddings.projection"), row(f"{at}embeddings.norm")]
    legs, found = block(f"{at}encoder.layers.0.blocks.0.", 6, 2, 12, table)
    stream += legs
    for start in range(0, 24, 6):
        stream += [row(f"{down}norm", f"{start}:{start + 6}|u"), f"{down}reduction.weight(*,{start}:{start + 6}|u)"]
    legs, spaces = block(f"{at}encoder.layers.1.blocks.0.", 12, 3, 24, table)
    upper = [f"{down}reduction.weight(u)", *legs, row(f"{at}layernorm"), "model.classifier.weight(*,u)"]
    return (
        Expected(6, scales=6, signs=6, legs=" ".join(stream)),
        Expected(12, scales=3, signs=3, legs=" ".join(upper)),
        *found,
        *spaces,
    )


def unit(name: str) -> str:
    """Rows of a convolution and the batch norm behind it."""
    return f"{name}.convolution.weight(u) {bn(f'{name}.normalization')}"


def resnet() -> tuple[Expected, ...]:
    """Bottleneck blocks; widths 5 -> 12 -> 20, reduced to 3 and 5."""
    at, found, widths = "model.resnet.", [], (12, 20)
    stream, size, writers = [unit(f"{at}embedder.embedder")], 5, 1
    for s, width in enumerate(widths):
        for i in range(2):
            block = f"{at}encoder.stages.{s}.layers.{i}."
            stream.append(f"{block}layer.0.convolution.weight(*,u)")
            for j in range(2):
                legs = f"{unit(f'{block}layer.{j}')} {block}layer.{j + 1}.convolution.weight(*,u)"
                found.append(Expected(width // 4, scales=1, norm_scales=1, norm_signs=1, legs=legs))
            if i == 0:
                legs = " ".join([*stream, f"{block}shortcut.convolution.weight(*,u)"])
                found.append(Expected(size, scales=1, norm_scales=writers, norm_signs=writers, legs=legs))
                stream, size, writers = [unit(f"{block}shortcut")], width, 1
            stream, writers = [*stream, unit(f"{block}layer.2")], writers + 1
    legs = " ".join([*stream, "model.classifier.1.weight(*,u)"])
    return (*found, Expected(size, scales=1, norm_scales=writers, norm_signs=writers, legs=legs))


def convnext() -> tuple[Expected, ...]:
    """Stages of 5 and 7 channels, two blocks each."""
    at, found = "model.convnext.", []
    stream = [row(f"{at}embeddings.patch_embeddings"), row(f"{at}embeddings.layernorm")]
    for s, width in enumerate((5, 7)):
        stage = f"{at}encoder.stages.{s}."
        if s:
            stream += [row(f"{stage}downsampling_layer.0"), f"{stage}downsampling_layer.1.weight(*,u)"]
            found.append(Expected(5, scales=5, signs=5, legs=" ".join(stream)))
            stream = [row(f"{stage}downsampling_layer.1")]
        for i in range(2):
            block = f"{stage}layers.{i}."
            stream += [row(f"{block}dwconv"), row(f"{block}layernorm"), f"{block}pwconv1.weight(*,u)"]
            stream += [row(f"{block}pwconv2"), f"{block}layer_scale_parameter(u)"]
            found.append(Expected(4 * width, legs=f"{row(f'{block}pwconv1')} {block}pwconv2.weight(*,u)"))
    stream += [row(f"{at}layernorm"), "model.classifier.weight(*,u)"]
    return (*found, Expected(7, scales=5, signs=5, legs=" ".join(stream)))


# channels (16, 24, 24, 32, ...) x 0.15; a block keeps its stream where neighbours are equal and its stride is 1
MOBILE = (2, 4, 4, 5, 5, 5, 10, 10, 10, 10, 14, 14, 14, 24, 24, 24, 48)


def mobilenet() -> tuple[Expected, ...]:
    """relu6 pins what it sees; between blocks the stream is linear."""
    at, found, stem = "model.mobilenet_v2.", [], "model.mobilenet_v2.conv_stem."
    wide = f"{unit(f'{stem}first_conv')} {unit(f'{stem}conv_3x3')} {stem}reduce_1x1.convolution.weight(*,u)"
    found.append(Expected(5, norm_scales=2, norm_signs=2, legs=wide))
    stream, writers = [unit(f"{stem}reduce_1x1")], 1
    for i in range(16):
        block = f"{at}layer.{i}."
        wide = f"{unit(f'{block}expand_1x1')} {unit(f'{block}conv_3x3')} {block}reduce_1x1.convolution.weight(*,u)"
        found.append(Expected(2 * MOBILE[i], norm_scales=2, norm_signs=2, legs=wide))
        stream.append(f"{block}expand_1x1.convolution.weight(*,u)")
        if MOBILE[i] != MOBILE[i + 1]:
            found.append(_linear_stream(MOBILE[i], writers, stream))
            stream, writers = [], 0
        stream, writers = [*stream, unit(f"{block}reduce_1x1")], writers + 1
    found.append(_linear_stream(48, writers, [*stream, f"{at}conv_1x1.convolution.weight(*,u)"]))
    return (
        *found,
        Expected(192, norm_scales=1, norm_signs=1, legs=f"{unit(f'{at}conv_1x1')} model.classifier.weight(*,u)"),
    )


def _linear_stream(size: int, writers: int, legs: list[str]) -> Expected:
    return Expected(size, scales=1, signs=1, norm_scales=writers, norm_signs=writers, legs=" ".join(legs))


_CASES: tuple[Case, ...] = (
    Case(
        "hub_vit",
        hub("ViTForImageClassification", "ViTConfig", image_size=8, patch_size=4, num_labels=3, **TINY),
        numbers(2, 3, 8, 8),
        vit(),
        why="four norms in two blocks and the last one, each read by linear maps only; the mean pins the stream "
        "itself. "
        "Not counted: key biases",
        extra=12,
    ),
    Case(
        "hub_resnet",
        hub(
            "ResNetForImageClassification",
            "ResNetConfig",
            embedding_size=5,
            hidden_sizes=[12, 20],
            depths=[2, 2],
            layer_type="bottleneck",
            num_labels=3,
        ),
        numbers(2, 3, 32, 32),
        resnet(),
        why="as resnet_bn: stem 5 (one norm), streams 12 and 20 (projection and two blocks: three norms), two "
        "hidden per block",
    ),
    Case(
        "hub_convnext",
        hub(
            "ConvNextForImageClassification",
            "ConvNextConfig",
            num_stages=2,
            hidden_sizes=[5, 7],
            depths=[2, 2],
            patch_size=2,
            num_labels=3,
            layer_scale_init_value=0.5,
        ),
        numbers(2, 3, 16, 16),
        convnext(),
        why="per block: (norm | pwconv1) and (layer_scale | pwconv2 rows); per stream: the norm behind it "
        "(downsampling or "
        "final) against its reader: 2 + 2 + 1. Streams end in norms, so nothing else moves",
    ),
    Case(
        "hub_mobilenet_v2",
        hub(
            "MobileNetV2ForImageClassification",
            "MobileNetV2Config",
            depth_multiplier=0.15,
            depth_divisible_by=1,
            min_depth=2,
            expand_ratio=2,
            finegrained_output=False,
            num_labels=3,
            pictures=True,
        ),
        numbers(2, 3, 64, 64),
        mobilenet(),
        why="expanded widths meet relu6 twice (two norms, nothing else); bottleneck streams have no activation: "
        "scale and sign, "
        "and one norm per block that writes",
    ),
    Case(
        "hub_swin",
        hub(
            "SwinForImageClassification",
            "SwinConfig",
            image_size=8,
            patch_size=2,
            embed_dim=6,
            depths=[1, 1],
            num_heads=[2, 3],
            window_size=2,
            mlp_ratio=2.0,
            num_labels=3,
        ),
        numbers(1, 3, 8, 8),
        swin(),
        why="windows move positions only; heads change places with their table of positions; before the merging each "
        "neighbour's channel has a norm weight of its own: 4 of the 6 scales",
    ),
    Case(
        "hub_vit_mae",
        seeded(Reconstruction),
        lambda: (numbers(2, 3, 8, 8)(), numbers(2, 16, seed=3)()),
        vit_mae(),
        why="three norms against their readers in the encoder, three in the decoder",
    ),
)

HUB_VISION = tuple(replace(case, needs="transformers") for case in _CASES)
