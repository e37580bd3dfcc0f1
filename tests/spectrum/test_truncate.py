import numpy as np
import pytest
import torch
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MPNetConfig,
    MPNetModel,
)

from rankscope._errors import RankscopeError
from rankscope.attention.interface import capture
from rankscope.pretrained import Pretrained
from rankscope.spectrum.low_rank import (
    exact_map,
    leaked_mass,
    projected,
    random_basis,
    remasked,
    right_basis,
    tail_error,
)
from rankscope.spectrum.truncate import Truncator, truncate
from rankscope.windows import packed_windows
from reference.truncation import best_map, causal_map, future_share, tail_share
from tiny_measure import DOCUMENTS, VOCABULARY, seeded, tiny_bert, tiny_causal, tiny_t5, word_tokenizer
from tiny_words import bert_config

N = 24
RANKS = [1, 4, 12, N]


def causal_lm() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    return seeded(lambda: LlamaForCausalLM(config), 0)


def gpt2_lm() -> GPT2LMHeadModel:
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.3)
    return seeded(lambda: GPT2LMHeadModel(config), 0)


def masked_lm() -> BertForMaskedLM:
    config = bert_config(hidden_size=32, num_attention_heads=4, max_position_embeddings=64, initializer_range=0.3)
    return seeded(lambda: BertForMaskedLM(config), 0)


def run(model, **options) -> xr.Dataset:
    given = {"ranks": RANKS, "n": N, "windows": 3, "tokenizer": word_tokenizer(), **options}
    return truncate(model, DOCUMENTS, **given)


@pytest.fixture(scope="module")
def causal() -> xr.Dataset:
    return run(causal_lm())


@pytest.fixture(scope="module")
def masked() -> xr.Dataset:
    return run(masked_lm())


def some_map(seed: int, n: int = 9, *, causal: bool = False) -> torch.Tensor:
    logits = 2 * torch.randn(n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    shut = torch.ones(n, n, dtype=torch.bool).triu(1)
    return (logits.masked_fill(shut, -torch.inf) if causal else logits).softmax(-1)


@pytest.mark.parametrize("causal_", [False, True])
@pytest.mark.parametrize("k", [1, 3, 9])
def test_best_map_leak_repair_and_tail_equal_the_loops(k, causal_):
    P = some_map(k, causal=causal_)
    basis = right_basis(P)
    best = projected(P, basis.vectors[:, :k])
    slow = best_map(P.numpy(), k)
    open_ = torch.ones(9, 9, dtype=torch.bool).tril()
    np.testing.assert_allclose(best.numpy(), slow, atol=1e-10)
    assert leaked_mass(best, open_).item() == pytest.approx(future_share(slow), abs=1e-9)
    np.testing.assert_allclose(remasked(best, torch.ones_like(P) / 9, open_).numpy(), causal_map(slow), atol=1e-9)
    assert tail_error(basis.sigma, k).item() == pytest.approx(tail_share(P.numpy(), k), abs=1e-7)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 16))
def test_error_of_the_best_map_falls_with_k_and_is_never_above_a_random_projections(seed, n):
    P = some_map(seed, n)
    basis = right_basis(P)
    control = random_basis(1, n, n, generator=torch.Generator().manual_seed(seed))[0]
    errors = [(projected(P, basis.vectors[:, :k]) - P).norm().item() for k in range(1, n + 1)]
    random = [(projected(P, control[:, :k]) - P).norm().item() for k in range(1, n + 1)]
    assert np.all(np.diff(errors) <= 1e-9)
    assert all(ours <= theirs + 1e-9 for ours, theirs in zip(errors, random, strict=True))
    predicted = [tail_error(basis.sigma, k).item() * P.norm().item() for k in range(1, n + 1)]
    np.testing.assert_allclose(errors, predicted, atol=1e-7)


def test_a_map_of_rank_three_is_kept_whole_by_three_values():
    generator = torch.Generator().manual_seed(0)
    rows = torch.rand(3, 20, dtype=torch.float64, generator=generator)
    P = torch.rand(20, 3, dtype=torch.float64, generator=generator) @ rows
    P = P / P.sum(-1, keepdim=True)
    value = torch.randn(20, 5, dtype=torch.float64, generator=generator)
    for k, least, most in ((2, 1e-3, 1.0), (3, 0.0, 1e-7), (7, 0.0, 1e-7)):
        error = ((projected(P, right_basis(P).vectors[:, :k]) - P) @ value).norm() / (P @ value).norm()
        assert least <= error.item() <= most


@pytest.mark.parametrize("make", [tiny_bert, tiny_causal])
def test_the_float64_map_is_the_captured_one(make):
    differences = []

    def compare(call):
        differences.append((exact_map(call) - call.context_map()).abs().max().item())

    model = make()
    with capture(model, compare), torch.no_grad():
        model(torch.randint(5, 44, (1, 17), generator=torch.Generator().manual_seed(0)))
    assert len(differences) == 2
    assert max(differences) < 2e-6


