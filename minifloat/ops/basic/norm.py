"""`LayerNorm`, `RMSNorm` and `L2Normalization`: over the last dims."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ... import norms
from ...core.norm import Norm, NormCall
from ...parameters import check_eps, check_size, default_device
from ..basic_operation import BasicOperation
from ..context import OperationContext
from .values import folded, matrix, plain

__all__ = ["L2Normalization", "LayerNorm", "NormOperation", "RMSNorm"]

PHASES = ("forward", "backward", "inference")


class NormOperation(BasicOperation):
    """Over the last dims, of shape `normalized_shape`, times `weight`, plus `bias` if it has one.

    With `zero_centered_gamma` the factor is `1 + weight`. `sm_margin`, a number or one for each of
    "forward", "backward" and "inference", is for kernels that we do not have: it is kept, and
    changes nothing.
    """

    forward_keywords = ()
    rms: ClassVar[bool]

    def __init__(
        self,
        normalized_shape: int | Iterable[int],
        *,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        sm_margin: int | dict[str, int] = 0,
    ) -> None:
        super().__init__()
        shape: Any = normalized_shape
        shape = tuple(shape) if isinstance(shape, Iterable) else (shape,)
        for n in shape:
            check_size(n, type(self).__name__, "normalized_shape")
        check_eps(eps, type(self).__name__)
        self._shape = tuple([operator.index(n) for n in shape])
        self._sm_margins = _margins(sm_margin, type(self).__name__)
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        device = default_device(device)
        self.weight = nn.Parameter(torch.empty(self._shape, device=device, dtype=dtype))
        if not self.rms:
            self.bias = nn.Parameter(torch.empty(self._shape, device=device, dtype=dtype))
        if device.type != "meta":
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """The factor 1 and no bias; meta parameters are made real."""
        for name, parameter in list(self.named_parameters(recurse=False)):
            if parameter.is_meta:
                real = torch.empty_like(parameter, device=default_device(None))
                self.register_parameter(name, nn.Parameter(real, parameter.requires_grad))
        nn.init.constant_(self.weight, 0.0 if self.zero_centered_gamma else 1.0)
        if not self.rms:
            nn.init.zeros_(self.bias)

    def begin(
        self,
        *,
        requires_grad: bool,
        input_requires_grad: bool,
        autocast_dtype: torch.dtype | None,
    ) -> dict[str, Any]:
        if self.weight.is_meta:
            self.reset_parameters()
        return {"needs": self._needs(requires_grad, input_requires_grad), "dtype": autocast_dtype}

    def _needs(self, requires_grad: bool, input_requires_grad: bool) -> tuple[bool, bool, bool]:
        """Which of the input, the weight and the bias want a gradient."""
        return (
            requires_grad and input_requires_grad,
            requires_grad and self.weight.requires_grad,
            requires_grad and not self.rms and self.bias.requires_grad,
        )

    def op_forward_compute(self, input_: Any, **kwargs: Any) -> tuple[Any, Any]:
        y, saved = self.produce(input_, **kwargs)
        return y.reshape(input_.shape), saved

    def produce(
        self,
        input_: Any,
        *,
        requires_grad: bool = True,
        needs: tuple[bool, bool, bool] | None = None,
        dtype: torch.dtype | None = None,
        lazy: bool = False,
        amax: bool = False,
        **kwargs: Any,
    ) -> tuple[Any, Any]:
        """(the result as a matrix, made or, if `lazy`, to be made; tensors to save).

        `amax`: the read for the statistics finds the amax of the result as well.
        """
        x = plain(input_)
        if tuple(x.shape[x.dim() - len(self._shape) :]) != self._shape:
            raise ValueError(
                f"input: got shape {tuple(x.shape)}; its last dims must be {self._shape}"
            )
        needs = self._needs(requires_grad, requires_grad) if needs is None else needs
        gamma: Tensor = self.weight
        beta: Tensor | None = None if self.rms else self.bias
        if len(self._shape) > 1:  # else no views: of a change since, PyTorch tells more by far
            gamma, beta = gamma.reshape(-1), None if beta is None else beta.reshape(-1)
        call = self._call(x, needs, dtype)._replace(lazy=lazy, amax=amax)
        rows = folded(x) if len(self._shape) == 1 else x.reshape(-1, gamma.shape[0])
        y, saved = Norm.compute(rows, (gamma, beta), call)
        return y, saved

    def _call(self, x: Any, needs: tuple[bool, bool, bool], dtype: Any) -> NormCall:
        made = x.dtype if dtype is None else dtype
        return NormCall(self.eps, self.rms, self.zero_centered_gamma, needs, made)

    def op_forward_save_ctx(
        self,
        ctx: OperationContext,
        input_: Any,
        tensors_to_save: Any,
        *,
        requires_grad: bool = True,
        needs: tuple[bool, bool, bool] | None = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        needs = self._needs(requires_grad, requires_grad) if needs is None else needs
        ctx.call = self._call(input_, needs, dtype)
        ctx.shape = input_.shape
        ctx.save_for_backward(*tensors_to_save)

    def op_backward(self, ctx: OperationContext, grad_output: Any) -> tuple[Any, Iterable[Any]]:
        return self.differentiate(ctx, grad_output, None)

    def differentiate(
        self, ctx: OperationContext, grad_output: Any, add: Any
    ) -> tuple[Any, Iterable[Any]]:
        """(gradient of the input, plus `add`, gradients of the parameters)."""
        assert ctx.saved_tensors is not None
        x, mean, rstd, gamma = ctx.saved_tensors
        needs = ctx.call.needs
        dy = plain(grad_output).reshape(x.shape)
        dx, dgamma, dbeta = norms.norm_backward(
            dy,
            x,
            mean,
            rstd,
            gamma,
            zero_centered=self.zero_centered_gamma,
            add=None if add is None else plain(add).reshape(x.shape),
        )
        found = [
            t.reshape(self._shape) if need and t is not None else None
            for t, need in zip((dgamma, dbeta), needs[1:], strict=True)
        ]
        return dx.reshape(ctx.shape) if needs[0] else None, found[:1] if self.rms else found

    def extra_repr(self) -> str:
        return f"{self._shape}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"


def _margins(given: int | dict[str, int], where: str) -> dict[str, int]:
    """`sm_margin` for each phase."""
    made = dict.fromkeys(PHASES, given) if isinstance(given, int) else given
    if not isinstance(made, dict) or set(made) != set(PHASES):
        raise ValueError(
            f"{where}: sm_margin: got {given!r}; an int, or a dict with an int for each of "
            f"{', '.join(PHASES)}"
        )
    return dict(made)


class LayerNorm(NormOperation):
    """`y = (x - mean) / sqrt(var + eps) weight + bias`."""

    rms = False


class RMSNorm(NormOperation):
    """`y = x / sqrt(mean(x^2) + eps) weight`."""

    rms = True


class L2Normalization(BasicOperation):
    """`y = x / sqrt(sum(x^2) + eps)` over the last dim. `seq_length` and `micro_batch_size` are for
    compilers that need them, and change nothing."""

    forward_keywords = ()

    def __init__(
        self,
        *,
        eps: float = 1e-6,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        check_eps(eps, "L2Normalization")
        self.eps = eps

    def op_forward_compute(
        self, input_: Any, *, requires_grad: bool = True, **kwargs: Any
    ) -> tuple[Any, Any]:
        if len(input_.shape) == 0:
            raise ValueError("input: got shape (); a last dim to normalize is needed")
        x: Tensor = matrix(input_)
        y, rstd = norms.l2_norm(x, self.eps)
        return y.reshape(input_.shape), (x, rstd) if requires_grad else ()

    def op_forward_save_ctx(
        self, ctx: OperationContext, input_: Any, tensors_to_save: Any, **kwargs: Any
    ) -> None:
        ctx.shape = input_.shape
        ctx.save_for_backward(*tensors_to_save)

    def op_backward(self, ctx: OperationContext, grad_output: Any) -> tuple[Any, Iterable[Any]]:
        assert ctx.saved_tensors is not None
        x, rstd = ctx.saved_tensors
        return norms.l2_norm_backward(matrix(grad_output), x, rstd).reshape(ctx.shape), ()

    def extra_repr(self) -> str:
        return f"eps={self.eps}"
