"""The butterfly is the matrix, is orthogonal, and adds in the order the specification states."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minifloat.formats import HADAMARD_SIGN_MASK
from minifloat.reference import hadamard, hadamard_matrix

from .cases import matrix

MASKS = [0, 0xFFFF, HADAMARD_SIGN_MASK]
SIGNS = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]


def sylvester(mask: int) -> np.ndarray:
    """`diag(signs) H16 / 4` by doubling."""
    h = np.ones((1, 1))
    while len(h) < 16:
        h = np.kron([[1, 1], [1, -1]], h)
    signs = np.array([-1 if mask >> i & 1 else 1 for i in range(16)])
    return signs[:, None] * h / 4


def integers(shape: tuple[int, int], seed: int) -> torch.Tensor:
    """Small integers: every sum of the transform is exact in fp32."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-64, 65, shape, generator=g).to(torch.float32)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_matrix(mask: int, dtype: torch.dtype) -> None:
    h = hadamard_matrix(mask, dtype)
    assert h.dtype is dtype
    np.testing.assert_array_equal(h.double().numpy(), sylvester(mask))
    assert torch.equal(h.double() @ h.double().t(), torch.eye(16).double())


def test_matrix_has_the_contracts_signs() -> None:
    """Column 0 of H16 is all ones: it shows the signs."""
    assert (hadamard_matrix(HADAMARD_SIGN_MASK)[:, 0] * 4).tolist() == SIGNS


@pytest.mark.parametrize("mask", MASKS)
@given(st.integers(0, 9), st.integers(0, 50), st.integers(0, 2**31))
def test_equals_the_matrix_product(mask: int, rows: int, columns: int, seed: int) -> None:
    """Exact on integers; the tail chunk is zero-padded and keeps all 16 outputs."""
    x = integers((rows, columns), seed)
    y = hadamard(x, mask)
    chunks = -(-columns // 16)
    assert y.shape == (rows, 16 * chunks)
    padded = np.zeros((rows, 16 * chunks))
    padded[:, :columns] = x.numpy()
    want = padded.reshape(rows, chunks, 16) @ sylvester(mask)
    np.testing.assert_array_equal(y.double().numpy(), want.reshape(padded.shape))


def test_rounding_is_that_of_the_butterflies() -> None:
    """Bit for bit: signs; distances 1, 2, 4, 8; `(a, b) -> (a + b, a - b)`; times 1/4."""
    x = matrix((20, 48), seed=4, spread=12)
    want = x.numpy().copy().reshape(-1, 16)
    for chunk in want:
        for i in range(16):
            if HADAMARD_SIGN_MASK >> i & 1:
                chunk[i] = -chunk[i]
        for d in (1, 2, 4, 8):
            for i in range(16):
                if not i & d:
                    chunk[i], chunk[i + d] = chunk[i] + chunk[i + d], chunk[i] - chunk[i + d]
    want = (want * np.float32(0.25)).reshape(20, 48)
    got = hadamard(x, HADAMARD_SIGN_MASK)
    np.testing.assert_array_equal(got.numpy(), want)
    # The order shows: the exact product, rounded once, is another number in some places.
    once = (x.double().reshape(-1, 16) @ torch.from_numpy(sylvester(HADAMARD_SIGN_MASK))).float()
    assert not torch.equal(got, once.reshape(20, 48))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_input_is_transformed_in_fp32(dtype: torch.dtype) -> None:
    x = matrix((5, 33)).to(dtype)
    y = hadamard(x, HADAMARD_SIGN_MASK)
    assert y.dtype is torch.float32
    assert torch.equal(y, hadamard(x.float(), HADAMARD_SIGN_MASK))


@pytest.mark.parametrize("m", [1, 15, 16, 17, 40])
def test_wgrad_is_invariant(m: int) -> None:
    """dy^T x contracts over the transformed dimension: H H^T = 1 leaves it, exactly on integers."""
    x, dy = integers((m, 7), 5), integers((m, 9), 6)
    hx, hdy = (hadamard(t.t(), HADAMARD_SIGN_MASK).double() for t in (x, dy))
    assert torch.equal(hdy @ hx.t(), (dy.t() @ x).double())


def test_dropping_tail_outputs_would_lose_information() -> None:
    x = torch.ones(1, 1)
    assert hadamard(x, 0).tolist() == [[0.25] * 16]
