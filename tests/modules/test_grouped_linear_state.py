"""Parameters, checkpoints and errors of GroupedLinear."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import minifloat as mf
from minifloat import recipe as recipes

SINGLE: dict[str, Any] = {"single_grouped_weight": True, "single_grouped_bias": True}
SPLITS = [5, 0, 33, 17]


def make(**kwargs: Any) -> Any:
    return mf.GroupedLinear(4, 48, 64, device=kwargs.pop("device", "cpu"), **kwargs)


# --------------------------------------------------------------------------------------- parameters
def test_names() -> None:
    names = [name for name, _ in make().named_parameters()]
    assert names == [f"{kind}{i}" for i in range(4) for kind in ("weight", "bias")]
    layer = make(**SINGLE)
    assert [(n, tuple(p.shape)) for n, p in layer.named_parameters()] == [
        ("weight", (4, 64, 48)),
        ("bias", (4, 64)),
    ]
    assert layer.weight2 is None and layer.bias2 is None
    assert make(bias=False).bias0 is None
    assert make(single_grouped_parameter=True).weight.shape == (4, 64, 48)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_one_seed_one_start(device: str) -> None:
    found = []
    for kwargs in ({}, SINGLE):
        torch.manual_seed(7)
        layer = make(device=device, **kwargs)
        if device == "meta":
            assert all(p.is_meta for p in layer.parameters())
            torch.manual_seed(7)
            layer.reset_parameters()
        found.append(layer)
    assert torch.equal(
        torch.stack([getattr(found[0], f"weight{i}") for i in range(4)]), found[1].weight
    )


@pytest.mark.parametrize(("mode", "dim"), [("column", 0), ("row", 1)])
def test_partition(mode: str, dim: int) -> None:
    layer = make(parallel_mode=mode, tp_size=2, bias=False)
    shape = [64, 48]
    shape[dim] //= 2
    assert tuple(layer.weight1.shape) == tuple(shape) and layer.weight1.partition_dim == dim
    layer = make(parallel_mode=mode, tp_size=2, bias=False, single_grouped_weight=True)
    assert tuple(layer.weight.shape) == (4, *shape) and layer.weight.partition_dim == dim + 1
    layer(torch.randn(55, layer.in_features), SPLITS)  # no collective: that is the caller's


@pytest.mark.parametrize("source", [{}, SINGLE, {"single_grouped_bias": True}])
@pytest.mark.parametrize("target", [{}, SINGLE, {"single_grouped_weight": True}])
@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_of_either_layout_loads(source: Any, target: Any, assign: bool) -> None:
    a, b = make(**source), make(**target)
    outer = torch.nn.Sequential(b)
    state = {f"0.{k}": v for k, v in a.state_dict().items()}
    outer.load_state_dict(state, assign=assign)
    x = torch.randn(55, 48)
    assert torch.equal(a(x, SPLITS), b(x, SPLITS))


def test_state_dicts_that_do_not_fit() -> None:
    state = make().state_dict()
    del state["weight2"]
    with pytest.raises(RuntimeError, match="Missing key"):
        make(**SINGLE).load_state_dict(state)
    with pytest.raises(RuntimeError, match="Missing key"):
        make().load_state_dict(mf.GroupedLinear(3, 48, 64, device="cpu", **SINGLE).state_dict())
    both = {**make().state_dict(), **make(**SINGLE).state_dict()}
    make().load_state_dict(both)
    make(**SINGLE).load_state_dict(both)


def test_delayed_state_goes_along() -> None:
    recipe = recipes.DelayedScaling()
    a, b = make(), make(**SINGLE)
    with mf.autocast(recipe=recipe):
        a(torch.randn(55, 48), SPLITS).sum().backward()
    b.load_state_dict(a.state_dict())
    assert torch.equal(a.delayed.scale_input, b.delayed.scale_input)
    assert a.delayed.scale_input.shape == (4,)
    assert a.delayed.scale_input.unique().numel() > 1


# ------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("splits", "match"),
    [
        ([5, 33, 17], r"GroupedLinear\(moe\): m_splits: got 3 sizes; there are 4"),
        ([5, -1, 34, 17], r"GroupedLinear\(moe\): m_splits: got \[5, -1, 34, 17\].*negative"),
        ([5, 1, 33, 17], r"GroupedLinear\(moe\): m_splits: .*56 rows together; the matrix has 55"),
        (torch.tensor([5, 33, 17]), r"GroupedLinear\(moe\): m_splits: .*\(3,\).*\(4,\)"),
        (torch.tensor([5, 1, 33, 17]), r"GroupedLinear\(moe\): m_splits: .*56 rows"),
        (torch.tensor([5.0, 0, 33, 17]), r"GroupedLinear\(moe\): m_splits: got torch.float32"),
    ],
)
def test_wrong_splits(splits: Any, match: str) -> None:
    layer = make(name="moe")
    with pytest.raises(ValueError, match=match):
        layer(torch.randn(55, 48), splits)


def test_wrong_sizes_in_a_graph() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(make(), backend="aot_eager", fullgraph=True)
    with pytest.raises(ValueError, match="56 rows together; the matrix has 55"):
        compiled(torch.randn(55, 48), torch.tensor([5, 1, 33, 17]))


def test_wrong_inputs() -> None:
    layer = make(name="moe")
    with pytest.raises(ValueError, match=r"inp: got shape \(55, 47\).*in_features=48"):
        layer(torch.randn(55, 47), SPLITS)
    with pytest.raises(TypeError, match="inp: got torch.bfloat16, the parameters torch.float32"):
        layer(torch.randn(55, 48, dtype=torch.bfloat16), SPLITS)
    quantizer = mf.MXFP8Quantizer(mf.DType.kFloat8E4M3)
    with pytest.raises(TypeError, match="inp: got MXFP8Tensor; a plain tensor"):
        layer(quantizer.quantize(torch.randn(55, 48)), SPLITS)
    layer.weight1.data = layer.weight1.data.bfloat16()
    with pytest.raises(TypeError, match=r"GroupedLinear\(moe\): the parameters have dtypes"):
        layer(torch.randn(55, 48), SPLITS)
    layer = make()
    with pytest.raises(ValueError, match=r"out: got .*\(3, 64\)"):
        layer(torch.randn(55, 48), SPLITS, out=torch.empty(3, 64))
    with pytest.raises(ValueError, match=r"dgrad_out: got .*\(3, 48\)"):
        layer(torch.randn(55, 48), SPLITS, dgrad_out=torch.empty(3, 48))


@pytest.mark.parametrize("argument", ["ub_overlap_rs", "ub_overlap_ag", "ub_name"])
def test_unsupported(argument: str) -> None:
    with pytest.raises(NotImplementedError, match=argument):
        make(**{argument: "x" if argument == "ub_name" else True})


def test_wrong_construction() -> None:
    with pytest.raises(ValueError, match="num_gemms: got 0"):
        mf.GroupedLinear(0, 48, 64, device="cpu")
    with pytest.raises(TypeError, match="use_grouped_tensor: got str"):
        make(use_grouped_tensor="yes")
    with pytest.raises(ValueError, match="parallel_mode"):
        make(parallel_mode="both")
    with pytest.raises(ValueError, match="bias with tp_size=2"):
        make(parallel_mode="column", tp_size=2)
    with (
        mf.quantized_model_init(recipe=recipes.DelayedScaling()),
        pytest.warns(UserWarning, match="the weights stay apart"),
    ):
        layer = make(**SINGLE)
    assert isinstance(layer.weight3, mf.QuantizedTensor)
