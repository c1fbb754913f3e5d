"""Parameters, checkpoints and errors of GroupedLinear."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import minifloat as mf
from minifloat import ops
from minifloat import recipe as recipes
from minifloat.convert import convert_state_dict
from minifloat.experts import together

from .cases import RECIPES
from .test_linear_state import with_recipe

SINGLE: dict[str, Any] = {"single_grouped_weight": True, "single_grouped_bias": True}
SPLITS = [5, 0, 33, 17]


def make(**kwargs: Any) -> Any:
    return mf.GroupedLinear(4, 48, 64, device=kwargs.pop("device", "cpu"), **kwargs)


# --------------------------------------------------------------------------------------- parameters
def test_names() -> None:
    names = [name for name, _ in make().named_parameters()]
    assert names == [f"{kind}{i}" for i in range(4) for kind in ("weight", "bias")]
    layer = make(**SINGLE)
    assert [(n, tuple(p.shape)) for n, p in layer.named_parameters()] == [
        ("weight", (4, 64, 48)),
        ("bias", (4, 64)),
    ]
    assert layer.weight2 is None and layer.bias2 is None
    assert make(bias=False).bias0 is None
    assert make(single_grouped_parameter=True).weight.shape == (4, 64, 48)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_one_seed_one_start(device: str) -> None:
    found = []
    for kwargs in ({}, SINGLE):
        torch.manual_seed(7)
        layer = make(device=device, **kwargs)
        if device == "meta":
            assert all(p.is_meta for p in layer.parameters())
            torch.manual_seed(7)
            layer.reset_parameters()
        found.append(layer)
    assert torch.equal(
        torch.stack([getattr(found[0], f"weight{i}") for i in range(4)]), found[1].weight
    )


@pytest.mark.parametrize(("mode", "dim"), [("column", 0), ("row", 1)])
def test_partition(mode: str, dim: int) -> None:
    layer = make(parallel_mode=mode, tp_size=2, bias=False)
    shape = [64, 48]
    shape[dim] //= 2
    assert tuple(layer.weight1.shape) == tuple(shape) and layer.weight1.partition_dim == dim
    layer = make(parallel_mode=mode, tp_size=2, bias=False, single_grouped_weight=True)
    assert tuple(layer.weight.shape) == (4, *shape) and layer.weight.partition_dim == dim + 1
    layer(torch.randn(55, layer.in_features), SPLITS)  # no collective: that is the caller's


@pytest.mark.parametrize("source", [{}, SINGLE, {"single_grouped_bias": True}])
@pytest.mark.parametrize("target", [{}, SINGLE, {"single_grouped_weight": True}])
@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_of_either_layout_loads(source: Any, target: Any, assign: bool) -> None:
    a, b = make(**source), make(**target)
    outer = torch.nn.Sequential(b)
    state = {f"0.{k}": v for k, v in a.state_dict().items()}
    outer.load_state_dict(state, assign=assign)
    x = torch.randn(55, 48)
    assert torch.equal(a(x, SPLITS), b(x, SPLITS))


def test_state_dicts_that_do_not_fit() -> None:
    state = make().state_dict()
    del state["weight2"]
    with pytest.raises(RuntimeError, match="Missing key"):
        make(**SINGLE).load_state_dict(state)
    with pytest.raises(RuntimeError, match="Missing key"):
        make().load_state_dict(mf.GroupedLinear(3, 48, 64, device="cpu", **SINGLE).state_dict())
    both = {**make().state_dict(), **make(**SINGLE).state_dict()}
    make().load_state_dict(both)
    make(**SINGLE).load_state_dict(both)


def test_delayed_state_goes_along() -> None:
    recipe = recipes.DelayedScaling()
    a, b = make(), make(**SINGLE)
    with mf.autocast(recipe=recipe):
        a(torch.randn(55, 48), SPLITS).sum().backward()
    b.load_state_dict(a.state_dict())
    assert torch.equal(a.delayed.scale_input, b.delayed.scale_input)
    assert a.delayed.scale_input.shape == (4,)
    assert a.delayed.scale_input.unique().numel() > 1


@pytest.mark.parametrize("kwargs", [{}, SINGLE], ids=["apart", "one"])
def test_delayed_state_of_transformer_engine(kwargs: Any) -> None:
    """There the slots of one expert come before those of the next."""
    slots = {"fwd": ("input", "weight", "output"), "bwd": ("grad_output", "grad_input")}
    entry = {
        name: torch.rand(*length, 4 * len(slots[tag]))
        for tag in slots
        for name, length in ((f"scale_{tag}", ()), (f"amax_history_{tag}", (8,)))
    }
    layer = make(**kwargs)
    state = {f"experts.{k}": v for k, v in layer.state_dict().items()}
    state["experts._extra_state"] = with_recipe(entry, "uint8")
    model = torch.nn.ModuleDict({"experts": layer})
    converted, count = convert_state_dict(state)
    model.load_state_dict(converted)
    assert count == 1 and layer.delayed.used
    for tag, names in slots.items():
        for i, slot in enumerate(names):
            scale, amax = layer.delayed.live(slot)
            mine = slice(i, None, len(names))
            assert torch.equal(scale, entry[f"scale_{tag}"][mine])
            assert torch.equal(amax, entry[f"amax_history_{tag}"][0, mine])
            history = getattr(
                layer.delayed, {"fwd": "history_forward"}.get(tag, "history_backward")
            )
            column = history[1:, 4 * i : 4 * (i + 1)]
            assert torch.equal(column, entry[f"amax_history_{tag}"][1:, mine])
    with mf.autocast(recipe=recipes.DelayedScaling(amax_history_len=8)):
        layer(torch.randn(55, 48), SPLITS).sum().backward()


# ------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("splits", "match"),
    [
        ([5, 33, 17], r"GroupedLinear\(moe\): m_splits: got 3 sizes; there are 4"),
        ([5, -1, 34, 17], r"GroupedLinear\(moe\): m_splits: got \[5, -1, 34, 17\].*negative"),
        ([5, 1, 33, 17], r"GroupedLinear\(moe\): m_splits: .*56 rows together; the matrix has 55"),
        (torch.tensor([5, 33, 17]), r"GroupedLinear\(moe\): m_splits: .*\(3,\).*\(4,\)"),
        (torch.tensor([5, 1, 33, 17]), r"GroupedLinear\(moe\): m_splits: .*56 rows"),
        (torch.tensor([5.0, 0, 33, 17]), r"GroupedLinear\(moe\): m_splits: got torch.float32"),
    ],
)
def test_wrong_splits(splits: Any, match: str) -> None:
    layer = make(name="moe")
    with pytest.raises(ValueError, match=match):
        layer(torch.randn(55, 48), splits)


@pytest.mark.parametrize("splits", [None, [5.0, 0, 33, 17], 55])
def test_splits_that_are_no_integers(splits: Any) -> None:
    with pytest.raises(TypeError, match=r"GroupedLinear\(moe\): m_splits: got .*of integers"):
        make(name="moe")(torch.randn(55, 48), splits)


def test_wrong_sizes_in_a_graph() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(make(), backend="aot_eager", fullgraph=True)
    with pytest.raises(ValueError, match="56 rows together; the matrix has 55"):
        compiled(torch.randn(55, 48), torch.tensor([5, 1, 33, 17]))


def test_wrong_inputs() -> None:
    layer = make(name="moe")
    with pytest.raises(ValueError, match=r"inp: got shape \(55, 47\).*in_features=48"):
        layer(torch.randn(55, 47), SPLITS)
    with pytest.raises(TypeError, match="inp: got torch.bfloat16, the parameters torch.float32"):
        layer(torch.randn(55, 48, dtype=torch.bfloat16), SPLITS)
    quantizer = mf.MXFP8Quantizer(mf.DType.kFloat8E4M3)
    with pytest.raises(TypeError, match="inp: got MXFP8Tensor; a plain tensor"):
        layer(quantizer.quantize(torch.randn(55, 48)), SPLITS)
    layer.weight1.data = layer.weight1.data.bfloat16()
    with pytest.raises(TypeError, match=r"GroupedLinear\(moe\): the parameters have dtypes"):
        layer(torch.randn(55, 48), SPLITS)
    layer = make()
    with pytest.raises(ValueError, match=r"out: got .*\(3, 64\)"):
        layer(torch.randn(55, 48), SPLITS, out=torch.empty(3, 64))
    with pytest.raises(ValueError, match=r"dgrad_out: got .*\(3, 48\)"):
        layer(torch.randn(55, 48), SPLITS, dgrad_out=torch.empty(3, 48))


@pytest.mark.parametrize("argument", ["ub_overlap_rs", "ub_overlap_ag", "ub_name"])
def test_unsupported(argument: str) -> None:
    with pytest.raises(NotImplementedError, match=argument):
        make(**{argument: "x" if argument == "ub_name" else True})


def test_wrong_construction() -> None:
    with pytest.raises(ValueError, match="num_gemms: got 0"):
        mf.GroupedLinear(0, 48, 64, device="cpu")
    for given, kind in (("yes", "str"), (1, "int"), (0, "int")):
        with pytest.raises(TypeError, match=f"use_grouped_tensor: got {kind}"):
            make(use_grouped_tensor=given)
    with pytest.raises(ValueError, match="parallel_mode"):
        make(parallel_mode="both")
    with pytest.raises(ValueError, match="bias with tp_size=2"):
        make(parallel_mode="column", tp_size=2)
    with (
        mf.quantized_model_init(recipe=recipes.DelayedScaling()),
        pytest.warns(UserWarning, match="the weights stay apart"),
    ):
        layer = make(**SINGLE)
    assert isinstance(layer.weight3, mf.QuantizedTensor)


# ------------------------------------------------------------------------------------- side by side
def weights(layer: Any) -> list[Any]:
    return [getattr(layer, f"weight{i}") for i in range(layer.num_gemms)]


def test_weights_that_are_apart_are_read_as_they_lie() -> None:
    layer = make()
    whole = together(weights(layer))
    assert whole.shape == (4, 64, 48) and whole.data_ptr() == layer.weight0.data_ptr()
    assert all(torch.equal(a, b) for a, b in zip(whole, weights(layer), strict=True))


@pytest.mark.parametrize(
    "move",
    [
        lambda layer: layer.double(),
        lambda layer: layer.to(torch.bfloat16),
        lambda layer: layer.to_empty(device="cpu"),
        lambda layer: layer.load_state_dict(make(**SINGLE).state_dict()),
    ],
    ids=["double", "bf16", "to_empty", "load"],
)
def test_a_module_that_moves_stays_together(move: Any) -> None:
    layer = make()
    before = weights(layer)
    move(layer)
    assert all(a is b for a, b in zip(before, weights(layer), strict=True))
    assert together(weights(layer)).data_ptr() == layer.weight0.data_ptr()


def test_meta_weights_come_together() -> None:
    layer = make(device="meta")
    layer.reset_parameters()
    if layer.weight0.device.type == "cpu":
        assert together(weights(layer)).data_ptr() == layer.weight0.data_ptr()


def test_a_copy_is_together_like_the_original() -> None:
    layer, lost = make(), make()
    lost.weight2 = torch.nn.Parameter(torch.randn(64, 48))
    model = torch.nn.ModuleList([layer, lost, layer])
    model.tied = layer.weight1
    made: Any = copy.deepcopy(model)
    assert made[0] is made[2] and made.tied is made[0].weight1
    for old, new, shared in ((layer, made[0], True), (lost, made[1], False)):
        assert [n for n, _ in old.named_parameters()] == [n for n, _ in new.named_parameters()]
        for a, b in zip(old.parameters(), new.parameters(), strict=True):
            assert torch.equal(a, b) and a.data_ptr() != b.data_ptr()
        found = together(weights(new))
        assert (found.data_ptr() == new.weight0.data_ptr()) == shared
    with torch.no_grad():
        made[0].weight1.add_(1.0)
    assert not torch.equal(layer.weight1, made[0].weight1)
    frozen = make(**SINGLE)
    assert torch.equal(copy.deepcopy(frozen).weight, frozen.weight)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("which", ["module", "op"])
def test_weights_become_one(quantized: bool, which: str) -> None:
    recipe = recipes.Float8CurrentScaling()
    init = mf.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True)
    with init if quantized else contextlib.nullcontext():
        if which == "module":
            layer: Any = make(parallel_mode="row")
        else:
            layer = ops.GroupedLinear(4, 48, 64, device="cpu")
    x = torch.randn(55, 48)
    given = torch.tensor(SPLITS)
    with mf.autocast(recipe=recipe):
        before = layer(x, given)
    values = [w.dequantize() if quantized else w.detach() for w in weights(layer)]
    at = layer.weight0.data_ptr()
    assert layer.make_grouped_weights() is None
    assert layer.single_grouped_weight and layer.weight0 is None and layer.weight3 is None
    assert layer.weight.shape == (4, 64, 48) and layer.weight.requires_grad
    assert layer.weight.partition_dim == (2 if which == "module" else 1)
    held = layer.weight.dequantize() if quantized else layer.weight
    assert torch.equal(held, torch.stack(values))
    if quantized:
        assert isinstance(layer.weight, mf.GroupedTensor)
        assert layer.weight.get_high_precision_init_val().shape == (4, 64, 48)
    else:
        assert layer.weight.data_ptr() == at  # not copied
    with mf.autocast(recipe=recipe):
        assert torch.equal(layer(x, given), before)
    layer.make_grouped_weights(defer_init=True)  # nothing is left to do


def test_initial_values_of_some_weights() -> None:
    with mf.quantized_model_init(
        recipe=recipes.MXFP8BlockScaling(), preserve_high_precision_init_val=True
    ):
        layer = make()
    layer.weight2.clear_high_precision_init_val()
    with pytest.raises(RuntimeError, match="make_grouped_weights: some of the weights"):
        layer.make_grouped_weights()
    assert layer.weight0 is not None and not layer.single_grouped_weight


@pytest.mark.parametrize("kwargs", [{}, SINGLE], ids=["discrete", "single"])
def test_gradients_that_come_later_are_marked(kwargs: Any) -> None:
    """What hooks of data parallelism look for."""
    for later in (False, True):
        layer = make(delay_wgrad_compute=later, **kwargs)
        for name, p in layer.named_parameters():
            marked = getattr(p, "skip_backward_post_hook", False)
            assert marked == (later and name.startswith("weight"))


def test_weights_of_several_shapes() -> None:
    layer = make(bias=False)
    layer.weight2 = torch.nn.Parameter(torch.randn(32, 48))
    match = r"weights: got shapes \[\(32, 48\), \(64, 48\)\]; all experts must have one"
    for call in (layer.make_grouped_weights, lambda: layer(torch.randn(55, 48), SPLITS)):
        with pytest.raises(ValueError, match=match):
            call()
    assert layer.weight2 is not None


def test_weights_with_live_scales_stay_apart() -> None:
    with mf.quantized_model_init(recipe=recipes.DelayedScaling()):
        layer = make()
    with pytest.warns(UserWarning, match="make_grouped_weights: .* so the weights stay apart"):
        layer.make_grouped_weights()
    assert layer.weight0 is not None and not layer.single_grouped_weight


@pytest.mark.parametrize("how", ["replaced", "transposed", "swapped", "copied"])
def test_weights_that_lie_elsewhere_are_copied(how: str) -> None:
    layer = make(bias=False)
    if how == "replaced":
        layer.weight2 = torch.nn.Parameter(torch.randn(64, 48))
    elif how == "transposed":
        layer.weight2.data = layer.weight2.data.t().contiguous().t()
    elif how == "swapped":
        layer.weight1, layer.weight2 = layer.weight2, layer.weight1
    else:
        layer = copy.deepcopy(layer)
        assert torch.equal(layer.weight1, make_twin(layer).weight1)
    whole = together(weights(layer))
    assert all(torch.equal(a, b) for a, b in zip(whole, weights(layer), strict=True))
    other = make(bias=False, single_grouped_weight=True)
    other.load_state_dict(layer.state_dict())
    x = torch.randn(55, 48)
    assert torch.equal(layer(x, SPLITS), other(x, SPLITS))


def make_twin(layer: Any) -> Any:
    other = make(bias=layer.use_bias)
    other.load_state_dict(layer.state_dict())
    return other


def test_an_optimizer_is_seen() -> None:
    layer = make(bias=False)
    x = torch.randn(55, 48)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    layer(x, SPLITS).square().sum().backward()
    optimizer.step()
    assert torch.equal(layer(x, SPLITS), make_twin(layer)(x, SPLITS))


def test_a_weight_that_changed_before_backward() -> None:
    layer = make(bias=False)
    y = layer(torch.randn(55, 48, requires_grad=True), SPLITS)
    with torch.no_grad():
        layer.weight2.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("kind", [mf.GroupedLinear, ops.GroupedLinear])
def test_a_quantized_weight_that_changed_before_backward(kind: Any) -> None:
    """The gradient of the input was that of the new weight: backward reads the group's buffers."""
    recipe = recipes.MXFP8BlockScaling()
    with mf.quantized_model_init(recipe=recipe):
        layer = kind(4, 48, 64, bias=False, single_grouped_weight=True, device="cpu")
    with mf.autocast(recipe=recipe):
        y = layer(torch.randn(55, 48, requires_grad=True), torch.tensor(SPLITS))
    layer.weight.grad = torch.ones(4, 64, 48)
    torch.optim.SGD(layer.parameters(), lr=0.5).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_one_expert() -> None:
    """A group of one has the bits of a Linear."""
    layer, alone = mf.GroupedLinear(1, 48, 64, device="cpu"), mf.Linear(48, 64, device="cpu")
    alone.load_state_dict({"weight": layer.weight0, "bias": layer.bias0})
    x = torch.randn(7, 48)
    for recipe in (None, recipes.Float8CurrentScaling()):
        results = []
        for one, rest in ((layer, ([7],)), (alone, ())):
            with mf.autocast(enabled=recipe is not None, recipe=recipe):
                y = one(x, *rest, is_first_microbatch=None)
            grads = torch.autograd.grad(y.square().sum(), list(one.parameters()))
            results.append([y, *grads])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    with mf.quantized_model_init(recipe=recipe):
        layer = mf.GroupedLinear(1, 48, 64, device="cpu")
    layer.load_state_dict({"weight0": alone.weight, "bias0": alone.bias})
    with mf.autocast(recipe=recipe):
        y = layer(x, [7])
        assert torch.equal(y, alone(x))
    y.sum().backward()
    assert layer.weight0.grad.shape == (64, 48)


