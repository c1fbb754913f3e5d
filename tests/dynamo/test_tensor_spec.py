"""A TensorSpec describes exactly what its quantizer makes, and makes it, in traced code too."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import minifloat as mf
from minifloat import opaque
from minifloat.dynamo import TensorSpec, to_tensor_spec

from ..quantizers.cases import (
    CLASSES,
    E4M3,
    FOUR,
    SEED,
    VALUES,
    Make,
    assert_same,
    buffers,
    delayed,
    sample,
)

compiles = pytest.mark.skipif(not opaque.AVAILABLE, reason="this PyTorch has no opaque objects")
USAGES = {"both": (True, True), "row": (True, False), "col": (False, True)}
U8, F32 = torch.uint8, torch.float32


def make_quantizer(make: Make, usage: str, internal: bool) -> Any:
    q = make()
    rowwise, columnwise = USAGES[usage]
    q.set_usage(rowwise=rowwise, columnwise=columnwise)
    q.internal = internal
    return q


def structure(t: Any) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {n: (tuple(b.shape), b.dtype) for n, b in buffers(t).items()}


def flattened(t: Any) -> dict[str, Any]:
    """The contract's part of what flattening gives."""
    _, ctx = t.__tensor_flatten__()
    return {k: ctx[k] for k in ("cls", "is_tensor", "requires_grad", "nontensor_kwargs")}


# ---------------------------------------------------------------------------------- plain tensors
def test_fields_and_defaults() -> None:
    fields = {f.name: f.default for f in dataclasses.fields(TensorSpec)}
    assert list(fields) == ["shape", "dtype", "quantizer", "requires_grad", "device"]
    assert (fields["quantizer"], fields["requires_grad"], fields["device"]) == (None, False, None)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_plain(requires_grad: bool) -> None:
    spec = TensorSpec((3, 5), torch.bfloat16, requires_grad=requires_grad)
    assert not spec.is_quantized
    assert spec.inner_names() == ("data",)
    assert spec.create_metadata() == {
        "is_tensor": True,
        "is_quantized": False,
        "dtype": torch.bfloat16,
        "requires_grad": requires_grad,
    }
    (inner,) = spec.create_inner_tensors()
    assert (inner.shape, inner.dtype) == ((3, 5), torch.bfloat16)
    made = spec.create_tensor()
    assert type(made) is Tensor
    assert made.requires_grad is requires_grad
    assert spec.assemble([inner]) is inner
    with pytest.raises(ValueError, match="update_usage: this TensorSpec describes a plain tensor"):
        spec.update_usage(columnwise_usage=False)
    for wrong in ([], [inner, inner]):
        with pytest.raises(ValueError, match=f"inner_tensors: got {len(wrong)}"):
            spec.assemble(wrong)


def test_the_default_device_is_the_same_for_all() -> None:
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    for q in (None, *(make() for make in FOUR.values())):
        assert TensorSpec((4, 32), F32, q).create_tensor().device.type == expected
        assert TensorSpec((4, 32), F32, q, device="meta").create_tensor().device.type == "meta"


# ------------------------------------------------------------------------------ quantized tensors
CASES = list(itertools.product(FOUR, USAGES, (False, True)))
IDS = [f"{n}-{u}-{'internal' if i else 'wrapper'}" for n, u, i in CASES]
cases = pytest.mark.parametrize("name, usage, internal", CASES, ids=IDS)


@cases
@pytest.mark.parametrize("shape", [(64, 96), (2, 3, 40)], ids=str)
def test_make_empty_and_the_description_agree(
    name: str, usage: str, internal: bool, shape: tuple[int, ...]
) -> None:
    q = make_quantizer(FOUR[name], usage, internal)
    spec = TensorSpec(shape, torch.bfloat16, q, device="cpu")
    assert spec.is_quantized
    empty = q.make_empty(shape, dtype=torch.bfloat16, device="cpu")
    described = spec.create_tensor()
    x = sample(*shape).bfloat16()

    # Structurally: class, names, shapes, dtypes and everything else that rebuilds the object.
    for made in (empty, described, q.quantize(x)):
        assert type(made) is (q._storage_class if internal else q._tensor_class)
        assert tuple(made.shape) == shape
        assert made._dtype == torch.bfloat16
        assert structure(made) == q.inner_tensor_specs(shape)
        assert tuple(made.__tensor_flatten__()[0]) == spec.inner_names()
        assert flattened(made) == spec.create_metadata()
        assert flattened(made) == q.create_metadata(shape, dtype=torch.bfloat16)
    meta = q.storage_metadata(torch.bfloat16)
    assert meta["cls"] is q._storage_class
    assert meta["nontensor_kwargs"] == spec.create_metadata()["nontensor_kwargs"]
    inner = spec.create_inner_tensors()
    assert [(tuple(t.shape), t.dtype) for t in inner] == list(q.inner_tensor_specs(shape).values())
    assert [t.shape for t in q.alloc_tensors(shape, device="cpu")] == [t.shape for t in inner]

    # Functionally: filled with the same values, they are the same tensor.
    expected = q.quantize(x)
    for made in (empty, described):
        q.update_quantized(x, made)
        assert_same(made, expected)
    rebuilt = spec.assemble(buffers(expected).values())
    assert_same(rebuilt, expected)
    assert torch.equal(rebuilt.dequantize(), expected.dequantize())


