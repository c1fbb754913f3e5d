"""State dicts of plain tensors, through safetensors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch

import minifloat as mf

from .cases import KINDS, VALUES, assert_same, bits, delayed, quantized, values


def through_a_file(state_dict: dict[str, Any], path: Path) -> dict[str, Any]:
    tensors, metadata = mf.flatten_state_dict(state_dict)
    safetensors.torch.save_file(tensors, path, metadata=metadata)
    with safetensors.safe_open(path, "pt") as file:
        read = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        return mf.unflatten_state_dict(read, file.metadata())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columnwise", [True, False])
def test_round_trip(kind: str, columnwise: bool, tmp_path: Path) -> None:
    t = quantized(kind, 3, 5, 17, columnwise=columnwise, dtype=torch.bfloat16)
    state = {"layer.weight": t, "layer.bias": values(5)}
    back = through_a_file(state, tmp_path / "x.safetensors")
    assert set(back) == set(state)
    assert_same(back["layer.weight"], t)
    assert torch.equal(back["layer.bias"], values(5))
    made = back["layer.weight"]._quantizer
    if kind in VALUES:
        assert made == t._quantizer
    else:
        assert type(made) is type(t._quantizer) and torch.equal(made.scale, t._quantizer.scale)
        assert torch.equal(made.amax, t._quantizer.amax)
    assert_same(
        back["layer.weight"].copy_(values(3, 5, 17, dtype=torch.bfloat16, seed=1)),
        quantized(kind, 3, 5, 17, columnwise=columnwise, dtype=torch.bfloat16, seed=1),
    )


def test_names_and_description() -> None:
    tensors, metadata = mf.flatten_state_dict({"w": quantized("current", 4, 6), "b": values(4)})
    assert set(tensors) == {"w._data", "w._transpose", "w._scale_inv", "b"}
    assert all(type(t) is torch.Tensor for t in tensors.values())
    assert set(metadata) == {"minifloat", "minifloat.w"}
    assert json.loads(metadata["minifloat"]) == {"version": 1}
    assert json.loads(metadata["minifloat.w"]) == {
        "class": "Float8Tensor",
        "dtype": {"torch.dtype": "float32"},
        "shape": [4, 6],
        "inner": ["_data", "_transpose", "_scale_inv"],
        "fields": {"fp8_dtype": {"DType": "kFloat8E4M3"}},
        "quantizer": {
            "class": "Float8CurrentScalingQuantizer",
            "fields": {
                "rowwise_usage": True,
                "columnwise_usage": True,
                "internal": False,
                "optimize_for_gemm": False,
                "dtype": {"DType": "kFloat8E4M3"},
                "with_amax_reduction": False,
                "force_pow_2_scales": False,
                "amax_epsilon": 0.0,
            },
        },
    }


def test_other_values_round_trip() -> None:
    storage, flat = quantized("mxfp8", internal=True), quantized("mxfp8", 32, 32).view(-1)
    bare = quantized("nvfp4")
    bare._quantizer = None
    live = mf.HybridQuantizer(
        rowwise_quantizer=delayed(), columnwise_quantizer=mf.IdentityQuantizer()
    ).quantize(values(8, 8))
    state = {"storage": storage, "flat": flat, "bare": bare, "live": live}
    back = mf.unflatten_state_dict(*mf.flatten_state_dict(state))
    for name, t in state.items():
        assert_same(back[name], t)
    assert back["bare"]._quantizer is None
    assert torch.equal(back["flat"].view(32, 32).dequantize(), flat.dequantize().view(32, 32))
    assert torch.equal(back["live"]._quantizer.rowwise_quantizer.scale, torch.full((1,), 16.0))


def test_a_module_round_trip(tmp_path: Path) -> None:
    net = torch.nn.Linear(48, 64)
    net.weight = torch.nn.Parameter(quantized("nvfp4_2d"))
    back = through_a_file(net.state_dict(), tmp_path / "x.safetensors")
    other = torch.nn.Linear(48, 64)
    other.weight = torch.nn.Parameter(quantized("nvfp4_2d", seed=1))
    other.load_state_dict(back)
    assert bits(other.weight) == bits(net.weight)
    assert torch.equal(other.bias, net.bias)


def test_a_layer_whose_weight_scales_by_history(tmp_path: Path) -> None:
    """Its live scale is the layer's buffer, and the file has both."""
    recipe = mf.recipe.DelayedScaling(amax_history_len=4)

    def made(seed: int) -> mf.Linear:
        torch.manual_seed(seed)
        with mf.quantized_model_init(recipe=recipe):
            return mf.Linear(16, 32, device="cpu")

    def output_of(layer: mf.Linear) -> torch.Tensor:
        with mf.autocast(recipe=recipe):
            return layer(values(8, 16))  # type: ignore[no-any-return]

    trained, resumed = made(0), made(1)
    output_of(trained).sum().backward()
    resumed.load_state_dict(through_a_file(trained.state_dict(), tmp_path / "x.safetensors"))
    assert torch.equal(resumed.delayed.scale_weight, trained.delayed.scale_weight)
    for _ in range(2):
        assert torch.equal(output_of(resumed), output_of(trained))