def test_members_of_different_shapes() -> None:
    state = make().state_dict()
    state["weight2"] = torch.randn(64, 40)
    with pytest.raises(ValueError, match=r"GroupedLinear: weight0 to weight3: got shapes .*40"):
        make(**SINGLE).load_state_dict(state)


def test_a_list_and_a_tensor_are_one() -> None:
    layer, x = make(), torch.randn(55, 48)
    y = layer(x, SPLITS)
    for splits in (tuple(SPLITS), torch.tensor(SPLITS), torch.tensor(SPLITS, dtype=torch.int32)):
        assert torch.equal(y, layer(x, splits))


def test_no_rows_at_all() -> None:
    layer = make()
    x = torch.randn(0, 48, requires_grad=True)
    for recipe in (None, recipes.Float8CurrentScaling(), recipes.MXFP8BlockScaling()):
        layer.zero_grad()
        with mf.autocast(enabled=recipe is not None, recipe=recipe):
            y = layer(x, [0, 0, 0, 0])
        y.sum().backward()
        assert y.shape == (0, 64) and not layer.weight0.grad.any()


@pytest.mark.parametrize("source", [{}, SINGLE], ids=["from_discrete", "from_single"])
@pytest.mark.parametrize("target", [{}, SINGLE], ids=["to_discrete", "to_single"])
@pytest.mark.parametrize("quantized", ["source", "target", "both"])
def test_state_dicts_of_quantized_weights(source: Any, target: Any, quantized: str) -> None:
    """Values go along; a quantized layer quantizes what it gets, which changes no such value."""
    recipe = recipes.MXFP8BlockScaling()
    made = []
    for which, kwargs in (("source", source), ("target", target)):
        init = contextlib.nullcontext()
        if quantized in (which, "both"):
            init = mf.quantized_model_init(recipe=recipe)
        with init:
            torch.manual_seed(len(made))
            made.append(make(**kwargs))
    a, b = made
    b.load_state_dict(a.state_dict())
    x = torch.randn(55, 48)
    with mf.autocast(recipe=recipe):
        assert torch.equal(a(x, SPLITS), b(x, SPLITS))


