"""FSDP2: a sharded quantized parameter is gathered as its codes, never in high precision.

Shards are cut along the first dim. What is gathered is the row copy, its block scales without
their padding; the column copy of a square format is derived from it afterwards, that of any other
format is gathered too. What serves the whole tensor (its scale, its amax) must be equal on every
shard, and stays equal: a shard reduces its amax over the group that it is gathered in.

FSDP2 keeps one unsharded parameter and refills it, so that tensors saved for backward find their
data again. A refill therefore never makes a new buffer where there is one, and it leaves version
counters alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.functional import pad

from ..formats import cdiv
from ..layout import flatten
from . import rows

__all__ = ["GatheredStorage", "GatheredTensor"]


class GatheredStorage:
    """The buffers of a storage as FSDP2 moves them."""

    def fsdp_buffer_fields(self: Any) -> tuple[str, ...]:
        """The attributes that are gathered, in order."""
        return tuple(
            inner.attr
            for copy in self._gathered_copies()
            for inner in self._INNER
            if inner.usage == copy and self._is_gathered(inner.part, copy)
        )

    def fsdp_extract_buffers(self: Any) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """(buffers to gather, rows first and unpadded; what every shard has in common)."""
        copies, present = self._gathered_copies(), self._buffers()
        if copies == ["col"] and self._cast(True).format.col_transposed:
            # It lies across rows: it travels as the row copy that it is the transpose of.
            copies, present = ["row"], {**present, **self._derive("row")}
        buffers: list[Tensor] = []
        shared = {i.attr: present[i.attr] for i in self._INNER if i.usage == "both"}
        for copy in copies:
            for inner in self._INNER:
                if inner.usage != copy:
                    continue
                t = present[inner.attr]
                if not self._is_gathered(inner.part, copy):
                    shared[inner.attr] = t
                elif inner.part.endswith("_scale"):
                    col = copy == "col"
                    buffers.append(rows.stripped_scale(t, self.shape, self._cast(col), col))
                else:
                    buffers.append(t.contiguous())
        return tuple(buffers), {"copies": copies, "usages": self.get_usages(), "shared": shared}

    def fsdp_assign_gathered(
        self: Any, gathered: Sequence[Tensor], metadata: dict[str, Any]
    ) -> list[Tensor]:
        """Take gathered buffers; returns those that were made here, not gathered or shared."""
        for attr, tensor in metadata["shared"].items():
            setattr(self, attr, tensor)
        rest, owned = list(gathered), []
        for copy in metadata["copies"]:
            for inner in self._INNER:
                if inner.usage != copy or not self._is_gathered(inner.part, copy):
                    continue
                t = rest.pop(0)
                if inner.part.endswith("_scale"):
                    cast, col = self._cast(copy == "col"), copy == "col"
                    padded = rows.padded_scale(t, self.shape, cast, col)
                    owned.append(self._refill(inner.attr, padded))
                else:
                    # Uneven shards are gathered with padding at the end.
                    count = flatten(self.shape)[0] if t.dim() == 1 < self.dim() else self.shape[0]
                    setattr(self, inner.attr, t[:count])
        usages = metadata["usages"]
        if usages["columnwise"] and "col" not in metadata["copies"]:
            owned += [self._refill(attr, t) for attr, t in self._derive("col").items()]
        if not usages["rowwise"]:
            self._drop("row")
        held = [t for t in self._buffers().values() if t is not None]
        return [t for t in owned if any(t is h for h in held)]

    def _refill(self, attr: str, tensor: Tensor) -> Tensor:
        """`tensor` as a field, in the memory the field has already."""
        current: Tensor | None = getattr(self, attr)
        if current is None or current.shape != tensor.shape:
            setattr(self, attr, tensor)
            return tensor
        with _unsafe_preserve_version_counter(current):
            current.copy_(tensor)
        return current

    def _gathered_copies(self: Any) -> list[str]:
        """The copies that are gathered; NotImplementedError where one cannot be."""
        row, col = self._has("row"), self._has("col")
        copies = ["row"] if row else []
        if col and not (row and self._square("row")):
            copies.append("col")
        for copy in copies:
            self._refuse_ungatherable(copy)
        return copies

    def _refuse_ungatherable(self: Any, copy: str) -> None:
        fmt, name = self._cast(copy == "col").format, type(self).__name__
        if self._with_gemm_swizzled_scales:
            raise NotImplementedError(
                f"{name}: FSDP2 cannot gather GEMM-swizzled scales; make the parameter with a "
                "quantizer that has optimize_for_gemm=False"
            )
        if fmt.scale_transposed:
            raise NotImplementedError(
                f"{name}: {fmt.name} stores its scales across rows, which FSDP2 cannot gather by "
                "rows; use block_scaling_dim=2"
            )
        if copy == "col" and fmt.col_transposed and not fmt.square:
            raise NotImplementedError(
                f"{name}: the columnwise copy of {fmt.name} lies across rows: it can be neither "
                "gathered by rows nor derived; use with_2d_quantization=True, or columnwise=False"
            )

    def _is_gathered(self: Any, part: str, copy: str) -> bool:
        """A global amax is common to all shards; amaxes of rows belong to their rows."""
        return not part.endswith("_amax") or (copy == "row" and self._cast(False).row_scaled)

    def _check_shards(self: Any, world: int, outer: Sequence[int]) -> None:
        """Raise, on every rank alike, if cutting `outer` into `world` shards cuts a block."""
        block = max(
            rows.block_rows(self._cast(c == "col"), c == "col")
            for c in ("row", "col")
            if self._has(c)
        )
        name, tiled = type(self).__name__, self._tiled()
        if tuple(self.shape[1:]) != tuple(outer[1:]):
            raise NotImplementedError(
                f"{name}: a shard of shape {tuple(self.shape)} of a parameter of shape "
                f"{tuple(outer)} is no set of rows; FSDP2 gathers quantized parameters along dim 0 "
                "alone, so leave out shard_placement_fn"
            )
        if tiled and len(outer) < 2:
            raise ValueError(
                f"{name}: FSDP2 cannot shard a parameter of shape {tuple(outer)}: its blocks lie "
                "along the only dim; keep it in high precision"
            )
        inner = flatten(outer)[0] // max(outer[0], 1) if len(outer) > 1 else 1
        if tiled and (outer[0] % world or outer[0] // world * inner % block):
            raise ValueError(
                f"{name}: FSDP2 would cut a parameter of shape {tuple(outer)} into {world} shards "
                f"of {outer[0] / world:g} x {inner} rows, not whole blocks of {block} rows; "
                f"make the first dim a multiple of {world * block}, or keep this parameter out of "
                "fully_shard with ignored_params"
            )

    def _amax_is_global(self: Any) -> bool:
        """Whether a requantization finds an amax that all shards must share: for its scale, or for
        the scales of later ones."""
        quantizer = self._quantizer
        if quantizer is None:
            return False
        scales = hasattr(quantizer, "with_amax_reduction") and quantizer._has_global_amax()
        return scales or bool(quantizer._state_written())

    def _shared_buffers(self: Any) -> list[Tensor]:
        """The tensor-wide scales and amaxes that a requantization computes."""
        return list(self.fsdp_extract_buffers()[1]["shared"].values())

    def _hollow_payload(self: Any, shape: Sequence[int]) -> dict[str, Any]:
        """The payload of a tensor of `shape` that is yet to get its buffers."""
        return {attr: None for attr, _ in self._PAYLOAD}


class GatheredTensor:
    """The hooks that FSDP2 calls on the local tensor of a sharded parameter."""

    def fsdp_pre_all_gather(
        self: Any,
        mesh: Any,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: torch.nn.Module,
        mp_policy: Any,
    ) -> tuple[tuple[Tensor, ...], Any]:
        """(tensors to gather, metadata for `fsdp_post_all_gather`)."""
        self._check_shards(mesh.size(), outer_size)
        if self._amax_is_global():
            self._join(mesh.get_group())
        buffers, metadata = self.fsdp_extract_buffers()
        chunk = cdiv(outer_size[0], mesh.size())
        missing = chunk - self.shape[0]
        if missing:
            # Uneven shards: only data is gathered, and FSDP2 wants it as large on every rank.
            buffers = tuple(
                pad(b, (0, 0) * (b.dim() - 1) + (0, missing))
                if b.dim() > 1
                else pad(b, (0, missing))
                for b in buffers
            )
        return buffers, {"metadata": metadata, "shape": tuple(outer_size)}

    def fsdp_post_all_gather(
        self: Any,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Any = None,
    ) -> Any:
        """The unsharded tensor, or `out` refilled."""
        if out is not None:
            local = getattr(out, "_local_tensor", out)  # a DTensor under tensor parallelism
            local.fsdp_assign_gathered(all_gather_outputs, metadata["metadata"])
            return None
        shape = metadata["shape"]
        made = self._like(
            self._hollow_payload(shape),
            shape,
            dtype=param_dtype,
            device=all_gather_outputs[0].device,
        )
        made.amax_reduction_group = None
        # FSDP2 frees what it gathered, and what is listed here.
        return made, tuple(made.fsdp_assign_gathered(all_gather_outputs, metadata["metadata"]))

    def _join(self: Any, group: Any) -> None:
        """Requantize over `group` from now on; and now, if its shards disagree on a scale.

        Shards of one quantized parameter agree. Shards that were initialised or loaded one by one
        do not, and would each be read with the scale of whoever reads it. With delayed scaling that
        goes for the scales to come, too.
        """
        if self._group_name == group.group_name:
            return
        self.amax_reduction_group = group
        with torch.no_grad():
            self._quantizer._meet(group.group_name)
        shared = self._shared_buffers()
        mine = torch.cat([t.reshape(-1) for t in shared])
        extremes = torch.stack([mine, -mine])
        if self.numel() == 0:  # it has no say, and reads the others' rows all the same
            extremes.fill_(-math.inf)
        torch.distributed.all_reduce(extremes, torch.distributed.ReduceOp.MAX, group=group)
        if not torch.equal(extremes[0], -extremes[1]):
            self.quantize_(self.dequantize())
        elif self.numel() == 0:
            pieces = torch.split(extremes[0], [t.numel() for t in shared])
            for t, common in zip(shared, pieces, strict=True):
                t.copy_(common.reshape(t.shape))
