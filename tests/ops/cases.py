"""Every operation as data: how to make one, what to feed it, and what plain PyTorch computes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager
from torch.nn import functional as F

import minifloat
from minifloat import ops
from minifloat import recipe as recipes
from minifloat.recipe.factories import current_scaling_factory

RECIPES: dict[str, recipes.Recipe] = {
    "delayed": recipes.DelayedScaling(),
    "current": recipes.Float8CurrentScaling(),
    "block": recipes.Float8BlockScaling(),
    "mxfp8": recipes.MXFP8BlockScaling(),
    "nvfp4": recipes.NVFP4BlockScaling(disable_stochastic_rounding=True),
    "custom": recipes.CustomRecipe(qfactory=current_scaling_factory),
}
K = 16  # features of the inputs


@dataclass(frozen=True)
class Case:
    """`make()`, and `reference(op, x, *extra)` of the same parameters; extra inputs by shape."""

    name: str
    make: Callable[[], ops.FusibleOperation]
    reference: Callable[..., Any]
    extra: tuple[tuple[int, ...], ...] = ()
    shape: tuple[int, ...] = (3, 5, K)

    def __str__(self) -> str:
        return self.name


def halves(x: Tensor, size: int | None = None) -> tuple[Tensor, Tensor]:
    n = size or x.shape[-1] // 2
    blocks = x.unflatten(-1, (-1, 2, n))
    return blocks[..., 0, :].flatten(-2), blocks[..., 1, :].flatten(-2)


def gated(f: Callable[[Tensor], Tensor], size: int | None = None) -> Callable[..., Tensor]:
    def run(op: Any, x: Tensor, *scales: Tensor) -> Tensor:
        g, linear = halves(x, size)
        return f(g) * linear

    return run


def gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def qgelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def srelu(x: Tensor) -> Tensor:
    return F.relu(x) ** 2


def clamped(x: Tensor, limit: float = 7.0, alpha: float = 1.702, offset: float = 1.0) -> Tensor:
    g, linear = halves(x)
    g = g.clamp(max=limit)
    return g * torch.sigmoid(alpha * g) * (linear.clamp(-limit, limit) + offset)


def layer_norm(op: Any, x: Tensor) -> Tensor:
    return F.layer_norm(x, op._shape, op.weight, op.bias, op.eps)


def rms_norm(op: Any, x: Tensor) -> Tensor:
    gamma = op.weight + 1 if op.zero_centered_gamma else op.weight
    dims = tuple(range(-len(op._shape), 0))
    return x * torch.rsqrt((x * x).mean(dims, keepdim=True) + op.eps) * gamma


CASES = (
    Case("BasicLinear", lambda: ops.BasicLinear(K, 24), lambda op, x: F.linear(x, op.weight)),
    Case("Linear", lambda: ops.Linear(K, 24), lambda op, x: F.linear(x, op.weight, op.bias)),
    Case("Bias", lambda: ops.Bias(K), lambda op, x: x + op.bias),
    Case("GELU", ops.GELU, lambda op, x: gelu(x)),
    Case("GEGLU", ops.GEGLU, gated(gelu)),
    Case("GLU", ops.GLU, gated(torch.sigmoid)),
    Case("QGELU", ops.QGELU, lambda op, x: qgelu(x)),
    Case("QGEGLU", ops.QGEGLU, gated(qgelu)),
    Case("ReLU", ops.ReLU, lambda op, x: F.relu(x)),
    Case("ReGLU", ops.ReGLU, gated(F.relu)),
    Case("SReLU", ops.SReLU, lambda op, x: srelu(x)),
    Case("SReGLU", ops.SReGLU, gated(srelu)),
    Case("SiLU", ops.SiLU, lambda op, x: F.silu(x)),
    Case("SwiGLU", ops.SwiGLU, gated(F.silu)),
    Case("SwiGLU_interleaved", lambda: ops.SwiGLU(glu_interleave_size=4), gated(F.silu, 4)),
    Case("ClampedSwiGLU", ops.ClampedSwiGLU, lambda op, x: clamped(x)),
    Case(
        "ClampedSwiGLU_tight",
        lambda: ops.ClampedSwiGLU(limit=0.5, alpha=2.0, glu_linear_offset=0.25),
        lambda op, x: clamped(x, 0.5, 2.0, 0.25),
    ),
    Case(
        "ScaledSwiGLU",
        ops.ScaledSwiGLU,
        lambda op, x, s: gated(F.silu)(op, x) * s[..., None],
        ((3, 5),),
    ),
    Case(
        "ScaledClampedQGeGLU",
        ops.ScaledClampedQGeGLU,
        lambda op, x, s: clamped(x) * s[..., None],
        ((3, 5),),
    ),
    Case("ScaledSReLU", ops.ScaledSReLU, lambda op, x, s: srelu(x) * s[..., None], ((3, 5),)),
    Case("LayerNorm", lambda: ops.LayerNorm(K), layer_norm),
    Case("LayerNorm_two_dims", lambda: ops.LayerNorm((5, K)), layer_norm),
    Case("RMSNorm", lambda: ops.RMSNorm(K), rms_norm),
    Case("RMSNorm_zero", lambda: ops.RMSNorm(K, zero_centered_gamma=True), rms_norm),
    Case(
        "L2Normalization",
        ops.L2Normalization,
        lambda op, x: x * torch.rsqrt((x * x).sum(-1, keepdim=True) + op.eps),
    ),
    Case("Quantize", lambda: ops.Quantize(True, True), lambda op, x: x * 1.0),
    Case("ConstantScale", lambda: ops.ConstantScale(0.375), lambda op, x: x * 0.375),
    Case("AddExtraInput", ops.AddExtraInput, lambda op, x, e: x + e, ((3, 5, K),)),
    Case("MakeExtraOutput", ops.MakeExtraOutput, lambda op, x: (x * 1.0, x * 1.0)),
    Case("Identity", ops.Identity, lambda op, x: x * 1.0),
    Case("Reshape", lambda: ops.Reshape((15, -1)), lambda op, x: x.reshape(15, -1)),
    Case("AllGather", ops.AllGather, lambda op, x: x * 1.0),
    Case("AllReduce", ops.AllReduce, lambda op, x: x * 1.0),
    Case("ReduceScatter", ops.ReduceScatter, lambda op, x: x * 1.0),
    Case("Dropout_eval", lambda: ops.Dropout(0.5).eval(), lambda op, x: x * 1.0),
)


def made(case: Case) -> Any:
    """The operation with parameters that are all different."""
    torch.manual_seed(3)
    op = case.make()
    with torch.no_grad():
        for p in op.parameters():
            p.copy_(torch.randn_like(p) / 2)
    return op


def inputs(case: Case, seed: int = 0) -> list[Tensor]:
    """The input and the extra inputs."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (case.shape, *case.extra)
    return [torch.randn(s, generator=generator).requires_grad_() for s in shapes]


