"""The exactness sweep: kernels against the reference, byte for byte, on one device.

    python -m tests.exact            on the GPU, sharded over processes
    python -m tests.exact --help     the options

`scripts/gpu_check` runs it together with the GPU tests and the benchmarks.
Nothing here needs pytest: it runs from a bare checkout wherever torch is.
"""
