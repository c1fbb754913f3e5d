"""`minifloat train`: a transformer in low precision, and the same one in bf16 beside it."""

from .errors import TrainError
from .options import Options
from .run import train

__all__ = ["Options", "TrainError", "train"]
