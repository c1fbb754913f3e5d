"""Casts of what is produced against the reference's casts of what the kernels produce."""

from __future__ import annotations

import pytest
import torch
from _cases import (
    DEVICE,
    INTERPRETED,
    assert_codes,
    assert_exact,
    buffer,
    filled,
    run_interpreted,
    wide,
)
from torch import Tensor

from minifloat import producers, reference
from minifloat.formats import Cast
from minifloat.layout import parts
from minifloat.producer import ACTIVATIONS, Producer, activation, columns, norm

pytest.importorskip("triton")
from minifloat.kernels import produce  # noqa: E402

BF16 = torch.bfloat16
SHAPES = [(1, 17), (130, 129), (128, 256), (196, 384)]  # the last two in words
CASTS = [Cast("fp8_e4m3"), Cast("fp8_e5m2_1x128", pow2=True), Cast("fp8_e4m3_128x128")]
DIRECTIONS = {"row": (True, False), "col": (False, True), "both": (True, True)}
Inputs = tuple[Tensor | None, ...]


def random(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed + sum(shape))
    x = torch.randn(shape, generator=g) * torch.exp2(torch.randint(-6, 3, shape, generator=g))
    return x.to(dtype).to(DEVICE)


def make(name: str, shape: tuple[int, int], dtype: torch.dtype = BF16) -> tuple[Producer, Inputs]:
    """A producer of `[M, K]` and what it reads."""
    m, k = shape
    if name in ACTIVATIONS:
        p = activation(name)
        return p, (random(m, 2 * k if p.gated else k, dtype=dtype),)
    stats = (random(m, dtype=torch.float32), random(m, dtype=torch.float32, seed=1).abs())
    gamma, beta = random(k, dtype=dtype, seed=2), random(k, dtype=dtype, seed=3)
    if name == "layer_norm":
        return norm(True), (random(m, k, dtype=dtype), *stats, gamma, beta)
    return norm(), (random(m, k, dtype=dtype), None, stats[1], gamma, None)


def twin(p: Producer, inputs: Inputs, dtype: torch.dtype) -> Tensor:
    x, *rest = [None if t is None else t.cpu() for t in inputs]
    assert x is not None
    if not p.normalizes:
        return reference.activate(x, p, dtype)
    mean, rstd, gamma, beta = rest
    assert rstd is not None
    return reference.norm(x, mean, rstd, gamma, beta, p.zero_centered, dtype)


