"""`minifloat bench`: layers by every recipe beside plain PyTorch and other libraries."""

from .errors import BenchError
from .options import Options
from .runner import bench

__all__ = ["BenchError", "Options", "bench"]
