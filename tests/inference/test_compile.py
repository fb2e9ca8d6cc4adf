from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from onebasin.inference.compile import batched, rewritings

SIDE = st.sampled_from([1, 3, 15, 16, 17, 64, 70])


def matrices(chains: int, rows: int, columns: int, *, shared: bool, turned: bool) -> Tensor:
    generator = torch.Generator().manual_seed(rows + 100 * columns)
    shape = (columns, rows) if turned else (rows, columns)
    lead = () if shared else (chains,)
    made = torch.randn(*lead, *shape, generator=generator, dtype=torch.float64)
    return (made.mT if turned else made).expand(chains, rows, columns)


def products_in(a: Tensor, b: Tensor) -> list[tuple[str, tuple[int, ...]]]:
    graph = make_fx(torch.bmm, decomposition_table=rewritings())(a, b)
    found = [node for node in graph.graph.nodes if str(node.target) in {"aten.mm.default", "aten.bmm.default"}]
    return [(str(node.target), tuple(node.meta["val"].shape)) for node in found]


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 3), SIDE, SIDE, SIDE, *[st.booleans()] * 4)
def test_a_rewritten_product_is_the_product(
    chains: int, m: int, k: int, n: int, left: bool, right: bool, left_turned: bool, right_turned: bool
) -> None:
    a = matrices(chains, m, k, shared=left, turned=left_turned)
    b = matrices(chains, k, n, shared=right, turned=right_turned)
    found = make_fx(torch.bmm, decomposition_table=rewritings())(a, b)(a, b)
    torch.testing.assert_close(found, torch.stack([x @ y for x, y in zip(a, b, strict=True)]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("turned", [False, True])
def test_a_shared_operand_makes_one_product(turned: bool) -> None:
    shared = matrices(3, 70, 80, shared=True, turned=turned)
    own = matrices(3, 80, 20, shared=False, turned=False)
    assert products_in(shared, own) == [("aten.mm.default", (70, 60))]
    assert products_in(own.mT, shared.mT) == [("aten.mm.default", (60, 70))]


def test_few_columns_are_computed_as_rows() -> None:
    a = matrices(3, 100, 20, shared=False, turned=False)
    b = matrices(3, 20, 2, shared=False, turned=False)
    assert products_in(a, b) == [("aten.bmm.default", (3, 2, 100))]
    assert products_in(b.mT, a.mT) == [("aten.bmm.default", (3, 2, 100))]


def test_a_product_in_its_best_form_is_left_alone() -> None:
    assert batched(torch.rand(2, 40, 30), torch.rand(2, 30, 40)) is NotImplemented
