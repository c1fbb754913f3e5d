"""Which bytes LayerNormLinear and LayerNormMLP keep between forward and backward, to the byte.

LayerNormLinear: the input, the statistics, one quantized copy of the norm's output. LayerNormMLP:
these, and fc1's output; nothing of the activation. With `checkpoint`: the input; a graph keeps the
statistics too, for whose eight bytes it would read a row again. Parameters are kept as they are.
Besides, a scale of four bytes for each tensor that backward casts again, and that has one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

import minifloat
from minifloat.core import activation, linear

from .layers import RECIPES
from .test_linear_checkpoint import copy_bytes

HIDDEN, FFN = 96, 64
NAMES = ("delayed", "current", "block", "mxfp8", "nvfp4", "custom")
SCALES = 64  # bytes: a handful of single numbers
# Tensors that backward casts again: the weights, and between two of them the activation.
RECAST = {"linear": 1, "linear_rms": 1, "mlp": 3, "mlp_swiglu": 3, "mlp_again": 2}


def numbers(name: str, way: str) -> int:
    """Bytes of scales, or of the amaxes they come from, where a tensor has one of its own."""
    if name not in ("delayed", "current", "custom"):
        return 0
    # A recompute casts fc1's input and weight by the scales of its forward.
    again = 2 if way == "mlp_again" and name == "delayed" else 0
    return 4 * (RECAST[way] + again)


def kept_of(layer: Any, x: Tensor, recipe: Any) -> tuple[int, Any]:
    """(bytes that autograd holds besides parameters, the output)."""
    saved: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
        minifloat.autocast(enabled=recipe is not None, recipe=recipe),
    ):
        y = layer(x)
    own = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    own |= {b.untyped_storage().data_ptr() for b in layer.buffers()}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in saved}
    return sum(s.nbytes() for at, s in storages.items() if at not in own), y


def expected(kind: str, recipe: Any, m: int, *, rms: bool, again: bool, gated: bool) -> int:
    given = m * HIDDEN * 2
    if again:
        return given
    statistics = m * 4 * (1 if rms else 2)
    fc1 = 0 if kind == "LayerNormLinear" else m * FFN * (2 if gated else 1) * 2
    return given + statistics + copy_bytes(recipe, m, HIDDEN) + fc1


WAYS = {
    "linear": ("LayerNormLinear", {}),
    "linear_rms": ("LayerNormLinear", {"normalization": "RMSNorm"}),
    "mlp": ("LayerNormMLP", {}),
    "mlp_swiglu": ("LayerNormMLP", {"normalization": "RMSNorm", "activation": "swiglu"}),
    "mlp_again": ("LayerNormMLP", {"activation": "swiglu", "checkpoint": True}),
}


def facts(kind: str, options: Any) -> dict[str, bool]:
    return {
        "rms": options.get("normalization") == "RMSNorm",
        "again": options.get("checkpoint", False),
        "gated": options.get("activation") == "swiglu",
    }


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [*NAMES, "none"])
def test_eager(name: str, way: str) -> None:
    recipe = None if name == "none" else RECIPES[name]()
    kind, options = WAYS[way]
    layer = getattr(minifloat, kind)(HIDDEN, FFN, params_dtype=torch.bfloat16, **options)
    x = torch.randn(2, 33, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    kept, y = kept_of(layer, x, recipe)
    assert kept == expected(kind, recipe, 66, **facts(kind, options)) + numbers(name, way)
    y.sum().backward()


@pytest.mark.parametrize("name", ["current", "delayed"])
def test_microbatches_keep_no_more(name: str) -> None:
    """A cached weight is the module's, not the graph's, and a recompute does not ask for it."""
    recipe = RECIPES[name]()
    layer = minifloat.LayerNormMLP(HIDDEN, FFN, params_dtype=torch.bfloat16, checkpoint=True)
    x = torch.randn(66, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    for first in (True, False):
        kept, y = kept_of(lambda_of(layer, first), x, recipe)
        # What is cached of fc2's weight, the column copy that dgrad multiplies.
        cached = FFN * HIDDEN
        assert 0 <= kept - 66 * HIDDEN * 2 <= SCALES + cached
        y.sum().backward()


def lambda_of(layer: Any, first: bool) -> Any:
    class Call(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Any:
            return self.layer(x, is_first_microbatch=first)

    return Call()


@pytest.mark.parametrize("name", NAMES)
def test_the_gradients_column_copy_is_made_when_it_is_multiplied(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not while dh is: memory is shortest there, and autograd has the gradient to read again."""
    order = []

    def watch(module: Any, function: str) -> None:
        ran = getattr(module, function)

        def watched(x: Any, *rest: Any, **options: Any) -> Any:
            if function != "operands":
                order.append("dh")
            elif x is grad or (isinstance(x, Tensor) and x.data_ptr() == grad.data_ptr()):
                order.append("".join("-" if cast is None else "g" for cast in rest[:2]))
            return ran(x, *rest, **options)

        monkeypatch.setattr(module, function, watched)

    layer = minifloat.LayerNormMLP(
        HIDDEN, FFN, params_dtype=torch.bfloat16, activation="swiglu", bias=False
    )
    x = torch.randn(66, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(66, HIDDEN, dtype=torch.bfloat16)
    with minifloat.autocast(recipe=RECIPES[name]()):
        y = layer(x)
    watch(linear, "operands")
    watch(activation, "activation_backward")
    y.backward(grad)
    assert order == ["g-", "dh", "-g"]


def test_frozen_parts_keep_less() -> None:
    recipe = RECIPES["current"]()
    layer = minifloat.LayerNormMLP(HIDDEN, FFN, params_dtype=torch.bfloat16)
    x = torch.randn(66, HIDDEN, dtype=torch.bfloat16)
    layer.layer_norm_weight.requires_grad_(False)
    layer.layer_norm_bias.requires_grad_(False)
    copy, fc1 = copy_bytes(recipe, 66, HIDDEN), 66 * FFN * 2
    kept, _ = kept_of(layer, x, recipe)
    assert 0 <= kept - copy - fc1 <= SCALES  # no gradient passes the norm: neither x nor its rows
    layer.fc1_weight.requires_grad_(False)
    kept, _ = kept_of(layer, x, recipe)
    assert 0 <= kept - fc1 <= SCALES
    layer.fc1_bias.requires_grad_(False)
    kept, _ = kept_of(layer, x, recipe)
    assert 0 <= kept - fc1 <= SCALES  # fc2's input is made of it


COMPILED = [
    pytest.param(
        name, way, id=f"{name}-{way}",
        marks=[] if name == "current" and way != "linear_rms" else pytest.mark.deep,
    )
    for name in NAMES for way in WAYS
]  # fmt: skip


def kept_of_graph(layer: Any, x: Tensor, recipe: Any) -> int:
    """Bytes that a graph's backward gets of its forward, besides parameters, and the input."""
    from functorch.compile import min_cut_rematerialization_partition

    torch._dynamo.reset()
    kept: list[Any] = []

    def backward_graph(graph: Any, inputs: Any) -> Any:
        for node in graph.graph.find_nodes(op="placeholder"):
            value = node.meta["val"]
            if isinstance(value, Tensor) and not node.name.startswith(("tangents", "primals")):
                kept.append((node.name, value.numel() * value.dtype.itemsize))
        return graph

    backend = aot_autograd(
        fw_compiler=lambda graph, _: graph,
        bw_compiler=backward_graph,
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )
    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=False)
    with minifloat.autocast(enabled=recipe is not None, recipe=recipe):
        y = compiled(x)
    y.sum().backward()
    given = x.numel() * x.dtype.itemsize  # a primal
    return sum(size for _, size in kept) + given


@pytest.mark.parametrize(("name", "way"), COMPILED)
def test_compiled(name: str, way: str) -> None:
    recipe = RECIPES[name]()
    kind, options = WAYS[way]
    layer = getattr(minifloat, kind)(HIDDEN, FFN, params_dtype=torch.bfloat16, **options)
    x = torch.randn(66, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    over = kept_of_graph(layer, x, recipe) - expected(kind, recipe, 66, **facts(kind, options))
    if options.get("checkpoint"):
        over -= 66 * 8
    if name == "nvfp4":  # what stochastic rounding draws from, which eager has in its calls
        over -= 16 * (1 if kind == "LayerNormLinear" else 2)
    if options.get("checkpoint") and name in ("current", "custom"):
        over -= 4  # the amax, which is found with the statistics
    assert over == numbers(name, way)
