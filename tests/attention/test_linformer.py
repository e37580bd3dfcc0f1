import pytest
import torch

from rankscope._errors import RankscopeError
from rankscope.attention._layout import TokenLayout, compact, pool_max, pool_mean, restore, segments, token_layout
from rankscope.attention.exact import exact_naive, sdpa
from rankscope.attention.linformer import apply_matrix, linformer
from reference import linformer as reference


def tensors(n, m=None, heads=2, batch=2, head_dim=4):
    generator = torch.Generator().manual_seed(n)
    return tuple(
        torch.randn(batch, heads, s, head_dim, dtype=torch.float64, generator=generator) for s in (n, m or n, m or n)
    )


def loops(query, key, value, E, F, mask):
    """The reference, head by head; E and F are ``(k, n)``, or ``None`` for means."""
    out = torch.zeros_like(query)
    kind = "mean" if isinstance(E, int) else "learned"
    k = E if isinstance(E, int) else E.shape[0]
    for b in range(query.shape[0]):
        for h in range(query.shape[1]):
            rows = [None if mask is None else mask[b : b + 1]]
            tokens = [reference.valid_rows(x[b, h][None], rows[0])[0] for x in (key, value)]
            if tokens[0]:
                sides = [
                    reference.project(kind, side, k, None, weight) for side, weight in zip(tokens, (E, F), strict=True)
                ]
                for t in range(query.shape[2]):
                    out[b, h, t] = reference.attention_row(query[b, h, t], *sides, query.shape[-1] ** -0.5)
    return out


@pytest.mark.parametrize(("n", "m"), [(7, 7), (5, 11)])
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("given", [True, False])
def test_equals_the_loops(n, m, padded, given):
    query, key, value = tensors(n, m)
    mask = None
    if padded:
        mask = torch.zeros(2, m, dtype=torch.bool)
        mask[0, :2] = mask[0, 4] = True
    generator = torch.Generator().manual_seed(1)
    E, F = torch.randn(2, 3, m + 2, generator=generator, dtype=torch.float64) if given else (3, 3)
    keywords = {"E": E, "F": F} if given else {"k": 3}
    got = linformer(query, key, value, key_padding_mask=mask, **keywords)
    torch.testing.assert_close(got, loops(query, key, value, E, F, mask), rtol=1e-12, atol=1e-12)


def test_with_k_equal_to_n_and_identities_it_is_softmax_attention():
    query, key, value = tensors(9)
    wanted = exact_naive(query, key, value)
    identity = torch.eye(9, dtype=torch.float64)
    torch.testing.assert_close(linformer(query, key, value, E=identity), wanted)
    torch.testing.assert_close(linformer(query, key, value, E=identity.expand(2, 9, 9)), wanted)
    torch.testing.assert_close(linformer(query, key, value, k=9), wanted)


def test_a_row_with_at_most_k_tokens_keeps_them_all():
    query, key, value = tensors(9)
    mask = torch.zeros(2, 9, dtype=torch.bool)
    mask[0, :4] = True
    wanted = exact_naive(query, key, value, key_padding_mask=mask)
    torch.testing.assert_close(linformer(query, key, value, k=6, key_padding_mask=mask)[0], wanted[0])


def test_fused_and_written_out_softmax_agree_for_every_mask():
    query, key, value = tensors(9)
    mask = torch.zeros(2, 9, dtype=torch.bool)
    mask[0, :4] = mask[1] = True
    for causal in (True, False):
        for padding in (mask, None):
            options = {"is_causal": causal, "key_padding_mask": padding, "scaling": 0.3}
            torch.testing.assert_close(sdpa(query, key, value, **options), exact_naive(query, key, value, **options))


