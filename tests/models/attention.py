"""Attention: torch's encoder layer, a modern decoder block, fused projections, position biases, pooling, mixing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .expect import Case, Expected, numbers, seeded, tokens


class Encoder(nn.Module):
    """Token and position embeddings, one nn.TransformerEncoderLayer (2 heads of 3, 7 hidden), a Linear."""

    def __init__(self, first: bool, act: str, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(11, 6), nn.Parameter(torch.zeros(5, 6))
        self.layer = nn.TransformerEncoderLayer(6, 2, 7, 0.0, act, batch_first=True, norm_first=first)
        self.head = nn.Linear(6, 11, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(ids) + self.place))


def heads(at: str, fused: str, out: str) -> tuple[Expected, ...]:
    """Heads (2), query-key (3 in each) and value-output (3 in each) of a fused projection of 3 x 2 x 3 rows."""

    def rows(block: int, where: str) -> str:
        return f"{at}{fused}weight({block}#3.{where})&{at}{fused}bias({block}#3.{where})"

    return (
        Expected(
            2,
            covered=(2, 2, 0, 0),
            legs=" ".join([*(rows(b, "u.3") for b in range(3)), f"{at}{out}.weight(*,u.3)"]),
            note="heads: their scales and signs are those of the dimensions inside",
        ),
        Expected(3, 2, scales=1, signs=1, legs=f"{rows(0, 'a2.u')} {rows(1, 'a2.u')}", note="QK"),
        Expected(3, 2, scales=1, signs=1, legs=f"{rows(2, 'a2.u')} {at}{out}.weight(*,a2.u)", note="VO"),
    )


def encoder_spaces(norms: int, hidden_scales: int, tied: bool = False) -> tuple[Expected, ...]:
    """The stream carries one scale and one sign for each LayerNorm whose output only linear maps read."""
    stream = "embed.weight(*,u)&place(*,u) layer.self_attn.in_proj_weight(*,u) "
    stream += "layer.self_attn.out_proj.weight(u)&layer.self_attn.out_proj.bias(u) layer.linear1.weight(*,u) "
    stream += "layer.linear2.weight(u)&layer.linear2.bias(u) layer.norm1.weight(u)&layer.norm1.bias(u) "
    stream += "layer.norm2.weight(u)&layer.norm2.bias(u)" + ("" if tied else " head.weight(*,u)")
    hidden = "layer.linear1.weight(u)&layer.linear1.bias(u) layer.linear2.weight(*,u)"
    return (
        Expected(6, scales=norms, signs=norms, legs=stream),
        *heads("layer.self_attn.", "in_proj_", "out_proj"),
        Expected(7, scales=hidden_scales, legs=hidden),
    )


def rotate(x: Tensor) -> Tensor:
    """Rotary position embedding of (batch, heads, time, d) by the rotate-half rule."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-2])[:, None] * 10.0 ** -torch.arange(half)[None, :]
    cos, sin = torch.cat([angle.cos()] * 2, -1).to(x.dtype), torch.cat([angle.sin()] * 2, -1).to(x.dtype)
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


