"""Linear over two ranks: tensor and sequence parallelism, and amaxes that all ranks share."""

from __future__ import annotations

import functools
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import minifloat
from minifloat import collectives
from minifloat import recipe as recipes

from ..tensors import world
from .cases import Counter
from .parallel import (
    IN,
    OUT,
    PLAIN_NVFP4,
    RECIPES,
    Case,
    Whole,
    alone,
    assert_equal,
    assert_within,
    bounds,
    call_of,
    half,
    local,
    make,
    of_parts,
    of_whole,
    run,
    sharded,
    summed,
    whole,
)

STEPS = 2  # delayed scaling's first scale is 1


# ------------------------------------------------------------------------ against unsharded layers
def check_parts(case: Case, rank: int) -> None:
    """Bit for bit what the ranks' parts add up to."""
    recipe = RECIPES[case.recipe]()
    data = whole(case, 0)
    layer, other = sharded(case, data, rank), alone(case, data, rank)
    call = call_of(case, layer, recipe)
    for step in range(STEPS):
        data = whole(case, step)
        expected = of_parts(case, data, rank, recipe, other)
        got = run(case, layer, recipe, *local(case, data, rank), call)
        assert_equal(expected, got, step)


def check_whole(case: Case, rank: int) -> None:
    """What an unsharded layer computes, of operands with the same codes.

    Where a scale serves a whole tensor, the data gives all shards of it the same amax; but not all
    rows, of which sequence parallelism must have seen the others'.
    """
    recipe = PLAIN_NVFP4 if case.recipe == "nvfp4" else RECIPES[case.recipe]()
    data = whole(case, 0, equal=True)
    layer = sharded(case, data, rank)
    other = make(case, IN, OUT, data.w, data.b, return_bias=case.return_bias)
    call, plain = call_of(case, layer, recipe), call_of(case, other, recipe)
    for step in range(STEPS):
        data = whole(case, step, equal=True)
        expected = of_whole(case, run(case, other, recipe, data.x, data.g, plain), rank)
        got = run(case, layer, recipe, *local(case, data, rank), call)
        if case.mode == "row" and case.sequence and case.bias:
            got["db"] = summed(got["db"])  # what Megatron does with bias.sequence_parallel
        assert_within(expected, got, of_whole(case, bounds(data), rank), step)