def test_not_a_number_in_padding_reaches_nothing():
    mask = torch.zeros(2, 9, dtype=torch.bool)
    mask[0, :4] = True
    for function in (linformer, exact_naive, sdpa):
        query, key, value = (x.requires_grad_() for x in tensors(9))
        output = function(
            query,
            key.masked_fill(mask[:, None, :, None], torch.nan),
            value.masked_fill(mask[:, None, :, None], torch.nan),
            key_padding_mask=mask,
        )
        output.sum().backward()
        assert output.isfinite().all()
        assert all(x.grad.isfinite().all() for x in (query, key, value))


def test_bad_input_is_refused_by_name():
    query, key, value = tensors(9)
    E = torch.ones(3, 9, dtype=torch.float64)
    wrong = [
        ({"k": 0}, "`k` must be in 1..m=9, got 0"),
        ({"k": 10}, "`k` must be in 1..m=9, got 10"),
        ({"k": 3, "E": E}, "`k`=3 was given beside `E`"),
        ({"F": E}, "`F` was given without `E`"),
        ({"E": E[:, :8]}, r"`E` must have shape \(k, n=9\), got \(3, 8\)"),
        ({"E": E, "F": E[:2]}, "the same k, got 3 and 2"),
        ({"E": torch.ones(10, 9)}, "1 <= k <= n"),
        ({"E": torch.ones(0, 9)}, "1 <= k <= n"),
        ({"E": torch.ones(3, 3, 9)}, "heads=2"),
    ]
    for keywords, message in wrong:
        with pytest.raises(RankscopeError, match=message):
            linformer(query, key, value, **keywords)
    with pytest.raises(RankscopeError, match="`query` must have shape"):
        linformer(query[0], key, value)
    with pytest.raises(RankscopeError, match="`key` must have shape"):
        linformer(query, key[:, :1], value)
    with pytest.raises(RankscopeError, match="`value` must have"):
        linformer(query, key, value[:, :, :5])
    with pytest.raises(RankscopeError, match="one length"):
        exact_naive(query, key[:, :, :4], value[:, :, :4], is_causal=True)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (5, 2), (12, 4), (13, 4), (4, 9), (63, 10)])
def test_segments_are_the_loops_runs_and_pools_follow_them(n, k):
    mask = torch.zeros(3, n, dtype=torch.bool)
    mask[0, : n // 2] = mask[2] = True
    layout = token_layout(mask, 3, n)
    cut = segments(layout, k, torch.device("cpu"))
    x = torch.randn(3, 1, n, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows = reference.valid_rows(x[:, 0], mask)
    packed = compact(x, layout)
    mean, largest = pool_mean(packed, layout, k), pool_max(packed, layout, k)
    for b in range(2):
        runs = reference.segments(len(rows[b]), k) if rows[b] else []
        got = [t[i].tolist() for t, i in zip(cut.tokens[b], cut.inside[b], strict=True)]
        assert [run for run in got if run] == [list(run) for run in runs]
        for i, run in enumerate(runs):
            tokens = torch.stack([rows[b][j] for j in run])
            torch.testing.assert_close(mean[b, 0, i], tokens.mean(0))
            torch.testing.assert_close(largest[b, 0, i], tokens.amax(0))
    assert mean[2].abs().max() == largest[2].abs().max() == 0


def test_compacting_undone_is_the_input_without_its_padding():
    mask = torch.tensor([[True, False, True, False], [False, False, False, False]])
    layout = token_layout(mask, 2, 4)
    x = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(restore(compact(x, layout), layout), x.masked_fill(mask[:, None, :, None], 0))
    assert compact(x, TokenLayout(4)) is x


def test_each_heads_matrix_meets_its_own_tokens_or_shared_ones():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 5, 4, generator=generator)
    for shape in ((2, 5), (3, 2, 5), (2, 3, 2, 5), (2, 1, 2, 5)):
        E = torch.randn(shape, generator=generator)
        torch.testing.assert_close(apply_matrix(E, x), E @ x)
        torch.testing.assert_close(apply_matrix(E, x[:, :1]), E @ x[:, :1])