@pytest.mark.parametrize(
    "name, usage, expected",
    [
        ("current", "both", "_data _transpose _scale_inv"),
        ("current", "row", "_data _scale_inv"),
        ("current", "col", "_transpose _scale_inv"),
        *(
            (n, u, e)
            for n in ("block", "mxfp8")
            for u, e in (
                (
                    "both",
                    "_rowwise_data _rowwise_scale_inv _columnwise_data _columnwise_scale_inv",
                ),
                ("row", "_rowwise_data _rowwise_scale_inv"),
                ("col", "_columnwise_data _columnwise_scale_inv"),
            )
        ),
        (
            "nvfp4",
            "both",
            "_rowwise_data _rowwise_scale_inv _columnwise_data _columnwise_scale_inv "
            "_amax_rowwise _amax_columnwise",
        ),
        ("nvfp4", "row", "_rowwise_data _rowwise_scale_inv _amax_rowwise"),
        ("nvfp4", "col", "_columnwise_data _columnwise_scale_inv _amax_columnwise"),
    ],
)
def test_names_and_order_are_the_contracts(name: str, usage: str, expected: str) -> None:
    q = make_quantizer(FOUR[name], usage, False)
    assert TensorSpec((64, 96), F32, q).inner_names() == tuple(expected.split())
    declared = tuple(a for a, _ in q._storage_class._INNER_TENSORS if a in expected.split())
    assert declared == tuple(expected.split())


def test_shapes_are_the_contracts() -> None:
    current = VALUES["current"]()
    assert current.inner_tensor_specs((2, 3, 40)) == {
        "_data": ((2, 3, 40), U8),
        "_transpose": ((40, 2, 3), U8),
        "_scale_inv": ((1,), F32),
    }
    assert VALUES["nvfp4"]().inner_tensor_specs((256, 512)) == {
        "_rowwise_data": ((256, 256), U8),
        "_rowwise_scale_inv": ((256, 32), U8),
        "_columnwise_data": ((512, 128), U8),
        "_columnwise_scale_inv": ((512, 16), U8),
        "_amax_rowwise": ((1,), F32),
        "_amax_columnwise": ((1,), F32),
    }
    row_scaled = VALUES["nvfp4-row-scaled"]().inner_tensor_specs((256, 512))
    assert row_scaled["_amax_rowwise"] == ((256,), F32)


@pytest.mark.parametrize("name", [n for n in VALUES if n not in FOUR])
def test_every_other_quantizer_is_described_too(name: str) -> None:
    q = VALUES[name]()
    x = sample(33, 48)
    spec = TensorSpec((33, 48), F32, q, device="cpu")
    made, expected = spec.create_tensor(), q.quantize(x, seed=SEED)
    assert structure(made) == structure(expected) == q.inner_tensor_specs((33, 48))
    assert flattened(expected) == spec.create_metadata()
    q.update_quantized(x, made, seed=SEED)
    assert_same(made, expected)


def test_delayed_scaling_is_described_too() -> None:
    q = delayed()
    made = TensorSpec((4, 8), torch.bfloat16, q, device="cpu").create_tensor()
    assert structure(made) == q.inner_tensor_specs((4, 8))
    q.update_quantized(sample(4, 8), made)
    assert torch.equal(made._data, q.quantize(sample(4, 8))._data)


def test_the_quantizer_is_private() -> None:
    q = mf.MXFP8Quantizer(E4M3)
    spec = TensorSpec((4, 32), F32, q)
    assert spec.quantizer == q
    assert spec.quantizer is not q
    q.set_usage(columnwise=False)
    assert spec.quantizer.columnwise_usage
    spec.update_usage(rowwise_usage=False)
    assert q.rowwise_usage
    frozen = mf.MXFP8Quantizer(E4M3)
    frozen.__fx_repr__()
    spec = TensorSpec((4, 32), F32, frozen)
    spec.update_usage(columnwise_usage=False)
    assert frozen.columnwise_usage
    assert not spec.quantizer.columnwise_usage


