"""LayerNormLinear and LayerNormMLP are their parts, bit for bit: outputs, gradients, scales.

The parts are `Linear`, which is tested against the reference, and a norm and an activation in fp32
that are rounded once, made here as functions of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import minifloat
from minifloat import norms, reference
from minifloat import recipe as recipes
from minifloat.producer import activation as activation_of
from minifloat.producers import activated, activation_gradient, normalized
from minifloat.recipe import zoo
from minifloat.recipe.factories import current_scaling_factory, delayed_scaling_factory

from .layers import ACTIVATIONS, BOTH, KINDS, OWN

DEEP = pytest.mark.deep
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
EPS = 1e-3
NVFP4 = recipes.NVFP4BlockScaling


def by_name(first: Any, second: Any) -> Callable[[], recipes.Recipe]:
    """fc1 by one factory, fc2 (and a layer without parts) by another."""
    return lambda: recipes.CustomRecipe(
        qfactory=lambda role: (first if role and "fc1" in role.name else second)(role)
    )


def identity(role: Any) -> Any:
    return minifloat.IdentityQuantizer()


RECIPES: dict[str, Callable[[], recipes.Recipe | None]] = {
    "none": lambda: None,
    "delayed": lambda: recipes.DelayedScaling(amax_history_len=3),
    "current": recipes.Float8CurrentScaling,
    "current_pow2": lambda: recipes.Float8CurrentScaling(
        use_power_2_scales=True, fp8_format=recipes.Format.E4M3
    ),
    "block": recipes.Float8BlockScaling,
    "block_f32": lambda: recipes.Float8BlockScaling(use_f32_scales=True),
    "mxfp8": recipes.MXFP8BlockScaling,
    "mxfp8_2d": lambda: recipes.MXFP8BlockScaling(
        enable_2d_quantization=True, fp8_format=recipes.Format.HYBRID
    ),
    "nvfp4": lambda: NVFP4(disable_stochastic_rounding=True),
    "nvfp4_rows": lambda: NVFP4(
        disable_rht=True, disable_stochastic_rounding=True, row_scaled_activation=True
    ),
    "nvfp4_4over6": lambda: NVFP4(
        disable_rht=True, disable_stochastic_rounding=True, nvfp4_4over6="all"
    ),
    "mxfp8_then_high": lambda: recipes.CustomRecipe(
        qfactory=zoo.mxfp8_fwd_high_precision_bwd_factory
    ),
    "rows_then_mxfp8": lambda: recipes.CustomRecipe(
        qfactory=zoo.nvfp4_row_scaled_fwd_mxfp8_bwd_factory
    ),
    "requests": lambda: recipes.CustomRecipe(qfactory=delayed_scaling_factory),
    "high_then_current": by_name(identity, current_scaling_factory),
    "current_then_high": by_name(current_scaling_factory, identity),
    "delayed_then_current": by_name(delayed_scaling_factory, current_scaling_factory),
    "current_then_delayed": by_name(current_scaling_factory, delayed_scaling_factory),
    "current_override": lambda: recipes.Float8CurrentScaling(backward_override="high_precision"),
    "block_override": lambda: recipes.Float8BlockScaling(backward_override="dequantized"),
    "nvfp4_override": lambda: NVFP4(backward_override="dequantized"),
}


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# ------------------------------------------------------------------------------------------ parts
class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor, beta: Any, rms: bool, zero: bool) -> Any:
        m = x.reshape(-1, x.shape[-1])
        if x.is_cuda:  # kernels' arithmetic, without the cast
            mean, rstd = norms.norm_stats(m, EPS, rms=rms)
            y = normalized(m, mean, rstd, gamma, beta, zero_centered=zero, dtype=x.dtype).value()
        else:
            mean, rstd = reference.norm_stats(m, EPS, rms)
            y = reference.norm(m, mean, rstd, gamma, beta, zero, x.dtype)
        ctx.save_for_backward(m, mean, rstd, gamma)
        ctx.zero, ctx.beta = zero, beta is not None
        return y.reshape(x.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, mean, rstd, gamma = ctx.saved_tensors
        d = dy.reshape(x.shape)
        if x.is_cuda:
            found: Any = norms.norm_backward(d, x, mean, rstd, gamma, zero_centered=ctx.zero)
        else:
            found = reference.norm_backward(d, x, mean, rstd, gamma, ctx.zero)
        dx, dgamma, dbeta = found
        dbeta = dbeta.to(gamma.dtype) if ctx.beta else None
        return dx.reshape(dy.shape), dgamma.to(gamma.dtype), dbeta, None, None


class Act(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, producer: Any) -> Any:
        ctx.save_for_backward(h)
        ctx.producer = producer
        m = h.reshape(-1, h.shape[-1])
        y = (
            activated(m, producer).value()
            if h.is_cuda
            else reference.activate(m, producer, h.dtype)
        )
        return y.reshape(*h.shape[:-1], -1) if h.numel() else y.reshape(*h.shape[:-1], y.shape[-1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        (h,) = ctx.saved_tensors
        m, d = h.reshape(-1, h.shape[-1]), dy.reshape(-1, dy.shape[-1])
        if h.is_cuda:
            return activation_gradient(m, d, ctx.producer).value().reshape(h.shape), None
        return reference.activate_gradient(m, d, ctx.producer, h.dtype).reshape(h.shape), None


class Parts(torch.nn.Module):
    """The same layer out of its parts, with copies of its parameters under the same names."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.rms, self.zero = layer.normalization == "RMSNorm", layer.zero_centered_gamma
        for name, p in layer.named_parameters(recurse=False):
            if name.startswith("layer_norm"):
                self.register_parameter(name, torch.nn.Parameter(p.detach().clone()))
        if self.rms:
            self.layer_norm_bias = None
        self.linears = torch.nn.ModuleList()
        self.act: Any = None
        device, bias = layer.layer_norm_weight.device, layer.use_bias
        options = {"params_dtype": layer.layer_norm_weight.dtype, "device": device, "bias": bias}
        if hasattr(layer, "fc1"):
            self.act = layer._act
            shapes = [("fc1_", layer.fc1_weight), ("fc2_", layer.fc2_weight)]
        else:
            shapes = [("", layer.weight)]
        for prefix, w in shapes:
            made = minifloat.Linear(w.shape[1], w.shape[0], name=prefix.rstrip("_"), **options)
            with torch.no_grad():
                made.weight.copy_(w)
                if bias:
                    made.bias.copy_(getattr(layer, f"{prefix}bias"))
            self.linears.append(made)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        n = Norm.apply(x, self.layer_norm_weight, self.layer_norm_bias, self.rms, self.zero)
        y = self.linears[0](n)
        if self.act is not None:
            y = self.linears[1](Act.apply(y, self.act))
        return y, n

    def results(self, layer: Any) -> dict[str, Any]:
        """Gradients and delayed scaling's state under the layer's names."""
        prefixes = ("fc1", "fc2") if self.act is not None else ("",)
        found: dict[str, Any] = {"layer_norm_weight": self.layer_norm_weight.grad}
        if self.layer_norm_bias is not None:
            found["layer_norm_bias"] = self.layer_norm_bias.grad
        for prefix, of in zip(prefixes, self.linears, strict=True):
            named = f"{prefix}_" if prefix else ""
            found[f"{named}weight"] = of.weight.grad
            if of.bias is not None:
                found[f"{named}bias"] = of.bias.grad
            path = f"{prefix}." if prefix else ""
            found |= {f"{path}delayed.{n}": b for n, b in of.delayed.named_buffers()}
        assert found.keys() == own(layer).keys()
        return found


