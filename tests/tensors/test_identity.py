"""High precision as a quantized tensor."""

from __future__ import annotations

import pytest
import torch

from minifloat import IdentityQuantizer, IdentityTensor, IdentityTensorStorage

from .cases import quantized, raw, values


@pytest.mark.parametrize("kind", ["identity", "identity_bf16"])
@pytest.mark.parametrize("shape", [(64, 48), (3, 5, 7), (7,), (), (0, 4)])
def test_values_are_kept(kind: str, shape: tuple[int, ...]) -> None:
    x = values(*shape)
    t = (
        quantized(kind, *shape)
        if shape
        else IdentityQuantizer(dtype=torch.bfloat16 if "bf16" in kind else None).quantize(x)
    )
    assert isinstance(t, IdentityTensor)
    held = torch.bfloat16 if kind == "identity_bf16" else torch.float32
    assert t._hp_data.dtype == held and t.dtype == torch.float32
    assert torch.equal(raw(t.dequantize()), raw(x.to(held).float()))
    t.dequantize().zero_()
    assert torch.equal(raw(t.dequantize()), raw(x.to(held).float()))


def test_any_floating_dtype() -> None:
    t = IdentityQuantizer().quantize(values(4, 4).double())
    assert t._hp_data.dtype == t.dtype == torch.float64
    with pytest.raises(TypeError, match="int64"):
        IdentityQuantizer().quantize(torch.ones(2, 2, dtype=torch.int64))


def test_constructor() -> None:
    x = values(4, 4)
    made = IdentityTensorStorage(x, None, torch.bfloat16)
    assert made._hp_data is x and made._dtype == torch.bfloat16
    assert torch.equal(made.dequantize(), x.bfloat16())
    assert tuple(made.view(16).shape) == (16,)
    assert torch.equal(made.view(2, 8).dequantize(dtype=torch.float32), x.view(2, 8))


def test_operands() -> None:
    t = quantized("identity", 4, 8, 32)
    assert torch.equal(t.operand(False).data, values(4, 8, 32).view(32, 32))
    assert torch.equal(t.operand(True).data, values(4, 8, 32).view(32, 32).t())
