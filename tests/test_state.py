"""State, its spec, its checks and its flat form."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from onebasin.errors import OnebasinError, SpecError
from onebasin.state import (
    TensorSpec,
    as_spec,
    check_state,
    flat_size,
    flatten,
    interpolate,
    restore,
    spec_from_json,
    spec_of,
    spec_to_json,
    state_of,
)

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
names = st.text(st.characters(categories=("L", "N"), include_characters="._"), min_size=1, max_size=12)
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
tensor_specs = st.builds(TensorSpec, shapes, st.sampled_from([*FLOATS, torch.int64, torch.bool]))
specs = st.dictionaries(names, tensor_specs, min_size=1, max_size=5)


def draw_state(spec, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(t.shape, generator=generator).mul(4).to(t.dtype) for name, t in spec.items()}


def same(a, b):
    return list(a) == list(b) and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


def test_every_question_has_its_own_exit_code():
    codes = [kind.exit_code for kind in [OnebasinError, *OnebasinError.__subclasses__()]]
    assert len(set(codes)) == len(codes)
    assert min(codes) == 3


def test_state_of_shares_memory_and_needs_no_gradient():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    state = state_of(model)
    assert state["0.weight"].data_ptr() == model[0].weight.data_ptr()
    assert not any(value.requires_grad for value in state.values())
    assert "1.num_batches_tracked" in state
    assert as_spec(model) == as_spec(state) == as_spec(as_spec(model))


def test_state_of_leaves_out_what_is_not_a_tensor():
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"version": 3}

    assert list(state_of(Extra(1, 1))) == ["weight", "bias"]


@given(specs)
def test_spec_survives_json_in_order(spec):
    again = spec_from_json(spec_to_json(spec))
    assert again == spec
    assert list(again) == list(spec)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"w": 1}', '{"w": {"shape": [1], "dtype": "load"}}', '{"w": {"shape": 3}}']
)
def test_bad_spec_text_is_refused_with_a_remedy(text):
    with pytest.raises(SpecError, match="spec_to_json"):
        spec_from_json(text)


@given(specs)
def test_flatten_and_restore_are_inverse(spec):
    state = draw_state(spec)
    vector = flatten(state)
    assert vector.shape == (flat_size(spec),)
    assert same(restore(vector, spec, rest=state), state)
    zeros = restore(vector, spec)
    assert all(not zeros[n].any() for n, t in spec.items() if not t.dtype.is_floating_point)


def test_restore_takes_leading_axes_and_names_the_expected_size():
    spec = spec_of(nn.Linear(2, 3).state_dict())
    assert restore(torch.zeros(5, 4, 9), spec)["weight"].shape == (5, 4, 3, 2)
    with pytest.raises(SpecError, match=r"\(\.\.\., 9\).*found shape \(8,\).*flatten"):
        restore(torch.zeros(8), spec)


def test_complex_weights_have_no_flat_form():
    with pytest.raises(SpecError, match="view_as_real"):
        flatten({"w": torch.zeros(2, dtype=torch.complex64)})


@pytest.mark.parametrize("dtype", FLOATS)
def test_interpolate_is_exact_at_both_ends_and_keeps_dtype(dtype):
    spec = {"w": TensorSpec((5,), dtype), "steps": TensorSpec((), torch.int64)}
    a, b = draw_state(spec, 1), draw_state(spec, 2)
    start, end = interpolate(a, b, 0.0), interpolate(a, b, 1.0)
    assert same(start, a)
    assert torch.equal(end["w"], b["w"])
    assert torch.equal(end["steps"], a["steps"])
    middle = interpolate(a, b, 0.5)["w"]
    torch.testing.assert_close(middle.double(), (a["w"].double() + b["w"].double()) / 2, rtol=1e-2, atol=1e-2)


LINEAR = {"fc.weight": torch.zeros(3, 2), "fc.bias": torch.zeros(3)}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"fc.weight": torch.zeros(3, 2)}, r"net\.pt is missing fc\.bias: use networks of one architecture"),
        ({**LINEAR, "x": torch.zeros(1)}, r"has unexpected x: use networks"),
        ({f"module.{n}": v for n, v in LINEAR.items()}, r"strip the prefix 'module\.'"),
        ({n.removeprefix("fc."): v for n, v in LINEAR.items()}, r"add the prefix 'fc\.'"),
        ({"fc.weights": LINEAR["fc.weight"], "fc.bias": LINEAR["fc.bias"]}, r"did you mean fc\.weight by fc\.weights"),
        ({**LINEAR, "fc.bias": torch.zeros(4)}, r"fc\.bias \(4,\) where \(3,\) is expected.*width"),
        ({**LINEAR, "fc.bias": torch.zeros(3).half()}, r"fc\.bias is float16, not float32.*\.to\(dtype\)"),
        ({**LINEAR, "fc.bias": [0.0, 0.0, 0.0]}, r"only dense tensors.*list under fc\.bias.*convert"),
    ],
)
def test_a_state_that_does_not_fit_is_explained(state, message):
    with pytest.raises(SpecError, match=message):
        check_state(state, spec_of(LINEAR), where="net.pt")


def test_long_lists_are_cut_short():
    with pytest.raises(SpecError, match="t0, t1, t2, t3 and 16 more"):
        check_state({}, spec_of({f"t{i}": torch.zeros(1) for i in range(20)}), where="net.pt")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_not_finite_is_refused_only_on_request(value):
    state = {**LINEAR, "fc.bias": torch.tensor([0.0, value, 0.0])}
    check_state(state, spec_of(LINEAR), where="net.pt")
    with pytest.raises(SpecError, match=r"net\.pt is not finite: tensor fc\.bias.*leave this network out"):
        check_state(state, spec_of(LINEAR), where="net.pt", finite=True)
