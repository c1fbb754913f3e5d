"""E8M0 copies of what is produced against the reference's casts of what the kernels produce."""

from __future__ import annotations

import pytest
import torch
from _cases import DEVICE, INTERPRETED, assert_codes, assert_exact, buffer, run_interpreted
from test_produce import make, value
from torch import Tensor

from minifloat import reference
from minifloat.formats import Cast
from minifloat.layout import parts
from minifloat.producer import ACTIVATIONS, activation

pytest.importorskip("triton")
from minifloat.kernels import produce_e8m0  # noqa: E402

BF16 = torch.bfloat16
SHAPES = [(1, 128), (130, 256), (128, 384), (256, 512)]
MX, E5M2 = Cast("mxfp8_e4m3"), Cast("mxfp8_e5m2")
DIRECTIONS = {"row": (True, False), "col": (False, True), "both": (True, True)}
FORMS = {"codes": (True, True), "values": (False, False), "kept": (False, True)}


def buffers(
    shape: tuple[int, int], row: Cast | None, col: Cast | None, form: str
) -> dict[str, Tensor]:
    """Garbage in place of codes and scales, or values, of the directions present."""
    out: dict[str, Tensor | None] = {}
    for name, cast, codes in zip(("row", "col"), (row, col), FORMS[form], strict=True):
        if cast is None:
            continue
        if codes:
            one = (cast, None) if name == "row" else (None, cast)
            for d in parts(shape, *one):
                out[d.name] = buffer(torch.empty(d.shape, dtype=d.dtype))
        else:
            out[name] = buffer(torch.empty(shape, dtype=BF16))
    return out  # type: ignore[return-value]


def assert_values(actual: Tensor, expected: Tensor) -> None:
    """Equal bytes; in the interpreter, whose cast to FP8 loses carries, a binade apart."""
    if not INTERPRETED:
        assert_exact(actual, expected)
        return
    near = torch.isclose(actual.float(), expected.float(), rtol=0.6, atol=0)
    tiny = (actual.float() - expected.float()).abs() <= expected.abs().amax() / 64
    assert bool((near | tiny).all())


def compare(out: dict[str, Tensor], y: Tensor, row: Cast | None, col: Cast | None) -> None:
    """`out` has what the reference makes of y."""
    for name, cast in (("row", row), ("col", col)):
        if cast is None:
            continue
        data, scale, _ = reference.quantize(y, cast, col=name == "col")
        if f"{name}_data" in out:
            assert_codes(out[f"{name}_data"], data)
            assert_exact(out[f"{name}_scale"], scale)
        else:
            assert_values(out[name], reference.fake_quantize(y, cast, col=name == "col"))


def check(name: str, shape: tuple[int, int], cast: Cast, direction: str, form: str) -> None:
    p, inputs = make(name, shape)
    y = value(p, inputs, shape, BF16)
    row, col = (cast if wanted else None for wanted in DIRECTIONS[direction])
    assert produce_e8m0.fuses(p, inputs, BF16, row, col)
    out = buffers(shape, row, col, form)
    produce_e8m0.quantize(p, inputs, row, col, out)
    compare(out, y, row, col)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["swiglu", "layer_norm", "rms_norm"])
def test_copies(name: str, shape: tuple[int, int], direction: str, form: str) -> None:
    check(name, shape, MX, direction, form)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation(name: str, form: str) -> None:
    check(name, (256, 512), MX, "both", form)
    check(name, (256, 512), E5M2, "both", form)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan, 3e38, 1e-38])
def test_extremes(bad: float, form: str) -> None:
    """What a block is scaled by when one of its numbers is not finite, huge or subnormal."""
    shape = (128, 256)
    p, inputs = make("relu", shape)
    h = inputs[0]
    assert h is not None
    h[37, 3::64] = bad
    h[64:96, 128:160] = bad
    out = buffers(shape, MX, MX, form)
    produce_e8m0.quantize(p, inputs, MX, MX, out)
    compare(out, value(p, inputs, shape, BF16), MX, MX)


@pytest.mark.gpu
def test_strided_rows() -> None:
    p, (h,) = make("swiglu", (128, 512))
    part = h[:, 128:384]  # type: ignore[index]
    out = buffers((128, 128), MX, MX, "kept")
    assert produce_e8m0.fuses(p, (part,), BF16, MX, MX)
    produce_e8m0.quantize(p, (part,), MX, MX, out)
    compare(out, value(p, (part,), (128, 128), BF16), MX, MX)


def test_what_is_left_to_others() -> None:
    h = torch.zeros(128, 512, dtype=BF16)
    swiglu = activation("swiglu")
    assert produce_e8m0.fuses(swiglu, (h,), BF16, MX, MX)
    assert not produce_e8m0.fuses(swiglu, (h,), torch.float32, MX, MX)
    assert not produce_e8m0.fuses(swiglu, (h.float(),), BF16, MX, MX)
    assert not produce_e8m0.fuses(swiglu, (h[:, :400],), BF16, MX, MX)
    assert not produce_e8m0.fuses(swiglu, (h,), BF16, MX, E5M2)
    for other in ("mxfp8_e4m3_32x32", "nvfp4", "fp8_e4m3", "fp8_e4m3_1x128"):
        assert not produce_e8m0.fuses(swiglu, (h,), BF16, Cast(other), None)
    between = activation("swiglu", glu_interleave_size=32)
    assert not produce_e8m0.fuses(between, (h,), BF16, MX, MX)


def test_interpreted() -> None:
    run_interpreted(__file__)


if __name__ == "__main__":
    assert INTERPRETED and DEVICE == "cpu"
    check("swiglu", (36, 128), MX, "both", "kept")
    check("layer_norm", (36, 128), MX, "both", "codes")
    check("rms_norm", (128, 128), E5M2, "col", "values")
