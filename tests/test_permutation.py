"""Permutations against the definition, their gradients, determinism and graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import minifloat as mf


def routed(tokens: int, experts: int, seed: int = 0, share: float = 0.4) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, experts, generator=generator) < share


def places(mask: Tensor) -> list[tuple[int, int]]:
    """(expert, token) of each row: by expert, then by token."""
    tokens, experts = mask.shape
    return [(e, t) for e in range(experts) for t in range(tokens) if mask[t, e]]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32])
def test_a_mask_orders_rows_by_expert_then_token(dtype: torch.dtype) -> None:
    mask, inp = routed(13, 5), torch.randn(13, 6)
    rows = places(mask)
    permuted, row_id_map = mf.moe_permute(inp, mask.to(dtype), len(rows))
    assert torch.equal(permuted, inp[[t for _, t in rows]])
    for at, (e, t) in enumerate(rows):
        assert row_id_map[t, e] == at
    assert int((row_id_map >= 0).sum()) == len(rows)


def test_indices_order_rows_by_expert_then_token() -> None:
    ids, inp = torch.tensor([[2, 0], [1, 2], [0, 1], [2, 1]]), torch.randn(4, 3)
    rows = sorted((int(e), t, j) for t, pair in enumerate(ids) for j, e in enumerate(pair))
    for count in (8, -1, 0):
        permuted, row_id_map = mf.moe_permute(inp, ids, count, map_type="index")
        assert torch.equal(permuted, inp[[t for _, t, _ in rows]])
        assert all(row_id_map[t, j] == at for at, (_, t, j) in enumerate(rows))
    weights = torch.rand(4, 2)
    out = mf.moe_unpermute(permuted, row_id_map, weights, map_type="index")
    torch.testing.assert_close(out, inp * weights.sum(1, keepdim=True))


def test_indices_need_no_number_of_rows() -> None:
    inp, ids = torch.randn(4, 3), torch.tensor([[1, 0], [0, 2], [2, 1], [0, 1]])
    permuted, row_id_map = mf.moe_permute(inp, ids, map_type="index")
    expected = mf.moe_permute(inp, ids, 8, map_type="index")
    assert torch.equal(permuted, expected[0]) and torch.equal(row_id_map, expected[1])


def test_an_id_below_zero_has_no_row() -> None:
    ids, inp = torch.tensor([[1, -1], [0, 1]]), torch.randn(2, 3)
    permuted, row_id_map = mf.moe_permute(inp, ids, 3, map_type="index")
    assert torch.equal(permuted, inp[[1, 0, 1]])
    assert row_id_map.tolist() == [[1, -1], [0, 2]]


@pytest.mark.parametrize("map_type", ["mask", "index"])
def test_more_and_fewer_rows_than_copies(map_type: str) -> None:
    inp = torch.randn(6, 4)
    if map_type == "mask":
        routing, count = routed(6, 4), int(routed(6, 4).sum())
    else:
        routing, count = torch.randint(0, 4, (6, 2)), 12
    full, _ = mf.moe_permute(inp, routing, count, map_type=map_type)
    more, row_id_map = mf.moe_permute(inp, routing, count + 3, map_type=map_type)
    assert torch.equal(more[:count], full) and not more[count:].any()
    assert int((row_id_map >= 0).sum()) == count
    less, row_id_map = mf.moe_permute(inp, routing, count - 2, map_type=map_type)
    assert torch.equal(less, full[: count - 2])
    assert int((row_id_map >= 0).sum()) == count - 2


def test_probs_travel_with_the_rows() -> None:
    mask, inp, probs = routed(13, 5), torch.randn(13, 6), torch.rand(13, 5)
    rows = places(mask)
    permuted, of_rows, row_id_map = mf.moe_permute_with_probs(inp, probs, mask, len(rows))
    assert torch.equal(permuted, inp[[t for _, t in rows]])
    assert torch.equal(of_rows, torch.stack([probs[t, e] for e, t in rows]))
    merged = mf.moe_unpermute(permuted, row_id_map, probs)
    # Sums of at most five products in fp32.
    torch.testing.assert_close(merged, inp * (probs * mask).sum(1, keepdim=True))
    assert torch.equal(merged, mf.moe_unpermute(permuted, row_id_map, probs=probs))


@pytest.mark.parametrize("on_host", [True, False])
def test_padding(on_host: bool) -> None:
    mask, inp, probs = routed(13, 5), torch.randn(13, 6), torch.rand(13, 5)
    counts = mask.sum(0)
    permuted, of_rows, row_id_map, offsets, padded = mf.moe_permute_and_pad_with_probs(
        inp, probs, mask, counts.tolist() if on_host else counts, 4
    )
    assert padded.tolist() == [-(-int(n) // 4) * 4 for n in counts]
    plain, plain_probs, plain_map = mf.moe_permute_with_probs(inp, probs, mask, int(counts.sum()))
    assert torch.equal(row_id_map, plain_map)
    blocks = zip(permuted.split(padded.tolist()), plain.split(counts.tolist()), strict=True)
    for block, rows in blocks:
        assert torch.equal(block[: len(rows)], rows) and not block[len(rows) :].any()
    assert float(of_rows.sum()) == pytest.approx(float(plain_probs.sum()))
    assert offsets is not None and offsets[0] == 0
    out = mf.moe_unpermute(permuted, row_id_map, pad_offsets=offsets)
    assert torch.equal(out, mf.moe_unpermute(plain, plain_map))
    nothing = mf.moe_permute_and_pad_with_probs(inp, probs, mask, counts, 1)
    assert nothing[3] is None and torch.equal(nothing[0], plain)


def test_chunks() -> None:
    inp, probs = torch.randn(12, 3, requires_grad=True), torch.rand(12, requires_grad=True)
    sizes, order = torch.tensor([3, 0, 5, 4]), torch.tensor([2, 0, 3, 1])
    expected = torch.cat([inp.split(sizes.tolist())[i] for i in order])
    with torch.device("meta"):  # the default device has no say
        out = mf.moe_sort_chunks_by_index(inp, sizes, order)
    assert torch.equal(out, expected)
    moved, of_rows = mf.moe_sort_chunks_by_index_with_probs(inp, probs, sizes, order)
    assert torch.equal(moved, expected)
    assert torch.equal(of_rows, torch.cat([probs.split(sizes.tolist())[i] for i in order]))
    weight = torch.randn(12, 3)
    grads = [torch.autograd.grad((y * weight).sum(), inp)[0] for y in (out, expected)]
    assert torch.equal(*grads)
    (of_probs,) = torch.autograd.grad((of_rows * weight[:, 0]).sum(), probs)
    assert torch.equal(mf.moe_sort_chunks_by_index(of_probs, sizes, order), weight[:, 0])


def test_gradients() -> None:
    """Against finite differences, in fp64: every path is linear in each argument."""
    mask = routed(5, 4)
    count = int(mask.sum())
    inp = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    probs = torch.rand(5, 4, dtype=torch.float64, requires_grad=True)

    def there_and_back(inp: Tensor, probs: Tensor) -> Any:
        rows, of_rows, row_id_map = mf.moe_permute_with_probs(inp, probs, mask, count + 1)
        out = mf.moe_unpermute(rows * of_rows[:, None], row_id_map, probs)
        padded = mf.moe_permute_and_pad_with_probs(inp, probs, mask, mask.sum(0), 3)
        return out, mf.moe_unpermute(padded[0] * 2, padded[2], probs, pad_offsets=padded[3])

    assert torch.autograd.gradcheck(there_and_back, (inp, probs))


def test_a_map_says_where_rows_are_whatever_its_type() -> None:
    """Of indices, with the type left at its default: the rows' gradients were of other tokens."""
    indices = torch.rand(16, 4).topk(2).indices
    rows, row_id_map = mf.moe_permute(torch.randn(16, 8), indices, map_type="index")
    probs, grad = torch.rand(16, 2), torch.randn(16, 8)
    found = []
    for map_type in ("index", "mask"):
        given = rows.clone().requires_grad_(), probs.clone().requires_grad_()
        y = mf.moe_unpermute(given[0], row_id_map, given[1], map_type=map_type)
        found.append([y, *torch.autograd.grad(y, given, grad)])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_each_is_the_gradient_of_the_other() -> None:
    mask, inp = routed(9, 4), torch.randn(9, 5, dtype=torch.bfloat16, requires_grad=True)
    rows, row_id_map = mf.moe_permute(inp, mask, int(mask.sum()))
    grad = torch.randn_like(rows)
    (back,) = torch.autograd.grad(rows, inp, grad)
    assert torch.equal(back, mf.moe_unpermute(grad, row_id_map))
    taken = rows.detach().requires_grad_()
    (there,) = torch.autograd.grad(mf.moe_unpermute(taken, row_id_map), taken, back)
    assert torch.equal(there, mf.moe_permute(back, mask, len(rows))[0])


