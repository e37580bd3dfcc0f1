import pytest
import torch

from rankscope._errors import RankscopeError
from rankscope.attention.exact import exact_naive
from rankscope.attention.linformer_causal import CausalCache, ChunkRule, Compression, linformer_causal
from reference import linformer as reference

KINDS = ["mean", "matrices", "pooling"]


def case(kind, n=23, batch=3, heads=2, chunk=4, rank=2, head_dim=3):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    inputs = [draw(batch, heads, n, head_dim) for _ in range(3)]
    keywords = {
        "mean": {},
        "matrices": {"E": draw(heads, rank, chunk), "F": draw(rank, chunk)},
        "pooling": {"pooling_logits": draw(batch, heads, n, rank)},
    }[kind]
    return inputs, keywords


def compressor(kind, keywords, b, h, rank):
    def compress(j, tokens, side):
        if kind == "mean":
            return reference.project("mean", tokens, rank, None)
        if kind == "matrices":
            matrix = keywords["E"][h] if side == "key" else keywords["F"]
            return [reference.combine(row, tokens) for row in matrix]
        logits = keywords["pooling_logits"][b, h, j * len(tokens) : (j + 1) * len(tokens)]
        return [reference.combine(reference.softmax(list(column)), tokens) for column in logits.T]

    return compress


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [1, 2, 6])
def test_equals_the_loops(kind, window):
    (query, key, value), keywords = case(kind, batch=1)
    got = linformer_causal(query, key, value, chunk=4, rank=2, window=window, **keywords)
    past = ChunkRule(4, 2, window).past
    for h in range(2):
        compress = compressor(kind, keywords, 0, h, 2)
        wanted = reference.causal(query[0, h], key[0, h], value[0, h], 4, past, compress)
        torch.testing.assert_close(got[0, h], wanted, rtol=1e-12, atol=1e-12)


def test_a_window_over_all_or_identity_chunks_are_causal_softmax_attention():
    (query, key, value), _ = case("mean")
    wanted = exact_naive(query, key, value, is_causal=True)
    identity = torch.eye(4, dtype=torch.float64)
    torch.testing.assert_close(linformer_causal(query, key, value, window=23), wanted)
    torch.testing.assert_close(linformer_causal(query, key, value, chunk=4, rank=4, window=1, E=identity), wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_a_later_token_moves_no_earlier_output_even_through_the_compression(kind):
    (query, key, value), keywords = case(kind)
    options = {"chunk": 4, "rank": 2, "window": 3}
    before = linformer_causal(query, key, value, **options, **keywords)
    for t in (3, 4, 5, 8, 22):
        parts = [x.clone() for x in (query, key, value)]
        for x in parts:
            x[:, :, t:] += 5
        changed = dict(keywords)
        if kind == "pooling":
            changed["pooling_logits"] = keywords["pooling_logits"].clone()
            changed["pooling_logits"][:, :, t:] -= 3
        after = linformer_causal(*parts, **options, **changed)
        assert torch.equal(after[:, :, :t], before[:, :, :t])
        assert (after[:, :, t] != before[:, :, t]).any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [1, 6])
@pytest.mark.parametrize("start", [0, 1, 4, 5, 17])
def test_prompt_and_steps_equal_the_whole_with_rows_padded_differently(kind, window, start):
    (query, key, value), keywords = case(kind)
    mask = torch.zeros(3, 23, dtype=torch.bool)
    if start == 17:
        mask[0, :5] = mask[1, :13] = mask[2, 3] = True
    whole = linformer_causal(query, key, value, chunk=4, rank=2, window=window, key_padding_mask=mask, **keywords)
    pooling = keywords.get("pooling_logits")

    def cut(part):
        return None if pooling is None else pooling[:, :, part]

    cache = CausalCache(ChunkRule(4, 2, window), Compression(keywords.get("E"), keywords.get("F")))
    if start:
        prompt = slice(0, start)
        cache.prefill(
            key[:, :, prompt],
            value[:, :, prompt],
            pooling_logits=cut(prompt),
            key_padding_mask=mask[:, prompt],
        )
    for t in range(start, 23):
        part = slice(t, t + 1)
        step = cache.step(query[:, :, part], key[:, :, part], value[:, :, part], pooling_logits=cut(part))
        torch.testing.assert_close(step, whole[:, :, part], rtol=1e-10, atol=1e-12)
    assert cache.tokens == 23


def test_a_cache_reordered_follows_its_rows():
    (query, key, value), _ = case("mean")
    cache = CausalCache(ChunkRule(4, 2, 3))
    cache.prefill(key[:, :, :22], value[:, :, :22])
    order = torch.tensor([2, 2, 0])
    cache.reorder(order)
    step = cache.step(query[order][:, :, 22:], key[order][:, :, 22:], value[order][:, :, 22:])
    whole = linformer_causal(query, key, value, chunk=4, rank=2, window=3)
    torch.testing.assert_close(step, whole[order][:, :, 22:])


def test_gradients_are_right_in_double_precision():
    (query, key, value), keywords = case("pooling", n=9, batch=1, head_dim=2)
    inputs = [x.requires_grad_() for x in (query, key, value, keywords["pooling_logits"])]

    def run(query, key, value, pooling):
        return linformer_causal(query, key, value, chunk=4, rank=2, window=2, pooling_logits=pooling)

    assert torch.autograd.gradcheck(run, inputs)


def test_bad_input_is_refused_by_name():
    (query, key, value), keywords = case("pooling")
    wrong = [
        ({"chunk": 0}, "`chunk` must be at least 1"),
        ({"rank": 0}, "`rank` must be in 1..chunk=16, got 0"),
        ({"rank": 17}, "`rank` must be in 1..chunk=16, got 17"),
        ({"window": 0}, "`window` must be at least 1"),
        ({"is_causal": False}, "causal by construction"),
        ({"E": torch.ones(2, 16)}, "`E` must have shape"),
        ({"F": torch.ones(1, 16)}, "`F` was given without `E`"),
        ({"rank": 2, "chunk": 4, "E": torch.ones(2, 4), **keywords}, "give one"),
        (keywords, "`pooling_logits` must have shape"),
    ]
    for options, message in wrong:
        with pytest.raises(RankscopeError, match=message):
            linformer_causal(query, key, value, **options)
    with pytest.raises(RankscopeError, match="one length"):
        linformer_causal(query, key[:, :, :5], value[:, :, :5])
    cache = CausalCache(ChunkRule(4, 2, 3))
    cache.prefill(key, value)
    with pytest.raises(RankscopeError, match="needs an empty cache"):
        cache.prefill(key, value)
    with pytest.raises(RankscopeError, match="must hold one token"):
        cache.step(query, key, value)
    one = [x[:, :, :1] for x in (query, key, value)]
    with pytest.raises(RankscopeError, match="at every step or at none"):
        cache.step(*one, pooling_logits=keywords["pooling_logits"][:, :, :1])