@pytest.mark.parametrize("name", FOUR)
def test_update_usage(name: str) -> None:
    spec = TensorSpec((64, 96), F32, FOUR[name](), device="cpu")
    both = spec.inner_names()
    spec.update_usage(columnwise_usage=False)
    assert spec.create_tensor().get_usages() == {"rowwise": True, "columnwise": False}
    row = spec.inner_names()
    spec.update_usage(rowwise_usage=False, columnwise_usage=True)
    assert spec.create_tensor().get_usages() == {"rowwise": False, "columnwise": True}
    assert set(row) | set(spec.inner_names()) == set(both)
    spec.update_usage()
    assert spec.quantizer.get_usages() == {"rowwise": False, "columnwise": True}


@pytest.mark.parametrize("requires_grad", [False, True])
def test_requires_grad(requires_grad: bool) -> None:
    q = mf.MXFP8Quantizer(E4M3)
    spec = TensorSpec((4, 32), F32, q, requires_grad, "cpu")
    assert spec.create_tensor().requires_grad is requires_grad
    assert spec.create_metadata()["requires_grad"] is requires_grad
    assert q.make_empty((4, 32), device="cpu", requires_grad=requires_grad).requires_grad is (
        requires_grad
    )
    q.internal = True
    assert TensorSpec((4, 32), F32, q, True, "cpu").create_metadata()["requires_grad"] is False


def test_a_description_out_of_order_is_an_error() -> None:
    class Reversed(mf.MXFP8Quantizer):
        def inner_tensor_specs(self, shape: Any) -> Any:
            return dict(reversed(super().inner_tensor_specs(shape).items()))

    spec = TensorSpec((4, 32), F32, Reversed(E4M3))
    with pytest.raises(RuntimeError, match=r"Reversed\.inner_tensor_specs gives .* declares"):
        spec.inner_names()
    with pytest.raises(RuntimeError, match="Reversed"):
        spec.create_tensor()


def test_assemble_wants_every_inner_tensor() -> None:
    spec = TensorSpec((4, 32), F32, mf.MXFP8Quantizer(E4M3), device="cpu")
    with pytest.raises(ValueError, match="inner_tensors: got 1; .*_rowwise_data"):
        spec.assemble(spec.create_inner_tensors()[:1])


# --------------------------------------------------------------------------------- to_tensor_spec
def test_of_a_plain_tensor() -> None:
    spec = to_tensor_spec(torch.zeros(3, 5, dtype=torch.float16).requires_grad_())
    assert (spec.shape, spec.dtype, spec.quantizer) == ((3, 5), torch.float16, None)
    assert spec.requires_grad
    assert spec.device == torch.device("cpu")
    made = spec.create_tensor()
    assert (made.shape, made.dtype, made.requires_grad) == ((3, 5), torch.float16, True)


def test_of_what_is_no_tensor() -> None:
    with pytest.raises(TypeError, match="tensor: got NoneType"):
        to_tensor_spec(None)


@cases
def test_of_a_quantized_tensor(name: str, usage: str, internal: bool) -> None:
    q = make_quantizer(FOUR[name], usage, internal)
    t = q.quantize(sample(33, 48).bfloat16())
    spec = to_tensor_spec(t)
    assert (spec.shape, spec.dtype) == ((33, 48), torch.bfloat16)
    assert spec.quantizer == q
    assert not spec.requires_grad
    made = spec.create_tensor()
    assert type(made) is type(t)
    assert structure(made) == structure(t)
    assert spec.create_metadata() == flattened(t)
    assert_same(spec.assemble(buffers(t).values()), t)


def test_of_a_parameter() -> None:
    parameter = torch.nn.Parameter(mf.MXFP8Quantizer(E4M3).quantize(sample(4, 32)))
    spec = to_tensor_spec(parameter)
    assert spec.requires_grad
    assert isinstance(spec.create_tensor(), mf.MXFP8Tensor)