def test_bf16_sums_are_rounded_once() -> None:
    mask, rows = torch.ones(4, 8), torch.randn(32, 16, dtype=torch.bfloat16)
    _, row_id_map = mf.moe_permute(torch.zeros(4, 16), mask, 32)
    out = mf.moe_unpermute(rows, row_id_map)
    exact = rows.double().reshape(8, 4, 16).sum(0)
    # fp32 sums of 8 terms are off by at most 8 * 2**-24 of the sum of the magnitudes.
    slack = 8 * 2.0**-24 * rows.double().abs().reshape(8, 4, 16).sum(0)
    assert bool(((out.double() - exact).abs() <= 2.0**-8 * exact.abs() + slack).all())


@pytest.mark.parametrize(("tokens", "experts"), [(0, 4), (3, 1), (1, 4)])
def test_small_and_empty(tokens: int, experts: int) -> None:
    mask = torch.ones(tokens, experts, dtype=torch.bool)
    inp = torch.randn(tokens, 2, requires_grad=True)
    rows, row_id_map = mf.moe_permute(inp, mask, tokens * experts)
    out = mf.moe_unpermute(rows, row_id_map)
    torch.testing.assert_close(out, inp * experts)
    out.sum().backward()
    assert inp.grad is not None and bool((inp.grad == experts).all())