def own(layer: Any) -> dict[str, Any]:
    found = {name: p.grad for name, p in layer.named_parameters()}
    return found | dict(layer.named_buffers())


# ------------------------------------------------------------------------------------------- checks
SHAPES: dict[str, tuple[tuple[int, ...], int, int]] = {
    "odd": ((17,), 33, 5),
    "three_dims": ((2, 3), 48, 18),
    "one_token": ((1,), 20, 12),
    "empty": ((0,), 16, 24),
    "tails": ((130,), 129, 34),
}
GATED = {"odd": "swiglu", "three_dims": "gelu", "one_token": "reglu", "empty": "geglu"}


def layer_of(kind: str, shape: str, dtype: torch.dtype, device: str, **more: Any) -> Any:
    torch.manual_seed(1)
    _, k, n = SHAPES[shape]
    if kind == "LayerNormMLP":
        more = {"activation": GATED.get(shape, "swiglu"), **more}
    layer = getattr(minifloat, kind)(
        k, n, eps=EPS, params_dtype=dtype, device=device, name=None, **more
    )
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(2)).to(p) * 0.2)
    return layer


def check(layer: Any, shape: str, recipe: Any, *, steps: int = 3, ours: Any = None) -> None:
    """A layer and its parts through a few steps."""
    parts = Parts(layer)
    lead, k, _ = SHAPES[shape]
    like = layer.layer_norm_weight
    for step in range(steps):
        made = torch.Generator().manual_seed(step)
        x = (torch.randn(*lead, k, generator=made) * (step + 1) + 0.5).to(like)
        results = []
        for module, call in ((layer, ours or layer), (parts, parts)):
            module.zero_grad(set_to_none=True)
            inp = x.clone().requires_grad_()
            with minifloat.autocast(enabled=recipe is not None, recipe=recipe):
                y = call(inp)
            shown = isinstance(y, tuple)
            y, n = y if shown else (y, None)
            shown = layer.return_layernorm_output
            g = torch.linspace(-1, 2, y.numel(), device=y.device).reshape(y.shape).to(y.dtype)
            if shown:
                torch.autograd.backward((y, n), (g, torch.ones_like(n) / 8))
            else:
                y.backward(g)
            found = own(layer) if module is layer else parts.results(layer)
            results.append({"y": y, "dx": inp.grad, **({"n": n} if shown else {}), **found})
        got, expected = results
        assert got.keys() == expected.keys()
        for name, a in expected.items():
            b = got[name]
            assert a is not None and b is not None and a.dtype == b.dtype, name
            assert torch.equal(a, b), f"step {step}, {name}: {(a - b).abs().max().item()} off"