@pytest.mark.parametrize("make", [causal_lm, masked_lm])
def test_full_rank_is_the_model_itself(make):
    ds = run(make(), ranks=[N], windows=1)
    assert float(abs(ds.loss_increase).max()) < 1e-5
    assert float(abs(ds.loss_increase_by_layer).max()) < 1e-5
    assert float((1 - ds.cosine).max()) < 1e-5
    assert float(ds.pv_error.max()) < 1e-9
    assert float(ds.leaked_mass.max()) < 1e-9


@pytest.mark.parametrize("make", [gpt2_lm, masked_lm])
def test_full_rank_is_the_model_itself_in_float64(make):
    # Not Llama: its own eager attention takes the softmax in float32 whatever the model's dtype.
    model = make().double()
    window = next(packed_windows(DOCUMENTS, word_tokenizer(), N, limit=1))
    pretrained = Pretrained(model, word_tokenizer(), "tiny", None, "module", "")
    found = Truncator(pretrained, window, [N], True, 0).run(window)
    assert np.abs(found["loss_increase"]).max() < 1e-9
    assert np.abs(found["loss_increase_by_layer"]).max() < 1e-9
    assert (1 - found["cosine"]).max() < 1e-9


def test_losses_and_cosines_are_the_models_own_at_full_rank_and_worse_below(causal, masked):
    for ds in (causal, masked):
        best = ds.sel(variant="best")
        assert float((1 - best.cosine.sel(k=1)).min()) > 1e-3
        assert float(abs(best.loss_increase.sel(k=N)).max()) < 1e-5
        error = ds.predicted_error.values
        assert np.all(np.diff(error, axis=1) < 1e-9)
    assert masked.attrs["objective"] == "masked"
    assert causal.attrs["objective"] == "causal"


def test_own_causal_loss_is_the_models(causal):
    model = causal_lm()
    stream = packed_windows(DOCUMENTS, word_tokenizer(), N, limit=3)
    for window, own in zip(stream, causal.own_loss.values, strict=True):
        ids = torch.tensor([window.input_ids])
        with torch.no_grad():
            assert model(input_ids=ids, labels=ids).loss.item() == pytest.approx(float(own), abs=1e-5)


def test_only_a_model_with_a_mask_leaks_and_is_remasked(causal, masked):
    assert list(causal.variant.values) == ["best", "random", "remasked"]
    assert list(masked.variant.values) == ["best", "random"]
    assert float(causal.leaked_mass.sel(k=1).mean()) > 0.05
    assert float(masked.leaked_mass.max()) == 0.0


def test_truncating_the_last_layer_alone_or_all_layers_of_a_one_layer_model_agree():
    ds = run(masked_lm(), windows=1)
    assert ds.loss_increase_by_layer.dims == ("window", "variant", "k", "layer")
    single = bert_config(
        hidden_size=32, num_attention_heads=4, max_position_embeddings=64, initializer_range=0.3, num_hidden_layers=1
    )
    one = run(seeded(lambda: BertForMaskedLM(single), 0), windows=1)
    np.testing.assert_allclose(one.loss_increase_by_layer.values[..., 0], one.loss_increase.values, atol=1e-9)


def test_a_model_without_a_head_is_judged_by_its_final_states():
    ds = run(tiny_bert(), windows=2, layerwise=False)
    assert ds.attrs["objective"] == "cosine"
    assert "loss" not in ds
    assert "cosine_by_layer" not in ds
    assert np.all(ds.cosine_ci_low.values <= ds.cosine_ci_high.values)


def test_the_same_seed_gives_the_same_numbers_and_another_another_control():
    first, again, other = (run(causal_lm(), windows=1, layerwise=False, seed=s) for s in (0, 0, 1))
    xr.testing.assert_identical(first.drop_attrs(), again.drop_attrs())
    assert first.attrs["corpus_hash"] == again.attrs["corpus_hash"]
    assert not np.allclose(first.pv_error.sel(variant="random"), other.pv_error.sel(variant="random"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ranks": [0, 4]}, "`ranks` must be numbers from 1 to n=24"),
        ({"ranks": [25]}, "`ranks` must be numbers from 1 to n=24"),
        ({"ranks": []}, "`ranks`"),
        ({"n": 65, "ranks": [4]}, "64 positions: choose --n 64"),
        ({"windows": 0}, "`windows` at least 1"),
        ({"seed": -1}, "`seed` must lie between 0"),
        ({"seed": 2**63}, "`seed` must lie between 0"),
    ],
)
def test_numbers_that_cannot_be_meant_are_refused(changes, words):
    with pytest.raises(RankscopeError, match=words):
        run(masked_lm(), **changes)


def test_a_model_whose_attention_cannot_be_replaced_is_refused():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    fallback = seeded(lambda: MPNetModel(MPNetConfig(vocab_size=VOCABULARY, **sizes)), 0)
    with pytest.raises(RankscopeError, match="can be measured but not replaced"):
        run(fallback, windows=1)
    with pytest.raises(RankscopeError, match="encoder and a decoder"):
        run(tiny_t5(), windows=1)


def test_weights_that_give_no_finite_map_are_named_by_layer_and_window():
    model = masked_lm()
    with torch.no_grad():
        model.bert.encoder.layer[1].attention.self.query.weight[0, 0] = torch.nan
    with pytest.raises(RankscopeError, match=r"encoder\.layer\.1.*no finite attention \(window 0, head 0\)"):
        run(model, windows=1)
