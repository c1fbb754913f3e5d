"""`BasicOperation`: one operation with its parameters, the unit that fusions rearrange."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..inputs import autocast_dtype
from ..recipe.autocast import STATE
from .context import OperationContext
from .fusible import FusibleOperation
from .results import results

__all__ = ["BasicOperation"]

COMPUTED = ("output", "tensors to save")
GRADIENTS = ("gradient of the input", "gradients of the parameters")
# Of an operation that is called by itself.
NO_NEIGHBOURS = {"prev_op_grad_output_quantizer": None, "next_op_input_quantizer": None}


class BasicOperation(FusibleOperation):
    """An operation that does not split further. It holds its parameters.

    On the split API a subclass defines

        op_forward_compute(input_, *, requires_grad, ..., **kwargs) -> (output, tensors to save)
        op_forward_save_ctx(ctx, input_, tensors_to_save, *, requires_grad, ..., **kwargs) -> None
        op_backward(ctx, grad_output) -> (gradient of the input, gradients of the parameters)

    and on the legacy one `op_forward(ctx, input_, *, ..., **kwargs) -> output` instead of the first
    two; `FusibleOperation` says which to use when. An operation with `num_extra_inputs` or
    `num_extra_outputs` defines the `fuser_` methods in place of the `op_` ones.
    """

    _framework = True
    num_extra_inputs: int = 0
    num_extra_outputs: int = 0

    def __init__(self, **of_module: Any) -> None:
        super().__init__(**of_module)  # what a base beside this one takes
        self._extra_input_channels: list[str | None] = [None] * self.num_extra_inputs
        self._extra_output_channels: list[str | None] = [None] * self.num_extra_outputs
        self._extra_outputs_to_caller: list[bool] = [True] * self.num_extra_outputs
        self._captured: str | None = None
        self._recipe: Any = None  # of the fuser that ran it last

    @property
    def is_fused_op(self) -> bool:
        return False

    # -------------------------------------------------------------------------------- channels
    def set_extra_input_channel(self, index: int, name: str | None) -> BasicOperation:
        """Take extra input `index` from the channel `name`; None: from the caller again."""
        self._check_channel("extra input", index, self.num_extra_inputs, name)
        self._extra_input_channels[index] = name
        return self

    def set_extra_output_channel(
        self, index: int, name: str | None, *, output_to_caller: bool = True
    ) -> BasicOperation:
        """Put extra output `index` on the channel `name`, and hand it to the caller as well if
        `output_to_caller`; None: to the caller alone."""
        if not isinstance(output_to_caller, bool):
            raise TypeError(
                f"{type(self).__name__}: output_to_caller: got {output_to_caller!r}; True or False"
            )
        self._check_channel("extra output", index, self.num_extra_outputs, name)
        self._extra_output_channels[index] = name
        self._extra_outputs_to_caller[index] = output_to_caller or name is None
        return self

    def _check_channel(self, what: str, index: int, count: int, name: Any) -> None:
        where = type(self).__name__
        if not 0 <= index < count:
            raise IndexError(f"{where}: index: got {index}; it has {count} {what}s")
        if name is not None and (not isinstance(name, str) or not name):
            raise ValueError(f"{where}: name: got {name!r}; a non-empty string, or None to unbind")
        if self._captured is not None:
            raise RuntimeError(
                f"{where}: the channel of {what} {index} cannot change any more: a fuser has "
                f"captured the operation as {self._captured}; set channels before the first call, "
                "or make another operation"
            )

    def _differentiates(self, slot: int, extra_input: Tensor) -> bool:
        """Whether somebody may want the gradient of an extra input. What a channel brings was made
        in this very forward, where autograd marks nothing."""
        return self._extra_input_channels[slot] is not None or extra_input.requires_grad

    @property
    def _writes_extra_inputs(self) -> bool:
        """Whether forward may write to the memory of its extra inputs."""
        return False

    # ------------------------------------------------------------------- start and end of a call
    def begin(
        self,
        *,
        requires_grad: bool,
        input_requires_grad: bool,
        autocast_dtype: torch.dtype | None,
    ) -> dict[str, Any]:
        """Keyword arguments for this call's forward, in addition to the caller's.

        Called before the forward of the pipeline, in order: the place to read ambient state (a
        recipe, `torch.autocast`, of which forward sees nothing), so that forward is a function of
        its arguments.
        """
        return {}

    def _begun(self, input_: Any, requires_grad: bool, kwargs: dict[str, Any]) -> dict[str, Any]:
        """`kwargs` of a forward that no fuser calls, and what `begin` adds to them."""
        begun = self.begin(
            requires_grad=requires_grad,
            input_requires_grad=requires_grad,
            autocast_dtype=autocast_dtype(input_),
        )
        return {**begun, **kwargs}

    def end(self, **kwargs: Any) -> None:
        """Called after the pipeline's forward, with what this operation's forward got."""

    def _input_taker(self, after: Any, **kwargs: Any) -> Any:
        """What the fuser gives the previous operation as `next_op_input_quantizer`; `after` is what
        it gives this one."""
        return self.get_input_quantizer()

    def _grad_taker(self, before: Any, **kwargs: Any) -> Any:
        """What the fuser gives the next operation as `prev_op_grad_output_quantizer`; `before` is
        what it gives this one."""
        return self.get_grad_output_quantizer()

    # ------------------------------------------------------------------------------ quantizers
    def num_quantizers(self, mode: str) -> int:
        """How many tensors it quantizes in "forward" or "backward"."""
        return 0

    def get_quantizer_roles(self, mode: str) -> list[Any] | None:
        """What each quantizer of a mode is for; None: nothing says."""
        return None

    def get_quantizer(self, mode: str, index: int) -> Any:
        """Quantizer `index` of a mode, by the recipe in force; None where there is none.

        It is a value that makes both copies: `copy()` it to change it. What backward needs of it,
        forward puts on the context.
        """
        self._check_quantizer(mode, index)
        # A graph reads the recipe that it is traced in: what eager calls left would be a guard.
        recipe = STATE.recipe if torch.compiler.is_compiling() else self._recipe
        if recipe is None:
            return None
        roles = self.get_quantizer_roles(mode)
        if roles is None:
            keys = tuple([("", "", "") for _ in range(self.num_quantizers(mode))])
        else:
            keys = tuple([r and (r.module_type, r.tensor_type, r.name) for r in roles])
        forward = mode == "forward"
        made = recipe.quantizers(keys if forward else (), () if forward else keys)
        found = made[0 if forward else 1][index]
        if found is None:
            raise NotImplementedError(
                f"{type(self).__name__}: quantizer {index} of {mode} scales by history, which only "
                "linear operations and Quantize keep; use a recipe without delayed scaling"
            )
        return found

    def _check_quantizer(self, mode: str, index: int) -> None:
        count = self.num_quantizers(mode)
        if not 0 <= index < count:
            raise IndexError(
                f"{type(self).__name__}: index: got {index}; it has {count} quantizers in {mode}"
            )

    def reset_recipe_state(self, *, recipe: Any) -> None:
        """Quantize by `recipe` from now on; None: not at all."""
        self._recipe = recipe

    def _save_fp8_metas(self) -> dict[str, Tensor] | None:
        """Copies of delayed scaling's tensors, for `_load_fp8_metas`; None: it has none."""
        return None

    def _load_fp8_metas(self, metas: dict[str, Tensor] | None) -> None:
        """Put back what `_save_fp8_metas` returned."""

    def get_input_quantizer(self) -> Any:
        return self.get_quantizer("forward", 0) if self.num_quantizers("forward") else None

    def get_grad_output_quantizer(self) -> Any:
        return self.get_quantizer("backward", 0) if self.num_quantizers("backward") else None

    # --------------------------------------------------------------------------------- forward
    def op_forward(self, ctx: OperationContext, input_: Any, *args: Any, **kwargs: Any) -> Any:
        """The output; `ctx` records what backward needs."""
        self._only_without_extras("op_forward")
        # Whatever `_use_split_forward`: a legacy subclass of a split class gets here by super().
        if not getattr(ctx, "_begun", False):
            kwargs = self._begun(input_, ctx.requires_grad, {**NO_NEIGHBOURS, **kwargs})
        kwargs["requires_grad"] = ctx.requires_grad
        with torch.no_grad():  # op_backward differentiates it, not autograd
            output, saved = self._computed(input_, kwargs)
        self.op_forward_save_ctx(ctx, input_, saved, **kwargs)
        return output

    def op_forward_compute(self, input_: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """(output, tensors to save)."""
        self._only_without_extras("op_forward_compute")
        raise NotImplementedError(
            f"{type(self).__name__} defines no forward: define op_forward_compute and "
            "op_forward_save_ctx"
        )

    def op_forward_save_ctx(
        self, ctx: OperationContext, input_: Any, tensors_to_save: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Record what backward needs; `tensors_to_save` is what compute returned."""
        self._only_without_extras("op_forward_save_ctx")
        raise NotImplementedError(f"{type(self).__name__} does not define op_forward_save_ctx")

    def op_backward(self, ctx: OperationContext, grad_output: Any) -> tuple[Any, Iterable[Any]]:
        """(gradient of the input, gradients of the parameters)."""
        self._only_without_extras("op_backward")
        raise NotImplementedError(f"{type(self).__name__} does not define op_backward")

    def _computed(self, input_: Any, kwargs: dict[str, Any]) -> Any:
        """(output, tensors to save)."""
        made = self.op_forward_compute(input_, **kwargs)
        return results(made, "op_forward_compute", COMPUTED)

    def _only_without_extras(self, method: str) -> None:
        """`op_` methods have no place for extra inputs and outputs."""
        if self.num_extra_inputs or self.num_extra_outputs:
            raise RuntimeError(
                f"{type(self).__name__}.{method}: the operation has {self.num_extra_inputs} extra "
                f"inputs and {self.num_extra_outputs} extra outputs, which {method} cannot take; "
                f"use (or define) {method.replace('op_', 'fuser_', 1)}"
            )

    # --------------------------------------------------------- the fuser's methods, by default
    def fuser_forward(
        self, basic_op_ctxs: list[Any], input_: Any, *args: Any, **fwd_kwargs: Any
    ) -> tuple[Any, Iterable[Iterable[Tensor | None]]]:
        own = type(self).op_forward is not BasicOperation.op_forward
        if own and not self._use_split_forward:
            self._only_without_extras("op_forward")
            return self.op_forward(basic_op_ctxs[0], input_, **_alone(fwd_kwargs)), [()]
        if not getattr(basic_op_ctxs[0], "_begun", False):
            given, trains = fwd_kwargs["basic_op_kwargs"][0], basic_op_ctxs[0].requires_grad
            fwd_kwargs["basic_op_kwargs"] = [self._begun(input_, trains, given)]
        return super().fuser_forward(basic_op_ctxs, input_, **fwd_kwargs)

    def fuser_forward_compute(
        self, input_: Any, *args: Any, **fwd_kwargs: Any
    ) -> tuple[Any, Iterable[Iterable[Tensor | None]], Any]:
        self._only_without_extras("op_forward_compute")
        output, saved = self._computed(input_, _alone(fwd_kwargs))
        return output, [()], saved

    def fuser_forward_save_ctx(
        self,
        basic_op_ctxs: list[Any],
        input_: Any,
        tensors_to_save: Any,
        *args: Any,
        **fwd_kwargs: Any,
    ) -> None:
        self._only_without_extras("op_forward_save_ctx")
        self.op_forward_save_ctx(basic_op_ctxs[0], input_, tensors_to_save, **_alone(fwd_kwargs))

    def fuser_backward(
        self, basic_op_ctxs: list[Any], grad_output: Any, *, basic_op_grad_extra_outputs: list[Any]
    ) -> tuple[Any, Iterable[Iterable[Any]], Iterable[Iterable[Any]]]:
        self._only_without_extras("op_backward")
        made = self.op_backward(basic_op_ctxs[0], grad_output)
        grad_input, grads = results(made, "op_backward", GRADIENTS)
        return grad_input, [grads], [()]

    def forward(self, input: Any, *extra_inputs: Any, **kwargs: Any) -> Any:  # noqa: A002
        """Run the operation alone, as a pipeline of one."""
        from .fuser import OperationFuser

        return OperationFuser([self])(input, *extra_inputs, basic_op_kwargs=[kwargs])


def _alone(fwd_kwargs: dict[str, Any]) -> dict[str, Any]:
    """The fuser's keyword arguments of a single operation, as its `op_` methods take them."""
    made = {
        "prev_op_grad_output_quantizer": fwd_kwargs["prev_op_grad_output_quantizer"],
        "next_op_input_quantizer": fwd_kwargs["next_op_input_quantizer"],
    }
    if "requires_grad" in fwd_kwargs:
        made["requires_grad"] = fwd_kwargs["requires_grad"][0]
    return {**made, **fwd_kwargs["basic_op_kwargs"][0]}