QUICK = ("none", "delayed", "current", "block", "mxfp8", "nvfp4", "requests")


EVERY = [
    pytest.param(
        name, kind, dtype, id=f"{name}-{kind}-{dtype}",
        marks=[] if dtype == "bf16" and (name in QUICK or kind == "LayerNormMLP") else DEEP,
    )
    for name, kind, dtype in itertools.product(RECIPES, KINDS, DTYPES)
]  # fmt: skip


@pytest.mark.parametrize(("name", "kind", "dtype"), EVERY)
def test_a_layer_is_its_parts(name: str, kind: str, dtype: str, device: str) -> None:
    check(layer_of(kind, "odd", DTYPES[dtype], device), "odd", RECIPES[name]())


REST = [
    pytest.param(
        kind, shape, name, bias, id=f"{kind}-{shape}-{name}-{'bias' if bias else 'none'}",
        marks=[] if i % 9 == 0 else DEEP,
    )
    for i, (kind, shape, name, bias) in enumerate(
        itertools.product(KINDS, SHAPES, QUICK, (True, False))
    )
]  # fmt: skip


@pytest.mark.parametrize(("kind", "shape", "name", "bias"), REST)
def test_shapes_norms_and_biases(kind: str, shape: str, name: str, bias: bool, device: str) -> None:
    more = {} if bias else {"normalization": "RMSNorm", "zero_centered_gamma": shape == "odd"}
    layer = layer_of(kind, shape, torch.bfloat16, device, bias=bias, **more)
    check(layer, shape, RECIPES[name]())


@pytest.mark.parametrize("name", ["current", "delayed", pytest.param("mxfp8", marks=DEEP)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("again", [False, True], ids=["", "again"])
def test_the_norms_output(kind: str, again: bool, name: str, device: str) -> None:
    more = {"checkpoint": again} if kind == "LayerNormMLP" else {}
    layer = layer_of(
        kind, "three_dims", torch.bfloat16, device, return_layernorm_output=True, **more
    )
    check(layer, "three_dims", RECIPES[name]())


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=DEEP) for n in RECIPES]
)
def test_recomputing_changes_nothing(name: str, device: str) -> None:
    layer = layer_of("LayerNormMLP", "odd", torch.bfloat16, device, checkpoint=True)
    check(layer, "odd", RECIPES[name]())


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", ["current", pytest.param("delayed", marks=DEEP)])
def test_activations(name: str, activation: str, device: str) -> None:
    layer = layer_of("LayerNormMLP", "three_dims", torch.float32, device, activation=activation)
    check(layer, "three_dims", RECIPES[name]())


