"""The poison reaches uninitialised memory, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from minifloat import writer

ONE_BYTE_FLOATS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu]
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.complex64, *ONE_BYTE_FLOATS]


@pytest.mark.parametrize("dtype", FLOATS)
def test_floats_are_nan(dtype: torch.dtype) -> None:
    wide = torch.complex64 if dtype.is_complex else torch.float32
    like = torch.zeros(3, 5, dtype=dtype).t()
    for t in (
        torch.empty(3, 5, dtype=dtype),
        torch.empty_like(like),
        torch.empty_strided((3, 5), (1, 3), dtype=dtype),
        torch.zeros(1).new_empty((3, 5), dtype=dtype),
        torch.zeros(1).new_empty_strided((3, 5), (1, 3), dtype=dtype),
    ):
        assert t.to(wide).isnan().all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64, torch.uint16])
def test_bytes_are_garbage(dtype: torch.dtype) -> None:
    t = torch.empty(7, dtype=dtype)
    assert (t.view(torch.uint8) == 0xA5).all()


def test_grad_and_version_are_left_alone() -> None:
    t = torch.empty(3, requires_grad=True)
    assert t.requires_grad
    assert t.is_leaf
    assert t._version == 0
    assert t.isnan().all()
    with torch.inference_mode():
        assert torch.empty(3).isnan().all()


def test_bool_and_no_elements() -> None:
    assert torch.empty(2, dtype=torch.bool).all()
    assert torch.empty(0).numel() == torch.empty(0, 4, dtype=torch.uint8).numel() == 0


def test_out_is_left_alone() -> None:
    t = torch.ones(3)
    assert torch.empty(3, out=t) is t
    assert (t == 1).all()


def test_meta_and_fake() -> None:
    assert torch.empty(3, device="meta").is_meta
    with FakeTensorMode():
        t = torch.empty(3)
        assert isinstance(t, FakeTensor)
        assert isinstance(t.new_empty(2), FakeTensor)


def allocate(x: torch.Tensor) -> torch.Tensor:
    a = torch.empty(x.shape[0], 2)
    b = torch.empty_like(x)
    c = x.new_empty(x.shape[0], 3)
    d = torch.empty_strided((x.shape[0], 2), (2, 1))
    return torch.cat([a.fill_(1), b.copy_(x), c.zero_(), d.fill_(2)], dim=1)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(backend: str, dynamic: bool) -> None:
    compiled = torch.compile(allocate, backend=backend, fullgraph=True, dynamic=dynamic)
    for rows in (4, 5):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(compiled(x), allocate(x), rtol=0, atol=0)


def test_make_fx_does_not_record_the_fill() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(lambda x: torch.empty(3).copy_(x))(torch.ones(3)).graph
    assert not [node for node in graph.nodes if "fill" in str(node.target)]


def test_function_transforms() -> None:
    def add_zero(x: torch.Tensor) -> torch.Tensor:
        return x + x.new_empty(3, dtype=torch.uint8).zero_() + torch.empty_like(x).zero_()

    x = torch.randn(2, 3)
    assert torch.equal(torch.func.vmap(add_zero)(x), x)
    assert torch.equal(torch.func.grad(lambda x: add_zero(x).sum())(x[0]), torch.ones(3))


@pytest.mark.gpu
def test_what_programs_allocate_is_poisoned() -> None:
    allocate = writer._allocate
    if allocate is None:
        pytest.skip("PyTorch has no such function")
    assert allocate((3, 5), (1, 3), torch.bfloat16).isnan().all()
    assert (allocate((7,), (1,), torch.uint8) == 0xA5).all()
