"""Classes of users as constants of graphs: what can be registered, and what traced code sees."""

from __future__ import annotations

import abc
from typing import Any

import pytest
import torch
from torch import Tensor

import minifloat as mf
from minifloat import Quantizer, opaque
from minifloat.dynamo import is_value_opaque_quantizer, register_value_opaque_quantizer

from ..quantizers.cases import VALUES, sample

compiles = pytest.mark.skipif(not opaque.AVAILABLE, reason="this PyTorch has no opaque objects")
X = sample(20, 48)


def compiled(fn: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(fn, fullgraph=True, backend="aot_eager")


@compiles
def test_an_ordinary_class_is_registered_by_us() -> None:
    """PyTorch 2.11 wants its metaclass, which a user need not know of."""

    @register_value_opaque_quantizer
    class Ordinary(Quantizer):
        field: int

        def __init__(self, field: int) -> None:
            super().__init__(rowwise=True, columnwise=True)
            self.field = field

        def quantize_impl(self, tensor: Tensor) -> Tensor:  # type: ignore[override]
            return tensor * self.field

    q = Ordinary(3)
    assert is_value_opaque_quantizer(q)
    source, names = q.__fx_repr__()
    assert eval(source, dict(names)) == q
    assert isinstance(q, Quantizer)
    assert torch.equal(compiled(lambda q, x: q.quantize(x))(q, X), X * 3)


@compiles
def test_a_class_that_pytorch_refuses_stays_as_it_was() -> None:
    class Keyless(Quantizer):
        field: int
        __hash__ = None  # type: ignore[assignment]

    with pytest.raises(TypeError, match="__hash__"):
        register_value_opaque_quantizer(Keyless)
    assert type(Keyless) is abc.ABCMeta
    q = Keyless(rowwise=True, columnwise=True)
    assert q._value_fields() is None
    assert not is_value_opaque_quantizer(q)


@pytest.mark.parametrize("cls", [int, object(), VALUES["mxfp8"]()], ids=["class", "object", "q"])
def test_only_quantizer_classes_are_registered(cls: Any) -> None:
    with pytest.raises(TypeError, match="cls: got .*a subclass of Quantizer is needed"):
        register_value_opaque_quantizer(cls)


@compiles
def test_isinstance_in_a_graph() -> None:
    def fn(q: Any, x: Tensor) -> Tensor:
        return x + 1 if isinstance(q, mf.MXFP8Quantizer) else x - 1

    assert torch.equal(compiled(fn)(VALUES["mxfp8"](), X), X + 1)
    assert torch.equal(compiled(fn)(VALUES["current"](), X), X - 1)