# --------------------------------------------------------------------------------- plain PyTorch
def swish(x: Tensor, alpha: float = 1.0) -> Tensor:
    return x * torch.sigmoid(alpha * x)


def halves(f: Any) -> Any:
    return lambda h: f(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1]


def clamped(h: Tensor) -> Tensor:
    gate, linear = h.chunk(2, -1)
    gate, linear = gate.clamp(max=2.0), linear.clamp(-2.0, 2.0) + 0.5
    return swish(gate, 1.5) * linear


def tanh_gelu(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


SIMPLE = {
    "gelu": tanh_gelu,
    "qgelu": lambda h: swish(h, 1.702),
    "relu": torch.relu,
    "srelu": lambda h: torch.relu(h).square(),
    "silu": swish,
}
FUNCTIONS: dict[str, Any] = {
    **SIMPLE,
    "geglu": halves(tanh_gelu),
    "glu": halves(torch.sigmoid),
    "qgeglu": halves(SIMPLE["qgelu"]),
    "reglu": halves(torch.relu),
    "sreglu": halves(SIMPLE["srelu"]),
    "swiglu": halves(swish),
    "clamped_swiglu": clamped,
}


@pytest.mark.parametrize("rms", [False, True], ids=["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_outside_autocast_it_is_pytorch(activation: str, rms: bool, device: str) -> None:
    """fp32 against fp64: the same formulas, as autograd differentiates them."""
    more: dict[str, Any] = {"activation": activation, "zero_centered_gamma": not rms}
    if activation == "clamped_swiglu":
        more["activation_params"] = {"limit": 2.0, "alpha": 1.5, "glu_linear_offset": 0.5}
    if rms:
        more["normalization"] = "RMSNorm"
    layer = layer_of("LayerNormMLP", "three_dims", torch.float32, device, **more)
    x = torch.randn(2, 3, 48, generator=torch.Generator().manual_seed(0)) * 3
    x = x.to(device).requires_grad_()
    y = layer(x)
    g = torch.linspace(-1, 2, y.numel(), device=device).reshape(y.shape)
    inputs = [x, *layer.parameters()]
    got = [y, *torch.autograd.grad(y, inputs, g)]
    leaves = [t.detach().double().requires_grad_() for t in inputs]
    x64, p = leaves[0], dict(zip([n for n, _ in layer.named_parameters()], leaves[1:], strict=True))
    gamma = p["layer_norm_weight"] + layer.zero_centered_gamma
    if rms:
        n = functional.rms_norm(x64, (48,), gamma, EPS)
    else:
        n = functional.layer_norm(x64, (48,), gamma, p["layer_norm_bias"], EPS)
    h = FUNCTIONS[activation](functional.linear(n, p["fc1_weight"], p["fc1_bias"]))
    y64 = functional.linear(h, p["fc2_weight"], p["fc2_bias"])
    expected = [y64, *torch.autograd.grad(y64, leaves, g.double())]
    for name, a, b in zip(["y", "dx", *p], expected, got, strict=True):
        assert (a - b).abs().max() <= 2.0**-17 * a.abs().max().clamp(min=1.0), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", ["current", *(pytest.param(n, marks=DEEP) for n in ("mxfp8", "nvfp4"))]
)
def test_a_quantized_layer_is_near_pytorch(kind: str, name: str, device: str) -> None:
    """Of the same size and direction: nothing is missing, transposed or scaled twice."""
    layer = layer_of(kind, "tails", torch.float32, device)
    x = torch.randn(130, 129, generator=torch.Generator().manual_seed(0)).to(device)
    results = []
    for recipe in (None, RECIPES[name]()):
        inp = x.clone().requires_grad_()
        with minifloat.autocast(enabled=recipe is not None, recipe=recipe):
            y = layer(inp)
        g = torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(device)
        grads = torch.autograd.grad(y, [inp, *layer.parameters()], g)
        results.append([y, *grads])
    for a, b in zip(*results, strict=True):
        assert (a - b).norm() <= (0.4 if name == "nvfp4" else 0.15) * a.norm()


# -------------------------------------------------------------------------------------- later wgrad
@pytest.mark.parametrize("name", ["current", "delayed", "nvfp4", "none"])
@pytest.mark.parametrize("kind", KINDS)
def test_wgrad_later_is_wgrad(kind: str, name: str, device: str) -> None:
    """fc2's first, then fc1's; hooks run once, after both."""
    recipe = RECIPES[name]()
    shape, dtype = "three_dims", torch.bfloat16
    layer = layer_of(kind, shape, dtype, device)
    later = layer_of(kind, shape, dtype, device, delay_wgrad_compute=True)
    x = torch.randn(2, 3, 48, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    ran: list[list[bool]] = []
    weights = [p for p in later.parameters() if p.dim() == 2]
    later.register_wgrad_accumulation_and_reduce_hooks(
        lambda: ran.append([w.grad is not None for w in weights])
    )
    assert later.need_backward_dw() and not layer.need_backward_dw()
    for _ in range(2):
        for module in (layer, later):
            with minifloat.autocast(enabled=recipe is not None, recipe=recipe):
                y = module(x)
            y.backward(torch.ones_like(y))
    assert all(w.grad is None for w in weights)
    with pytest.raises(RuntimeError, match=f"{kind}.*backward_dw"):
        for _ in range(3):
            later.backward_dw()
    assert ran == [[True] * len(weights)] * 2
    for (n, p), q in zip(layer.named_parameters(), later.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), n


@pytest.mark.parametrize("override", ["none", "high_precision"])
@pytest.mark.parametrize("kind", KINDS)
def test_wgrad_later_runs_as_in_backward(kind: str, override: str) -> None:
    """Whatever is in force by then: what it makes has no graph, and torch.autocast no say."""
    recipe = RECIPES["current"]()
    recipe = None if override == "none" else recipe.replace(backward_override=override)
    x = torch.randn(2, 3, 48, requires_grad=True)
    grads = []
    for amp in (False, True):
        layer = layer_of(kind, "three_dims", torch.float32, "cpu", delay_wgrad_compute=True)
        with minifloat.autocast(enabled=recipe is not None, recipe=recipe):
            y = layer(x * 2)
        y.square().sum().backward()
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            layer.backward_dw()
        grads.append([p.grad for p in layer.parameters() if p.dim() == 2])
        assert not any(g.requires_grad for g in grads[-1])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_backward_dw_takes_fc2_before_fc1() -> None:
    layer = minifloat.LayerNormMLP(16, 24, delay_wgrad_compute=True)
    y = layer(torch.randn(5, 16))
    y.sum().backward()
    order = []
    for part in (layer.fc1, layer.fc2):
        pop = part.wgrad_store.pop

        def recorded(where: str, pop: Any = pop) -> Any:
            order.append(where)
            return pop(where)

        part.wgrad_store.pop = recorded
    layer.backward_dw()
    assert order == ["LayerNormMLP: fc2", "LayerNormMLP: fc1"]


@pytest.mark.parametrize("frozen", ["fc1_weight", "fc2_weight"])
def test_wgrad_later_beside_a_frozen_weight(frozen: str) -> None:
    """Which leaves nothing for later."""
    torch.manual_seed(0)
    later = minifloat.LayerNormMLP(16, 24, delay_wgrad_compute=True)
    layer = minifloat.LayerNormMLP(16, 24)
    layer.load_state_dict(later.state_dict())
    ran: list[int] = []
    later.register_wgrad_accumulation_and_reduce_hooks(lambda: ran.append(1))
    x = torch.randn(5, 16)
    for module in (layer, later):
        getattr(module, frozen).requires_grad_(False)
        module(x).square().sum().backward()
    later.backward_dw()
    assert ran == [1]
    for (n, p), q in zip(layer.named_parameters(), later.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None) == (n == frozen), n
        assert p.grad is None or torch.equal(p.grad, q.grad), n
    with pytest.raises(RuntimeError, match="once per backward"):
        later.backward_dw()


@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "LayerNormMLP"])
def test_later_wgrad_of_a_frozen_layer_is_nothing(kind: str) -> None:
    module = getattr(minifloat, kind)(32, 32, delay_wgrad_compute=True).requires_grad_(False)
    x = torch.ones(4, 32, requires_grad=True)
    with minifloat.autocast(recipe=RECIPES["mxfp8"]()):
        module(x).sum().backward()
    assert not module.need_backward_dw()
    module.backward_dw()
    assert x.grad is not None and all(p.grad is None for p in module.parameters())


# ------------------------------------------------------------------------------------------- frozen
@pytest.mark.parametrize("name", ["none", "current", pytest.param("delayed", marks=DEEP)])
@pytest.mark.parametrize("again", [False, True], ids=["", "again"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_frozen_has_the_same_gradient(
    kind: str, again: bool, name: str, device: str
) -> None:
    recipe = RECIPES[name]()
    more = {"checkpoint": True} if again and kind == "LayerNormMLP" else {}
    frozen = {case.frozen for case in (*BOTH, *OWN[kind]) if case.frozen}
    expected: dict[str, Any] = {}
    for names in ((), *sorted(frozen)):
        layer = layer_of(kind, "odd", torch.bfloat16, device, **more)
        for n, p in layer.named_parameters():
            p.requires_grad_(n not in names)
        x = torch.randn(17, 33, generator=torch.Generator().manual_seed(0)).to(device).bfloat16()
        x.requires_grad_("input" not in names)
        with minifloat.autocast(enabled=recipe is not None, recipe=recipe):
            y = layer(x)
        y.backward(torch.linspace(-1, 2, y.numel(), device=device).reshape(y.shape).to(y.dtype))
        found = {"y": y, "input": x.grad, **{n: p.grad for n, p in layer.named_parameters()}}
        expected = expected or found
        for n, t in found.items():
            assert (t is None) is (n in names), (names, n)
            assert t is None or torch.equal(t, expected[n]), (names, n)


# ------------------------------------------------------------------------- recompute x microbatches
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cache", [False, pytest.param(True, marks=DEEP)], ids=["", "cached"])
@pytest.mark.parametrize(
    "name",
    ["delayed", *(pytest.param(n, marks=DEEP) for n in ("requests", "current", "block", "nvfp4"))],
)
@pytest.mark.parametrize("together", [False, True], ids=["one by one", "in flight"])
def test_recompute_with_cached_weights(name: str, together: bool, cache: bool, device: str) -> None:
    """A weight that was cast in an earlier step is multiplied by that step's scale, twice."""
    recipe, results = RECIPES[name](), []
    for again in (False, True):
        with minifloat.autocast(recipe=recipe):
            layer = layer_of(
                "LayerNormMLP", "odd", torch.bfloat16, device, checkpoint=again, cache_weights=cache
            )
        found: list[Any] = []
        for step in range(2):
            outputs = []
            for i, first in enumerate((True, False, False)):
                made = torch.Generator().manual_seed(10 * step + i)
                x = (torch.randn(17, 33, generator=made) * (i + 1)).to(device, torch.bfloat16)
                x.requires_grad_()
                with minifloat.autocast(recipe=recipe):
                    outputs.append((layer(x, is_first_microbatch=first), x))
                if not together:
                    outputs[-1][0].sum().backward()
            for y, x in outputs:
                if together:
                    y.sum().backward()
                found += [y.detach(), x.grad]
            found += [p.grad.clone() for p in layer.parameters()]
            found += [b.clone() for b in layer.buffers()]
            with torch.no_grad():
                for p in layer.parameters():
                    p.mul_(1.5)
        results.append(found)
    for i, (a, b) in enumerate(zip(*results, strict=True)):
        assert torch.equal(a, b), i


def test_activation_names_are_those_of_the_library() -> None:
    assert [activation_of(name).gated for name in ("gelu", "swiglu")] == [False, True]
    assert set(FUNCTIONS) == set(ACTIVATIONS)
