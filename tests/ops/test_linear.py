"""`BasicLinear` and `Linear`: the same bits as `minifloat.Linear`, and their quantizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import minifloat
from minifloat import ops
from minifloat import recipe as recipes

from .cases import RECIPES, assert_same, mlp, results, step


def twins(dtype: torch.dtype = torch.float32, **kwargs: Any) -> tuple[Any, Any]:
    torch.manual_seed(2)
    ours = ops.Linear(48, 32, dtype=dtype, **kwargs)
    module = minifloat.Linear(48, 32, params_dtype=dtype, fuse_wgrad_accumulation=bool(kwargs))
    with torch.no_grad():
        ours.bias.uniform_(-1, 1)
        module.weight.copy_(ours.weight)
        module.bias.copy_(ours.bias)
    return ours, module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*RECIPES, "override", "none"])
def test_the_bits_of_the_module(name: str, dtype: torch.dtype) -> None:
    recipe = RECIPES.get(name)
    if name == "override":
        recipe = recipes.Float8CurrentScaling(backward_override="dequantized")
    ours, module = twins(dtype)
    for seed in range(3):
        x = torch.randn(3, 7, 48, generator=torch.Generator().manual_seed(seed)).to(dtype)
        got, expected = step(ours, ours, x, recipe), step(module, module, x, recipe)
        if name == "none" or dtype is torch.float32:  # a bias of its own is added after rounding
            torch.testing.assert_close(got[0], expected[0], rtol=1e-5, atol=1e-5)
            got, expected = got[1:], expected[1:]
        assert_same(got[:3], expected[:3])


def test_quantizers() -> None:
    op = ops.BasicLinear(32, 32)
    assert (op.num_quantizers("forward"), op.num_quantizers("backward")) == (2, 1)
    assert op.get_quantizer("forward", 0) is None and op.get_input_quantizer() is None
    forward = op.get_quantizer_roles("forward")
    assert forward is not None
    assert [r.tensor_type for r in forward if r is not None] == ["input", "weight"]
    op.reset_recipe_state(recipe=recipes.MXFP8BlockScaling())
    assert isinstance(op.get_input_quantizer(), minifloat.MXFP8Quantizer)
    assert isinstance(op.get_grad_output_quantizer(), minifloat.MXFP8Quantizer)
    kept = op.get_quantizer("forward", 1)
    op.reset_recipe_state(recipe=recipes.MXFP8BlockScaling())
    assert op.get_quantizer("forward", 1) is kept
    op.reset_recipe_state(recipe=recipes.DelayedScaling())
    live = op.get_input_quantizer()
    assert live.scale is op.delayed.scale_input
    op.reset_recipe_state(recipe=None)
    assert op.get_input_quantizer() is None
    with pytest.raises(IndexError, match="BasicLinear: index: got 2; it has 2 quantizers"):
        op.get_quantizer("forward", 2)
    with pytest.raises(ValueError, match="mode: got 'both'"):
        op.num_quantizers("both")


def test_the_fuser_sets_the_recipe() -> None:
    op = ops.BasicLinear(32, 32)
    with minifloat.autocast(recipe=recipes.MXFP8BlockScaling()):
        op(torch.randn(32, 32))
    assert isinstance(op.get_input_quantizer(), minifloat.MXFP8Quantizer)
    op(torch.randn(32, 32))
    assert op.get_input_quantizer() is None


@pytest.mark.parametrize("overwrite", [False, True])
def test_main_grad(overwrite: bool) -> None:
    ours, module = twins(accumulate_into_main_grad=True)
    for weight in (ours.weight, module.weight):
        weight.main_grad = torch.full((32, 48), 0.5)
        weight.overwrite_main_grad = overwrite
    x = torch.randn(5, 48)
    recipe = recipes.Float8CurrentScaling()
    for layer in (ours, module):
        step(layer, layer, x, recipe)
        assert layer.weight.grad is None
    assert torch.equal(ours.weight.main_grad, module.weight.main_grad)
    ours.weight.grad_added_to_main_grad = False
    step(ours, ours, x, recipe)
    assert ours.weight.grad_added_to_main_grad and ours.weight.grad.shape == (32, 48)
    del ours.weight.main_grad
    with pytest.raises(RuntimeError, match="BasicLinear: accumulate_into_main_grad without weight"):
        step(ours, ours, x, recipe)


def test_stochastic_rounding_repeats_with_the_seed() -> None:
    op = ops.BasicLinear(32, 32)
    x = torch.randn(32, 32)
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(step(op, op, x, recipes.NVFP4BlockScaling()))
    assert_same(found[0], found[1])
    assert not torch.equal(found[0][1], found[2][1])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["delayed", "current"])
def test_checkpoints_repeat_the_forward(name: str, reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    def again(x: torch.Tensor) -> Any:
        return checkpoint(other, x, use_reentrant=reentrant)

    model, other = mlp(), mlp()
    for seed in range(3):
        x = torch.randn(6, 32, generator=torch.Generator().manual_seed(seed))
        expected = step(model, model, x, RECIPES[name])
        assert_same(expected, step(other, again, x, RECIPES[name]))


def test_meta_parameters_are_made_at_the_first_call() -> None:
    model = ops.Sequential(
        ops.RMSNorm(8, device="meta"), ops.Linear(8, 4, device="meta"), ops.LayerNorm(4)
    )
    assert model(torch.randn(2, 8)).shape == (2, 4)
    assert not any(p.is_meta for p in model.parameters())


def test_arguments() -> None:
    with pytest.raises(NotImplementedError, match="userbuffers_options"):
        ops.BasicLinear(8, 8, userbuffers_options={"comm_name": "qkv"})
    for cls in (ops.BasicLinear, ops.Linear):
        with pytest.raises(ValueError, match=f"^{cls.__name__}: tensor_parallel_mode: got 'col'"):
            cls(8, 8, tensor_parallel_mode="col")
    with pytest.raises(ValueError, match="dtype: got torch.float64"):
        ops.BasicLinear(8, 8, dtype=torch.float64)
    with pytest.raises(ValueError, match="Dropout: p: got 2"):
        ops.Dropout(2.0)
    with pytest.raises(ValueError, match=r"ScaledSReLU \(op 0 of 1\): scales: got shape \(3,\)"):
        ops.ScaledSReLU()(torch.ones(2, 4), torch.ones(3))


def test_quantized_inputs_are_read_as_their_values() -> None:
    op, x = ops.BasicLinear(32, 32), torch.randn(32, 32)
    quantized = minifloat.MXFP8Quantizer(minifloat.DType.kFloat8E4M3).quantize(x)
    assert torch.equal(op(quantized), op(quantized.dequantize()))
    y = results(op(x), [x], op.parameters())[0]
    assert y.shape == (32, 32)


def test_delayed_state_is_saved_and_put_back() -> None:
    op, x = ops.BasicLinear(32, 32, device="cpu"), torch.randn(32, 32)
    assert op._save_fp8_metas() is None and ops.GELU()._save_fp8_metas() is None
    assert ops.GELU().get_quantizer_roles("forward") is None
    with minifloat.autocast(recipe=recipes.DelayedScaling(amax_history_len=4)):
        op(x)
    metas = op._save_fp8_metas()
    assert metas is not None
    with minifloat.autocast(recipe=recipes.DelayedScaling(amax_history_len=8)):
        op(x * 100)
    changed = op._save_fp8_metas()
    assert changed is not None and not torch.equal(changed["scale_input"], metas["scale_input"])
    op._load_fp8_metas(metas)
    again = op._save_fp8_metas()
    assert again is not None and all(torch.equal(again[k], metas[k]) for k in metas)
    op._load_fp8_metas(None)