def results(y: Any, given: list[Tensor], parameters: Any) -> list[Tensor]:
    """Outputs, and the gradients of everything for a fixed gradient of the outputs."""
    outputs = y if isinstance(y, tuple) else (y,)
    grads = [torch.linspace(-1, 1, t.numel()).reshape(t.shape).to(t.dtype) for t in outputs]
    parameters = list(parameters)
    for t in (*given, *parameters):
        t.grad = None
    torch.autograd.backward(outputs, grads)
    found = [t.detach() for t in outputs] + [t.grad for t in (*given, *parameters)]
    return [
        t.dequantize() if isinstance(t, minifloat.QuantizedTensor) else t
        for t in found
        if t is not None
    ]


def mlp(dtype: torch.dtype = torch.float32, bias: bool = True) -> ops.Sequential:
    """The chain of a transformer's MLP, 32 features."""
    torch.manual_seed(5)
    return ops.Sequential(
        ops.RMSNorm(32, dtype=dtype),
        ops.Linear(32, 96, bias=bias, dtype=dtype),
        ops.SwiGLU(),
        ops.Linear(48, 32, bias=bias, dtype=dtype),
    )


def step(
    model: Any, call: Callable[..., Any], x: Tensor, recipe: recipes.Recipe | None, *extra: Tensor
) -> list[Tensor]:
    """One training step under the recipe: results, and what delayed scaling keeps."""
    given = [t.detach().clone().requires_grad_() for t in (x, *extra)]
    with minifloat.autocast(enabled=recipe is not None, recipe=recipe):
        y = call(*given)
    found = results(y, given, model.parameters())
    return [*found, *[b.detach().clone() for b in model.buffers()]]


def assert_same(expected: list[Tensor], got: list[Tensor]) -> None:
    assert len(expected) == len(got)
    for i, (a, b) in enumerate(zip(expected, got, strict=True)):
        assert torch.equal(a, b), f"tensor {i}: {(a - b).abs().max().item()} off"


class Counter:
    """A backend that counts the graphs it compiles, and runs them as they are."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, module: Any, inputs: Any) -> Any:
        self.graphs += 1
        return aot_eager(module, inputs)


def compiled_like_eager(
    model: Any,
    call: Callable[[Any], Callable[..., Any]],
    data: list[list[Tensor]],
    recipe: recipes.Recipe | None = None,
    graphs: int = 1,
    fullgraph: bool = True,
    dynamic: bool | None = None,
) -> None:
    """`call(model)` compiled has the bits of eager, in at most so many graphs."""
    torch._dynamo.reset()
    other = copy.deepcopy(model)
    counter = Counter()
    compiled = torch.compile(call(other), backend=counter, fullgraph=fullgraph, dynamic=dynamic)
    for given in data:
        torch.manual_seed(9)
        expected = step(model, call(model), given[0], recipe, *given[1:])
        torch.manual_seed(9)
        assert_same(expected, step(other, compiled, given[0], recipe, *given[1:]))
    assert counter.graphs <= graphs, counter.graphs
