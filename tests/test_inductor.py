"""Casts that Inductor inlines into their producers: fused, and with the codes of unfused ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.utils import run_and_get_code

import minifloat
from minifloat import dispatch, inductor
from minifloat.formats import Cast
from minifloat.recipe.factories import current_scaling_factory

CASTS = [Cast("fp8_e4m3"), Cast("fp8_e5m2", pow2=True), Cast("fp8_e4m3_1x128", pow2=True)]
PRODUCERS: dict[str, Callable[[Tensor], Tensor]] = {
    "rms_norm": lambda x: F.rms_norm(x, (x.shape[-1],)),
    "gelu": F.gelu,
    "swiglu": lambda x: F.silu(x) * x,
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def compiled(f: Callable[..., Any], *args: Any) -> tuple[Any, str]:
    torch._dynamo.reset()
    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        out, code = run_and_get_code(torch.compile(f, fullgraph=True), *args)
    return out, "\n".join(code)


def cast_of(producer: Callable[[Tensor], Tensor], cast: Cast) -> Callable[..., Any]:
    return lambda x: dispatch.quantize(producer(x), cast, None)


@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cast", CASTS, ids=lambda c: c.format_name)
@pytest.mark.parametrize("name", PRODUCERS)
def test_a_fused_cast_has_the_codes_of_one_that_is_not(
    name: str, cast: Cast, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(96, 256, dtype=torch.bfloat16, device=device)
    f = cast_of(PRODUCERS[name], cast)
    fused, code = compiled(f, x)
    assert "ops.minifloat.quantize" not in code
    for math in inductor._FUSIBLE:
        monkeypatch.setitem(inductor._FUSIBLE, math, (inductor._FUSIBLE[math][0], _never))
    monkeypatch.setattr(inductor, "_registered", False)
    apart, code = compiled(f, x)
    assert "ops.minifloat.quantize" in code
    monkeypatch.undo()
    monkeypatch.setattr(inductor, "_registered", False)
    inductor.register()
    for a, b in zip(fused, apart, strict=True):
        if device == "cpu":
            assert torch.equal(a, b)
        else:  # Triton's division is not rounded to nearest there: a scale may be one ulp off
            assert (a != b).float().mean().item() < 0.01 or torch.allclose(
                a.float(), b.float(), rtol=1e-6
            )


@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("fp8_e4m3_1x128", (8, 160)),
        ("fp8_e5m2_128x128", (3, 8, 320)),
        ("fp8_e4m3_128x128", (300, 1)),
    ],
)
def test_a_last_block_that_is_not_whole(name: str, shape: tuple[int, ...]) -> None:
    """The codes of an eager cast: PyTorch 2.13's loops on CPUs left those of the last block out."""
    cast, x = Cast(name, pow2=True), torch.randn(shape)
    f = cast_of(lambda x: x * 2, cast)
    for a, b in zip(f(x), compiled(f, x)[0], strict=True):
        assert torch.equal(a, b)


def _never(*args: Any) -> bool:
    return False


def test_delayed_scaling_fuses_too() -> None:
    cast, scale = Cast("fp8_e4m3"), torch.full((1,), 3.0)

    def f(x: Tensor, amax: Tensor) -> Any:
        return dispatch.quantize_scaled(F.gelu(x), scale, amax, cast, row=True, col=False)

    x = torch.randn(64, 128)
    expected_amax, amax = torch.zeros(1), torch.zeros(1)
    expected = f(x, expected_amax)
    made, code = compiled(f, x, amax)
    assert "ops.minifloat.quantize_scaled" not in code
    assert torch.equal(made[1], expected[1])
    assert (made[0] != expected[0]).float().mean().item() < 0.01  # gelu's last bit
    assert torch.allclose(amax, expected_amax)


@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e4m3_1x128"])
def test_room_is_filled_on_the_way(name: str) -> None:
    """Sizes that are not known, and zeros up to what products ask for."""
    cast = Cast(name, room=(16, 0))
    x = torch.randn(90, 250)
    torch._dynamo.mark_dynamic(x, 0)
    made, code = compiled(lambda x: dispatch.quantize(x * 2, cast, None), x)
    assert "ops.minifloat.quantize" not in code
    for a, b in zip(made, dispatch.quantize(x * 2, cast, None), strict=True):
        assert torch.equal(a, b)


def test_both_copies_keep_the_kernel() -> None:
    cast = Cast("fp8_e4m3")
    _, code = compiled(lambda x: dispatch.quantize(F.gelu(x), cast, cast), torch.randn(64, 128))
    assert "ops.minifloat.quantize" in code


def test_rows_that_data_decides() -> None:
    torch._dynamo.reset()
    layer = minifloat.Linear(16, 16, device="cpu")
    recipe = minifloat.recipe.CustomRecipe(qfactory=current_scaling_factory)

    def kept(x: torch.Tensor) -> torch.Tensor:
        with minifloat.autocast(recipe=recipe):
            held = x[x[:, 0] > 0]
            with torch.no_grad():
                fixed = layer(held)
            return layer(held) + fixed  # type: ignore[no-any-return]

    compiled = torch.compile(kept, fullgraph=True)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for rows in (5, 0, 9):
            x = torch.randn(9, 16)
            x[:, 0] = torch.where(torch.arange(9) < rows, 1.0, -1.0)
            torch.testing.assert_close(compiled(x), kept(x))
