"""Bad input to Linear: what is said names the module, the argument, the rule and the fix, and
nothing is changed by it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minifloat
from minifloat import recipe as recipes
from minifloat.opaque import AVAILABLE
from minifloat.quantizers import MXFP8Quantizer
from minifloat.recipe.autocast import STATE

from .cases import RECIPES

CURRENT, MX = recipes.Float8CurrentScaling(), recipes.MXFP8BlockScaling()
DELAYED = recipes.DelayedScaling(amax_history_len=4)
compiles = pytest.mark.skipif(not AVAILABLE, reason="this PyTorch has no opaque objects")
WHERE = r"Linear\(fc\)"


def layer(**kwargs: Any) -> Any:
    torch.manual_seed(1)
    return minifloat.Linear(32, 48, name="fc", **kwargs)


def says(*words: str) -> str:
    """A pattern: the module, then each of these somewhere behind the one before it."""
    return "(?s)" + ".*".join((WHERE, *words))


def everything(module: Any) -> dict[str, Any]:
    """What a refused call must leave as it was."""
    return {
        "state": {k: v.clone() for k, v in module.state_dict().items()},
        "buffers": {k: v.clone() for k, v in module.named_buffers()},
        "versions": [p._version for p in module.parameters()],
        "grads": [None if p.grad is None else p.grad.clone() for p in module.parameters()],
        "used": module.delayed.used,
        "cached": module._cached is None,
        "queue": len(module.wgrad_store.queue),
        "ambient": (STATE.recipe, STATE.depth, STATE.ran),
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@contextmanager
def refused(error: type[Exception], pattern: str, module: Any) -> Iterator[None]:
    before = everything(module)
    with pytest.raises(error, match=pattern):
        yield
    after = everything(module)
    assert [k for k in before if not same(before[k], after[k])] == []


# --------------------------------------------------------------------------------- constructor
UNSUPPORTED = {
    "ub_overlap_ag": True,
    "ub_overlap_rs": True,
    "ub_overlap_rs_dgrad": True,
    "ub_bulk_dgrad": True,
    "ub_bulk_wgrad": True,
    "ub_name": "qkv",
    "symmetric_ar_type": "multimem_all_reduce",
}


@pytest.mark.parametrize("argument", UNSUPPORTED)
def test_what_is_not_supported(argument: str) -> None:
    with pytest.raises(NotImplementedError, match=says(argument, "not supported", "default")):
        layer(**{argument: UNSUPPORTED[argument]})


@pytest.mark.parametrize("mode", ["columns", "", 1, "Row"])
@pytest.mark.parametrize("error", [AssertionError, ValueError])
def test_an_unknown_parallel_mode(mode: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=says("parallel_mode", repr(mode), "allowed", "column", "row")):
        layer(parallel_mode=mode)


@pytest.mark.parametrize("size", [-1, 32.0, "32", None])
@pytest.mark.parametrize("argument", ["in_features", "out_features"])
def test_a_size_that_is_none(argument: str, size: Any) -> None:
    sizes = {"in_features": 32, "out_features": 48, argument: size}
    with pytest.raises(ValueError, match=says(argument, repr(size), "an int >= 0")):
        minifloat.Linear(**sizes, name="fc")


@pytest.mark.parametrize("size", [0, -1, "2", 2.0])
def test_a_number_of_ranks_that_is_none(size: Any) -> None:
    with pytest.raises(ValueError, match=says("tp_size", repr(size), "an int >= 1")):
        layer(tp_size=size)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.complex64, "bf16"])
def test_a_dtype_that_parameters_cannot_have(dtype: Any) -> None:
    with pytest.raises(TypeError, match=says("params_dtype", "torch.bfloat16")):
        layer(params_dtype=dtype)


@pytest.mark.parametrize("argument", ["init_method", "get_rng_state_tracker"])
def test_a_function_that_is_none(argument: str) -> None:
    with pytest.raises(TypeError, match=says(argument, "'zeros'", "a function is needed")):
        layer(**{argument: "zeros"})


@pytest.mark.parametrize("mode", [None, "column", "row"])
def test_ranks_without_a_group(mode: Any) -> None:
    made = layer(tp_size=2, parallel_mode=mode)
    pattern = says("tp_size=2", "process group", "tp_group", "set_tensor_parallel_group")
    with refused(RuntimeError, pattern, made), minifloat.autocast(recipe=CURRENT):
        made(torch.randn(4, made.in_features))


def test_an_input_on_another_device() -> None:
    made = layer()
    with refused(RuntimeError, says("inp", "meta", "cpu", "move"), made):
        made(torch.randn(4, 32, device="meta"))


@pytest.mark.parametrize("shape", [(3,), (32, 48)])
def test_a_main_grad_of_another_shape(shape: tuple[int, ...]) -> None:
    made = layer(fuse_wgrad_accumulation=True)
    made.weight.main_grad = torch.zeros(shape)
    pattern = says("fuse_wgrad_accumulation", "main_grad", r"\(48, 32\)")
    with refused(ValueError, pattern, made), minifloat.autocast(recipe=CURRENT):
        made(torch.randn(4, 32))


@pytest.mark.parametrize(
    ("given", "error", "word"),
    [
        (torch.zeros(48, 32, dtype=torch.int32), TypeError, "torch.int32"),
        ("yes", TypeError, "str"),
        (torch.zeros(48, 32, device="meta"), RuntimeError, "on meta"),
    ],
)
def test_a_main_grad_that_is_none(given: Any, error: Any, word: str) -> None:
    made = layer(fuse_wgrad_accumulation=True)
    made.weight.main_grad = given
    made.weight.grad_added_to_main_grad = False
    pattern = says("fuse_wgrad_accumulation", "main_grad", word)
    with refused(error, pattern, made), minifloat.autocast(recipe=DELAYED):
        made(torch.randn(4, 32))
    assert made.weight.grad_added_to_main_grad is False


@pytest.mark.parametrize("recipe", [None, CURRENT, DELAYED], ids=lambda r: type(r).__name__)
def test_an_evaluation_needs_no_main_grad(recipe: Any) -> None:
    """And says nothing of one that there is, which it adds nothing to."""
    made, x = layer(fuse_wgrad_accumulation=True), torch.randn(4, 32)
    made.weight.grad_added_to_main_grad = False
    with torch.no_grad(), minifloat.autocast(enabled=recipe is not None, recipe=recipe):
        assert made(x).shape == (4, 48)
        made.weight.main_grad = torch.zeros(48, 32)
        made(x, is_first_microbatch=True)
    assert made.weight.grad_added_to_main_grad is False


def test_a_dtype_that_no_recipe_quantizes() -> None:
    made, x = layer(params_dtype=torch.float64), torch.randn(4, 32, dtype=torch.float64)
    assert made(x).dtype is torch.float64
    for recipe in (CURRENT, DELAYED):
        pattern = says("inp", "float64", "bf16", "outside autocast")
        with refused(TypeError, pattern, made), minifloat.autocast(recipe=recipe):
            made(x)
    made.recipe = CURRENT  # which an autocast comes before
    with minifloat.autocast(enabled=False):
        assert made(x).dtype is torch.float64
    with refused(TypeError, pattern, made):
        made(x)


@pytest.mark.parametrize("recipe", [None, MX, CURRENT, DELAYED], ids=lambda r: type(r).__name__)
def test_a_second_derivative(recipe: Any) -> None:
    """It is an error, never left out; the first one may be asked for a graph."""
    made = layer()
    x = torch.randn(4, 32).requires_grad_()
    with minifloat.autocast(enabled=recipe is not None, recipe=recipe):
        y = made(x)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"no second derivative; use torch\.nn's"):
        (y.sum() + dx.square().sum()).backward()


@pytest.mark.parametrize("way", ["parametrized", "functional_call"])
def test_cache_weights_knows_a_weight_that_is_made_for_every_call(way: str) -> None:
    """It may lie where the last one did, and nobody has written to it."""
    with minifloat.autocast(recipe=MX):
        module = layer(cache_weights=True)
    other, x = layer(), torch.randn(4, 32)
    scale = torch.ones(())
    if way == "parametrized":
        nn.utils.parametrizations.weight_norm(module)
        scale = module.parametrizations.weight.original0
    start = other.weight.detach().clone()
    for power in range(1, 8):
        with torch.no_grad(), minifloat.autocast(recipe=MX):
            scale.mul_(2)
            other.weight.copy_(start * 2**power)
            if way == "parametrized":
                found = module(x)
            else:
                made = {"weight": start * scale, "bias": module.bias}
                found = torch.func.functional_call(module, made, (x,))
                del made
            assert torch.equal(found, other(x))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_of_a_module_with_a_cached_weight_casts_its_own(copied: Any) -> None:
    with minifloat.autocast(recipe=MX):
        module = layer(cache_weights=True)
        x = torch.randn(4, 32)
        expected = module(x)
        made = copied(module)
        assert torch.equal(made(x), expected)
        with torch.no_grad():
            made.weight.mul_(2)
        assert not torch.equal(made(x), expected)
        assert torch.equal(module(x), expected)


@pytest.mark.parametrize("recipe", [None, MX], ids=lambda r: type(r).__name__)
@pytest.mark.parametrize("first", [None, True])
def test_a_retained_graph_whose_weight_changed(recipe: Any, first: bool | None) -> None:
    """PyTorch's error, not a gradient by the new weight."""
    made = layer()
    x = torch.randn(4, 32).requires_grad_()
    with minifloat.autocast(enabled=recipe is not None, recipe=recipe):
        y = made(x, is_first_microbatch=first)
    y.sum().backward(retain_graph=True)
    kept = x.grad
    assert kept is not None
    x.grad = None
    y.sum().backward(retain_graph=True)
    assert x.grad is not None and torch.equal(x.grad, kept)
    with torch.no_grad():
        made.weight.mul_(2)
    if recipe is not None and first:
        with minifloat.autocast(recipe=recipe):
            made(x, is_first_microbatch=True)  # writes what was cast anew
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