def value(p: Producer, inputs: Inputs, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    out = buffer(torch.empty(shape, dtype=dtype))
    assert out is not None
    produce.value(p, inputs, out)
    return out.cpu()


def check_value(name: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    p, inputs = make(name, shape, dtype)
    made = value(p, inputs, shape, dtype)
    # One unit in the last place: the kernels' exp is another one. Small results lose more, where
    # a sigmoid is below fp32's normal numbers or an offset cancels.
    eps = max(torch.finfo(dtype).eps, 2**-16)
    torch.testing.assert_close(made, twin(p, inputs, dtype), rtol=eps, atol=1e-6)


def check_cast(
    name: str, shape: tuple[int, int], dtype: torch.dtype, cast: Cast, direction: str
) -> None:
    p, inputs = make(name, shape, dtype)
    y = value(p, inputs, shape, dtype)
    row, col = (cast if wanted else None for wanted in DIRECTIONS[direction])
    if not produce.fuses(p, inputs, dtype, row, col):
        assert cast.tiled and (dtype is not BF16 or shape[0] % 4 or shape[1] % 128)
        return
    if not cast.tiled:
        scale, before = torch.tensor([3.0]), torch.tensor([0.5])
        codes, inverse, amax = reference.quantize_scaled(y, scale, cast)
        out = buffers(shape, row, col)
        running = before.to(DEVICE)
        produce.quantize_scaled(p, inputs, dtype, scale.to(DEVICE), running, cast, out)
        assert_exact(running, torch.maximum(amax, before))
        compare(out, {"row_data": codes, "col_data": codes.t(), "scale": inverse})
    for known in (None, torch.tensor([100.0])):
        if cast.tiled and known is not None:
            continue
        out, expected = buffers(shape, row, col), {}
        given = None if known is None else known.to(DEVICE)
        produce.quantize(p, inputs, dtype, row, col, out, given)
        for prefix, wanted in (("row", row), ("col", col)):
            if wanted is not None:
                is_col = prefix == "col"
                data, scale_, _ = reference.quantize(y, wanted, col=is_col, amax=known)
                expected[f"{prefix}_data"] = data
                expected[f"{prefix}_scale" if cast.tiled else "scale"] = scale_
        compare(out, expected)


def buffers(shape: tuple[int, int], row: Cast | None, col: Cast | None) -> dict[str, Tensor]:
    return {d.name: buffer(torch.empty(d.shape, dtype=d.dtype)) for d in parts(shape, row, col)}  # type: ignore[misc]


def compare(out: dict[str, Tensor], expected: dict[str, Tensor | None]) -> None:
    for name, made in out.items():
        exact = filled(expected[name], made.shape)
        (assert_codes if name.endswith("data") else assert_exact)(made, exact)


NAMES = ["swiglu", "layer_norm", "rms_norm"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", [*ACTIVATIONS, "layer_norm", "rms_norm"])
def test_value(name: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    check_value(name, shape, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("cast", CASTS, ids=lambda c: c.format_name)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_cast(name: str, shape: tuple[int, int], cast: Cast, direction: str) -> None:
    check_cast(name, shape, BF16, cast, direction)


@pytest.mark.gpu
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("cast", CASTS, ids=lambda c: c.format_name)
@pytest.mark.parametrize("shape", [(1, 17), (130, 129), (132, 128), (196, 384)])
@pytest.mark.parametrize("name", ["swiglu", "layer_norm"])
def test_room_is_filled_with_zeros(
    name: str, shape: tuple[int, int], cast: Cast, direction: str
) -> None:
    check_cast(name, shape, BF16, wide(cast), direction)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("cast", CASTS, ids=lambda c: c.format_name)
@pytest.mark.parametrize("name", NAMES)
def test_fp16(name: str, cast: Cast) -> None:
    check_cast(name, (128, 256), torch.float16, cast, "both")


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("shape", SHAPES[1:3])
@pytest.mark.parametrize("cast", CASTS, ids=lambda c: c.format_name)
def test_inf_and_nan(cast: Cast, shape: tuple[int, int], bad: float) -> None:
    p, inputs = make("swiglu", shape)
    h = inputs[0]
    assert h is not None
    h[shape[0] // 2, shape[1] + 3] = bad
    y = value(p, inputs, shape, BF16)
    # Through the front, which makes the value first where no kernel does both.
    made = producers.quantize(producers.Lazy(p, inputs, shape, BF16), cast, cast)
    data, _, _ = reference.quantize(y, cast)
    assert_codes(made[0], data)


def test_interpreted() -> None:
    run_interpreted(__file__)


if __name__ == "__main__":
    assert INTERPRETED and columns(activation("swiglu"), 4) == 2
    for name in (*ACTIVATIONS, "layer_norm", "rms_norm"):
        check_value(name, (3, 130), BF16)
    for name in NAMES:
        check_value(name, (3, 2048), torch.float32)
        for shape in ((130, 129), (128, 128), (132, 128)):
            for cast in CASTS:
                check_cast(name, shape, BF16, cast, "both")
    for name, cast in zip(NAMES, CASTS, strict=True):
        check_cast(name, (132, 128), BF16, wide(cast), "both")  # type: ignore[arg-type]
    check_cast("gelu", (17, 33), BF16, wide(CASTS[0]), "both")  # type: ignore[arg-type]
    check_cast("gelu", (128, 128), BF16, CASTS[1], "row")
    check_cast("gelu", (64, 128), BF16, CASTS[0], "col")
    check_cast("reglu", (130, 129), torch.float16, CASTS[0], "col")