@pytest.mark.parametrize("source", [{}, SINGLE], ids=["from_discrete", "from_single"])
@pytest.mark.parametrize("target", [{}, SINGLE], ids=["to_discrete", "to_single"])
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("name", ["current", "block", "nvfp4"])
def test_codes_go_along(source: Any, target: Any, assign: bool, name: str) -> None:
    """Scales of values that were quantized before would not be the same."""
    recipe = RECIPES[name]()
    torch.manual_seed(2)
    with mf.quantized_model_init(recipe=recipe):
        a = make(**source)
        b = make(device="meta" if assign else "cpu", **target)
    b.load_state_dict(a.state_dict(), assign=assign)
    held = [list(one.weight.split_into_quantized_tensors()) if kwargs else weights(one)
            for one, kwargs in ((a, source), (b, target))]  # fmt: skip
    for x, y in zip(*held, strict=True):
        assert type(x) is type(y) and x.get_usages() == y.get_usages()
        theirs = y._buffers()
        for key, buffer in x._buffers().items():
            assert (buffer is None) == (theirs[key] is None)
            assert buffer is None or torch.equal(buffer, theirs[key])
    with mf.autocast(recipe=recipe):
        x = torch.randn(55, 48)
        y = b(x, SPLITS)
        assert torch.equal(a(x, SPLITS), y)
    y.sum().backward()
    if target:  # what a group keeps besides: of the values
        found = b.weight.dequantize().abs().amax((1, 2))
        assert b.weight.amax is None or name == "nvfp4" or torch.allclose(b.weight.amax, found)