def test_nobody_is_routed() -> None:
    rows, row_id_map = mf.moe_permute(torch.randn(3, 2), torch.zeros(3, 4), 0)
    assert rows.shape == (0, 2)
    assert not mf.moe_unpermute(rows, row_id_map).any()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_graph_for_any_number_of_tokens(backend: str) -> None:
    torch._dynamo.reset()

    def block(inp: Tensor, probs: Tensor, mask: Tensor, count: int) -> Tensor:
        rows, of_rows, row_id_map = mf.moe_permute_with_probs(inp, probs, mask, count)
        merged = mf.moe_unpermute(rows * 2, row_id_map, probs)
        return merged + mf.moe_unpermute(rows * of_rows[:, None], row_id_map)

    counter = CompileCounterWithBackend(backend)
    fn = torch.compile(block, backend=counter, fullgraph=True, dynamic=True)
    for seed, tokens in enumerate((13, 20, 7)):
        mask = routed(tokens, 5, seed)
        inp = torch.randn(tokens, 6, requires_grad=True)
        probs = torch.rand(tokens, 5, requires_grad=True)
        results = [f(inp, probs, mask, int(mask.sum())) for f in (fn, block)]
        grads = [torch.autograd.grad(y.sum(), (inp, probs)) for y in results]
        for a, b in zip((results[0], *grads[0]), (results[1], *grads[1]), strict=True):
            if backend == "aot_eager":
                assert torch.equal(a, b)
            else:
                torch.testing.assert_close(a, b)
    assert counter.frame_count == 1


