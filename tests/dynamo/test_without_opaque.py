"""A PyTorch without opaque objects: registration does nothing, and eager works."""

from __future__ import annotations

import minifloat as mf

from ..quantizers.cases import (
    E4M3,
    run_python,
    sample,
)

# PyTorch 2.13 itself needs the API for DTensor, which it imports at the first operator on a tensor
# of a subclass.
HIDDEN = """
import torch.distributed.tensor
import torch._library.opaque_object as api
del api.register_opaque_type
import torch, minifloat as mf
from minifloat import opaque
from minifloat.dynamo import is_value_opaque_quantizer, register_value_opaque_quantizer, TensorSpec
assert not opaque.AVAILABLE
E4M3 = mf.DType.kFloat8E4M3
x = torch.randn(20, 48, generator=torch.Generator().manual_seed(0))

class Mine(mf.MXFP8Quantizer):
    extra: int
assert register_value_opaque_quantizer(Mine) is Mine
assert Mine._value_field_names[-1] == "extra"
register_value_opaque_quantizer(Mine)  # a no-op cannot clash
try:
    class Bad(mf.MXFP8Quantizer):
        state: torch.Tensor
    register_value_opaque_quantizer(Bad)
except TypeError as e:
    assert "Bad.state" in str(e)
else:
    raise AssertionError("a bad field went unnoticed")

quantizers = [
    mf.Float8CurrentScalingQuantizer(E4M3, "cpu"), mf.Float8BlockQuantizer(E4M3),
    mf.MXFP8Quantizer(E4M3), mf.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True),
    mf.IdentityQuantizer(),
    mf.HybridQuantizer(rowwise_quantizer=mf.MXFP8Quantizer(E4M3),
                       columnwise_quantizer=mf.NVFP4Quantizer()),
    mf.Float8Quantizer(torch.ones(1), torch.zeros(1), E4M3),
]
for q in quantizers:
    assert not is_value_opaque_quantizer(q)
    t = x.clone().requires_grad_()
    made = q.quantize(t)
    made.dequantize().sum().backward()
    assert (t.grad == 1).all()
    q.update_quantized(2 * x, made.detach())
    q.make_empty((4, 32), device="cpu")
    TensorSpec((4, 32), torch.float32, q, device="cpu").create_tensor()
for q in quantizers[:-1]:
    assert q == q.copy() and hash(q) == hash(q.copy()) and q.copy() is not q
    text, names = q.__fx_repr__()
    assert eval(text, dict(names)) == q
    try:
        q.set_usage(rowwise=False)
    except RuntimeError as e:
        assert "copy()" in str(e)
    else:
        raise AssertionError("printing did not freeze")
print("ok", mf.MXFP8Quantizer(E4M3).quantize(x)._rowwise_data.sum().item())
"""


def test_everything_eager_works_without_the_api() -> None:
    said, total = run_python(HIDDEN).split()
    assert said == "ok"
    x = sample(20, 48)
    assert int(total) == mf.MXFP8Quantizer(E4M3).quantize(x)._rowwise_data.sum().item()
