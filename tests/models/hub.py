"""Real classes from `transformers` with tiny random configurations; spaces worked out from their source (4.57)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .expect import Case, Expected, calibrate, scramble, tokens


class Logits(nn.Module):
    """The logits alone, so that the output is a tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).logits


def hub(kind: str, config: str, pictures: bool = False, **options: Any) -> Callable[[], nn.Module]:
    """A builder for a class of `transformers`, generic weights throughout."""

    def build() -> nn.Module:
        import transformers

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            settings = getattr(transformers, config)(**options)
            model = Logits(getattr(transformers, kind)(settings)).eval()
            scramble(model)
            if pictures:
                calibrate(model, torch.randn(4, 3, 64, 64), gain=6.0)
        return model

    return build


def row(name: str, where: str = "u", bias: bool = True) -> str:
    """Weight rows, with their bias."""
    return f"{name}.weight({where})&{name}.bias({where})" if bias else f"{name}.weight({where})"


def attention(q: str, k: str, v: str, out: str, bias: bool = True) -> tuple[Expected, ...]:
    """Two heads of three dimensions in separate projections."""
    blocks = " ".join(row(name, "u.3", bias) for name in (q, k, v))
    return (
        Expected(2, covered=(2, 2, 0, 0), legs=f"{blocks} {out}.weight(*,u.3)", note="heads"),
        Expected(3, 2, scales=1, signs=1, legs=f"{row(q, 'a2.u', bias)} {row(k, 'a2.u', bias)}", note="QK"),
        Expected(3, 2, scales=1, signs=1, legs=f"{row(v, 'a2.u', bias)} {out}.weight(*,a2.u)", note="VO"),
    )


def bert() -> tuple[Expected, ...]:
    """Post-norm: only the last norm is read by a linear map alone (the pooler)."""
    at, found = "model.bert.", []
    tables = "&".join(f"{at}embeddings.{n}_embeddings.weight(*,u)" for n in ("word", "position", "token_type"))
    stream = [f"{tables}", row(f"{at}embeddings.LayerNorm")]
    for i in range(2):
        layer = f"{at}encoder.layer.{i}."
        own = f"{layer}attention.self."
        stream += [
            "&".join(f"{own}{n}.weight(*,u)" for n in ("query", "key", "value")),
            row(f"{layer}attention.output.dense"),
        ]
        stream += [row(f"{layer}attention.output.LayerNorm"), f"{layer}intermediate.dense.weight(*,u)"]
        stream += [row(f"{layer}output.dense"), row(f"{layer}output.LayerNorm")]
        found += attention(f"{own}query", f"{own}key", f"{own}value", f"{layer}attention.output.dense")
        found.append(Expected(11, legs=f"{row(f'{layer}intermediate.dense')} {layer}output.dense.weight(*,u)"))
    stream.append(f"{at}pooler.dense.weight(*,u)")
    pooler = f"{row(f'{at}pooler.dense')} model.classifier.weight(*,u)"
    return (Expected(6, scales=1, signs=1, legs=" ".join(stream)), Expected(6, signs=1, legs=pooler), *found)


