"""`FusedMLP`: two linear operations and the activation between them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...core.activation import ActivatedCall, ActivatedLinear
from ...core.linear import Gradient
from ..basic.activation import ActivationOperation
from ..basic.bias import Bias
from ..basic.extra import AddExtraInput
from ..basic.values import folded, plain, summed
from ..fused_operation import FusedOperation

__all__ = ["FusedMLP"]

Outputs = Iterable[Iterable[Any]]
Gradients = tuple[Any, Iterable[Iterable[Any]], Iterable[Iterable[Any]]]


class FusedMLP(FusedOperation):
    """`act(x w1^T + b1) w2^T + b2 + extra`, both ways; the biases and `extra` may be missing.

    The activation is cast as it is made and not kept: backward makes it again of what the first
    product returned, in the kernel that casts that one's gradient. So the second operation saves
    its input before the activation, as `minifloat.LayerNormMLP` does.
    """

    def __init__(self, basic_ops: Iterable[Any]) -> None:
        super().__init__(basic_ops)
        ops = list(self.basic_ops)
        act = 2 if isinstance(ops[1], Bias) else 1
        self._act = act
        self._bias1 = 1 if act == 2 else None
        rest = range(act + 2, len(ops))
        self._bias2 = next((i for i in rest if isinstance(ops[i], Bias)), None)
        self._extra = next((i for i in rest if isinstance(ops[i], AddExtraInput)), None)

    @staticmethod
    def fits(ops: list[Any], recipe: Any) -> bool:
        """Whether the activation has the width and the dtype that the second product reads."""
        at = next(i for i, op in enumerate(ops) if isinstance(op, ActivationOperation))
        first, act, second = ops[0], ops[at], ops[at + 1]
        ways = 2 if act._producer.gated else 1
        if first.local_out_features != ways * second.local_in_features:
            return False
        return bool(first.weight.dtype == second.weight.dtype) and not act.cache_quantized_input

    # ------------------------------------------------------------------------------------ forward
    def fuser_forward_compute(self, input_: Any, **fwd_kwargs: Any) -> tuple[Any, Outputs, Any]:
        """What is saved: (the first operation's tensors, the second's)."""
        first, second = self._linears()
        given = fwd_kwargs["basic_op_kwargs"]
        call1, call2 = given[0]["call"], given[self._act + 1]["call"]
        call1 = call1._replace(hands=(True, False))  # the activation reads h next: no rank sums it
        h, saved1 = first.multiply(input_, self._vector(self._bias1, call1), call1)
        shape = (*h.shape[:-1], second.local_out_features)
        joining = add = extra = None
        if self._extra is not None:
            add = self.basic_ops[self._extra]
            extra = fwd_kwargs["basic_op_extra_inputs"][self._extra][0]
            joining = add.joining(extra, shape, call2.dtype)
        both = self._call(call1, call2 if joining is None else call2._replace(**joining))
        params = second.weight_of(call2), self._vector(self._bias2, call2)
        y, saved2 = ActivatedLinear.compute(folded(h), params, both)
        y = y.reshape(shape)
        if add is not None and joining is None:
            y = add.add(extra, y)
        return y, [() for _ in self.basic_ops], (saved1, saved2)

    def fuser_forward_save_ctx(
        self, basic_op_ctxs: list[Any], input_: Any, tensors_to_save: Any, **fwd_kwargs: Any
    ) -> None:
        saved = {0: tensors_to_save[0], self._act + 1: tensors_to_save[1]}
        if self._extra is not None:
            first, second = self._linears()
            shape = (*first.output_shape(input_)[:-1], second.local_out_features)
            basic_op_ctxs[self._extra].of_x = shape
        for i, tensors in saved.items():
            self.basic_ops[i].fuser_forward_save_ctx(
                [basic_op_ctxs[i]], input_, tensors, **self.basic_kwargs(i, fwd_kwargs)
            )

    # ----------------------------------------------------------------------------------- backward
    def fuser_backward(
        self, basic_op_ctxs: list[Any], grad_output: Any, *, basic_op_grad_extra_outputs: list[Any]
    ) -> Gradients:
        first, _ = self._linears()
        of_params: list[Any] = [() for _ in self.basic_ops]
        of_extra: list[Any] = [() for _ in self.basic_ops]
        if self._extra is not None:
            of_extra[self._extra] = (grad_output,)
            grad_output = summed(grad_output, basic_op_ctxs[self._extra].of_x)
        if self._bias2 is not None:
            bias, ctx = self.basic_ops[self._bias2], basic_op_ctxs[self._bias2]
            grad_output, of_params[self._bias2] = bias.op_backward(ctx, grad_output)
        ctx1, ctx2 = basic_op_ctxs[0], basic_op_ctxs[self._act + 1]
        g = grad_output
        if not isinstance(g, Gradient):
            g = folded(plain(g).to(ctx2.call.dtype))
        both = self._call(ctx1.call, ctx2.call)
        dh, (dw, _) = ActivatedLinear.backward(g, list(ctx2.saved_tensors), both)
        of_params[self._act + 1] = (dw,)
        dx = None
        of_params[0] = (None,)
        if dh is not None:
            dx, of_params[0] = first.differentiate(ctx1, dh, ctx1.call)
        if self._bias1 is not None:
            vector = self.basic_ops[self._bias1].bias
            db = None if dh is None else dh.of_bias
            of_params[self._bias1] = (None if db is None else db.to(vector.dtype),)
        return dx, of_params, of_extra

    # -------------------------------------------------------------------------------------- parts
    def _linears(self) -> tuple[Any, Any]:
        return self.basic_ops[0], self.basic_ops[self._act + 1]

    def _vector(self, index: int | None, call: Any) -> Any:
        """A bias as the product of a call takes it."""
        return None if index is None else self.basic_ops[index].bias.to(call.dtype)

    def _call(self, call1: Any, call2: Any) -> ActivatedCall:
        """Of the second operation; the gradient of h is cast, and summed, for the first."""
        need_dx, need_dw, _ = call1.needs
        of_bias = False
        if self._bias1 is not None:
            of_bias = call2.needs[0] and self.basic_ops[self._bias1].bias.requires_grad
        before = call1._replace(needs=(need_dx, need_dw, of_bias))
        return ActivatedCall(self.basic_ops[self._act]._producer, before, call2)
