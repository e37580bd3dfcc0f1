"""Longer positions: tables tiled past RoBERTa's offset and without one, matrices stretched without a change."""

import pytest
import torch
from transformers import BertModel, RobertaConfig, RobertaModel

from rankscope._errors import RankscopeError
from rankscope.attention._layout import TokenLayout
from rankscope.models.positions import extend_positions, position_table, stretched, tiled
from rankscope.models.projections import resample
from rankscope.pretrained import max_positions
from tiny_words import bert_config
from zoo import spread_weights, tiny_model


def bert(positions=20):
    return tiny(BertModel(bert_config(max_position_embeddings=positions)))


def roberta(positions=20):
    sizes = {name: getattr(bert_config(), name) for name in ("vocab_size", "hidden_size", "intermediate_size")}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2}
    return tiny(RobertaModel(RobertaConfig(**sizes, **heads, max_position_embeddings=positions + 2, pad_token_id=1)))


def tiny(model):
    spread_weights(model)
    return model.eval()


def output(model, ids):
    with torch.no_grad():
        return model(ids).last_hidden_state


@pytest.mark.parametrize("make", [bert, roberta])
def test_an_extended_model_is_the_same_on_short_texts_and_repeats_its_positions(make):
    model = make()
    ids = torch.randint(5, 40, (2, 20), generator=torch.Generator().manual_seed(0))
    before = output(model, ids)
    trained = position_table(model)[1].weight.detach().clone()
    extend_positions(model, 47)
    _, table, skip = position_table(model)
    assert torch.equal(output(model, ids), before)
    assert max_positions(model) == 47
    assert output(model, ids.repeat(1, 3)[:, :47]).shape[1] == 47
    assert torch.equal(table.weight[:skip], trained[:skip])
    for i in range(47):
        assert torch.equal(table.weight[skip + i], trained[skip + i % 20])
    extend_positions(model, 30)
    assert max_positions(model) == 47


def test_an_offset_is_taken_away_and_put_on():
    trained = torch.arange(6.0)[:, None]
    assert tiled(trained, 5, skip=2, offset=0).flatten().tolist() == [2, 3, 4, 5, 2]
    assert tiled(trained, 3, skip=0, offset=2).flatten().tolist() == [0, 0, 0, 1, 2]
    assert tiled(trained, 3, skip=2).flatten().tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("m", [1, 5, 12])
def test_a_stretched_matrix_does_to_a_text_what_the_matrix_did(m):
    E = torch.randn(2, 3, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    longer = stretched(E, 36)
    assert longer.shape == (2, 3, 36)
    torch.testing.assert_close(resample(longer, TokenLayout(m)), resample(E, TokenLayout(m)), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(longer.sum(-1), E.sum(-1))


def test_a_model_without_a_table_is_refused():
    with pytest.raises(RankscopeError, match="no table of absolute position embeddings"):
        extend_positions(tiny_model("t5"), 100)