def gpt2() -> tuple[Expected, ...]:
    """Pre-norm, weights stored (in, out), fused qkv, head tied to the embedding: ln_f has no freedom."""
    at, found = "model.transformer.", []
    stream = [f"{at}wte.weight(*,u)&{at}wpe.weight(*,u)", row(f"{at}ln_f")]
    for i in range(2):
        h = f"{at}h.{i}."
        fused, out, up, down = (f"{h}{n}" for n in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"))
        stream += [row(f"{h}ln_1"), f"{fused}.weight(u)", f"{out}.weight(*,u)&{out}.bias(u)"]
        stream += [row(f"{h}ln_2"), f"{up}.weight(u)", f"{down}.weight(*,u)&{down}.bias(u)"]
        q, k, v = (f"{fused}.weight(*,{b}#3.{{0}})&{fused}.bias({b}#3.{{0}})" for b in range(3))
        found += [
            Expected(2, covered=(2, 2, 0, 0), legs=f"{q} {k} {v} {out}.weight({{0}})".format("u.3"), note="heads"),
            Expected(3, 2, scales=1, signs=1, legs=f"{q} {k}".format("a2.u"), note="QK"),
            Expected(3, 2, scales=1, signs=1, legs=f"{v} {out}.weight({{0}})".format("a2.u"), note="VO"),
            Expected(11, legs=f"{up}.weight(*,u)&{up}.bias(u) {down}.weight(u)"),
        ]
    return (Expected(6, scales=4, signs=4, legs=" ".join(stream)), *found)


def llama() -> tuple[Expected, ...]:
    """2 x 3 query heads on 2 key-value heads of 10 (5 rotary pairs)."""
    at, found = "model.model.", []
    stream = [f"{at}embed_tokens.weight(*,u)", f"{at}norm.weight(u)", "model.lm_head.weight(*,u)"]
    for i in range(2):
        own, ffn = f"{at}layers.{i}.self_attn.", f"{at}layers.{i}.mlp."
        q, k, v, out = (f"{own}{n}_proj.weight" for n in "qkvo")
        stream += [f"{at}layers.{i}.input_layernorm.weight(u)", f"{q}(*,u)&{k}(*,u)&{v}(*,u)", f"{out}(u)"]
        stream += [f"{at}layers.{i}.post_attention_layernorm.weight(u)"]
        stream += [f"{ffn}gate_proj.weight(*,u)&{ffn}up_proj.weight(*,u)", f"{ffn}down_proj.weight(u)"]
        found += [
            Expected(2, covered=(2, 2, 0, 0), legs=f"{q}(u.30) {k}(u.10) {v}(u.10) {out}(*,u.30)", note="kv groups"),
            Expected(3, 2, legs=f"{q}(a2.u.10) {out}(*,a2.u.10)", note="query heads in a group"),
            Expected(
                5, 2, permutation=False, scales=1, signs=1, legs=f"{q}(a2.3.2.u) {k}(a2.2.u)", note="rotary pairs"
            ),
            Expected(10, 2, scales=1, signs=1, legs=f"{v}(a2.u) {out}(*,a2.3.u)", note="VO"),
            Expected(
                13,
                scales=1,
                signs=1,
                legs=f"{ffn}gate_proj.weight(u) {ffn}up_proj.weight(u) {ffn}down_proj.weight(*,u)",
            ),
        ]
    return (Expected(7, scales=5, signs=6, legs=" ".join(stream)), *found)


def falcon(groups: int, heads: int) -> tuple[Expected, ...]:
    """One layer: for each of `groups` keys and values `heads` heads of queries, (heads + 2) x 4 fused rows in a group.

    Without groups of its own (multi-query) attention and the hidden layer read one norm, else each has its own.
    """
    at, h = "model.transformer.", "model.transformer.h.0."
    fused, out = f"{h}self_attention.query_key_value.weight", f"{h}self_attention.dense.weight"
    up, down = f"{h}mlp.dense_h_to_4h.weight", f"{h}mlp.dense_4h_to_h.weight"
    norms = ("input_layernorm",) if groups == 1 else ("ln_attn", "ln_mlp")
    stream = [f"{at}word_embeddings.weight(*,u)", *[row(f"{h}{norm}") for norm in norms], row(f"{at}ln_f")]
    stream += [f"{fused}(*,u)&{up}(*,u)"] if groups == 1 else [f"{fused}(*,u)", f"{up}(*,u)"]

    def rows(first: int, last: int, where: str, group: str = f"a{groups}.") -> str:
        spans = [(at * (heads + 2) + first, at * (heads + 2) + last) for at in range(groups)]
        return f"{fused}({'+'.join(f'{4 * a}:{4 * b}' for a, b in spans)}|{group}{where})"

    query, key, value = (0, heads), (heads, heads + 1), (heads + 1, heads + 2)
    block = " ".join([*[rows(*span, "*", "u.") for span in (query, key, value)], f"{out}(*,u.*)"])
    pairs = f"{rows(*query, f'{heads}.2.u')} {rows(*key, '2.u')}"
    return (
        Expected(
            groups * heads * 4, scales=len(norms), signs=len(norms), legs=" ".join([*stream, f"{out}(u) {down}(u)"])
        ),
        *([Expected(groups, covered=(2, 2, 0, 0), legs=block, note="groups")] if groups > 1 else []),
        Expected(heads, groups, legs=f"{rows(*query, 'u.4')} {out}(*,a{groups}.u.4)", note="heads of queries"),
        Expected(2, groups, permutation=False, scales=1, signs=1, legs=pairs, note="rotary pairs"),
        Expected(4, groups, scales=1, signs=1, legs=f"{rows(*value, 'u')} {out}(*,a{groups}.{heads}.u)", note="VO"),
        Expected(11, legs=f"{up}(u) {down}(*,u)"),
    )


def build_falcon(groups: int, heads: int) -> Callable[[], nn.Module]:
    """Falcon as in the 7B (multi-query) and 40B models (groups of queries)."""
    return hub(
        "FalconForCausalLM",
        "FalconConfig",
        vocab_size=19,
        hidden_size=groups * heads * 4,
        num_hidden_layers=1,
        num_attention_heads=groups * heads,
        num_kv_heads=groups,
        new_decoder_architecture=groups > 1,
        multi_query=True,
        parallel_attn=True,
        alibi=False,
        bias=False,
        ffn_hidden_size=11,
    )


TINY = {
    "hidden_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 11,
    "layer_norm_eps": 1e-5,
}
IDS = tokens(2, 5, high=19)
_CASES: tuple[Case, ...] = (
    Case(
        "hub_bert",
        hub(
            "BertForSequenceClassification",
            "BertConfig",
            vocab_size=19,
            max_position_embeddings=8,
            num_labels=3,
            pad_token_id=None,
            **TINY,
        ),
        IDS,
        bert(),
        why="post-norm: every norm but the last runs on into another norm and is pinned; the last is read by the "
        "pooler alone. "
        "The pooler (also 6) is a tanh layer. Not counted: key biases, one token type, three positions",
        extra=36,
    ),
    Case(
        "hub_gpt2",
        hub("GPT2LMHeadModel", "GPT2Config", vocab_size=19, n_positions=8, n_embd=6, n_layer=2, n_head=2, n_inner=11),
        IDS,
        gpt2(),
        why="ln_1 and ln_2 of two layers against their readers; ln_f is read by the embedding, which the stream "
        "pins. gelu. Not "
        "counted: key biases and three positions",
        extra=30,
    ),
    Case(
        "hub_llama",
        hub(
            "LlamaForCausalLM",
            "LlamaConfig",
            vocab_size=19,
            hidden_size=7,
            intermediate_size=13,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=10,
            max_position_embeddings=16,
        ),
        IDS,
        llama(),
        why="five norm weights against their readers (scale and sign), and the sign of the stream itself; rotary pairs",
    ),
    Case(
        "hub_falcon",
        build_falcon(1, 3),
        IDS,
        falcon(1, 3),
        why="queries, key and value are heads 0:3, 3 and 4 of one projection: their widths are spaces of their own. "
        "The last norm is read by the embedding, which the stream pins",
    ),
    Case(
        "hub_falcon_groups",
        build_falcon(2, 3),
        IDS,
        falcon(2, 3),
        why="the same in each of two groups, which change places as blocks",
    ),
)

HUB = tuple(replace(case, needs="transformers") for case in _CASES)
