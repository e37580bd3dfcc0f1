"""The decoder: nothing later is seen, and a step gives what the whole gives."""

import pytest
import torch

from rankscope import LinformerConfig, LinformerForCausalLM, LinformerForMaskedLM
from rankscope._errors import RankscopeError

KINDS = ("dynamic", "learned", "mean")


def fresh(kind, k=1):
    config = LinformerConfig(
        vocab_size=45,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=48,
        projected_length=k,
        projection=kind,
        chunk_size=4,
        chunk_rank=1,
        window=5,
        initializer_range=0.2,
        pad_token_id=0,
        is_decoder=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LinformerForCausalLM(config).eval()


def tokens(batch, n, seed=0):
    return torch.randint(5, 45, (batch, n), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [None, 1])
def test_changing_a_token_moves_no_output_before_it(kind, k):
    model, ids = fresh(kind, k), tokens(1, 30)
    with torch.no_grad():
        before = model(ids).logits
        for t in (0, 3, 4, 17, 29):
            changed = ids.clone()
            changed[0, t] = 5 + (int(ids[0, t]) - 4) % 40
            after = model(changed).logits
            torch.testing.assert_close(after[:, :t], before[:, :t], rtol=0, atol=1e-6)
            assert not torch.allclose(after[:, t], before[:, t], atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [None, 1])
def test_generation_with_the_cache_is_generation_without_it(kind, k):
    model, ids = fresh(kind, k), tokens(2, 9)
    settings = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False}
    assert torch.equal(model.generate(ids, **settings), model.generate(ids, use_cache=False, **settings))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [None, 1])
def test_a_prompt_padded_left_is_continued_as_if_it_stood_alone(kind, k):
    model, ids = fresh(kind, k), tokens(2, 11)
    keep = torch.ones_like(ids)
    ids[0, :4], keep[0, :4] = 0, 0
    settings = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    together = model.generate(ids, attention_mask=keep, **settings)
    assert torch.equal(together[:1, 4:], model.generate(ids[:1, 4:], **settings))
    assert torch.equal(together[1:], model.generate(ids[1:], **settings))


def test_the_loss_is_that_of_the_next_token():
    model, ids = fresh("mean"), tokens(2, 12)
    with torch.no_grad():
        output = model(ids, labels=ids)
        expected = torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(output.loss, expected)


def test_a_saved_decoder_comes_back_the_same(tmp_path):
    model = fresh("dynamic")
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(
            LinformerForCausalLM.from_pretrained(tmp_path)(tokens(1, 9)).logits, model(tokens(1, 9)).logits
        )


def test_a_decoders_configuration_makes_no_masked_language_model():
    with pytest.raises(RankscopeError, match="is_decoder"):
        LinformerForMaskedLM(fresh("mean").config)
