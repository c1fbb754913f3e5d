"""Linear against the reference: output and every gradient, for every recipe, dtype and shape.

The expectation is made here from `minifloat.reference` alone: six operands by a table of casts, and

    fprop gemm(x.row, w.row)      dgrad gemm(g.row, w.col)      wgrad gemm(g.col, x.col)

What a product may be off by is derived, in `check`: its error, against the fp64 product of the same
quantized operands, is under twice that of PyTorch's own product of them in the dtype at hand.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import minifloat
from minifloat import recipe as recipes
from minifloat import reference
from minifloat.formats import HADAMARD_SIGN_MASK, Cast, Operand, Scale
from minifloat.recipe import zoo

HIGH = Cast("high_precision")
E4M3, E5M2 = Cast("fp8_e4m3"), Cast("fp8_e5m2")
MX, FP4, FP4_2D = Cast("mxfp8_e4m3"), Cast("nvfp4"), Cast("nvfp4_16x16")
RHT = HADAMARD_SIGN_MASK


@dataclass(frozen=True)
class Kind:
    """A recipe, and the casts it stands for: (row, column) of input, weight and gradient."""

    make: Callable[[], recipes.Recipe] | None
    x: tuple[Cast, Cast]
    w: tuple[Cast, Cast]
    g: tuple[Cast, Cast]
    override: str = ""
    scales: dict[str, float] = field(default_factory=dict)  # delayed scaling's


def _same(x: Cast, w: Cast, g: Cast) -> tuple[tuple[Cast, Cast], ...]:
    return (x, x), (w, w), (g, g)


def _pow2(name: str) -> Cast:
    return Cast(name, pow2=True)


_FP4_GRAD = (FP4.replace(stochastic=True), FP4.replace(stochastic=True, hadamard=RHT))
_ONE, _TWO = "fp8_e4m3_1x128", "fp8_e4m3_128x128"
KINDS: dict[str, Kind] = {
    "high_precision": Kind(None, *_same(HIGH, HIGH, HIGH)),
    "delayed": Kind(
        lambda: recipes.DelayedScaling(amax_history_len=4),
        *_same(E4M3, E4M3, E5M2),
        scales={"input": 100.0, "weight": 213.7, "grad_output": 4096.0},
    ),
    "current": Kind(recipes.Float8CurrentScaling, *_same(E4M3, E4M3, E5M2)),
    "current_pow2": Kind(
        lambda: recipes.Float8CurrentScaling(
            use_power_2_scales=True, fp8_format=recipes.Format.E4M3
        ),
        *_same(_pow2("fp8_e4m3"), _pow2("fp8_e4m3"), _pow2("fp8_e4m3")),
    ),
    "block": Kind(recipes.Float8BlockScaling, *_same(_pow2(_ONE), _pow2(_TWO), _pow2(_ONE))),
    "block_f32": Kind(
        lambda: recipes.Float8BlockScaling(use_f32_scales=True),
        *_same(Cast(_ONE), Cast(_TWO), Cast(_ONE)),
    ),
    "block_1d": Kind(
        lambda: recipes.Float8BlockScaling(
            use_f32_scales=True, w_block_scaling_dim=1, fp8_format=recipes.Format.HYBRID
        ),
        *_same(Cast(_ONE), Cast(_ONE), Cast("fp8_e5m2_1x128")),
    ),
    "mxfp8": Kind(recipes.MXFP8BlockScaling, *_same(MX, MX, MX)),
    "mxfp8_2d": Kind(
        lambda: recipes.MXFP8BlockScaling(
            enable_2d_quantization=True, fp8_format=recipes.Format.HYBRID
        ),
        *_same(MX, Cast("mxfp8_e4m3_32x32"), Cast("mxfp8_e5m2")),
    ),
    "nvfp4": Kind(
        recipes.NVFP4BlockScaling, (FP4, FP4.replace(hadamard=RHT)), (FP4_2D, FP4_2D), _FP4_GRAD
    ),
    "nvfp4_plain": Kind(
        lambda: recipes.NVFP4BlockScaling(
            disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True
        ),
        *_same(FP4, FP4, FP4),
    ),
    "nvfp4_rows": Kind(
        lambda: recipes.NVFP4BlockScaling(
            disable_rht=True, disable_stochastic_rounding=True, row_scaled_activation=True
        ),
        *_same(FP4.replace(row_scaled=True), FP4_2D, FP4),
    ),
    "nvfp4_4over6": Kind(
        lambda: recipes.NVFP4BlockScaling(disable_rht=True, nvfp4_4over6="all"),
        *_same(
            FP4.replace(error="MAE", scale_max=256),
            FP4_2D.replace(error="MAE", scale_max=256),
            FP4.replace(stochastic=True),
        ),
    ),
    "mxfp8_then_nvfp4": Kind(
        lambda: recipes.CustomRecipe(qfactory=zoo.mxfp8_fwd_nvfp4_bwd_factory),
        (MX, FP4.replace(hadamard=RHT)),
        (MX, FP4_2D),
        _FP4_GRAD,
    ),
    "rows_then_mxfp8": Kind(
        lambda: recipes.CustomRecipe(qfactory=zoo.nvfp4_row_scaled_fwd_mxfp8_bwd_factory),
        (FP4.replace(row_scaled=True), MX),
        (FP4_2D, MX),
        (MX, MX),
    ),
    "mxfp8_then_high": Kind(
        lambda: recipes.CustomRecipe(qfactory=zoo.mxfp8_fwd_high_precision_bwd_factory),
        (MX, HIGH),
        (MX, HIGH),
        (HIGH, HIGH),
    ),
    "current_override": Kind(
        lambda: recipes.Float8CurrentScaling(backward_override="high_precision"),
        *_same(E4M3, E4M3, E5M2),
        override="high_precision",
    ),
    "nvfp4_dequantized": Kind(
        lambda: recipes.NVFP4BlockScaling(backward_override="dequantized"),
        (FP4, FP4),
        (FP4_2D, FP4_2D),
        (FP4, FP4),
        override="dequantized",
    ),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# (leading dims of the input, in_features, out_features)
SHAPES = {
    "odd": ((17,), 33, 5),
    "three_dims": ((2, 3), 48, 17),
    "one_token": ((1,), 20, 12),
    "ones": ((5,), 1, 1),
    "empty": ((0,), 16, 24),
    "blocks": ((32,), 128, 32),
}
LARGE = {"tails": ((130,), 129, 150), "full": ((128,), 256, 128)}
OPTION_SHAPE = ((2, 9), 35, 18)
OPTIONS = (
    "frozen_input",
    "frozen_weight",
    "no_grad",
    "microbatches",
    "main_grad",
    "overwrite",
    "save_original_input",
    "primary",
    "return_bias",
    "delay_wgrad",
    "cache_weights",
    "split",
    "checkpoint",
    "quantized_input",
)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# --------------------------------------------------------------------------------- expectation
def operand(
    x: Tensor, cast: Cast, col: bool, scale: float | None = None, seed: Tensor | None = None
) -> Operand:
    """One direction of `x[M, K]`, contraction last, by the reference."""
    m, k = x.shape
    if scale is not None:
        data, inverse, _ = reference.quantize_scaled(x, torch.tensor([scale]), cast)
        return Operand(data.t() if col else data, inverse, None, cast, m if col else k)
    data, s, amax = reference.quantize(x, cast, col=col, seed=seed)
    if col and not cast.format.col_transposed and s is not None:
        data, s = data.t(), s.t()
    return Operand(data, s, amax, cast, cast.format.columns(m if col else k, cast.transforms))


def high(x: Tensor) -> Operand:
    return Operand(x, None, None, HIGH, x.shape[1])


def values(o: Operand) -> Tensor:
    """What an operand stands for, in fp64, where codes times scales are exact."""
    fmt = o.cast.format
    if fmt.element is None:
        return o.data.double()
    assert o.scale is not None
    if fmt.tile is None:
        return reference.decode(o.data, fmt.element).double() * o.scale.double()
    if fmt.scale is Scale.F32:
        assert fmt.scale_tile is not None
        s = o.scale.t() if fmt.scale_transposed else o.scale
        rows, columns = o.data.shape
        s = s.repeat_interleave(fmt.scale_tile[0], 0)[:rows]
        s = s.repeat_interleave(fmt.scale_tile[1], 1)[:, :columns]
        return reference.decode(o.data, fmt.element).double() * s.double()
    made = reference.unscaled(o.data, o.scale, o.cast, o.columns).double()
    if o.amax is not None:
        made = made * (o.amax * reference.dequantize_factor(o.cast)).double().reshape(-1, 1)
    return made


def check(
    got: Tensor,
    a: Operand,
    b: Operand,
    what: str,
    *,
    bias: Tensor | None = None,
    before: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """`got` is `a b^T (+ bias) (+ before)`, up to twice the error of PyTorch's product.

    To that comes one unit in the last place of each number that is rounded (the product, and its
    sum with a bias or an accumulator), and on tensor cores, which add FP8 products in fewer than 24
    bits, 2^-12 of the sum of absolute products.
    """
    dtype = got.dtype if dtype is None else dtype
    va, vb = values(a), values(b)
    product = va @ vb.t()
    plain = (va.to(dtype) @ vb.to(dtype).t()).double()
    bound = 2 * (plain - product).abs().amax() if product.numel() else product.new_zeros(())
    exact, size = product, product.abs()
    for term in (bias, before):
        if term is not None:
            exact, size = exact + term.double(), size + term.double().abs()
    info = torch.finfo(dtype)
    bound = bound + info.eps * size + info.smallest_normal * info.eps
    native = got.is_cuda and None not in (a.cast.format.element, b.cast.format.element)
    if native:
        bound = bound + 2.0**-12 * (va.abs() @ vb.abs().t())
    spec = reference.matmul(a, b, dtype, bias=bias, accumulate=before)
    for name, found in (("reference", spec), ("Linear", got)):
        assert found.shape == exact.shape, (what, name, found.shape, exact.shape)
        off = (found.detach().cpu().double() - exact).abs()
        assert bool((off <= bound).all()), f"{what}, {name}: off by {(off - bound).max().item()}"


@dataclass
class Expected:
    """The operands of one step. `weight` is what was cast, which may not be the weight of now."""

    kind: Kind
    x: Tensor
    weight: Tensor
    g: Tensor
    seed: Tensor | None
    scales: dict[str, float]
    now: Tensor  # the weight itself, of which nothing is kept where forward does not quantize it

    def scale(self, slot: str) -> float | None:
        return self.scales.get(slot)

    def fprop(self) -> tuple[Operand, Operand]:
        x = operand(self.x, self.kind.x[0], False, self.scale("input"))
        return x, self._weight(0)

    def _weight(self, i: int) -> Operand:
        w = self.now if self.kind.w[0] is HIGH else self.weight
        return operand(w, self.kind.w[i], i == 1, self.scale("weight"))

    def dgrad(self) -> tuple[Operand, Operand]:
        if self.kind.override:
            return high(self.g), high(self._overridden(1).t())
        g = operand(self.g, self.kind.g[0], False, self.scale("grad_output"), self.seed)
        return g, self._weight(1)

    def wgrad(self) -> tuple[Operand, Operand]:
        if self.kind.override:
            return high(self.g.t()), high(self._overridden(0).t())
        g = operand(self.g, self.kind.g[1], True, self.scale("grad_output"), self.seed)
        return g, operand(self.x, self.kind.x[1], True, self.scale("input"))

    def _overridden(self, i: int) -> Tensor:
        x = (self.x, self.now)[i]
        if self.kind.override == "high_precision":
            return x
        o = self.fprop()[i]
        shape = (x.shape[0], x.shape[1])
        return reference.dequantize(o.data, o.scale, o.amax, o.cast, shape, x.dtype)


# --------------------------------------------------------------------------------------- run
@dataclass
class Setting:
    """One case: what is made, called and checked."""

    name: str
    dtype: torch.dtype
    shape: tuple[tuple[int, ...], int, int]
    bias: bool
    option: str
    device: str

    def __post_init__(self) -> None:
        self.kind = KINDS[self.name]
        self.recipe = None if self.kind.make is None else self.kind.make()
        self.generator = torch.Generator().manual_seed(hash((self.shape, self.bias)) & 0xFFFF)

    def random(self, *shape: int, std: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=self.generator) * std).to(self.dtype)

    def region(self) -> Any:
        return minifloat.autocast(enabled=self.recipe is not None, recipe=self.recipe)

    def layer(self) -> Any:
        _, k, n = self.shape
        kwargs: dict[str, Any] = {
            "main_grad": {"fuse_wgrad_accumulation": True},
            "overwrite": {"fuse_wgrad_accumulation": True},
            "save_original_input": {"save_original_input": True},
            "return_bias": {"return_bias": True},
            "delay_wgrad": {"delay_wgrad_compute": True},
            "cache_weights": {"cache_weights": True},
            "split": {"parameters_split": {"q_": n - 4, "k": 4}},
        }.get(self.option, {})
        context: Any = contextlib.nullcontext()
        if self.option == "primary":
            context = minifloat.quantized_model_init(
                recipe=self.recipe, preserve_high_precision_init_val=True
            )
        weight, bias = self.random(n, k, std=0.3), self.random(n)
        with context, self.region():
            made = minifloat.Linear(
                k,
                n,
                bias=self.bias,
                params_dtype=self.dtype,
                device=self.device,
                init_method=lambda w: w.copy_(weight[: w.shape[0]]),
                **kwargs,
            )
        with torch.no_grad():
            at = 0
            for w, b in zip(made._weights(), made._biases() or [None] * 9, strict=False):
                if self.option != "primary":
                    w.copy_(weight[at : at + w.shape[0]])
                if b is not None:
                    b.copy_(bias[at : at + b.shape[0]])
                at += w.shape[0]
            for slot, value in self.kind.scales.items():
                made.delayed.live(slot)[0].fill_(value)
        self.weight, self.of_bias = weight, bias if self.bias else None
        return made

    def seed(self, number: int) -> Tensor | None:
        if not any(cast.stochastic for cast in self.kind.g):
            return None
        torch.manual_seed(number)
        made = torch.randint(0, 2**62, (2,), dtype=torch.int64, device=self.device)
        torch.manual_seed(number)
        return made.cpu()

    def input(self, layer: Any) -> tuple[Tensor, Any]:
        """(the leaf, what the layer gets)."""
        lead, k, _ = self.shape
        x = self.random(*lead, k).to(self.device)
        x.requires_grad_(self.option not in ("frozen_input", "no_grad"))
        if self.option != "quantized_input":
            return x, x
        assert self.recipe is not None
        roles = layer.get_quantizer_roles(fwd=True, num_quantizers=3)
        quantizer = recipes.RecipeState.create(
            self.recipe, mode="forward", num_quantizers=3, device=self.device, roles=roles
        ).make_quantizers()[0]
        if self.kind.scales:
            quantizer.scale.fill_(self.kind.scales["input"])
        return x, quantizer.quantize(x)

    def call(self, layer: Any, x: Any) -> Any:
        kwargs: dict[str, Any] = {}
        if self.option in ("microbatches", "overwrite"):
            kwargs["is_first_microbatch"] = True
        if self.option == "checkpoint":
            return minifloat.checkpoint(layer, x, **kwargs)
        if self.option == "microbatches":
            with torch.no_grad():
                layer(x, **kwargs)
                layer.weight.add_(1)  # which a cast that is used again does not see
                layer.delayed.amax_input.zero_()
            torch.manual_seed(7)
            kwargs["is_first_microbatch"] = False
        return layer(x, **kwargs)

    def run(self) -> None:
        layer = self.layer()
        if self.option == "frozen_weight":
            layer.weight.requires_grad_(False)
        into = None
        if self.option in ("main_grad", "overwrite"):
            _, k, n = self.shape
            into = torch.full((n, k), 0.75)
            layer.weight.main_grad = into.clone().to(self.device)
        leaf, x = self.input(layer)
        lead, k, n = self.shape
        g = self.random(*lead, n, std=0.02)
        seed = self.seed(7)
        grads = self.option != "no_grad"
        with torch.set_grad_enabled(grads), self.region():
            y = self.call(layer, x)
        scales = dict(self.kind.scales)
        if self.option == "primary" and scales:
            scales["weight"] = 1.0  # as it was when the weight was made
        expected = Expected(
            self.kind, leaf.detach().cpu().reshape(-1, k), self.weight, g.reshape(-1, n), seed,
            scales, self.now(layer),
        )  # fmt: skip
        bias = self.of_bias
        if self.option == "return_bias":
            y, returned = y
            assert returned is layer.bias
            bias = None
        assert y.shape == (*lead, n) and y.dtype is self.dtype
        check(y.reshape(-1, n), *expected.fprop(), "output", bias=bias)
        if grads:
            y.backward(g.to(self.device))
            self.check_gradients(layer, leaf, expected, into)
        self.check_state(layer, expected, grads)

    def now(self, layer: Any) -> Tensor:
        if self.option == "primary" and not self.kind.override:
            return self.weight  # of which a high-precision copy is kept
        if self.option == "primary":
            return layer.weight.dequantize().detach().cpu()
        return torch.cat([w.detach().cpu() for w in layer._weights()])

    def check_gradients(
        self, layer: Any, leaf: Tensor, expected: Expected, into: Tensor | None
    ) -> None:
        _, k, _ = self.shape
        if leaf.requires_grad:
            assert leaf.grad is not None and leaf.grad.dtype is self.dtype
            check(leaf.grad.reshape(-1, k), *expected.dgrad(), "grad of input")
        else:
            assert leaf.grad is None
        if self.option == "delay_wgrad":
            assert layer.weight.grad is None
            layer.backward_dw()
        weights = layer._weights()
        if self.option == "frozen_weight":
            assert weights[0].grad is None
        elif into is not None:
            assert weights[0].grad is None
            before = into if self.option == "main_grad" else None
            dtype = torch.float32
            main_grad = weights[0].main_grad
            check(main_grad, *expected.wgrad(), "main_grad", before=before, dtype=dtype)
        else:
            dw = torch.cat([w.grad for w in weights])
            assert dw.dtype is self.dtype
            check(dw, *expected.wgrad(), "grad of weight")
        if self.bias and self.option != "return_bias":
            db = torch.cat([b.grad for b in layer._biases()])
            ones = torch.ones(1, expected.g.shape[0], dtype=self.dtype)
            check(db[:, None], high(expected.g.t()), high(ones), "grad of bias")

    def check_state(self, layer: Any, expected: Expected, grads: bool) -> None:
        """Delayed scaling records the amaxes, and nothing else does."""
        if not self.kind.scales:
            assert not layer.delayed.used
            return
        tensors = {"input": expected.x, "weight": expected.weight, "grad_output": expected.g}
        for slot, x in tensors.items():
            amax = float(x.float().abs().max()) if x.numel() else 0.0
            scale, now = layer.delayed.live(slot)
            silent = (slot == "input" and self.option == "quantized_input") or (
                slot == "weight" and self.option in ("primary", "microbatches", "cache_weights")
            )
            if silent:
                continue
            if not grads:  # the step has no end
                assert slot == "grad_output" or float(now) == amax
                continue
            limit = 57344.0 if slot == "grad_output" else 448.0
            assert float(now) == 0, slot
            wanted = torch.tensor(limit) / amax if amax else torch.tensor(self.kind.scales[slot])
            assert float(scale) == float(wanted), slot


BASE = [
    pytest.param(name, dtype, shape, bias, id=f"{name}-{dtype}-{shape}-{'bias' * bias or 'none'}")
    for name in KINDS
    for dtype in DTYPES
    for shape in SHAPES
    for bias in (True, False)
]
BIG = [
    pytest.param(name, dtype, shape, True, id=f"{name}-{dtype}-{shape}")
    for i, name in enumerate(KINDS)
    for dtype in (list(DTYPES)[i % 3],)
    for shape in LARGE
]


def allowed(name: str, option: str) -> bool:
    """Whether the option is for the recipe."""
    if name == "high_precision":
        return option not in ("primary", "quantized_input")
    if option == "save_original_input":
        return name != "delayed"
    if option == "quantized_input":  # made by the recipe: both copies are there
        return not KINDS[name].override
    return True


OPTION_CASES = [
    pytest.param(name, dtype, option, id=f"{name}-{dtype}-{option}")
    for i, name in enumerate(KINDS)
    for j, option in enumerate(OPTIONS)
    for dtype in ("fp32", list(DTYPES)[1 + (i + j) % 2])
    if allowed(name, option)
]


@pytest.mark.parametrize(("name", "dtype", "shape", "bias"), BASE)
def test_every_shape(name: str, dtype: str, shape: str, bias: bool, device: str) -> None:
    Setting(name, DTYPES[dtype], SHAPES[shape], bias, "", device).run()


@pytest.mark.parametrize(("name", "dtype", "shape", "bias"), BIG)
def test_larger_shapes(name: str, dtype: str, shape: str, bias: bool, device: str) -> None:
    Setting(name, DTYPES[dtype], LARGE[shape], bias, "", device).run()


@pytest.mark.parametrize(("name", "dtype", "option"), OPTION_CASES)
def test_every_option(name: str, dtype: str, option: str, device: str) -> None:
    Setting(name, DTYPES[dtype], OPTION_SHAPE, True, option, device).run()


def test_there_are_enough_cases() -> None:
    assert len(BASE) + len(BIG) + len(OPTION_CASES) >= 882


def test_a_wrong_operand_is_seen() -> None:
    """The tolerance is one: another code in one place, or another cast, is off by more."""
    case = Setting("mxfp8", torch.bfloat16, SHAPES["odd"], True, "", "cpu")
    x, w = case.random(17, 33), case.random(5, 33)
    a, b = operand(x, MX, False), operand(w, MX, False)
    y = reference.matmul(a, b, torch.bfloat16)
    check(y, a, b, "as it is")
    data = a.data.clone()
    data[3, int(values(a)[3].abs().argmax())] ^= 0x80  # its sign
    for other in (a._replace(data=data), operand(x, FP4, False), high(x)):
        with pytest.raises(AssertionError, match="off by"):
            check(y, other, b, "another")
