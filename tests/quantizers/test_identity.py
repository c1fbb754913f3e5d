"""High precision as a format like any other."""

from __future__ import annotations

import inspect
import pickle

import pytest
import torch

from minifloat import HybridQuantizer, IdentityQuantizer
from minifloat.dynamo import TensorSpec, is_value_opaque_quantizer
from minifloat.opaque import AVAILABLE

from .cases import buffers, sample

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def test_signature() -> None:
    parameters = inspect.signature(IdentityQuantizer).parameters
    assert {n: p.default for n, p in parameters.items()} == {
        "dtype": None,
        "rowwise": True,
        "columnwise": True,
    }
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters.values())


@pytest.mark.parametrize("given", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", [None, *FLOATS], ids=str)
def test_keeps_the_values(given: torch.dtype, dtype: torch.dtype | None) -> None:
    x = sample(3, 5).to(given)
    made = IdentityQuantizer(dtype=dtype).quantize(x)
    assert made.dtype == given, "the nominal dtype is the input's"
    assert made._hp_data.dtype == (dtype or given)
    assert torch.equal(made._hp_data, x.to(dtype or given))
    assert torch.equal(made.dequantize(), x.to(dtype or given).to(given))


def test_the_data_is_a_copy() -> None:
    x = sample(3, 5)
    made = IdentityQuantizer().quantize(x)
    x.zero_()
    assert made.dequantize().abs().sum() > 0


@pytest.mark.parametrize("usages", [(True, True), (True, False), (False, True)])
def test_one_buffer_serves_both_directions(usages: tuple[bool, bool]) -> None:
    q = IdentityQuantizer(rowwise=usages[0], columnwise=usages[1])
    x = sample(3, 5)
    assert torch.equal(q.quantize(x).dequantize(), x)
    assert list(q.inner_tensor_specs((3, 5))) == ["_hp_data"]


@pytest.mark.parametrize("dtype", [None, *FLOATS], ids=str)
def test_every_dtype_is_part_of_the_value(dtype: torch.dtype | None) -> None:
    q = IdentityQuantizer(dtype=dtype)
    others = [IdentityQuantizer(dtype=d) for d in (None, *FLOATS) if d is not dtype]
    assert q not in others
    text, names = q.__fx_repr__()
    for twin in (eval(text, dict(names)), pickle.loads(pickle.dumps(q))):
        assert twin == q
        assert hash(twin) == hash(q)
        assert twin.dtype is dtype
    assert is_value_opaque_quantizer(q) is AVAILABLE


@pytest.mark.parametrize("bad", [torch.int32, torch.complex64, "float32", 7, torch.float])
def test_other_dtypes_are_refused(bad: object) -> None:
    if bad is torch.float:  # another name of float32
        assert IdentityQuantizer(dtype=torch.float).dtype is torch.float32
        return
    with pytest.raises(TypeError, match="dtype: got .*; a floating torch dtype or None is needed"):
        IdentityQuantizer(dtype=bad)  # type: ignore[arg-type]


def test_is_quantizable() -> None:
    q = IdentityQuantizer()
    assert q.is_quantizable(sample(3).double())
    assert q.is_quantizable(torch.tensor(1.0))
    assert not q.is_quantizable(torch.zeros(3, dtype=torch.int8))
    assert q.is_requantization_safe()


@pytest.mark.parametrize("dtype", [None, torch.float16])
@pytest.mark.parametrize("nominal", [torch.float32, torch.bfloat16])
def test_an_empty_one_is_as_wide_as_a_quantized_one(
    dtype: torch.dtype | None, nominal: torch.dtype
) -> None:
    identity = IdentityQuantizer(dtype=dtype)
    mixed = HybridQuantizer(rowwise_quantizer=identity.copy(), columnwise_quantizer=identity.copy())
    x = torch.ones(4, 6, dtype=nominal)
    for q in (identity, mixed):
        made = q(x)
        empty = q.make_empty((4, 6), dtype=nominal, device="cpu")
        spec = TensorSpec((4, 6), nominal, q, device="cpu")
        for other in (empty, spec.create_tensor()):
            assert buffers(other).keys() == buffers(made).keys()
            for name, t in buffers(made).items():
                assert buffers(other)[name].dtype == t.dtype