class RMS(nn.Module):
    """x / rms(x) * weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-3) * self.weight


class Decoder(nn.Module):
    """A block with RMSNorm, SwiGLU and 2 x 3 query heads on 2 key-value heads of 10, between embedding and head."""

    def __init__(self, rope: bool) -> None:
        super().__init__()
        self.rope = rope
        self.embed, self.head = nn.Embedding(11, 7), nn.Linear(7, 11, bias=False)
        self.norm1, self.norm2, self.norm3 = RMS(7), RMS(7), RMS(7)
        self.q, self.k, self.v = (nn.Linear(7, n * 10, bias=False) for n in (6, 2, 2))
        self.out = nn.Linear(60, 7, bias=False)
        self.gate, self.up = nn.Linear(7, 13, bias=False), nn.Linear(7, 13, bias=False)
        self.down = nn.Linear(13, 7, bias=False)

    def attend(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (f(x).view(b, t, -1, 10).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.rope:
            q, k = rotate(q), rotate(k)
        k, v = (y[:, :, None].expand(b, 2, 3, t, 10).reshape(b, 6, t, 10) for y in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(b, t, 60))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.attend(self.norm1(x))
        y = self.norm2(x)
        x = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return self.head(self.norm3(x))


def decoder_spaces(rope: bool) -> tuple[Expected, ...]:
    """Query rows are (group, head in group, d); with rotary positions d is (2, pair)."""
    stream = (
        "embed.weight(*,u) norm1.weight(u) q.weight(*,u)&k.weight(*,u)&v.weight(*,u) out.weight(u) norm2.weight(u) "
    )
    stream += "gate.weight(*,u)&up.weight(*,u) down.weight(u) norm3.weight(u) head.weight(*,u)"
    pair = Expected(
        5, 2, permutation=False, scales=1, signs=1, legs="q.weight(a2.3.2.u) k.weight(a2.2.u)", note="rotary pairs"
    )
    free = Expected(10, 2, scales=1, signs=1, legs="q.weight(a2.3.u) k.weight(a2.u)", note="QK")
    return (
        Expected(7, scales=3, signs=4, legs=stream),
        Expected(
            2,
            covered=(2, 2, 0, 0),
            legs="q.weight(u.30) k.weight(u.10) v.weight(u.10) out.weight(*,u.30)",
            note="kv groups",
        ),
        Expected(3, 2, legs="q.weight(a2.u.10) out.weight(*,a2.u.10)", note="query heads inside a group"),
        pair if rope else free,
        Expected(10, 2, scales=1, signs=1, legs="v.weight(a2.u) out.weight(*,a2.3.u)", note="VO"),
        Expected(13, scales=1, signs=1, legs="gate.weight(u) up.weight(u) down.weight(*,u)"),
    )


class Fused(nn.Module):
    """timm-style block on patches of 4 numbers: fused qkv, optionally a table of relative position biases (Swin)."""

    def __init__(self, relative: bool = False) -> None:
        super().__init__()
        self.stem, self.norm, self.qkv = nn.Linear(4, 7), nn.LayerNorm(7), nn.Linear(7, 18)
        self.proj, self.head = nn.Linear(6, 7), nn.Linear(7, 5)
        self.table = nn.Parameter(torch.zeros(9, 2)) if relative else None
        place = torch.arange(5)
        self.register_buffer("offset", place[:, None] - place[None, :] + 4, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        b, n, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(b, n, 3, 2, 3).permute(2, 0, 3, 1, 4).unbind(0)
        score = (q * 3**-0.5) @ k.transpose(-2, -1)
        if self.table is not None:
            score = score + self.table[self.offset.reshape(-1)].view(5, 5, 2).permute(2, 0, 1)[None]
        mixed = (score.softmax(dim=-1) @ v).transpose(1, 2).reshape(b, n, 6)
        return self.head((x + self.proj(mixed)).mean(dim=1))


def fused_spaces(relative: bool = False) -> tuple[Expected, ...]:
    """As `heads`, and the stream; a bias table adds a leg to the heads."""
    stream = "stem.weight(u)&stem.bias(u) norm.weight(u)&norm.bias(u) qkv.weight(*,u) proj.weight(u)&proj.bias(u) "
    outer, key, value = heads("", "qkv.", "proj")
    if relative:
        outer = Expected(
            2, covered=(2, 2, 0, 0), legs=outer.legs + " table(*,u)", note="heads, each with its bias column"
        )
    return Expected(7, scales=1, signs=1, legs=stream + "head.weight(*,u)"), outer, key, value


class Pooling(nn.Module):
    """Softmax attention pooling over five items."""

    def __init__(self) -> None:
        super().__init__()
        self.item, self.score, self.head = nn.Linear(3, 7), nn.Linear(7, 1), nn.Linear(7, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.item(x))
        return self.head((self.score(x).softmax(dim=1) * x).sum(dim=1))


class Mixer(nn.Module):
    """One MLP-Mixer block on 5 patches of 3 numbers: 7 channels, 11 token-mixing and 13 channel-mixing units."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(3, 7), nn.Linear(7, 2)
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(7), nn.LayerNorm(7), nn.LayerNorm(7)
        self.token1, self.token2 = nn.Linear(5, 11), nn.Linear(11, 5)
        self.channel1, self.channel2 = nn.Linear(7, 13), nn.Linear(13, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.norm1(x).transpose(1, 2)
        x = x + self.token2(F.gelu(self.token1(y))).transpose(1, 2)
        x = x + self.channel2(F.gelu(self.channel1(self.norm2(x))))
        return self.head(self.norm3(x).mean(dim=1))


MIXER = "stem.weight(u)&stem.bias(u) norm1.weight(u)&norm1.bias(u) norm2.weight(u)&norm2.bias(u) channel1.weight(*,u) "
MIXER += "channel2.weight(u)&channel2.bias(u) norm3.weight(u)&norm3.bias(u) head.weight(*,u)"
IDS = tokens(3, 5, high=11)
DEAD_KEY = "Not counted: the key bias is dead (softmax)"


class CrossAttention(nn.Module):
    """nn.TransformerDecoderLayer: the fused projection of its second attention reads two streams."""

    def __init__(self) -> None:
        super().__init__()
        self.target, self.memory = nn.Linear(3, 6), nn.Linear(4, 6)
        self.layer = nn.TransformerDecoderLayer(6, 2, 7, 0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.head(self.layer(self.target(x), torch.tanh(self.memory(memory))))


class Seeds(nn.Module):
    """Pooling by attention: two trained seeds ask, a set answers; nn.MultiheadAttention, 2 heads of 3."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.seeds = nn.Linear(3, 6), nn.Parameter(torch.randn(1, 2, 6))
        self.pool, self.head = nn.MultiheadAttention(6, 2, batch_first=True), nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.body(x))
        return self.head(self.pool(self.seeds.expand(len(x), -1, -1), x, x, need_weights=False)[0].flatten(1))


def cross_attention_spaces() -> tuple[Expected, ...]:
    """Rows 0:6 of the second attention's projection read the target, rows 6:18 the memory."""
    at = "layer.multihead_attn."
    stream = "target.weight(u)&target.bias(u) layer.self_attn.in_proj_weight(*,u) layer.linear1.weight(*,u) "
    stream += f"layer.self_attn.out_proj.weight(u)&layer.self_attn.out_proj.bias(u) {at}in_proj_weight(0:6|*,u) "
    stream += (
        f"{at}out_proj.weight(u)&{at}out_proj.bias(u) layer.linear2.weight(u)&layer.linear2.bias(u) head.weight(*,u) "
    )
    stream += " ".join(f"layer.norm{i}.weight(u)&layer.norm{i}.bias(u)" for i in (1, 2, 3))
    return (
        Expected(6, scales=3, signs=3, legs=stream),
        Expected(6, signs=1, legs=f"memory.weight(u)&memory.bias(u) {at}in_proj_weight(6:18|*,u)"),
        *heads("layer.self_attn.", "in_proj_", "out_proj"),
        *heads(at, "in_proj_", "out_proj"),
        Expected(7, scales=1, legs="layer.linear1.weight(u)&layer.linear1.bias(u) layer.linear2.weight(*,u)"),
    )


ATTENTION: tuple[Case, ...] = (
    Case(
        "cross_attention",
        seeded(CrossAttention),
        lambda: (numbers(2, 5, 3)(), numbers(2, 4, 4, seed=2)()),
        cross_attention_spaces(),
        why="pre-norm: norms 1 to 3 against the self-attention, the queries of the second attention and the hidden "
        "layer. The memory is a tanh layer read by keys and values alone",
    ),
    Case(
        "attention_seeds",
        seeded(Seeds),
        numbers(4, 5, 3),
        (
            Expected(6, scales=1, legs="body.weight(u)&body.bias(u) pool.in_proj_weight(6:18|*,u)"),
            Expected(2, legs="seeds(*,u) head.weight(*,u.6)"),
            Expected(6, scales=1, signs=1, legs="seeds(*,*,u) pool.in_proj_weight(0:6|*,u)"),
            Expected(6, scales=1, signs=1, legs="pool.out_proj.weight(u)&pool.out_proj.bias(u) head.weight(*,2.u)"),
            *heads("pool.", "in_proj_", "out_proj"),
        ),
        why="queries read the seeds, keys and values the set: two spaces on the columns of one matrix. Seeds change "
        "places with their columns of the head. Not counted: key biases",
        extra=6,
    ),
    Case(
        "encoder_prenorm_relu",
        seeded(lambda: Encoder(True, "relu")),
        IDS,
        encoder_spaces(2, 1),
        extra=6,
        why=f"both norms are read by linear maps only; the stream itself is pinned by them. {DEAD_KEY}",
    ),
    Case(
        "encoder_prenorm_gelu",
        seeded(lambda: Encoder(True, "gelu")),
        IDS,
        encoder_spaces(2, 0),
        extra=6,
        why=f"as with relu, the hidden layer only permutes. {DEAD_KEY}",
    ),
    Case(
        "encoder_postnorm_relu",
        seeded(lambda: Encoder(False, "relu")),
        IDS,
        encoder_spaces(1, 1),
        extra=6,
        why=f"norm1's output runs on into norm2 and is pinned; norm2's is read by the head alone. {DEAD_KEY}",
    ),
    Case(
        "encoder_postnorm_gelu",
        seeded(lambda: Encoder(False, "gelu")),
        IDS,
        encoder_spaces(1, 0),
        extra=6,
        why=f"as with relu, the hidden layer only permutes. {DEAD_KEY}",
    ),
    Case(
        "encoder_tied",
        seeded(lambda: Encoder(False, "gelu", tied=True)),
        IDS,
        encoder_spaces(0, 0, tied=True),
        extra=6,
        why=f"the head is the embedding, pinned by norm1, and so pins norm2's output: the stream only permutes. "
        f"{DEAD_KEY}",
    ),
    Case(
        "decoder_rope_gqa",
        seeded(lambda: Decoder(rope=True)),
        IDS,
        decoder_spaces(rope=True),
        why="a mean of squares lets the stream flip (1 sign) and each of three norm weights trade scale and sign "
        "with its "
        "readers. Rotations pair dimension i with i + 5: no permutation, one scale and sign per pair and key head",
    ),
    Case(
        "decoder_gqa",
        seeded(lambda: Decoder(rope=False)),
        IDS,
        decoder_spaces(rope=False),
        why="without positions the ten query-key dimensions of a group permute",
    ),
    Case(
        "attention_fused",
        seeded(Fused),
        numbers(3, 5, 4),
        fused_spaces(),
        extra=6,
        why=f"rows of the fused projection are (3, heads, d). The stream is read raw by the head but pinned by the "
        f"norm. {DEAD_KEY}",
    ),
    Case(
        "attention_relative",
        seeded(lambda: Fused(relative=True)),
        numbers(3, 5, 4),
        fused_spaces(relative=True),
        extra=6,
        why=f"the columns of the bias table move with the heads; its rows are addressed by position. {DEAD_KEY}",
    ),
    Case(
        "attention_pooling",
        seeded(Pooling),
        numbers(4, 5, 3),
        (Expected(7, scales=1, legs="item.weight(u)&item.bias(u) score.weight(*,u) head.weight(*,u)"),),
        extra=1,
        why="score and head both read the units. Not counted: the score's bias is dead (softmax)",
    ),
    Case(
        "mixer",
        seeded(Mixer),
        numbers(4, 5, 3),
        (
            Expected(7, scales=2, signs=2, legs=MIXER),
            Expected(11, legs="token1.weight(u)&token1.bias(u) token2.weight(*,u)"),
            Expected(13, legs="channel1.weight(u)&channel1.bias(u) channel2.weight(*,u)"),
        ),
        why="norm1's output meets gelu along the tokens, channel by channel, and is pinned; norm2 and norm3 are "
        "read by "
        "linear maps over channels. Tokens are rigid (they come from the input). Not counted: token2's bias (5) is "
        "the same for "
        "all channels and dies in the next norm; one gain of all of norm1 against all of token1",
        extra=6,
    ),
)