def test_a_group_from_elsewhere() -> None:
    recipe = recipes.MXFP8BlockScaling()
    layer, x = make(**SINGLE), torch.randn(55, 48)
    group = mf.group_quantize(
        layer.weight.detach(), mf.MXFP8Quantizer(mf.DType.kFloat8E4M3), 4, None
    )
    with mf.autocast(recipe=recipe):
        expected = layer(x, SPLITS)
        layer.weight = mf.as_parameter(group)
        assert torch.equal(layer(x, SPLITS), expected)
    with (
        mf.autocast(recipe=recipes.Float8CurrentScaling()),
        pytest.raises(
            RuntimeError, match="Recipe mismatch .*quantized as mxfp8_e4m3, .* multiplies fp8_e4m3"
        ),
    ):
        layer(x, SPLITS)


def test_copies_that_only_some_weights_have() -> None:
    """One parameter has all of them, or none is made: no buffer is left as it was allocated."""
    for name in ("current", "mxfp8"):
        recipe = RECIPES[name]()
        with mf.quantized_model_init(recipe=recipe):
            layer = make()
        other, x = copy.deepcopy(layer), torch.randn(55, 48, requires_grad=True)
        layer.weight0.update_usage(columnwise_usage=False)
        if name == "mxfp8":
            with pytest.raises(RuntimeError, match="the columnwise copy is absent"):
                layer.make_grouped_weights()
            assert not layer.single_grouped_weight
            continue
        layer.make_grouped_weights()
        found = []
        for one in (layer, other):
            with mf.autocast(recipe=recipe):
                y = one(x, SPLITS)
            found += torch.autograd.grad(y.sum(), x)
        assert torch.equal(*found)
    with mf.quantized_model_init(recipe=RECIPES["mxfp8"]()):
        layer = make()
    with mf.quantized_model_init(recipe=RECIPES["block"]()):
        layer.weight1 = make().weight1
    with pytest.raises(ValueError, match="make_grouped_weights: .* not quantized alike"):
        layer.make_grouped_weights()


