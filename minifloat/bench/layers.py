"""The layers of the cases in plain PyTorch: what everything is compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..models.config import TransformerConfig
from ..models.transformer import rotary_table, rotate
from .cases import KINDS, Case, Heads
from .work import EPS, Work

__all__ = [
    "DecoderLayer",
    "PlainExperts",
    "PlainMLP",
    "PlainNormLinear",
    "Stack",
    "Weights",
    "attention",
    "decoder_table",
    "plain",
    "stacked",
]


Weights = dict[str, list[Tensor]]


class PlainNormLinear(nn.Module):
    """RMSNorm, then a linear layer."""

    def __init__(self, k: int, n: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(k, device=device, dtype=dtype))
        self.linear = nn.Linear(k, n, bias=False, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(F.rms_norm(x, x.shape[-1:], self.norm, EPS))
        return out


class PlainMLP(nn.Module):
    """RMSNorm, fc1, SwiGLU, fc2: the gate is the first half of fc1's output."""

    def __init__(
        self, hidden: int, ffn: int, device: torch.device, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(hidden, device=device, dtype=dtype))
        self.fc1 = nn.Linear(hidden, 2 * ffn, bias=False, device=device, dtype=dtype)
        self.fc2 = nn.Linear(ffn, hidden, bias=False, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        y = F.rms_norm(x, x.shape[-1:], self.norm, EPS)
        gate, linear = self.fc1(y).chunk(2, -1)
        out: Tensor = self.fc2(F.silu(gate) * linear)
        return out


class PlainExperts(nn.Module):
    """A linear layer for each group of rows, in one product; `ends` are where the groups end."""

    def __init__(
        self, experts: int, k: int, n: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, n, k, device=device, dtype=dtype))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return F.grouped_mm(x, self.weight.transpose(1, 2), offs=ends)


class DecoderLayer(nn.Module):
    """x + attention(x), then x + mlp(x), around the linear layers of one library.

    `qkv` and `mlp` begin with a norm. Rotary embeddings and PyTorch's attention are everyone's.
    """

    table: Tensor

    def __init__(self, case: Case, qkv: nn.Module, out: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.heads = case.heads
        self.qkv, self.out, self.mlp = qkv, out, mlp
        self.register_buffer("table", decoder_table(case, next(out.parameters()).device))

    def forward(self, x: Tensor, **how: Any) -> Tensor:
        y = attention(self.qkv(x, **how), self.heads, self.table)
        x = x + self.out(y, **how)
        out: Tensor = x + self.mlp(x, **how)
        return out


class Stack(nn.ModuleList):
    """Layers one after the other."""

    def forward(self, x: Tensor, **how: Any) -> Tensor:
        for layer in self:
            x = layer(x, **how)
        return x


def stacked(
    case: Case, make: Callable[[], tuple[nn.Module, nn.Module, nn.Module, Weights]]
) -> tuple[nn.Module, Weights]:
    """(the decoder layers of a case, their weights), each of the parts that `make` makes."""
    layers: list[nn.Module] = []
    weights: Weights = {}
    for prefix in KINDS[case.kind].prefixes:
        qkv, out, mlp, found = make()
        layers.append(DecoderLayer(case, qkv, out, mlp))
        weights.update({prefix + name: parts for name, parts in found.items()})
    return Stack(layers), weights


def _decoder_parts(work: Work) -> tuple[nn.Module, nn.Module, nn.Module, Weights]:
    case, device, dtype = work.case, work.device, work.dtype
    _, k, n = case.sizes
    qkv = PlainNormLinear(k, case.heads.qkv, device, dtype)
    out = nn.Linear(k, k, bias=False, device=device, dtype=dtype)
    mlp = PlainMLP(k, n, device, dtype)
    weights: Weights = {"qkv": [qkv.linear.weight], "out": [out.weight]}
    weights |= {"fc1": [mlp.fc1.weight], "fc2": [mlp.fc2.weight]}
    return qkv, out, mlp, weights


def decoder_table(case: Case, device: torch.device) -> Tensor:
    """Cosines and sines of the positions of a sequence."""
    heads = case.heads
    config = TransformerConfig(
        hidden_size=case.sizes[1],
        heads=heads.queries,
        kv_heads=heads.keys,
        context=heads.context,
    )
    return rotary_table(config, device)


def attention(qkv: Tensor, heads: Heads, table: Tensor) -> Tensor:
    """[tokens, q, k and v] -> [tokens, hidden]: causal, within each sequence."""
    each = qkv.view(-1, heads.context, heads.queries + 2 * heads.keys, heads.size).transpose(1, 2)
    q, k, v = torch.split(each, [heads.queries, heads.keys, heads.keys], dim=1)
    same = heads.queries == heads.keys
    y = F.scaled_dot_product_attention(
        rotate(q, table), rotate(k, table), v, is_causal=True, enable_gqa=not same
    )
    return y.transpose(1, 2).reshape(qkv.shape[0], heads.queries * heads.size)


def plain(work: Work) -> tuple[nn.Module, tuple[Tensor, ...], Weights]:
    """(the layer, what it takes besides the input, its parameters by the work's names)."""
    case, device, dtype = work.case, work.device, work.dtype
    _, k, n = case.sizes
    if case.kind == "linear":
        linear = nn.Linear(k, n, bias=False, device=device, dtype=dtype)
        return linear, (), {"weight": [linear.weight]}
    if case.kind == "norm_linear":
        normed = PlainNormLinear(k, n, device, dtype)
        return normed, (), {"weight": [normed.linear.weight]}
    if case.kind == "mlp":
        mlp = PlainMLP(k, n, device, dtype)
        return mlp, (), {"fc1": [mlp.fc1.weight], "fc2": [mlp.fc2.weight]}
    if case.kind != "grouped":
        stack, weights = stacked(case, lambda: _decoder_parts(work))
        return stack, (), weights
    assert work.ends is not None
    experts = PlainExperts(case.experts, k, n, device, dtype)
    return experts, (work.ends,), {"weight": [experts.weight]}