def _of(x: Tensor, scores: Tensor, rows: str) -> tuple[Tensor, Tensor, Tensor, Any]:
    """(tokens, scores, mask, number of rows) by what the tokens hold: a graph knows no length."""
    count: Any = 10
    if rows == "read":
        count = int((x.detach()[:, 0] > 0).sum().item())
    else:
        keep = x[:, 0] > 0
        x, scores = x[keep], scores[keep]
    mask = torch.zeros_like(scores, dtype=torch.bool).scatter(1, scores.topk(2, -1).indices, True)
    return x, scores, mask, 2 * x.shape[0] if rows == "kept" else count


def _by_probs(x: Tensor, scores: Tensor, rows: str) -> Tensor:
    x, scores, mask, count = _of(x, scores, rows)
    permuted, probs, row_id_map = mf.moe_permute_with_probs(x, scores * mask, mask, count)
    return mf.moe_unpermute(torch.tanh(permuted) * probs[:, None], row_id_map)


def _by_merging(x: Tensor, scores: Tensor, rows: str) -> Tensor:
    x, scores, mask, count = _of(x, scores, rows)
    permuted, row_id_map = mf.moe_permute(x, mask, count)
    return mf.moe_unpermute(torch.tanh(permuted), row_id_map, scores, restore_shape=x.shape)


def _by_index(x: Tensor, scores: Tensor, rows: str) -> Tensor:
    x, scores, _, _ = _of(x, scores, rows)
    best, chosen = scores.topk(2, -1)
    permuted, row_id_map = mf.moe_permute(x, chosen, map_type="index")
    return mf.moe_unpermute(torch.tanh(permuted), row_id_map, best, map_type="index")


def _by_chunks(x: Tensor, scores: Tensor, rows: str) -> Tensor:
    x, scores, _, _ = _of(x, scores, rows)
    sizes = (torch.arange(2) + x.shape[0]) // 2
    order = torch.tensor([1, 0])
    moved, probs = mf.moe_sort_chunks_by_index_with_probs(x, scores[:, 0], sizes, order)
    return moved * probs[:, None]