def test_plain_files_are_read_as_they_are() -> None:
    tensors = {"a": values(2), "minifloat.b": values(3)}
    assert mf.unflatten_state_dict(tensors, None) == tensors
    assert mf.unflatten_state_dict(tensors, {"format": "pt"}) == tensors


def test_nothing_is_pickled() -> None:
    program = (
        "import minifloat as mf, torch, pickle\n"
        "q = mf.MXFP8Quantizer(mf.DType.kFloat8E4M3)\n"
        "flat = mf.flatten_state_dict({'w': q.quantize(torch.ones(32, 32))})\n"
        "def refuse(*a, **k): raise AssertionError('pickled')\n"
        "pickle.loads = pickle.load = pickle.dumps = refuse\n"
        "assert mf.unflatten_state_dict(*flat)['w'].dequantize().sum() == 1024\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


class Own(mf.MXFP8Quantizer):
    pass


@pytest.mark.parametrize(
    ("value", "error", "complaint"),
    [
        (lambda: {"x": b"bytes"}, TypeError, "'x' is a bytes"),
        (lambda: {"w": quantized("current"), "w._data": values(1)}, ValueError, "'w._data'"),
        (lambda: {"w": Own(mf.DType.kFloat8E4M3).quantize(values(32, 32))}, TypeError, "Own"),
    ],
)
def test_what_cannot_be_stored(value: Any, error: type, complaint: str) -> None:
    with pytest.raises(error, match=complaint):
        mf.flatten_state_dict(value())


def edited(**changes: Any) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """A stored tensor whose description was changed; None removes a key."""
    tensors, metadata = mf.flatten_state_dict({"w": quantized("mxfp8")})
    about = json.loads(metadata["minifloat.w"])
    for path, value in changes.items():
        *steps, last = path.split("__")
        target = about
        for step in steps:
            target = target[step]
        if value is None:
            del target[last]
        else:
            target[last] = value
    return tensors, {**metadata, "minifloat.w": json.dumps(about)}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"class": "os.system"}, "'os.system'; known: .*MXFP8Tensor"),
        ({"class": "Float8Tensor"}, "'with_gemm_swizzled_scales'"),
        ({"quantizer__class": "Pickle"}, "'Pickle'; known: .*MXFP8Quantizer"),
        ({"quantizer__fields__colour": 1}, "unknown 'colour'"),
        ({"quantizer__fields__dtype": None}, "no 'dtype'"),
        ({"quantizer__fields__dtype": {"DType": "kFloat2"}}, "kFloat2"),
        ({"fields__colour": 1}, "unknown 'colour'"),
        ({"fields__fp8_dtype": None}, "no 'fp8_dtype'"),
        ({"dtype": {"torch.dtype": "load"}}, "load"),
        ({"shape": None}, "no 'shape'"),
        ({"extra": 1}, "unknown 'extra'"),
        ({"inner": ["_rowwise_data", "_missing"]}, "'w._missing' is missing"),
    ],
)
def test_a_wrong_description_is_named(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        mf.unflatten_state_dict(*edited(**changes))


def test_a_foreign_inner_tensor_is_named() -> None:
    tensors, metadata = edited(inner=["_rowwise_data", "_colour"])
    with pytest.raises(ValueError, match="'_colour' that MXFP8Tensor does not have"):
        mf.unflatten_state_dict({**tensors, "w._colour": values(1)}, metadata)


def test_other_versions_and_texts() -> None:
    tensors, metadata = edited()
    with pytest.raises(ValueError, match="version 2"):
        mf.unflatten_state_dict(tensors, {**metadata, "minifloat": '{"version": 2}'})
    with pytest.raises(ValueError, match="version None"):
        mf.unflatten_state_dict(tensors, {"minifloat.w": metadata["minifloat.w"]})
    with pytest.raises(ValueError, match="no JSON"):
        mf.unflatten_state_dict(tensors, {**metadata, "minifloat.w": "{"})
    with pytest.raises(ValueError, match="object"):
        mf.unflatten_state_dict(tensors, {**metadata, "minifloat.w": "[]"})
    with pytest.raises(ValueError, match="plain and as a quantized"):
        mf.unflatten_state_dict({**tensors, "w": values(1)}, metadata)
