"""`convert` on a Llama of transformers, and LoRA of peft on top; neither is a dependency."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import minifloat
from minifloat import recipe

transformers = pytest.importorskip("transformers")
RECIPE = recipe.Float8CurrentScaling()


def llama(tied: bool = False, layers: int = 2) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def batch() -> dict[str, Any]:
    ids = torch.randint(96, (2, 16), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize(
    ("layers", "tied", "fuse"),
    ((1, False, True), pytest.param(2, True, False, marks=pytest.mark.deep)),
)
def test_a_llama_trains_compiled_and_is_saved(
    layers: int, tied: bool, fuse: bool, tmp_path: Path
) -> None:
    model, data = llama(tied, layers), batch()
    keys = list(model.state_dict())
    report = minifloat.convert(model, RECIPE, fuse=fuse)
    assert list(model.state_dict()) == keys
    assert len(report.fused) == (3 * layers if fuse else 0)
    assert len(report.converted) == 7 * layers
    assert list(report.skipped) == ["lm_head"]
    assert ("embedding" in report.skipped["lm_head"]) == tied
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

    def step() -> float:
        loss = compiled(**data).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    first = step()
    proof = minifloat.assert_quantized(model, step)
    assert proof.total == 7 * layers * 3
    assert step() < first
    model.save_pretrained(tmp_path)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert type(again.model.layers[0].mlp.down_proj) is torch.nn.Linear
    for (name, a), (other, b) in zip(
        model.state_dict().items(), again.state_dict().items(), strict=True
    ):
        assert name == other
        assert torch.equal(a, b), name
    minifloat.convert(again, RECIPE, fuse=fuse)
    assert torch.equal(again(**data).loss, model(**data).loss)


@pytest.mark.parametrize("family", ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Phi3"))
def test_mlps_of_families_are_fused(family: str) -> None:
    """Their norms too, whatever class those are, and the gradients are those of the layers."""
    config = getattr(transformers, f"{family}Config")(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    other, data = copy.deepcopy(model), batch()
    used = recipe.MXFP8BlockScaling()
    report = minifloat.convert(model, used, fuse=True)
    minifloat.convert(other, used)
    assert {name.split(".")[-1]: fusion.pattern for name, fusion in report.fused.items()} == {
        "mlp": "gated_mlp",
        "post_attention_layernorm": "norm_mlp",
        "input_layernorm": "norm_linear",
    }
    readers = report.fused["model.layers.0.input_layernorm"].members
    names = ("qkv_proj",) if family == "Phi3" else ("q_proj", "k_proj", "v_proj")
    assert [name.split(".")[-1] for name in list(readers.values())[1:]] == list(names)
    for m in (model, other):
        m(**data).loss.backward()
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert p.grad is not None, name
        assert q.grad is not None, name
        if name.endswith("k_proj.bias"):  # zero but for rounding: softmax does not see it
            continue
        assert (p.grad - q.grad).norm() < 1e-5 * q.grad.norm(), name


def test_compiled_gradients_are_those_of_the_layers() -> None:
    """Norms, projections and MLPs as one, in one graph, against layer by layer."""
    data, found = batch(), []
    for fuse in (False, True):
        model = llama(layers=1)
        minifloat.convert(model, recipe.MXFP8BlockScaling(), fuse=fuse)
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if fuse else model
        run(**data).loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    for name, expected in found[0].items():
        assert (found[1][name] - expected).norm() < 1e-5 * expected.norm(), name


def test_gradient_checkpointing() -> None:
    data = batch()
    grads = []
    for checkpointed in (False, True):
        model = llama()
        minifloat.convert(model, RECIPE, fuse=True)
        model.train()
        if checkpointed:
            model.gradient_checkpointing_enable()
        model(**data).loss.backward()
        grads.append(model.model.layers[0].mlp.down_proj.weight.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("before", (True, False), ids=("convert_first", "lora_first"))
def test_lora_on_a_frozen_quantized_base(before: bool) -> None:
    peft = pytest.importorskip("peft")
    model, data = llama(), batch()
    if before:
        minifloat.convert(model, RECIPE, fuse=True)  # what LoRA wraps runs by itself again
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj", "down_proj"], r=4)
    model = peft.get_peft_model(model, config)
    if not before:
        minifloat.convert(model, RECIPE, recipes={"*.lora_*": None})
    base = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)

    def step() -> float:
        loss = model(**data).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    first = step()
    proof = minifloat.assert_quantized(model, step)
    assert len(proof.layers) == 14
    assert all(layer.quantized[2] == 0 for layer in proof.layers.values())  # frozen: no wgrad
    for _ in range(3):
        last = step()
    assert last < first
    for name, parameter in model.named_parameters():
        if name in base:
            assert torch.equal(parameter, base[name])