@pytest.mark.parametrize("rows", ["kept", "read", "fixed"])
@pytest.mark.parametrize("block", [_by_probs, _by_merging, _by_index, _by_chunks])
def test_numbers_of_tokens_and_rows_that_a_graph_computes(block: Any, rows: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    settings: Any = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    with torch._dynamo.config.patch(settings):
        for tokens, kept in ((9, 5), (9, 0), (12, 12), (9, 1), (0, 0)):
            x, scores = torch.randn(tokens, 8), torch.rand(tokens, 4)
            x[:, 0] = torch.where(torch.arange(tokens) < kept, 1.0, -1.0)
            found = []
            for fn in (block, compiled):
                leaves = [t.clone().requires_grad_() for t in (x, scores)]
                y = fn(*leaves, rows)
                y.sum().backward()
                found += [[y, *[t.grad for t in leaves]]]
            for a, b in zip(*found, strict=True):
                assert torch.equal(a, b), (tokens, kept)


def test_chunks_in_a_graph() -> None:
    torch._dynamo.reset()
    fn = torch.compile(mf.moe_sort_chunks_by_index, backend="aot_eager", fullgraph=True)
    order, inp = torch.tensor([2, 0, 1]), torch.randn(9, 2)
    for sizes in (torch.tensor([3, 2, 4]), torch.tensor([0, 9, 0])):
        assert torch.equal(fn(inp, sizes, order), mf.moe_sort_chunks_by_index(inp, sizes, order))


def sort(x: Tensor, sizes: list[int], order: list[int]) -> Tensor:
    of: Any = {"dtype": torch.int64}
    return mf.moe_sort_chunks_by_index(x, torch.tensor(sizes, **of), torch.tensor(order, **of))


def test_other_counts_than_those_of_the_map_in_a_graph() -> None:
    x, mask = torch.randn(3, 2), torch.ones(3, 4, dtype=torch.bool)
    padded = torch.compile(mf.moe_permute_and_pad_with_probs, backend="aot_eager", fullgraph=True)
    assert padded(x, mask.float(), mask, [3, 3, 3, 3], 4)[0].shape == (16, 2)
    with pytest.raises(RuntimeError, match="tokens_per_expert: routing_map gives"):
        padded(x, mask.float(), mask, [2, 4, 3, 3], 4)


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda x, m: mf.moe_permute(x, m, 4, map_type="rows"), "map_type: got 'rows'"),
        (lambda x, m: mf.moe_permute(x, m[:2], 4), "routing_map: got shape"),
        (lambda x, m: mf.moe_permute(x, m, -1), "num_out_tokens: got -1"),
        (lambda x, m: mf.moe_permute(x, m), "num_out_tokens: got -1"),
        (lambda x, m: mf.moe_permute(x, m, m.sum()), "num_out_tokens: got Tensor"),
        (lambda x, m: mf.moe_sort_chunks_by_index(x, [1, 2], [1, 0]), "split_sizes: got list"),
        (
            lambda x, m: mf.moe_sort_chunks_by_index(x, torch.tensor([1, 2]), torch.ones(2)),
            "sorted_index: got torch.float32",
        ),
        (lambda x, m: mf.moe_permute_with_probs(x, m.float()[:, :1], m, 4), "probs: got"),
        (lambda x, m: mf.moe_unpermute(x, None), "row_id_map: got NoneType"),
        (lambda x, m: mf.moe_unpermute(x, m[0].long()), r"row_id_map: got shape \(4,\)"),
        (lambda x, m: mf.moe_unpermute(x, m.long(), x), "merging_probs: got"),
        (lambda x, m: mf.moe_unpermute(x, m.long(), restore_shape=(1, 1)), "restore_shape: got"),
        (
            lambda x, m: mf.moe_permute_and_pad_with_probs(x, m.float(), m, [1], 4),
            "tokens_per_expert: got",
        ),
        (
            lambda x, m: mf.moe_permute_and_pad_with_probs(x, m.float(), m, [2, 4, 3, 3], 4),
            r"tokens_per_expert: got \[2, 4, 3, 3\]; routing_map gives .* other numbers",
        ),
        (
            lambda x, m: mf.moe_permute_and_pad_with_probs(x, m.float(), m, [3.0, 3, 3, 3], 4),
            "tokens_per_expert: got .* integers",
        ),
        (lambda x, m: mf.moe_permute(x, [[1, 0]], 4), "routing_map: got list"),
        (lambda x, m: mf.moe_permute_with_probs(x, None, m, 4), "probs: got NoneType"),
        (lambda x, m: mf.moe_unpermute(x, m.float()), "row_id_map: got torch.float32"),
        (
            lambda x, m: mf.moe_unpermute(x, mf.moe_permute(x, m, 12)[1]),
            "inp: got 3 rows; row_id_map is of an input with more",
        ),
        (
            lambda x, m: mf.moe_unpermute(x, m.long() - 1, pad_offsets=torch.zeros(3)),
            r"pad_offsets: got \(3,\); one for each of 4",
        ),
        (lambda x, m: sort(x, [4, -1], [1, 0]), r"split_sizes: got \[4, -1\]; none .* negative"),
        (lambda x, m: sort(x, [2, 2], [1, 0]), r"split_sizes: got \[2, 2\]; .* the 3 rows"),
        (lambda x, m: sort(x, [1, 2], [1, 1]), r"sorted_index: got \[1, 1\]; each of the 2"),
        (lambda x, m: sort(x, [1, 2], [1, 2]), r"sorted_index: got \[1, 2\]; each of the 2"),
        (lambda x, m: sort(x, [], []), "split_sizes: got no chunks"),
    ],
)
def test_errors_name_the_argument(call: Any, complaint: str) -> None:
    with pytest.raises((ValueError, TypeError), match=complaint):
        call(torch.randn(3, 2), torch.ones(3, 4, dtype=torch.bool))
