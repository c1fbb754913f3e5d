"""Weight workspaces: a weight that is cast once and multiplied several times.

A workspace is plain tensors: the parts of the row and of the column operand. It is passed into the
core and comes out of it; nothing here knows a module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..core.linear import Workspace as Copies
from ..core.linear import weight_operands
from ..operands import Live
from ..quantizers import Quantizer
from ..recipe.plan import Plan

__all__ = ["Cached", "Versions", "cast_weight", "quantize_weight"]


class Cached(NamedTuple):
    """A cast weight: its copies, `Plan.weight_key` of the casts, and delayed scaling's scale."""

    copies: Copies
    key: str
    scale: Tensor | None


class _Steps:
    """How many steps optimizers have taken, from the first question for `Versions` on."""

    def __init__(self) -> None:
        self.taken = 0
        self.watched = False

    @torch._disable_dynamo  # type: ignore[attr-defined]  # a graph would hold for one number
    def add(self, *_: Any) -> None:
        self.taken += 1


_STEPS = _Steps()


class Versions:
    """The values that parameters have now: equal until one of them is written or replaced.

    An address that was freed comes back with other values; the storage that had it does not, as
    long as a weak reference to it is held here. The step of an optimizer, of any, writes all that
    trains: fused ones leave no version, nor do those that receive what other ranks have made.
    """

    def __init__(self, owners: Sequence[Tensor] = ()) -> None:
        if not _STEPS.watched:
            register_optimizer_step_post_hook(_STEPS.add)
            _STEPS.watched = True
        self._held = [StorageWeakRef(w.untyped_storage()) for w in owners]  # type: ignore[no-untyped-call]
        self._seen = [(w.data_ptr(), w._version) for w in owners]
        self._steps = _STEPS.taken if any(w.requires_grad for w in owners) else 0

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, Versions) and self._seen == other._seen
        return same and self._held == other._held and self._steps == other._steps  # type: ignore[attr-defined]

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return Versions, ()  # the parameters of a copy are others


def cast_weight(
    weight: Tensor,
    plan: Plan,
    live: Live | None,
    cached: Cached | None,
    *,
    col: bool,
    update: bool,
    cast: Callable[[Tensor, Plan, Live | None, bool], Copies] = weight_operands,
) -> tuple[Cached, Cached | None]:
    """(what to multiply, the new workspace or None); `cast` makes the copies.

    A miss casts and returns the workspace twice. A hit is `cached`, cast again in place if
    `update`, and None. A workspace of other casts, without a column copy that is wanted now, or of
    inference mode outside of it, is a miss.
    """
    hit = cached is not None and _fits(cached, plan, col)
    if hit and not update:
        assert cached is not None
        return cached, None
    with torch.no_grad():
        copies = cast(weight.detach(), plan, live, col or hit)
        scale = None if live is None else live[0].clone()
        if not hit:
            made = Cached(_own(copies, plan), plan.weight_key, scale)
            return made, made
        assert cached is not None
        for kept, new in zip(_flat(cached), (*copies[0], *copies[1], scale), strict=True):
            if kept is not None and new is not None:
                _refill(kept, new)
    return cached, None


def _own(copies: Copies, plan: Plan) -> Copies:
    """The copies in memory of their own: one in high precision is the weight itself, which to write
    it again would change for autograd, and which has other values once it has trained."""
    row, (data, scale, amax) = copies
    if data is None or plan.w_col.layout[0] is torch.uint8:
        return copies
    return row, (data.clone(), scale, amax)


def _refill(kept: Tensor, new: Tensor) -> None:
    """`kept` = `new`; one of them has more room if it was made for another device: zeros stay."""
    if kept.shape != new.shape:
        corner = tuple([slice(min(a, b)) for a, b in zip(kept.shape, new.shape, strict=True)])
        kept, new = kept[corner], new[corner]
    kept.copy_(new)


def _fits(cached: Cached, plan: Plan, col: bool) -> bool:
    if cached.key != plan.weight_key or (col and cached.copies[1][0] is None):
        return False
    data = cached.copies[0][0]
    usable = torch.compiler.is_compiling() or torch.is_inference_mode_enabled()
    return usable or data is None or not data.is_inference()


def _flat(cached: Cached) -> tuple[Tensor | None, ...]:
    return (*cached.copies[0], *cached.copies[1], cached.scale)


def quantize_weight(
    *,
    tensor: Any = None,
    quantizer: Any = None,
    workspace: Any = None,
    update_workspace: bool = True,
    skip_update_flag: Tensor | None = None,
    fsdp_group: Any = None,
    workspace_dtype: torch.dtype | None = None,
    cache: bool = False,
) -> tuple[Any, Any]:
    """(weight for a GEMM, new workspace or None), on quantized tensors.

    A quantized `tensor` is returned as it is. A `workspace` that has the copies `quantizer` asks
    for, cast as it casts, is a hit: it is quantized again in place if `update_workspace` (and
    `skip_update_flag` is not 1.0) and returned with None. Else `tensor` is quantized, and is the
    new workspace if `cache`.
    """
    from ..tensors import QuantizedTensorStorage

    if fsdp_group is not None:
        raise NotImplementedError("fsdp_group: FSDP1 is not supported; use FSDP2 (fully_shard)")
    named = quantizer is None or torch.compiler.is_compiling()  # 2.11 traces no `isinstance` of it
    if not named and not isinstance(quantizer, Quantizer):
        raise TypeError(f"quantizer: got {type(quantizer).__name__}; a Quantizer is needed")
    if workspace is not None and not isinstance(workspace, QuantizedTensorStorage):
        raise TypeError(
            f"workspace: got {type(workspace).__name__}; what quantize_weight(cache=True) returned "
            "is needed"
        )
    if isinstance(tensor, QuantizedTensorStorage):
        if quantizer is not None:
            tensor.update_usage(
                rowwise_usage=quantizer.rowwise_usage or None,
                columnwise_usage=quantizer.columnwise_usage or None,
            )
        return tensor, None
    if workspace is not None and quantizer is not None and not _has(workspace, quantizer):
        workspace = None
    if workspace is not None:
        if update_workspace:
            if tensor is None:
                raise ValueError("tensor: None; updating a workspace needs the weight")
            workspace.quantize_(tensor, noop_flag=skip_update_flag)
        return workspace, None
    if tensor is None or quantizer is None:
        missing = "tensor" if tensor is None else "quantizer"
        raise ValueError(
            f"{missing}: None; without a workspace both tensor and quantizer are needed"
        )
    with torch.no_grad():
        made = quantizer.quantize(tensor, dtype=workspace_dtype)
    return made, made if cache else None


def _has(workspace: Any, quantizer: Any) -> bool:
    try:
        quantizer._check_destination(workspace)
    except ValueError:  # of another format
        return False
    usages = workspace.get_usages()
    return all(usages[k] or not v for k, v in quantizer.get_usages().items())
