"""Matrices that are tensors of their own are cast as they are in one, wherever they lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

import minifloat as mf
from minifloat import apart, ops, ragged
from minifloat import recipe as recipes
from minifloat.formats import Cast

CASTS = ("fp8_e4m3", "fp8_e4m3_128x128", "mxfp8_e4m3", "nvfp4_16x16")


def matrices(side_by_side: bool) -> list[Tensor]:
    torch.manual_seed(0)
    one = torch.randn(3, 40, 48)
    return list(one.unbind(0)) if side_by_side else [m.clone() for m in one]


def test_where_they_lie() -> None:
    near, far = matrices(True), matrices(False)
    found = apart.whole(near)
    assert found is not None and found.data_ptr() == near[0].data_ptr() and found.shape[0] == 3
    assert apart.stacked(near).data_ptr() == near[0].data_ptr()
    for other in (far, near[::-1], [near[0].t(), near[1].t()], [m[:20] for m in near]):
        assert apart.whole(other) is None
        assert torch.equal(apart.stacked(other), torch.stack(other))


@pytest.mark.parametrize("near", [True, False], ids=["near", "far"])
@pytest.mark.parametrize("name", CASTS)
def test_the_bits_of_one(name: str, near: bool) -> None:
    cast, given = Cast(name), matrices(near)
    one = torch.cat(given)
    for row, col in ((cast, cast), (cast, None), (None, cast)):
        expected = ragged.quantize(one, None, 3, row, col)
        for a, b in zip(expected, apart.quantize(given, row, col), strict=True):
            assert torch.equal(a, b)


def test_the_bits_of_one_by_given_scales() -> None:
    cast, scales = Cast("fp8_e4m3"), torch.tensor([1.0, 2.0, 4.0])
    seen, other = torch.tensor([0.0, 100.0, 0.0]), torch.tensor([0.0, 100.0, 0.0])
    both = {"row": True, "col": True}
    one = torch.cat(matrices(False))
    expected = ragged.quantize_scaled(one, None, 3, scales, cast, **both, seen=seen)
    found = apart.quantize_scaled(matrices(True), scales, cast, **both, seen=other)
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(seen, other)


def test_operators_have_right_fakes() -> None:
    check: Any = torch.library.opcheck
    tests = ("test_schema", "test_faketensor")
    cast = Cast("fp8_e4m3")
    for near in (True, False):
        given = matrices(near)
        op = torch.ops.minifloat.group_quantize_apart.default
        check(op, (given, Cast("mxfp8_e4m3"), None), test_utils=tests)
        scaled = torch.ops.minifloat.group_quantize_scaled_apart.default
        check(scaled, (given, torch.ones(3), cast, True, True), test_utils=tests)


@pytest.mark.parametrize("which", ["module", pytest.param("op", marks=pytest.mark.deep)])
@pytest.mark.parametrize("name", ["current", pytest.param("delayed", marks=pytest.mark.deep)])
def test_a_graph_copies_no_weight(name: str, which: str) -> None:
    torch._dynamo.reset()
    short = recipes.DelayedScaling(amax_history_len=4)  # its history is joined with the next row
    recipe = {"current": recipes.Float8CurrentScaling(), "delayed": short}[name]
    make: Any = {"module": mf.GroupedLinear, "op": ops.GroupedLinear}[which]
    layer = make(3, 48, 40, bias=False, device="cpu")
    seen: list[Any] = []

    def kept(graph: Any, inputs: Any) -> Any:
        seen.extend(node for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=kept)
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    x = torch.randn(20, 48, requires_grad=True)
    with mf.autocast(recipe=recipe):
        compiled(x, torch.tensor([4, 0, 16])).sum().backward()
    casts = [node for node in seen if "apart" in str(node.target)]
    joins = [
        node for node in seen if str(node.target) in ("aten.stack.default", "aten.cat.default")
    ]
    assert len(casts) == 1
    assert all(node.meta["val"].numel() < 3 * 48 * 40 for node in joins)
