"""Compile caches on disk: an equal quantizer in another process hits, a different one does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minifloat import opaque

from ..quantizers.cases import run_python

pytestmark = pytest.mark.skipif(not opaque.AVAILABLE, reason="this PyTorch has no opaque objects")

# Nothing here needs a generated kernel, so nothing waits for a C++ compiler.
SCRIPT = """
import json, sys, torch
import minifloat as mf
from torch._dynamo.utils import counters
from torch._functorch import config

E4M3, E5M2 = mf.DType.kFloat8E4M3, mf.DType.kFloat8E5M2
FIRST = {
    "current": lambda: mf.Float8CurrentScalingQuantizer(E4M3, "cpu"),
    "block": lambda: mf.Float8BlockQuantizer(E4M3),
    "mxfp8": lambda: mf.MXFP8Quantizer(E4M3),
    "nvfp4": lambda: mf.NVFP4Quantizer(),
    "identity": lambda: mf.IdentityQuantizer(dtype=torch.bfloat16),
    "hybrid": lambda: mf.HybridQuantizer(
        rowwise_quantizer=mf.MXFP8Quantizer(E4M3), columnwise_quantizer=mf.NVFP4Quantizer()),
}
OTHER = {
    "current": lambda: mf.Float8CurrentScalingQuantizer(E4M3, "cpu", force_pow_2_scales=True),
    "block": lambda: mf.Float8BlockQuantizer(E4M3, block_scaling_dim=1),
    "mxfp8": lambda: mf.MXFP8Quantizer(E5M2),
    "nvfp4": lambda: mf.NVFP4Quantizer(with_2d_quantization=True),
    "identity": lambda: mf.IdentityQuantizer(dtype=torch.float16),
    "hybrid": lambda: mf.HybridQuantizer(
        rowwise_quantizer=mf.MXFP8Quantizer(E5M2), columnwise_quantizer=mf.NVFP4Quantizer()),
}
ONE = {"mxfp8": FIRST["mxfp8"]}
# A tensor class called in a graph is a function that PyTorch does not know to be pure.
PURE = {
    f"{cls.__module__}.{cls.__name__}": mf.__version__
    for cls in (make()._tensor_class for make in FIRST.values())
}
X = torch.randn(40, 48, generator=torch.Generator().manual_seed(0)) * 3
TURN = torch.eye(48)[torch.randperm(48, generator=torch.Generator().manual_seed(1))]

def argument(make):
    q = make()
    return torch.compile(lambda q, x: q.quantize(x).dequantize(), fullgraph=True)(q, X.clone())

# With a product behind it: an empty backward graph is never cached.
def gradient(make):
    q, x = make(), X.clone().requires_grad_()
    y = torch.compile(lambda q, x: q.quantize(x).dequantize() @ TURN, fullgraph=True)(q, x)
    y.backward(torch.full_like(y, 2.0) @ TURN)
    assert (x.grad == 2).all()
    return y.detach() @ TURN.t()

def internal(make):
    q = make()
    q.internal = True
    return torch.compile(lambda q, x: q.quantize(x).dequantize(), fullgraph=True)(q, X.clone())

class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, q):
        return q.quantize(x).dequantize()

    @staticmethod
    def backward(ctx, grad):
        return grad, None

def function(make):
    q, x = make(), X.clone().requires_grad_()
    q.internal = True
    y = torch.compile(lambda q, x: Straight.apply(x, q) @ TURN, fullgraph=True)(q, x)
    y.backward(torch.full_like(y, 2.0) @ TURN)
    assert (x.grad == 2).all()
    return y.detach() @ TURN.t()

def tensor(make):
    t = make().quantize(X)
    return torch.compile(lambda t: t.dequantize(), fullgraph=True)(t)

def run(makers, aot, allow):
    config.enable_autograd_cache = aot
    config.autograd_cache_allow_custom_autograd_functions = allow
    torch._inductor.config.unsafe_marked_cacheable_functions = PURE if allow else {}
    report = {}
    for name, make in makers.items():
        every = (argument, gradient, internal, function, tensor)
        for fn in every if name == "mxfp8" else (argument,):
            torch._dynamo.reset()
            counters.clear()
            made = fn(make)
            report[f"{name}-{fn.__name__}"] = {
                "right": torch.equal(made, make().quantize(X).dequantize()),
                "fx_hit": counters["inductor"]["fxgraph_cache_hit"],
                "fx_miss": counters["inductor"]["fxgraph_cache_miss"],
                "aot_hit": counters["aot_autograd"]["autograd_cache_hit"],
                "aot_miss": counters["aot_autograd"]["autograd_cache_miss"],
                "aot_bypass": counters["aot_autograd"]["autograd_cache_bypass"],
            }
    return report

print(json.dumps([run(globals()[m], aot, allow) for m, aot, allow in RUNS]))
"""


def processes(folder: Path, *runs: tuple[str, bool, bool]) -> list[dict[str, Any]]:
    """Reports of a fresh process that does these runs: (quantizers, AOT cache on, all allowed)."""
    said = run_python(
        SCRIPT.replace("RUNS", repr(runs)),
        TORCHINDUCTOR_CACHE_DIR=str(folder),
        TORCHINDUCTOR_COMPILE_THREADS="1",
        OMP_NUM_THREADS="1",
    )
    reports: list[dict[str, Any]] = json.loads(said.splitlines()[-1])
    for report in reports:
        assert all(r["right"] for r in report.values()), report
    return reports


def test_caches_hit_across_processes_and_tell_quantizers_apart(tmp_path: Path) -> None:
    cold, _ = processes(tmp_path, ("FIRST", True, True), ("ONE", True, False))
    for case, r in cold.items():
        assert (r["aot_hit"], r["aot_bypass"]) == (0, 0), case
        assert r["aot_miss"] >= 1, case
        if case.endswith("argument"):  # the others may lower to a graph that came before
            assert (r["fx_hit"], r["fx_miss"]) == (0, 1), case

    warm, without_aot, default, other = processes(
        tmp_path,
        ("FIRST", True, True),
        ("FIRST", False, True),
        ("ONE", True, False),
        ("OTHER", True, True),
    )
    for case, r in warm.items():
        assert r["aot_hit"] >= 1, case
        assert (r["aot_miss"], r["aot_bypass"], r["fx_miss"]) == (0, 0, 0), case
    for case, r in without_aot.items():
        assert r["fx_hit"] >= 1, case
        assert (r["fx_miss"], r["aot_hit"]) == (0, 0), case
    # By default PyTorch keeps no graph that makes a tensor or has an autograd.Function. Users lift
    # the latter with TORCHINDUCTOR_AUTOGRAD_CACHE_ALLOW_CUSTOM_AUTOGRAD=1.
    assert [(c.split("-")[1], r["aot_bypass"], r["aot_hit"]) for c, r in default.items()] == [
        ("argument", 1, 0),
        ("gradient", 1, 0),
        ("internal", 0, 1),
        ("function", 1, 0),
        ("tensor", 0, 1),
    ]
    # The same functions with other quantizers: equal keys would give the first ones' results.
    for case, r in other.items():
        assert r["aot_hit"] == 0, case
        assert r["aot_miss"] >= 1, case
