"""`Weighted`: a projection that owns its weight and bias, whole or split into named parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .. import apart
from ..parameters import (
    check_one_main_grad,
    check_parameter_dtype,
    default_device,
    initialise,
    make_writable,
    quantized_parameter,
    splits,
)
from .projection import ModeError, Projection

__all__ = ["Weighted"]


class Weighted(Projection):
    """Parameters `weight` and `bias`, or those of each name of `parameters_split`."""

    return_bias: bool
    _init_method: Callable[[Tensor], Any]
    _tracker: tuple[Callable[[], Any] | None, str | None]

    def _make_parameters(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        dtype: torch.dtype,
        parameters_split: Any,
        device: torch.device,
        where: str,
    ) -> None:
        self._shard(in_features, out_features, where)
        check_parameter_dtype(dtype, where)
        column = self.tp_size if self.parallel_mode == "column" else 1
        self._splits = splits(parameters_split, out_features, column, where)
        if len(self._splits) > 1 and device.type == "meta":
            raise ModeError(
                f"{where}: parameters_split on the meta device: the parts share one buffer, which "
                "must exist; construct it on a real device"
            )
        if len(self._splits) > 1 and self._init_recipe is not None:
            raise RuntimeError(
                f"{where}: parameters_split inside quantized_model_init: the parts of a quantized "
                "weight cannot be split; construct it outside, or without parameters_split"
            )
        if self.fuse_wgrad_accumulation:
            check_one_main_grad(self._splits, where)
        weight = torch.empty(self.out_features, self.in_features, dtype=dtype, device=device)
        vector = torch.zeros(self.out_features, dtype=dtype, device=device)
        rows = list(self._splits.values())
        for prefix, part in zip(self._splits, torch.split(weight, rows), strict=True):
            self.register_parameter(f"{prefix}weight", nn.Parameter(part))
        for prefix, part in zip(self._splits, torch.split(vector, rows), strict=True):
            self.register_parameter(f"{prefix}bias", nn.Parameter(part) if bias else None)
        if "" not in self._splits:
            self.__dict__.pop("weight", None)
        self.reset_parameters(defer_init=device.type == "meta")
        if self.cache_weights and "" in self._splits:
            self._preallocate(self.weight)

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Initialise; with `defer_init` only mark the parameters. Meta parameters are made real."""
        if "_splits" not in self.__dict__:
            return  # nn.Linear's constructor, which is not ours
        weights = self._weights()
        if not defer_init:
            make_writable(self, self._init_recipe is not None)
            self.delayed.materialise(default_device(None))
            weights = self._weights()
            initialise(weights, self._init_method, *self._tracker, self._where())
            with torch.no_grad():
                for b in self._biases():
                    b.zero_()
            self.delayed.reset()
            if self._init_recipe is not None:
                self._quantize_parameter()
        self._mark_parameters()

    def _quantize_parameter(self) -> None:
        assert self._init_recipe is not None
        roles = self.get_quantizer_roles(fwd=True, num_quantizers=3)
        (prefix,) = self._splits
        self.register_parameter(
            f"{prefix}weight",
            quantized_parameter(
                self._weights()[0], self._init_recipe, roles, self.delayed, self._preserve
            ),
        )

    def _mark_parameters(self) -> None:
        """Attributes that Megatron-style optimizers and checkpoints look for."""
        for w in self._weights():
            w.tensor_model_parallel = True
            w.partition_dim = 1 if self.parallel_mode == "row" else 0
            w.partition_stride = 1
            if self.wgrad_store.enabled:
                w.skip_backward_post_hook = True  # backward leaves no gradient to act on
        for b in self._biases():
            if self.parallel_mode == "row":
                b.sequence_parallel = self.sequence_parallel
            elif self.parallel_mode == "column":
                b.tensor_model_parallel = True
                b.partition_dim, b.partition_stride = 0, 1

    @property
    def use_bias(self) -> bool:
        """Whether there is a bias: as an `nn.Linear`'s, one may be given, or taken away, later."""
        return bool(self._biases())

    @property
    def apply_bias(self) -> bool:
        """Whether the output has it."""
        return self.use_bias and not self.return_bias

    def _weights(self) -> list[Any]:
        return [getattr(self, f"{prefix}weight") for prefix in self._splits]

    def _biases(self) -> list[Any]:
        found = [getattr(self, f"{prefix}bias") for prefix in self._splits]
        return [b for b in found if b is not None]

    def _joined_weight(self) -> Any:
        return self.weight if "" in self._splits else _joined(self._weights())

    def _owners(self, weight: Any) -> list[Any]:
        """The parameters that `weight`, `_joined_weight`'s, is made of."""
        return [weight] if "" in self._splits else self._weights()

    def _bias(self) -> Any:
        if "" in self._splits:
            return self.bias
        found = self._biases()
        return _joined(found) if found else None

    def need_backward_dw(self) -> bool:
        """Whether `backward_dw` has anything to do with this module."""
        return self.wgrad_store.expects(self._weights())

    def backward_dw(self) -> None:
        """Compute the weight's gradient that the oldest backward left, and store it."""
        if self.need_backward_dw():
            self._backward_dw(self._weights(), list(self._splits.values()))

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], Any]) -> None:
        """`hook()` runs after each `backward_dw`."""
        self.wgrad_store.hooks.append(hook)


def _joined(parts: list[Any]) -> Any:
    return parts[0] if len(parts) == 1 else apart.joined(torch.cat, parts)
