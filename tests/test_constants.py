"""Transformer Engine's constants, by the numbers that its users index with."""

from __future__ import annotations

import torch

import minifloat
from minifloat import constants


def test_sizes_of_blocks() -> None:
    assert constants.MXFP8_BLOCK_SCALING_SIZE == 32
    assert constants.NVFP4_BLOCK_SCALING_SIZE == 16


def test_what_is_named_elsewhere_is_the_same() -> None:
    assert minifloat.constants is constants
    assert constants.DType is minifloat.DType
    assert constants.TE_DType is minifloat.TE_DType
    assert constants.TE_DType_To_Torch is minifloat.TE_DType_To_Torch
    assert constants.dist_group_type is torch.distributed.ProcessGroup


def test_slots() -> None:
    assert {s.name: int(s) for s in constants.FP8FwdTensorIdx} == {
        "GEMM1_INPUT": 0,
        "GEMM1_WEIGHT": 1,
        "GEMM1_OUTPUT": 2,
        "GEMM2_INPUT": 3,
        "GEMM2_WEIGHT": 4,
        "GEMM2_OUTPUT": 5,
        "GEMM3_OUTPUT": 8,
    }
    assert {s.name: int(s) for s in constants.FP8BwdTensorIdx} == {
        "GRAD_OUTPUT1": 0,
        "GRAD_INPUT1": 1,
        "GRAD_OUTPUT2": 2,
        "GRAD_INPUT2": 3,
        "GRAD_OUTPUT3": 4,
        "GRAD_INPUT3": 5,
    }


def test_a_layers_quantizers_are_in_these_slots() -> None:
    seen = []

    def qfactory(role: minifloat.QuantizerRole | None) -> minifloat.Quantizer:
        seen.append("" if role is None else role.tensor_type)
        return minifloat.IdentityQuantizer()

    with minifloat.autocast(recipe=minifloat.recipe.CustomRecipe(qfactory=qfactory)):
        made = minifloat.Linear(8, 8).quantizers
    forward, backward = seen[: len(made["scaling_fwd"])], seen[len(made["scaling_fwd"]) :]
    assert forward[constants.FP8FwdTensorIdx.GEMM1_INPUT] == "input"
    assert forward[constants.FP8FwdTensorIdx.GEMM1_WEIGHT] == "weight"
    assert backward[constants.FP8BwdTensorIdx.GRAD_OUTPUT1] == "grad_output"