TRANSFORMS: dict[str, Callable[[Any, Tensor], Any]] = {
    "vmap": lambda m, x: torch.func.vmap(m, randomness="same")(x),
    "grad": lambda m, x: torch.func.grad(lambda x: m(x).sum())(x),
    "jvp": lambda m, x: torch.func.jvp(m, (x,), (x,)),
    "parameters": lambda m, x: torch.func.grad(
        lambda p: torch.func.functional_call(m, p, (x,)).sum()
    )(dict(m.named_parameters())),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("recipe", [None, MX], ids=["plain", "mxfp8"])
@pytest.mark.parametrize("grads", [True, False])
def test_no_transform_of_torch_func(transform: str, recipe: Any, grads: bool) -> None:
    module = layer()
    module.recipe = recipe
    refused = pytest.raises(RuntimeError, match=r"no transform of torch\.func.*torch\.autograd")
    with torch.set_grad_enabled(grads), refused:
        TRANSFORMS[transform](module, torch.randn(2, 4, 32))


@compiles
def test_no_transform_of_torch_func_in_a_graph() -> None:
    """PyTorch would take the gradient for zeros."""
    module, transform = layer(), TRANSFORMS["parameters"]
    call = torch.compile(lambda x: transform(module, x), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"no transform of torch\.func.*torch\.autograd"):
        call(torch.randn(4, 32))


SPLITS: list[tuple[Any, type[Exception], tuple[str, ...], dict[str, Any]]] = [
    ((), ValueError, ("empty", "name at least one"), {}),
    ([], ValueError, ("empty", "name at least one"), {}),
    ({}, ValueError, ("empty", "name at least one"), {}),
    (3, TypeError, ("int", "list of names or a dict"), {}),
    ("qkv", TypeError, ("str", "list of names or a dict"), {}),
    (("a", "b", "c", "d", "e"), ValueError, ("5 parameters", "divide", "out_features=48"), {}),
    ({"a": 56, "b": -8}, ValueError, ("'b': -8", "an int >= 0"), {}),
    ({"a": 24.0, "b": 24.0}, ValueError, ("'a': 24.0", "an int >= 0"), {}),
    (("a", "b", "a"), ValueError, ("'a' twice", "name each once"), {}),
    ({"a": 24, "a_": 24}, ValueError, ("'a_' is a second 'a_'", "name each once"), {}),
    ((1, 2), ValueError, ("got 1", "a name"), {}),
    ({"a": 20, "b": 20}, ValueError, ("sum to 40", "out_features is 48"), {}),
    (
        {"a": 45, "b": 3},
        RuntimeError,
        ("'a' has 45 rows", "tp_size=2"),
        {"parallel_mode": "column", "tp_size": 2},
    ),
    (("a", "b"), AssertionError, ("meta device", "real device"), {"device": "meta"}),
]


@pytest.mark.parametrize(("split", "error", "words", "kwargs"), SPLITS)
def test_a_wrong_split(split: Any, error: Any, words: tuple[str, ...], kwargs: Any) -> None:
    with pytest.raises(error, match=says("parameters_split", *words)):
        layer(parameters_split=split, **kwargs)


def test_a_split_of_a_quantized_weight() -> None:
    with (
        minifloat.quantized_model_init(recipe=CURRENT),
        pytest.raises(RuntimeError, match=says("parameters_split", "quantized_model_init")),
    ):
        layer(parameters_split=("a", "b"))
    assert STATE.init is None


def test_one_name_is_no_split() -> None:
    with minifloat.quantized_model_init(recipe=CURRENT):
        module = minifloat.Linear(32, 48, parameters_split=("qkv",))
    assert isinstance(module.qkv_weight, minifloat.QuantizedTensor)
    assert list(module.state_dict()) == ["qkv_weight", "qkv_bias"]
    x = torch.randn(4, 32, requires_grad=True)
    with minifloat.autocast(recipe=CURRENT):
        module(x).sum().backward()
    assert module.qkv_weight.grad is not None and x.grad is not None


@pytest.mark.parametrize(
    ("mode", "argument"), [("column", "out_features=33"), ("row", "in_features=33")]
)
def test_sizes_that_tensor_parallelism_cannot_divide(mode: str, argument: str) -> None:
    with pytest.raises(ValueError, match=says(argument, "tp_size=2", "divide")):
        minifloat.Linear(33, 33, name="fc", parallel_mode=mode, tp_size=2)


def test_sizes_below_zero() -> None:
    with pytest.raises(
        ValueError, match=r"Linear\(q\): in_features: got -1; an int >= 0 is needed"
    ):
        minifloat.Linear(-1, 8, name="q", device="cpu")


@pytest.mark.parametrize("split", [None, ("a", "b")])
def test_an_initialisation_that_leaves_nan(split: Any) -> None:
    def half(w: Tensor) -> None:
        w.fill_(1.0)
        w[-1, -1] = float("nan")

    with pytest.raises(ValueError, match=says("init_method", "NaN", "every element")):
        layer(init_method=half, parameters_split=split)


def test_an_initialisation_that_does_nothing() -> None:
    """Tests run on poisoned memory, where what is not written is NaN."""
    with pytest.raises(ValueError, match=says("init_method", "NaN")):
        layer(init_method=lambda w: None)


def test_resetting_refuses_it_too() -> None:
    module = layer()
    module._init_method = lambda w: w.fill_(float("nan"))
    with pytest.raises(ValueError, match=says("init_method", "NaN")):
        module.reset_parameters()


def test_the_device_default_and_meta() -> None:
    module = layer(device="meta")
    assert module.weight.is_meta and module.bias.is_meta
    module.reset_parameters()
    assert not module.weight.is_meta and not module.weight.isnan().any()
    assert torch.count_nonzero(module.bias) == 0


# --------------------------------------------------------------------------------------- input
@pytest.mark.parametrize("recipe", [None, MX, DELAYED], ids=["none", "mxfp8", "delayed"])
@pytest.mark.parametrize(
    ("inp", "error", "words"),
    [
        (torch.ones(4, 31), ValueError, ("inp", r"\(4, 31\)", "last dim", "in_features=32")),
        (torch.ones(2, 4, 33), ValueError, ("inp", r"\(2, 4, 33\)", "in_features=32")),
        (torch.tensor(1.0), ValueError, ("inp", r"\(\)", "in_features=32")),
        (torch.ones(4, 0), ValueError, ("inp", r"\(4, 0\)", "in_features=32")),
        ([[1.0] * 32], TypeError, ("inp", "list", "a tensor is needed")),
        (None, TypeError, ("inp", "NoneType", "a tensor is needed")),
        (
            torch.ones(4, 32, dtype=torch.bfloat16),
            TypeError,
            ("inp", "torch.bfloat16", "torch.float32", "convert", "torch.autocast"),
        ),
        (torch.ones(4, 32, dtype=torch.float64), TypeError, ("inp", "torch.float64")),
        (torch.ones(4, 32, dtype=torch.int64), TypeError, ("inp", "torch.int64")),
    ],
)
def test_a_wrong_input(
    inp: Any, error: Any, words: tuple[str, ...], recipe: recipes.Recipe | None
) -> None:
    module = layer()
    with (
        refused(error, says(*words), module),
        minifloat.autocast(enabled=recipe is not None, recipe=recipe),
    ):
        module(inp)


def test_a_module_without_a_name_says_its_class() -> None:
    with pytest.raises(ValueError, match="^Linear: inp"):
        minifloat.Linear(32, 48)(torch.ones(4, 31))


def test_torch_autocast_converts() -> None:
    module = layer()
    with torch.autocast("cpu", torch.bfloat16), minifloat.autocast(recipe=MX):
        y = module(torch.randn(4, 32))
    assert y.dtype is torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        y = module(torch.randn(4, 32))
    assert y.dtype is torch.bfloat16


@pytest.mark.parametrize("shape", [(32,), (0, 32), (2, 0, 32), (1, 1, 1, 32)])
def test_shapes_that_are_fine(shape: tuple[int, ...]) -> None:
    with minifloat.autocast(recipe=MX):
        y = layer()(torch.ones(shape))
    assert y.shape == (*shape[:-1], 48)


# ------------------------------------------------------------------------------- tensor parallel
@pytest.mark.parametrize("mode", ["column", "row"])
@pytest.mark.parametrize("sequence", [False, True])
def test_tensor_parallelism_without_a_group(mode: str, sequence: bool) -> None:
    module = layer(parallel_mode=mode, tp_size=2, sequence_parallel=sequence)
    x = torch.ones(4, module.in_features)
    words = ("tp_size=2", "process group", "tp_group", "set_tensor_parallel_group")
    with refused(RuntimeError, says(*words), module), minifloat.autocast(recipe=MX):
        module(x)


def test_sequence_parallelism_needs_more_than_one_rank() -> None:
    assert not layer(parallel_mode="row", sequence_parallel=True).sequence_parallel


# ------------------------------------------------------------------------------------- options
@pytest.mark.parametrize("name", list(RECIPES))
def test_accumulation_without_a_main_grad(name: str) -> None:
    module = layer(fuse_wgrad_accumulation=True)
    pattern = says("fuse_wgrad_accumulation", "main_grad", "set it")
    for first in (None, True):
        with (
            refused(RuntimeError, pattern, module),
            minifloat.autocast(recipe=RECIPES[name]()),
        ):
            module(torch.ones(4, 32), is_first_microbatch=first)


def test_save_original_input_with_delayed_scaling() -> None:
    module = layer(save_original_input=True)
    pattern = says("save_original_input", "delayed", "another recipe")
    with refused(ValueError, pattern, module), minifloat.autocast(recipe=DELAYED):
        module(torch.ones(4, 32))


def test_save_original_input_with_a_quantizer_that_cannot_run_twice() -> None:
    class Once(MXFP8Quantizer):
        def is_requantization_safe(self) -> bool:
            return False

    def factory(role: Any) -> Any:
        return Once(minifloat.DType.kFloat8E4M3)

    module = layer(save_original_input=True)
    with (
        pytest.warns(UserWarning, match=says("save_original_input", "ignored", "twice")),
        minifloat.autocast(recipe=recipes.CustomRecipe(qfactory=factory)),
    ):
        y = module(torch.ones(4, 32))
    y.sum().backward()


@pytest.mark.parametrize("first", [0, 1, "yes", torch.tensor(True)])
def test_a_first_microbatch_that_is_no_bool(first: Any) -> None:
    """1 == True, and yet it would be added to main_grad."""
    module = layer()
    pattern = says("is_first_microbatch", "True, False or None")
    with refused(TypeError, pattern, module), minifloat.autocast(recipe=DELAYED):
        module(torch.ones(4, 32), is_first_microbatch=first)


@pytest.mark.parametrize("recipe", [MX, DELAYED], ids=["mxfp8", "delayed"])
def test_a_weight_of_another_recipe(recipe: Any) -> None:
    with minifloat.quantized_model_init(recipe=recipes.Float8BlockScaling()):
        module = layer()
    pattern = f"Recipe mismatch for '{WHERE}'.*use the recipe of quantized_model_init"
    with refused(RuntimeError, pattern, module), minifloat.autocast(recipe=recipe):
        module(torch.ones(4, 32))


@pytest.mark.parametrize("row", [True, False])
def test_a_quantized_input_without_a_copy(row: bool) -> None:
    module, x = layer(), torch.randn(4, 32)
    kind = minifloat.DType.kFloat8E4M3
    missing = "columnwise" if row else "rowwise"
    pattern = says("inp", f"the {missing} copy is absent", f"{missing}=True")
    inp = MXFP8Quantizer(kind, rowwise=row, columnwise=not row)(x)
    with refused(RuntimeError, pattern, module), minifloat.autocast(recipe=MX):
        module(inp)
    if not row:
        with refused(RuntimeError, pattern, module), minifloat.autocast(recipe=DELAYED):
            module(inp)


@pytest.mark.parametrize("argument", ["fp8_output", "fp8_grad"])
@pytest.mark.parametrize("region", ["none", "disabled"])
def test_quantized_results_outside_autocast(argument: str, region: str) -> None:
    module = layer()
    words = (f"{argument}=True", "outside autocast", "enter an autocast")

    def call() -> Any:
        if region == "none":
            return module(torch.ones(4, 32), **{argument: True})
        with minifloat.autocast(enabled=False):
            return module(torch.ones(4, 32), **{argument: True})

    with refused(ValueError, says(*words), module):
        call()


def test_later_wgrad_without_a_backward() -> None:
    module = layer(delay_wgrad_compute=True)
    assert module.need_backward_dw()
    with refused(RuntimeError, says("backward_dw", "once per backward"), module):
        module.backward_dw()
    with minifloat.autocast(recipe=MX):
        module(torch.ones(4, 32)).sum().backward()
    module.backward_dw()
    with refused(RuntimeError, says("backward_dw"), module):
        module.backward_dw()


def test_later_wgrad_that_was_not_asked_for_is_nothing() -> None:
    module = layer()
    assert not module.need_backward_dw()
    before = everything(module)
    module.backward_dw()
    assert same(before, everything(module))


def test_later_wgrad_leaves_a_frozen_part_alone() -> None:
    module = layer(delay_wgrad_compute=True, parameters_split=["q", "k", "v"])
    module.k_weight.requires_grad_(False)
    with minifloat.autocast(recipe=MX):
        module(torch.ones(4, 32)).sum().backward()
    assert module.need_backward_dw()
    module.backward_dw()
    assert module.k_weight.grad is None
    assert module.q_weight.grad is not None and module.v_weight.grad is not None


def test_a_factory_that_returns_rubbish() -> None:
    for answer, error in ((None, ValueError), ("fp8", TypeError)):
        recipe = recipes.CustomRecipe(qfactory=lambda role, answer=answer: answer)
        module = layer()
        with refused(error, "qfactory: returned", module), minifloat.autocast(recipe=recipe):
            module(torch.ones(4, 32))


# ----------------------------------------------------------------------------------- compiled
def compiled(module: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    made: Callable[..., Any] = torch.compile(module, backend="aot_eager", fullgraph=True)
    return made


@compiles
@pytest.mark.parametrize(
    ("kwargs", "forward", "recipe", "words"),
    [
        ({"delay_wgrad_compute": True}, {}, MX, ("delay_wgrad_compute", "compile without it")),
        ({}, {"fp8_output": True}, recipes.DelayedScaling(), ("fp8_output", "current scaling")),
        ({}, {"fp8_grad": True}, recipes.DelayedScaling(), ("fp8_grad", "current scaling")),
        ({"fuse_wgrad_accumulation": True}, {}, MX, ("fuse_wgrad_accumulation", "main_grad")),
        ({"save_original_input": True}, {}, recipes.DelayedScaling(), ("save_original_input",)),
        ({}, {"fp8_output": True}, None, ("fp8_output=True outside autocast",)),
    ],
)
def test_errors_inside_a_graph(kwargs: Any, forward: Any, recipe: Any, words: Any) -> None:
    module = layer(**kwargs)
    x = torch.ones(4, 32, requires_grad=True)
    with (
        pytest.raises(Exception, match=says(*words)),
        minifloat.autocast(enabled=recipe is not None, recipe=recipe),
    ):
        compiled(module)(x, **forward)
    assert STATE.recipe is None and STATE.depth == 0


@compiles
@pytest.mark.parametrize("inp", [torch.ones(4, 31), torch.ones(4, 32, dtype=torch.bfloat16)])
def test_wrong_inputs_inside_a_graph(inp: Tensor) -> None:
    module = layer()
    with pytest.raises(Exception, match=says("inp")), minifloat.autocast(recipe=MX):
        compiled(module)(inp)


# -------------------------------------------------------------------------- quantize_weight
def test_quantize_weight() -> None:
    quantizer = MXFP8Quantizer(minifloat.DType.kFloat8E4M3)
    weight = torch.randn(48, 32)
    with pytest.raises(NotImplementedError, match="fsdp_group.*FSDP2"):
        minifloat.quantize_weight(tensor=weight, quantizer=quantizer, fsdp_group=object())
    with pytest.raises(ValueError, match="tensor: None"):
        minifloat.quantize_weight(quantizer=quantizer)
    with pytest.raises(ValueError, match="quantizer: None"):
        minifloat.quantize_weight(tensor=weight)
    made, new = minifloat.quantize_weight(tensor=weight, quantizer=quantizer, cache=True)
    assert made is new
    with pytest.raises(ValueError, match="tensor: None; updating a workspace"):
        minifloat.quantize_weight(quantizer=quantizer, workspace=made)
    kept = copy.deepcopy(made)
    again, new = minifloat.quantize_weight(
        quantizer=quantizer, workspace=made, update_workspace=False
    )
    assert again is made and new is None and torch.equal(made.dequantize(), kept.dequantize())
    again, new = minifloat.quantize_weight(tensor=2 * weight, quantizer=quantizer, workspace=made)
    assert again is made and new is None
    assert torch.equal(made.dequantize(), 2 * kept.dequantize())
    made, new = minifloat.quantize_weight(tensor=weight, quantizer=quantizer)
    assert new is None and torch.equal(made.dequantize(), kept.dequantize())
    same_tensor, new = minifloat.quantize_weight(tensor=made, quantizer=quantizer)
    assert same_tensor is made and new is None
    wider = MXFP8Quantizer(minifloat.DType.kFloat8E5M2)
    current = minifloat.Float8CurrentScalingQuantizer(minifloat.DType.kFloat8E4M3, "cpu")
    for other in (wider, current):  # a workspace of another format is a miss
        found, new = minifloat.quantize_weight(
            tensor=weight, quantizer=other, workspace=made, cache=True
        )
        assert found is new and found._fp8_dtype == other.dtype
        assert torch.equal(found.dequantize(), other(weight).dequantize())
    with pytest.raises(TypeError, match="quantizer: got str; a Quantizer"):
        minifloat.quantize_weight(tensor=weight, quantizer="mxfp8")
    with pytest.raises(TypeError, match="workspace: got Tensor"):
        minifloat.quantize_weight(tensor=weight, quantizer=quantizer, workspace=weight)


# ------------------------------------------------------------------------------ first microbatch
def test_false_before_true_casts() -> None:
    module, other = layer(), layer()
    x = torch.randn(4, 32)
    with torch.no_grad(), minifloat.autocast(recipe=MX):
        assert torch.equal(module(x, is_first_microbatch=False), other(x))


def test_a_cached_weight_of_another_recipe_is_cast_again() -> None:
    module, other = layer(), layer()
    x = torch.randn(4, 32)
    with torch.no_grad():
        with minifloat.autocast(recipe=MX):
            module(x, is_first_microbatch=True)
        with minifloat.autocast(recipe=CURRENT):
            assert torch.equal(module(x, is_first_microbatch=False), other(x))


def test_a_cached_weight_without_a_column_copy_is_cast_again() -> None:
    module, other = layer().eval(), layer()
    with minifloat.autocast(recipe=MX):
        with torch.no_grad():
            module(torch.randn(4, 32), is_first_microbatch=True)
        x = torch.randn(4, 32, requires_grad=True)
        module(x, is_first_microbatch=False).sum().backward()
        z = x.detach().clone().requires_grad_()
        other(z).sum().backward()
    assert x.grad is not None and z.grad is not None and torch.equal(x.grad, z.grad)


CHANGES = ("in_place", "load", "assign", "to", "replace", "data", "address")


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", list(RECIPES))
def test_cache_weights_sees_every_change_of_the_weight(change: str, name: str) -> None:
    recipe = recipes.Float8BlockScaling(use_f32_scales=True) if name == "block" else RECIPES[name]()
    with minifloat.autocast(recipe=recipe):
        module = layer(cache_weights=True)
    x = torch.randn(4, 32)
    for _ in range(2):
        with torch.no_grad(), minifloat.autocast(recipe=recipe):
            module(x)
        value = torch.randn(48, 32)
        state = {"weight": value, "bias": torch.zeros(48)}
        if change == "in_place":
            with torch.no_grad():
                module.weight.copy_(value)
        elif change == "data":
            module.weight.data = value.clone()
        elif change == "address":  # of the old values, which the second allocation gets again
            module.weight.data = value.clone()
            module.weight.data = value.clone()
        elif change == "replace":
            module.weight = nn.Parameter(value.clone())
        elif change == "to":
            module.to(torch.bfloat16).to(torch.float32)
            value = module.weight.detach().clone()
        else:
            module.load_state_dict(state, assign=change == "assign")
        other = layer()
        other.load_state_dict({"weight": value, "bias": module.bias.detach().clone()})
        with torch.no_grad(), minifloat.autocast(recipe=recipe):
            assert torch.equal(module(x), other(x))


def test_a_copy_of_a_module_casts_its_own_weight() -> None:
    with minifloat.autocast(recipe=MX):
        module = layer(cache_weights=True)
        x = torch.randn(4, 32)
        y = module(x)
        made = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
        for other in made:
            assert torch.equal(other(x), y)
            with torch.no_grad():
                other.weight.mul_(2)
            assert not torch.equal(other(x), y)
        assert torch.equal(module(x), y)


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("split", [None, ("a", "b")])
def test_a_weight_that_inference_mode_cast_trains(cache: bool, split: Any) -> None:
    with minifloat.autocast(recipe=MX):
        module, other = (layer(cache_weights=cache, parameters_split=split) for _ in range(2))
        x = torch.randn(4, 32, requires_grad=True)
        with torch.inference_mode():
            y = module(x, is_first_microbatch=True)
        for first in (False, True, None):
            z = module(x, is_first_microbatch=first)
            assert torch.equal(z, y)
            z.sum().backward()
            other(x).sum().backward()
    for a, b in zip(module.parameters(), other.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)


def test_cache_weights_of_a_module_of_inference_mode() -> None:
    """Its parameters count no writes, so that every call casts."""
    with torch.inference_mode(), minifloat.autocast(recipe=MX):
        module, other, x = layer(cache_weights=True), layer(), torch.randn(4, 32)
        for _ in range(2):
            assert torch.equal(module(x), other(x))
            module.weight.mul_(2)
            other.weight.mul_(2)


def test_cache_weights_sees_a_change_of_a_part() -> None:
    with minifloat.autocast(recipe=MX):
        module = layer(cache_weights=True, parameters_split=("a", "b"))
    x = torch.randn(4, 32)
    with torch.no_grad(), minifloat.autocast(recipe=MX):
        before = module(x)
        assert torch.equal(before, module(x))
        module.b_weight.add_(1)
        after = module(x)
    assert torch.equal(before[:, :24], after[:, :24])
    assert not torch.equal(before[:, 24:], after[:, 24:])


def test_gradients_of_parts_have_no_one_buffer() -> None:
    words = ("fuse_wgrad_accumulation", "parameters_split", "leave one")
    with pytest.raises(ValueError, match=says(*words)):
        layer(fuse_wgrad_accumulation=True, parameters_split=("a", "b"))
    module = layer(fuse_wgrad_accumulation=True, parameters_split=("a",))
    module.a_weight.main_grad = torch.zeros(48, 32)
    with minifloat.autocast(recipe=MX):
        module(torch.randn(4, 32)).sum().backward()
    assert module.a_weight.main_grad.count_nonzero() and module.a_weight.grad is None


@pytest.mark.parametrize("wrong", ["mxfp8", recipes.MXFP8BlockScaling])
def test_a_recipe_of_a_layer_that_is_none(wrong: Any) -> None:
    module = layer()
    module.recipe = wrong
    with pytest.raises(TypeError, match=says("recipe: got", r"MXFP8BlockScaling\(\)")):
        module(torch.randn(4, 32))
