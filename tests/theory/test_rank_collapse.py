import numpy as np
import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel

from rankscope._errors import RankscopeError
from rankscope.pretrained import fresh
from rankscope.theory.rank_collapse import VARIANTS, Parts, along_depth, relative_residual


def bert_config(**changes):
    sizes = {
        "vocab_size": 45,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 24,
    }
    return BertConfig(**{**sizes, **changes})


@pytest.fixture(scope="module")
def model():
    return fresh(bert_config(num_hidden_layers=4, hidden_size=32), seed=0)


@pytest.fixture(scope="module")
def ids():
    return torch.randint(5, 45, (2, 20), generator=torch.Generator().manual_seed(0))


def test_whole_layers_are_the_model_itself(model, ids):
    with torch.no_grad():
        expected = model(ids, output_attentions=False).last_hidden_state
    torch.testing.assert_close(along_depth(model, ids, VARIANTS["whole"]).tokens, expected, rtol=1e-5, atol=1e-6)


def test_tokens_collapse_without_skips_and_do_not_with_them(model, ids):
    last = {name: along_depth(model, ids, parts).residual[-1].max().item() for name, parts in VARIANTS.items()}
    assert last["attention without norm"] < 1e-2
    assert last["attention"] < 0.2 * last["attention, skip"]
    assert last["whole"] > 0.2


def test_residual_agrees_with_its_loops():
    X = np.random.default_rng(0).normal(size=(5, 3))
    centred = X - X.mean(0)

    def norm(A):
        one = max(sum(abs(A[i, j]) for i in range(5)) for j in range(3))
        infinity = max(sum(abs(A[i, j]) for j in range(3)) for i in range(5))
        return (one * infinity) ** 0.5

    assert relative_residual(torch.from_numpy(X)).item() == pytest.approx(norm(centred) / norm(X), rel=1e-12)


def test_one_layer_can_be_run_again_and_again(model, ids):
    twice = along_depth(model, ids, VARIANTS["whole"], order=[1, 1, 1])
    assert twice.effective_rank.shape == (3, 2, 2)
    assert (twice.effective_rank >= 1).all()
    assert (twice.energy_rank_90 <= 20).all()
    with pytest.raises(RankscopeError, match="layers 0 to 3"):
        along_depth(model, ids, Parts(skip=True, mlp=True), order=[4])


def test_other_models_are_refused_by_name(ids):
    with pytest.raises(RankscopeError, match=r"BERT-like encoder.*got Linear"):
        along_depth(nn.Linear(2, 2), ids, VARIANTS["whole"])


def test_training_mode_is_restored(ids):
    model = BertModel(bert_config()).train()
    along_depth(model, ids, VARIANTS["whole"])
    assert model.training
