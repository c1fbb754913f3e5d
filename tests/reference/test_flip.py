"""A square tile's column copy, made from its row copy, is what quantizing the source gives."""

from __future__ import annotations

import pytest
import torch

from minifloat import reference
from minifloat.formats import FORMATS, Cast

SQUARE = [f.name for f in FORMATS.values() if f.square and f.tile is not None]
SHAPES = [(1, 1), (16, 48), (17, 100), (129, 257), (128, 256), (0, 5), (5, 0)]


@pytest.mark.parametrize("name", SQUARE)
@pytest.mark.parametrize("shape", SHAPES)
def test_flip_equals_quantizing_the_columns(name, shape):
    x = torch.randn(shape) * torch.logspace(-3, 3, max(shape[1], 1))[: shape[1]]
    cast = Cast(name)
    data, scale, _ = reference.quantize(x, cast)
    want_data, want_scale, _ = reference.quantize(x, cast, col=True)
    got_data, got_scale = reference.flip(data, scale, cast, shape)
    assert torch.equal(got_data, want_data)
    assert torch.equal(got_scale, want_scale)


@pytest.mark.parametrize("name", ["fp8_e4m3_1x128", "mxfp8_e4m3", "nvfp4", "fp8_e4m3"])
def test_other_formats_cannot_be_flipped(name):
    cast = Cast(name)
    data, scale, _ = reference.quantize(torch.randn(32, 32), cast)
    with pytest.raises(ValueError, match="square"):
        reference.flip(data, scale, cast, (32, 32))
