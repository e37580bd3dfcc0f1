"""A whole linformer_roberta of fairseq, tiny and random, under its own names."""

import pytest
import torch

from rankscope._errors import RankscopeError
from rankscope.models.fairseq_checkpoint import read_model
from reference.foreign_linformer import linformer_roberta_forward

N, K, D, WIDE, HEADS, LAYERS, VOCABULARY = 12, 4, 8, 16, 2, 2, 30
ROOT = "encoder.sentence_encoder."


def state_of(sharing="headwise"):
    shapes = {f"{ROOT}embed_tokens.weight": (VOCABULARY, D), f"{ROOT}embed_positions.weight": (N + 2, D)}
    norms = [f"{ROOT}emb_layer_norm", "encoder.lm_head.layer_norm"]
    linears = {"encoder.lm_head.dense": (D, D)}
    for layer in range(LAYERS):
        at = f"{ROOT}layers.{layer}."
        norms += [f"{at}self_attn_layer_norm", f"{at}final_layer_norm"]
        linears |= {f"{at}self_attn.{name}_proj": (D, D) for name in ("q", "k", "v", "out")}
        linears |= {f"{at}fc1": (WIDE, D), f"{at}fc2": (D, WIDE)}
    shapes |= {f"{name}.weight": shape for name, shape in linears.items()}
    shapes |= {f"{name}.bias": shape[:1] for name, shape in linears.items()}
    shapes |= {f"{name}.{part}": (D,) for name in norms for part in ("weight", "bias")}
    shapes["encoder.lm_head.bias"] = (VOCABULARY,)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    state = {name: draw(*shape) for name, shape in shapes.items()}
    state["encoder.lm_head.weight"] = state[f"{ROOT}embed_tokens.weight"]
    one = draw(K, N)
    for layer in range(LAYERS):
        at = f"{ROOT}layers.{layer}.self_attn."
        state[f"{at}compress_k.weight"] = one if sharing == "layerwise" else draw(K, N)
        if sharing == "headwise":
            state[f"{at}compress_v.weight"] = draw(K, N)
        elif sharing == "layerwise":
            # One linear map under every layer's two names, and its bias, which no forward adds.
            state |= {f"{at}compress_v.weight": one, f"{at}compress_k.bias": draw(K), f"{at}compress_v.bias": draw(K)}
    if sharing == "layerwise":
        state |= {f"{ROOT}compress_layer.weight": one, f"{ROOT}compress_layer.bias": draw(K)}
    return state | {f"{ROOT}version": torch.tensor([1.0]), f"{ROOT}layers.0.version": torch.tensor(2)}


def some_ids(n):
    return torch.randint(4, VOCABULARY, (2, n), generator=torch.Generator().manual_seed(n))


@pytest.mark.parametrize(("sharing", "count"), [("headwise", 4), ("key_value", 2), ("layerwise", 1)])
def test_logits_are_fairseqs(sharing, count):
    state = state_of(sharing)
    model = read_model(state, num_heads=HEADS)
    assert (model.config.projection_sharing, model.projection_count) == (sharing, count)
    for n in (N, 7):
        wanted = linformer_roberta_forward(state, some_ids(n), LAYERS, HEADS)
        with torch.no_grad():
            torch.testing.assert_close(model(some_ids(n)).logits, wanted, rtol=1e-9, atol=1e-9)


def test_without_a_head_it_is_the_encoder():
    state = {name: tensor for name, tensor in state_of().items() if "lm_head" not in name}
    model = read_model(state, num_heads=HEADS)
    whole = read_model(state_of(), num_heads=HEADS)
    with torch.no_grad():
        got, wanted = model(some_ids(N)).last_hidden_state, whole.base_model(some_ids(N)).last_hidden_state
    torch.testing.assert_close(got, wanted)


def test_a_model_of_other_layers_is_refused():
    state = state_of()
    norm = {f"{ROOT}layer_norm.{part}": torch.ones(D) for part in ("weight", "bias")}
    with pytest.raises(RankscopeError, match="pre-norm"):
        read_model(state | norm, num_heads=HEADS)
    with pytest.raises(RankscopeError, match=r"quant.scale, which has no place"):
        read_model(state | {f"{ROOT}quant.scale": torch.ones(1)}, num_heads=HEADS)
    without = {name: tensor for name, tensor in state.items() if "emb" not in name}
    with pytest.raises(RankscopeError, match="lacks its embeddings"):
        read_model(without, num_heads=HEADS)
    jargon = {
        name.replace(f"{ROOT}layers", "roberta.encoder.layer").replace("self_attn", "attention"): tensor
        for name, tensor in state.items()
        if ".self_attn." in name
    }
    with pytest.raises(RankscopeError, match="pre-norm layers, other embeddings"):
        read_model(jargon, num_heads=HEADS)