def check_attributes(case: Case, rank: int) -> None:
    """What Megatron-style code reads off the parameters."""
    layer = sharded(case, whole(case, 0), rank)
    row = case.mode == "row"
    shape = (OUT, IN // 2) if row else (OUT // 2, IN)
    assert tuple(layer.weight.shape) == shape
    assert tuple(layer.bias.shape) == ((OUT,) if row else (OUT // 2,))
    w, b = layer.weight, layer.bias
    assert (w.tensor_model_parallel, w.partition_dim, w.partition_stride) == (True, int(row), 1)
    assert layer.sequence_parallel is case.sequence and layer.tp_size == 2
    if row:
        assert b.sequence_parallel is case.sequence
        assert not hasattr(b, "tensor_model_parallel")
    else:
        assert (b.tensor_model_parallel, b.partition_dim, b.partition_stride) == (True, 0, 1)
        assert not hasattr(b, "sequence_parallel")


def check_bias_once(rank: int) -> None:
    for sequence in (False, True):
        case = Case("row", "none", sequence)
        data = whole(case, 0)
        layer = sharded(case, data, rank)
        x = torch.zeros_like(local(case, data, rank)[0])
        y = layer(x)
        assert torch.equal(y, data.b.expand_as(y))


# ----------------------------------------------------------------------------------------- compiled
def check_compiled(case: Case, rank: int) -> None:
    """One graph with the bits of eager; another one for any number of tokens."""
    torch._dynamo.reset()
    recipe = RECIPES[case.recipe]()
    data = whole(case, 0)
    layer, other = (sharded(case, data, rank) for _ in range(2))
    counter = Counter()
    call = call_of(case, layer, recipe)
    compiled = torch.compile(call_of(case, other, recipe), backend=counter, fullgraph=True)
    for step, lead in enumerate([(6, 7), (6, 7), (4, 7), (10, 7), (16, 7)]):
        inputs = local(case, whole(case, step, lead), rank)
        expected = run(case, layer, recipe, *inputs, call)
        assert_equal(expected, run(case, other, recipe, *inputs, compiled), lead)
        assert counter.graphs <= (1 if step < 2 else 2), (lead, counter.graphs)
    for a, b in zip(layer.buffers(), other.buffers(), strict=True):
        assert torch.equal(a, b)
    with torch.no_grad():
        data = whole(case, 9, (8, 7))
        x = local(case, data, rank)[0]
        out = run_forward(case, recipe, call, x), run_forward(case, recipe, compiled, x)
        assert torch.equal(*out)


def run_forward(case: Case, recipe: Any, call: Any, x: torch.Tensor) -> Any:
    with minifloat.autocast(enabled=recipe is not None, recipe=recipe):
        y = call(x)
    return y[0] if isinstance(y, tuple) else y


# ------------------------------------------------------------------------------------------- amaxes
@functools.cache
def groups(rank: int) -> dict[str, Any]:
    own = [distributed.new_group([r]) for r in range(world.SIZE)]
    return {"world": None, "both": distributed.new_group([0, 1]), "own": own[rank]}


def check_amax(group: str, reduces: bool, inside: bool, compiled: bool, rank: int) -> None:
    """Scales are those of the data of the whole group, in both directions."""
    torch._dynamo.reset()
    given = groups(rank)[group]
    shared = reduces and group != "own"
    length = 1024 if compiled else 3
    recipe = recipes.DelayedScaling(amax_history_len=length, reduce_amax=reduces)
    by_itself = recipes.DelayedScaling(amax_history_len=length, reduce_amax=False)

    def tensors(step: int, r: int) -> list[torch.Tensor]:
        made = torch.Generator().manual_seed(10 * step + r)
        return [torch.randn(5, n, generator=made) * 10.0 ** (r - step) for n in (24, 40)]

    def weight(r: int) -> torch.Tensor:
        return torch.full((40, 24), 1.5 + r)

    layer, other = (minifloat.Linear(24, 40, bias=False) for _ in range(2))
    with torch.no_grad():
        layer.weight.copy_(weight(rank))
        other.weight.copy_(weight(1 if shared else rank))

    def step_of(x: torch.Tensor) -> torch.Tensor:
        if not inside:
            return layer(x)  # type: ignore[no-any-return]
        with minifloat.autocast(recipe=recipe, amax_reduction_group=given):
            return layer(x)  # type: ignore[no-any-return]

    counter = Counter()
    call = torch.compile(step_of, backend=counter, fullgraph=True) if compiled else step_of
    for step in range(5):
        x, g = tensors(step, rank)
        with minifloat.autocast(recipe=recipe, amax_reduction_group=given):
            y = call(x.requires_grad_())
        y.backward(g)
        if shared:
            both = [tensors(step, r) for r in range(world.SIZE)]
            x, g = (torch.cat(parts) for parts in zip(*both, strict=True))
        with minifloat.autocast(recipe=by_itself):
            y = other(x.detach().requires_grad_())
        y.backward(g)
        for (name, a), (_, b) in zip(layer.named_buffers(), other.named_buffers(), strict=True):
            assert torch.equal(a, b), (step, name, a, b)
    assert layer.delayed.scale_input != 1 and layer.delayed.scale_grad_output != 1
    assert counter.graphs <= 1


def check_amax_of_nested_groups(rank: int) -> None:
    """A layer reduces over the group of the autocast it ran in."""
    first, second = (minifloat.Linear(8, 8, bias=False) for _ in range(2))
    recipe = recipes.DelayedScaling()
    x = torch.full((4, 8), 1.0 + rank)
    with minifloat.autocast(recipe=recipe):
        a = first(x)
        with minifloat.autocast(recipe=recipe, amax_reduction_group=groups(rank)["own"]):
            b = second(x)
    assert first.delayed.history_forward.max() == 2.0
    assert second.delayed.history_forward.max() == 1.0 + rank
    ((a + b) * (1.0 + rank)).sum().backward()
    assert first.delayed.history_backward.max() == 2.0
    assert second.delayed.history_backward.max() == 1.0 + rank


def check_ddp(reduces: bool, rank: int) -> None:
    """Without DDP's writes to buffers, amaxes of two forwards in one autocast are of all ranks."""
    recipe = recipes.DelayedScaling(reduce_amax=reduces)
    layer = minifloat.Linear(8, 8, bias=False, device="cpu")
    replica = torch.nn.parallel.DistributedDataParallel(layer, broadcast_buffers=False)
    with minifloat.autocast(recipe=recipe):
        y = [replica(torch.full((4, 8), value)) for value in (3.0 + rank, 1.0)]
    assert layer.delayed.history_forward[:, 0].max() == (4.0 if reduces else 3.0 + rank)
    torch.stack(y).sum().backward()
    expected = torch.full((8, 8), 4 * (3.5 + 1.0))
    assert layer.weight.grad is not None and torch.equal(layer.weight.grad, expected)


def check_layers_reduce_together(rank: int) -> None:
    """One collective for all layers of an autocast, however their steps are made."""
    recipe = recipes.DelayedScaling()
    by_hand = recipes.DelayedScaling(
        scaling_factor_compute_algo=lambda amax, scale, limit, recipe: limit / amax
    )
    layers = [minifloat.Linear(8, 8, bias=False) for _ in range(4)]
    sent = []
    ordinary = collectives.all_reduce

    def counted(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        sent.append(x.numel())
        return ordinary(x, *rest)

    collectives.all_reduce = counted
    try:
        with minifloat.autocast(recipe=recipe):
            for i, layer in enumerate(layers[:3]):
                layer(torch.full((4, 8), float(i + 1) * (1 + rank)))
            with minifloat.autocast(recipe=by_hand):
                layers[3](torch.full((4, 8), 9.0 * (1 + rank)))
    finally:
        collectives.all_reduce = ordinary
    assert sent == [4 * 3]
    for layer, largest in zip(layers, (2.0, 4.0, 6.0, 18.0), strict=True):
        assert layer.delayed.history_forward.max() == largest
        assert layer.delayed.scale_input == 448.0 / largest
        assert layer.delayed.amax_input == 0


def check_layers_on_two_devices(rank: int) -> None:
    """Those of a device have a collective of their own."""
    here, there = (minifloat.Linear(8, 8, bias=False, device=d) for d in ("cpu", "meta"))
    with minifloat.autocast(recipe=recipes.DelayedScaling()):
        for layer in (there, here, there):
            layer(torch.full((4, 8), 1.0 + rank, device=layer.weight.device))
    assert here.delayed.history_forward.max() == 2.0 and here.delayed.scale_input == 224.0


# ------------------------------------------------------------------------------- other ways to call
def check_quantized_input(mode: str, sequence: bool, name: str, rank: int) -> None:
    """A quantized input is worth its values."""
    case = Case(mode, name, sequence)
    recipe = RECIPES[name]()
    data = whole(case, 0)
    x, g = local(case, data, rank)
    quantizer = minifloat.Float8CurrentScalingQuantizer(minifloat.DType.kFloat8E4M3)
    if name == "mxfp8":
        quantizer = minifloat.MXFP8Quantizer(minifloat.DType.kFloat8E4M3)
    quantized = quantizer.quantize(x)
    found = []
    for inp in (quantized, quantized.dequantize()):
        layer = sharded(case, data, rank)
        with minifloat.autocast(recipe=recipe):
            y = layer(inp)
        y.backward(g)
        found.append({"y": y.detach(), "db": layer.bias.grad})
        if name == "current":  # whose column copy has the values of the row copy
            found[-1]["dw"] = layer.weight.grad
    assert_equal(found[1], found[0])


def check_fp8_grad(name: str, sequence: bool, compiled: bool, rank: int) -> None:
    """The gradient of the input is quantized after it is summed."""
    case = Case("column", name, sequence)
    recipe = RECIPES[name]()
    data = whole(case, 0)
    x, g = local(case, data, rank)
    found = []
    for fp8_grad in (False, True):
        layer = sharded(case, data, rank)
        call: Any = partial(layer, fp8_grad=fp8_grad)
        if compiled:
            torch._dynamo.reset()
            call = torch.compile(call, backend="aot_eager", fullgraph=True)
        inp = x.clone().requires_grad_()
        with minifloat.autocast(recipe=recipe):
            y = call(inp)
        (dx,) = torch.autograd.grad(y, inp, g)
        found.append(dx)
    quantizer: Any = minifloat.Float8CurrentScalingQuantizer(minifloat.DType.kFloat8E5M2)
    if name == "delayed":
        one, amax = torch.ones(1), torch.zeros(1)
        quantizer = minifloat.Float8Quantizer(one, amax, minifloat.DType.kFloat8E5M2)
    expected, got = quantizer.quantize(found[0]).dequantize(), found[1]
    got = got.dequantize() if isinstance(got, minifloat.QuantizedTensor) else got
    assert torch.equal(expected, got)
    if name == "delayed":
        largest = found[0].abs().max()
        distributed.all_reduce(largest, distributed.ReduceOp.MAX)
        assert layer.delayed.history_backward[:, 1].max() == largest
        assert layer.delayed.amax_grad_input == 0


def check_split(rank: int) -> None:
    """Each of the parts of a weight is split over the ranks."""
    names = {"q": IN, "k": IN // 2}
    layer = minifloat.Linear(
        IN, 3 * IN // 2, parameters_split=names, bias=False, parallel_mode="column",
        tp_group=distributed.group.WORLD,
    )  # fmt: skip
    assert tuple(layer.q_weight.shape) == (IN // 2, IN)
    assert tuple(layer.k_weight.shape) == (IN // 4, IN)
    assert layer.k_weight.partition_dim == 0
    x = torch.randn(4, IN)
    expected = x @ torch.cat([layer.q_weight, layer.k_weight]).t()
    torch.testing.assert_close(layer(x), expected)


def check_checkpoint(case: Case, compiled: bool, rank: int) -> None:
    """Recomputing repeats the collectives."""
    torch._dynamo.reset()
    recipe = RECIPES[case.recipe]()
    data = whole(case, 0)
    layer, other = (sharded(case, data, rank) for _ in range(2))

    def again(x: torch.Tensor) -> Any:
        return minifloat.checkpoint(other, x)

    call = torch.compile(again, backend="aot_eager", fullgraph=True) if compiled else again
    for step in range(STEPS):
        inputs = local(case, whole(case, step), rank)
        expected = run(case, layer, recipe, *inputs, layer)
        assert_equal(expected, run(case, other, recipe, *inputs, call), step)


def check_main_grad(case: Case, rank: int) -> None:
    recipe = RECIPES[case.recipe]()
    data = whole(case, 0)
    inputs = local(case, data, rank)
    layer, other = (
        sharded(case, data, rank),
        sharded(case, data, rank, fuse_wgrad_accumulation=True),
    )
    expected = run(case, layer, recipe, *inputs, layer)
    other.weight.main_grad = torch.ones_like(other.weight)
    with minifloat.autocast(enabled=recipe is not None, recipe=recipe):
        y = other(inputs[0].clone().requires_grad_())
    y.backward(inputs[1])
    assert other.weight.grad is None
    close = torch.testing.assert_close
    close(other.weight.main_grad, expected["dw"] + 1, rtol=2**-22, atol=2**-22)


def check_quantized_weight(case: Case, rank: int) -> None:
    """Parameters made quantized: the parts are quantized one by one."""
    recipe = RECIPES[case.recipe]()
    data = whole(case, 0)
    with minifloat.quantized_model_init(recipe=recipe):
        layer = sharded(case, data, rank)
    assert isinstance(layer.weight, minifloat.QuantizedTensor)
    assert layer.weight.partition_dim == (case.mode == "row")
    values = layer.weight.dequantize()
    with minifloat.quantized_model_init(recipe=recipe):
        other = alone(case, data, rank)
    assert torch.equal(values, other.weight.dequantize())
    expected = of_parts(case, data, rank, recipe, other)
    assert_equal(expected, run(case, layer, recipe, *local(case, data, rank), layer))


# ------------------------------------------------------------------------------------------- errors
def raises(error: type, match: str, function: Any, *args: Any, **kwargs: Any) -> None:
    with pytest.raises(error, match=match):
        function(*args, **kwargs)


def check_groups(rank: int) -> None:
    """A group that is set later; groups that do not fit."""
    case = Case("column", "none", True)
    data = whole(case, 0)
    x, _ = local(case, data, rank)
    late = make(
        case, IN, OUT, half(data.w, 0, rank), half(data.b, 0, rank),
        tp_size=2, parallel_mode="column", sequence_parallel=True, name="late",
    )  # fmt: skip
    raises(RuntimeError, r"Linear\(late\): tp_size=2.*set_tensor_parallel_group", late, x)
    raises(ValueError, "1 ranks.*tp_size=2", late.set_tensor_parallel_group, groups(rank)["own"])
    assert late.tp_group is None
    late.set_tensor_parallel_group(distributed.group.WORLD)
    assert late.tp_group is distributed.group.WORLD
    assert torch.equal(late(x), sharded(case, data, rank)(x))
    late.set_tensor_parallel_group(None)
    raises(RuntimeError, "without a process group", late, x)
    # A group of one, or no mode, is no parallelism.
    one = minifloat.Linear(
        24, 40, tp_group=groups(rank)["own"], parallel_mode="row", sequence_parallel=True
    )
    assert one.tp_size == 1 and not one.sequence_parallel
    assert torch.equal(one(torch.ones(3, 24)), torch.nn.Linear.forward(one, torch.ones(3, 24)))
    no_mode = minifloat.Linear(24, 40, tp_group=distributed.group.WORLD)
    assert tuple(no_mode.weight.shape) == (40, 24)
    assert tuple(no_mode(torch.ones(3, 24)).shape) == (3, 40)


def check_rows_that_do_not_divide(rank: int) -> None:
    case = Case("row", "none", True)
    layer = sharded(case, whole(case, 0), rank, name="down")
    raises(ValueError, r"Linear\(down\).*5.*tp_size=2", layer, torch.ones(5, 4, IN // 2))
    raises(ValueError, r"Linear\(down\).*sequence", layer, torch.ones(IN // 2))


CHANGES = ({}, {"bias": False}, {"return_bias": True})
MODES = tuple(product(("column", "row"), (False, True)))
ALL = [
    Case(mode, name, sequence, **change)
    for (mode, sequence), name, change in product(MODES, RECIPES, CHANGES)
]
QUICK_CASES = [  # every mode, every recipe
    Case("column", "delayed"),
    Case("column", "nvfp4", True),
    Case("row", "current"),
    Case("row", "block", True, return_bias=True),
]
AMAX = [
    *product(("world", "both", "own"), (True,), (False, True), (False, True)),
    *product(("world",), (False,), (False, True), (False, True)),
]
BF16 = [
    Case(mode, name, sequence, dtype=torch.bfloat16)
    for (mode, sequence), name in product(MODES, RECIPES)
]
INSIDE = [
    Case(mode, name, sequence, inside=True)
    for (mode, sequence), name in product(MODES, ("delayed", "mxfp8"))
]
COMPILED = [
    case for case in ALL if case.recipe == "current" or (case.bias and not case.return_bias)
] + INSIDE
CHECKS: world.Checks = {
    **{f"parts_{case}": partial(check_parts, case) for case in (*ALL, *BF16, *INSIDE)},
    **{f"whole_{case}": partial(check_whole, case) for case in ALL},
    **{f"attributes_{m}_{s}": partial(check_attributes, Case(m, "none", s)) for m, s in MODES},
    "bias_once": check_bias_once,
    **{f"compiled_{case}": partial(check_compiled, case) for case in COMPILED},
    **{
        f"amax_{group}{'' if reduces else '_unreduced'}{'_inside' if inside else ''}"
        f"{'_compiled' if compiled else ''}": partial(check_amax, group, reduces, inside, compiled)
        for group, reduces, inside, compiled in AMAX
    },
    "amax_nested": check_amax_of_nested_groups,
    **{f"ddp_{reduces}": partial(check_ddp, reduces) for reduces in (True, False)},
    "amax_together": check_layers_reduce_together,
    "amax_devices": check_layers_on_two_devices,
    **{
        f"quantized_input_{m}_{s}_{name}": partial(check_quantized_input, m, s, name)
        for (m, s), name in product(MODES, ("current", "mxfp8"))
    },
    **{
        f"fp8_grad_{name}_{s}{'_compiled' if c else ''}": partial(check_fp8_grad, name, s, c)
        for name, s, c in product(("current", "delayed"), (False, True), (False, True))
        if not (c and name == "delayed")
    },
    "split": check_split,
    **{
        f"checkpoint{'_compiled' if c else ''}_{m}_{s}_{name}": partial(
            check_checkpoint, Case(m, name, s), c
        )
        for (m, s), name, c in product(MODES, ("delayed", "nvfp4"), (False, True))
    },
    **{
        f"main_grad_{m}_{s}_{name}": partial(check_main_grad, Case(m, name, s))
        for (m, s), name in product(MODES, ("current", "none"))
    },
    **{
        f"quantized_weight_{m}_{s}_{name}": partial(check_quantized_weight, Case(m, name, s))
        for (m, s), name in product(MODES, ("current", "block", "mxfp8", "nvfp4"))
    },
    "groups": check_groups,
    "rows": check_rows_that_do_not_divide,
}
QUICK_NAMES = {
    *(f"{kind}_{case}" for case in QUICK_CASES for kind in ("parts", "whole")),
    "parts_row_sequence_mxfp8", "whole_column_sequence_current",
    "compiled_column_sequence_delayed", "compiled_row_mxfp8", "compiled_row_sequence_nvfp4",
    "attributes_column_False", "attributes_row_True", "bias_once", "amax_both",
    "amax_world_compiled", "amax_world_unreduced", "amax_nested", "amax_together", "amax_devices",
    "ddp_True", "ddp_False",
    "quantized_input_column_True_current", "fp8_grad_delayed_True", "checkpoint_row_True_delayed",
    "groups", "rows",
}  # fmt: skip
QUICK = {name: CHECKS[name] for name in CHECKS if name in QUICK_NAMES}
DEEP = {name: CHECKS[name] for name in CHECKS if name not in QUICK_NAMES}
assert len(QUICK) == len(QUICK_NAMES)


@pytest.mark.parametrize("name", QUICK)
def test_on_two_ranks(name: str) -> None:
    world.passes(__name__, "QUICK", name)


@pytest.mark.deep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", DEEP)
def test_on_two_ranks_deeply(name: str) -> None:
    world.passes(__name__, "DEEP", name)


# ---------------------------------------------------------------------------------- in one process
@pytest.mark.parametrize(
    ("arguments", "error", "complaint"),
    [
        ({"parallel_mode": "diagonal"}, ValueError, "parallel_mode.*'diagonal'.*'column', 'row'"),
        ({"parallel_mode": "diagonal"}, AssertionError, "parallel_mode"),
        ({"parallel_mode": "column", "tp_size": 3}, ValueError, "out_features=40.*tp_size=3"),
        ({"parallel_mode": "row", "tp_size": 5}, ValueError, "in_features=24.*tp_size=5"),
        ({"tp_group": "world"}, TypeError, r"Linear\(up\): tp_group: got .world.; a process"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type, complaint: str) -> None:
    with pytest.raises(error, match=complaint):
        minifloat.Linear(24, 40, name="up", **arguments)


@pytest.mark.parametrize("mode", ["column", "row"])
def test_a_missing_group(mode: str) -> None:
    layer = minifloat.Linear(24, 40, tp_size=2, parallel_mode=mode, name="up")
    x = torch.ones(4, layer.in_features)
    with pytest.raises(RuntimeError, match=r"Linear\(up\): tp_size=2 without a process group"):
        layer(x)


def test_a_group_that_is_none() -> None:
    layer = minifloat.Linear(24, 40, name="up")
    with pytest.raises(TypeError, match=r"Linear\(up\): group: got 3; a process group"):
        layer.set_tensor_parallel_group(3)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_dtensors_are_refused_where_they_would_be_cast(recipe: str, compiled: bool) -> None:
    """Blocks of a shard are none of the whole: MXFP8 gave NaN."""
    with world.alone():
        mesh = init_device_mesh("cpu", (1,))
        for sharded_weight in (False, True):
            layer = minifloat.Linear(24, 40, bias=False, device="cpu", name="up")
            x: Any = torch.randn(4, 24)
            if sharded_weight:
                weight = distribute_tensor(layer.weight.detach(), mesh, [Shard(0)])
                layer.weight = torch.nn.Parameter(weight)
            else:
                x = distribute_tensor(x, mesh, [Shard(0)])
            f = torch.compile(layer, backend="aot_eager") if compiled else layer
            said = rf"Linear\(up\): {'weight' if sharded_weight else 'inp'}: got a DTensor, whose"
            with (
                pytest.raises(TypeError, match=said),
                minifloat.autocast(recipe=RECIPES[recipe]()),
            ):
                f(x)
            assert not layer.delayed.used
            torch.compiler.reset()
        x = distribute_tensor(torch.randn(4, 24), mesh, [Replicate()])
        assert layer(x).full_tensor().shape == (4, 40)  # no recipe: nothing is cast
        with pytest.raises(TypeError, match="tensor: got a DTensor, whose parts"):
            minifloat.MXFP8Quantizer(minifloat.DType.kFloat8E4M3)(x)


def test_data_has_equal_amaxes() -> None:
    """What `check_whole` relies on."""
    data: Whole = whole(Case("row", "none"), 0, equal=True)
    for t in (data.x, data.g, data.w):
        assert len({half(t, -1, r).abs().max().item() for r in range(2)}) == 1
    assert len({half(data.w, 0, r).abs().max().item() for r in range(2)}) == 1
    for t in (data.x, data.g):
        first, second = (half(t, 0, r).abs().max().item() for r in range(2))
        assert first < second / 2