@pytest.mark.parametrize("kwargs", [{}, SINGLE], ids=["discrete", "single"])
def test_initial_values_are_kept(kwargs: Any) -> None:
    torch.manual_seed(4)
    plain = make(**SINGLE).weight.detach()
    with mf.quantized_model_init(
        recipe=recipes.Float8BlockScaling(), preserve_high_precision_init_val=True
    ):
        torch.manual_seed(4)
        layer = make(**kwargs)
    owners = [layer.weight] if kwargs else weights(layer)
    found = [w.get_high_precision_init_val() for w in owners]
    assert torch.equal(found[0] if kwargs else torch.stack(found), plain)
    for w in owners:
        w.clear_high_precision_init_val()
        assert w.get_high_precision_init_val() is None


# ------------------------------------------------------------------------------------------ devices
@pytest.mark.parametrize("kwargs", [{}, SINGLE], ids=["discrete", "single"])
@pytest.mark.parametrize("name", ["none", *RECIPES])
def test_shapes_without_values(name: str, kwargs: Any) -> None:
    """As of a Linear: a layer on the meta device, and one of fake tensors, tell them of a step."""
    recipe = None if name == "none" else RECIPES[name]()
    for region in (torch.device("meta"), FakeTensorMode()):
        with region, mf.autocast(enabled=recipe is not None, recipe=recipe):
            layer = make(device=None, **kwargs)
            x = torch.randn(55, 48, requires_grad=True)
            y = layer(x, SPLITS)
        with region if isinstance(region, FakeTensorMode) else contextlib.nullcontext():
            y.sum().backward()
        assert y.shape == (55, 64) and x.grad is not None and x.grad.shape == x.shape
        assert all(p.grad is not None and p.grad.shape == p.shape for p in layer.parameters())


def test_splits_in_a_list_whatever_the_default_device_is() -> None:
    layer, x = make(), torch.randn(55, 48)
    with torch.device("meta"):
        y = layer(x, SPLITS)
    assert torch.equal(y, layer(x, SPLITS))