# ------------------------------------------------------------------------------------ traced code
def compiled(fn: Any, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(fn, fullgraph=True, backend="aot_eager", **options)


@compiles
@pytest.mark.parametrize("make", CLASSES.values(), ids=CLASSES.keys())
def test_everything_traces(make: Make) -> None:
    def use(q: Any, x: Tensor) -> Any:
        spec = TensorSpec(x.shape, torch.bfloat16, q, device="cpu")
        names = spec.inner_names()
        inner = spec.create_inner_tensors()
        meta = spec.create_metadata()
        made = spec.create_tensor()
        again = spec.assemble([t.zero_() for t in inner])
        is_quantized = spec.is_quantized
        spec.update_usage(columnwise_usage=False)
        return names, inner, meta["is_tensor"], made, again, is_quantized, spec.create_tensor()

    q = make()
    names, inner, is_tensor, made, again, is_quantized, row = compiled(use)(q, sample(33, 48))
    spec = TensorSpec((33, 48), torch.bfloat16, make(), device="cpu")
    assert names == spec.inner_names()
    expected = q._holding(torch.bfloat16).inner_tensor_specs((33, 48))
    assert [(t.shape, t.dtype) for t in inner] == list(expected.values())
    assert is_tensor
    assert is_quantized
    for t in (made, again):
        assert type(t) is q._tensor_class
        assert structure(t) == structure(spec.create_tensor())
        assert t._quantizer == q
    spec.update_usage(columnwise_usage=False)
    assert structure(row) == structure(spec.create_tensor())
    assert row._quantizer == spec.quantizer
    assert q == make(), "the caller's quantizer keeps its usages"


@compiles
@pytest.mark.parametrize("make", FOUR.values(), ids=FOUR.keys())
def test_internal_results_and_plain_ones_trace(make: Make) -> None:
    def use(q: Any, x: Tensor) -> Any:
        storage = TensorSpec(x.shape, x.dtype, q, device="cpu").create_tensor()
        plain = TensorSpec(x.shape, x.dtype, device="cpu").create_tensor()
        return storage.get_usages(), plain + x

    q = make()
    q.internal = True
    usages, plain = compiled(use)(q, sample(8, 32))
    assert usages == {"rowwise": True, "columnwise": True}
    assert plain.shape == (8, 32)


@compiles
def test_a_quantizer_made_in_the_graph_is_described() -> None:
    def use(x: Tensor) -> Any:
        return TensorSpec(x.shape, x.dtype, mf.MXFP8Quantizer(E4M3), device="cpu").create_tensor()

    made = compiled(use)(sample(8, 32))
    assert structure(made) == mf.MXFP8Quantizer(E4M3).inner_tensor_specs((8, 32))


@compiles
def test_symbolic_shapes_compile_once() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter, dynamic=True)
    def use(q: Any, x: Tensor) -> Any:
        spec = TensorSpec(x.shape, x.dtype, q, device="cpu")
        spec.update_usage(columnwise_usage=False)
        return spec.create_inner_tensors()

    q = mf.NVFP4Quantizer()
    row = mf.NVFP4Quantizer(columnwise=False)
    for shape in ((40, 72), (64, 130), (257, 48)):
        made = use(q, sample(*shape))
        assert [(t.shape, t.dtype) for t in made] == list(row.inner_tensor_specs(shape).values())
    assert counter.frame_count == 1


@pytest.mark.parametrize("make", CLASSES.values(), ids=CLASSES.keys())
def test_under_fake_tensor_mode(make: Make) -> None:
    spec = TensorSpec((33, 48), torch.bfloat16, make(), device="cpu")
    with FakeTensorMode():
        made = spec.create_tensor()
        plain = TensorSpec((3, 5), torch.bfloat16, device="cpu").create_tensor()
    assert isinstance(plain, FakeTensor)
    assert type(made) is spec.quantizer._tensor_class
    assert all(isinstance(b, FakeTensor) for b in buffers(made).values())
    assert structure(made) == structure(spec.create_tensor())


@compiles
@pytest.mark.parametrize("name", ["current", "block", "mxfp8", "nvfp4"])
def test_a_graph_describes_its_input(name: str) -> None:
    made = VALUES[name]()(sample(32, 48))

    def fn(t: Tensor) -> Any:
        spec = to_tensor_spec(t)
        return spec.inner_names(), spec.is_quantized, spec.create_inner_tensors()

    names, quantized, inner = compiled(fn)(made)
    assert quantized
    assert names == tuple(buffers(made))
    assert [t.shape for t in inner] == [t.shape for t in buffers(made).values()]


@compiles
@pytest.mark.parametrize("make", VALUES.values(), ids=VALUES.keys())
def test_an_empty_tensor_is_made_in_a_graph(make: Make) -> None:
    def fn(q: Any, x: Tensor) -> Any:
        return q.make_empty(x.shape, dtype=torch.bfloat16, device="cpu")

    q = make()
    made = compiled(fn)(q, sample(33, 48))
    assert structure(made) == structure(fn(q, sample(33, 48)))
    assert made._quantizer == q
