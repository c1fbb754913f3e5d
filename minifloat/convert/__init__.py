"""Models of `nn.Linear` layers into ours, and checkpoints of Transformer Engine into tensors."""

from .checkpoints import convert_checkpoint, convert_state_dict, read_extra_state
from .report import ConversionReport, ConvertedLayer
from .swap import convert

__all__ = [
    "ConversionReport",
    "ConvertedLayer",
    "convert",
    "convert_checkpoint",
    "convert_state_dict",
    "read_extra_state",
]
