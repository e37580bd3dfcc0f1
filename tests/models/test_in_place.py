"""Linformer in place: the anchor identity, padding, what is new in the model, undoing, files, refusals."""

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

import rankscope
from rankscope import linformerize, load_projections, restore, save_projections
from rankscope._errors import RankscopeError
from rankscope.attention.interface import capture
from rankscope.models.projections import PROJECTIONS
from zoo import spread_weights, tiny_inputs, tiny_model

ENCODERS = ["bert", "roberta", "electra", "modernbert", "vit", "whisper", "distilbert", "albert"]


def encoder(name: str):
    model = tiny_model(name)
    return model.get_encoder() if name == "whisper" else model


def inputs_of(name: str, **options):
    inputs = tiny_inputs(name, **options)
    inputs.pop("decoder_input_ids", None)
    return inputs


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def output(model, inputs):
    with torch.no_grad():
        return model(**inputs).last_hidden_state


def set_identity(bank) -> None:
    with torch.no_grad():
        for parameter in bank.parameters():
            parameter.copy_(torch.eye(parameter.shape[-1]).expand_as(parameter))


@pytest.mark.parametrize("sharing", ["none", "headwise", "key_value", "layerwise"])
@pytest.mark.parametrize("name", ENCODERS)
def test_identity_projections_of_full_length_give_the_models_own_outputs(name, sharing):
    model, inputs = encoder(name), inputs_of(name)
    exact = output(model, inputs)
    n = keys_of(model, inputs)[0].shape[-2]
    bank = linformerize(model, k=n, n=n, sharing=sharing, generator=seeded())
    assert (output(model, inputs) - exact).abs().max() > 1e-3
    set_identity(bank)
    assert (output(model, inputs) - exact).abs().max() < 1e-5
    restore(model)
    assert torch.equal(output(model, inputs), exact)


def keys_of(model, inputs):
    keys = []
    with torch.no_grad(), capture(model, lambda call: keys.append(call.key)):
        model(**inputs)
    return keys


@pytest.mark.parametrize("kind", list(PROJECTIONS))
@pytest.mark.parametrize("name", ["bert", "modernbert", "electra"])
def test_padding_changes_nothing_at_kept_positions(name, kind):
    model = encoder(name)
    linformerize(model, k=4, kind=kind, sharing="headwise", generator=seeded())
    padded = inputs_of(name, padding="right")
    other = {**padded, "input_ids": padded["input_ids"].clone()}
    other["input_ids"][1, -3:] = torch.tensor([7, 8, 9])
    kept = output(model, padded)[1, :-3]
    assert torch.allclose(output(model, other)[1, :-3], kept, atol=1e-6)
    alone = output(model, {"input_ids": padded["input_ids"][1:, :-3]})[0]
    assert torch.allclose(alone, kept, atol=1e-5)


def test_left_padding_gives_what_no_padding_gives():
    model = encoder("bert")
    linformerize(model, k=4, generator=seeded())
    padded = inputs_of("bert", padding="left")
    positions = (padded["attention_mask"].cumsum(1) - 1).clamp(min=0)
    kept = output(model, {**padded, "position_ids": positions})[1, 3:]
    alone = output(model, {"input_ids": padded["input_ids"][1:, 3:]})[0]
    assert torch.allclose(alone, kept, atol=1e-5)


def test_projections_are_the_only_new_parameters_and_learn():
    model = encoder("bert")
    before = {name for name, _ in model.named_parameters()}
    bank = linformerize(model, k=4, n=40, generator=seeded())
    new = {name: p for name, p in model.named_parameters() if name not in before}
    assert {tuple(p.shape) for p in new.values()} == {(4, 40)}
    assert len(new) == bank.count == 4
    assert set(new) <= set(model.state_dict())
    model(**inputs_of("bert")).last_hidden_state.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in new.values())
    restore(model)
    assert {name for name, _ in model.named_parameters()} == before


def test_a_modernbert_layer_with_a_window_keeps_its_exact_attention():
    model = encoder("modernbert")
    bank = linformerize(model, k=4, generator=seeded())
    assert bank.settings.modules == ["layers.0.attn"]
    restore(model)
    with pytest.raises(RankscopeError, match="sliding window"):
        linformerize(model, k=4, modules=["layers.1.attn"], generator=seeded())


def test_saved_projections_come_back_in_a_fresh_model(tmp_path):
    model, inputs = encoder("bert"), inputs_of("bert", padding="right")
    linformerize(model, k=[3, 5], sharing="none", length_rule="interpolate", generator=seeded())
    expected = output(model, inputs)
    file = save_projections(model, tmp_path / "projections.safetensors")
    assert file.stat().st_size < 64_000
    fresh = encoder("bert")
    bank = load_projections(fresh, file)
    assert bank.settings.k == [3, 5]
    assert torch.equal(output(fresh, inputs), expected)
    load_projections(fresh, file)
    assert torch.equal(output(fresh, inputs), expected)


def test_projections_of_a_model_with_a_head_fit_the_encoder_alone(tmp_path):
    headed = BertForMaskedLM(encoder("bert").config)
    linformerize(headed, k=4, generator=seeded())
    file = save_projections(headed, tmp_path / "p.safetensors")
    alone, again = headed.bert, BertForMaskedLM(encoder("bert").config)
    restore(headed)
    load_projections(alone, file)
    assert alone.rankscope_projections.settings.modules[0] == "encoder.layer.0.attention.self"
    back = load_projections(again, save_projections(alone, file))
    assert back.settings.modules[1] == "bert.encoder.layer.1.attention.self"


def test_a_file_that_does_not_fit_says_what_differs(tmp_path):
    model = encoder("bert")
    linformerize(model, k=4, generator=seeded())
    file = save_projections(model, tmp_path / "p.safetensors")
    other = encoder("bert")
    linformerize(other, k=5, generator=seeded())
    with pytest.raises(RankscopeError, match=r"k: file 4, model 5"):
        load_projections(other, file)
    with pytest.raises(RankscopeError, match="lacks"):
        load_projections(encoder("vit"), file)
    with pytest.raises(RankscopeError, match="heads"):
        load_projections(tiny_model("bert", num_attention_heads=2), file)
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(RankscopeError, match="truncated"):
        load_projections(encoder("bert"), file)
    with pytest.raises(RankscopeError, match="no file"):
        load_projections(encoder("bert"), tmp_path / "none")
    with pytest.raises(RankscopeError, match="no Linformer projections"):
        save_projections(encoder("bert"), file)


@pytest.mark.parametrize("name", ["gpt2", "llama", "opt"])
def test_causal_models_are_refused_and_left_as_they_were(name):
    model = tiny_model(name)
    before = set(model.state_dict())
    with pytest.raises(RankscopeError, match="causal"):
        linformerize(model, k=4, generator=seeded())
    assert set(model.state_dict()) == before


def test_an_encoder_that_turns_causal_is_refused_when_it_runs():
    model = tiny_model("bert", is_decoder=True)
    with pytest.raises(RankscopeError, match="causal"):
        linformerize(model, k=4, generator=seeded())


def test_an_encoder_decoder_is_refused_whole_and_served_by_its_encoder():
    model, inputs = tiny_model("bart"), tiny_inputs("bart")
    with pytest.raises(RankscopeError, match=r"causal|cross-attention"):
        linformerize(model, k=4, generator=seeded())
    paths = [f"encoder.layers.{i}.self_attn" for i in range(2)]
    exact = output(model, inputs)
    linformerize(model, k=4, n=20, modules=paths, generator=seeded())
    assert (output(model, inputs) - exact).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"k": 0}, r"1\.\."),
        ({"k": 99}, r"1\.\."),
        ({"k": [4, 5], "sharing": "layerwise"}, "one k under"),
        ({"k": [4, 5, 6]}, "one for each of 2 layers"),
        ({"k": 4, "kind": "lerned"}, "did you mean 'learned'"),
        ({"k": 4, "sharing": "headwize"}, "did you mean 'headwise'"),
        ({"k": 4, "modules": ["encoder.layer.0.attention.slef"]}, "did you mean"),
    ],
)
def test_bad_options_are_refused(options, words):
    model = encoder("bert")
    with pytest.raises(RankscopeError, match=words):
        linformerize(model, generator=seeded(), **options)
    assert not hasattr(model, "rankscope_projections")


def test_twice_is_refused_and_the_first_stays():
    model = encoder("bert")
    bank = linformerize(model, k=4, generator=seeded())
    with pytest.raises(RankscopeError, match="restore"):
        linformerize(model, k=5, generator=seeded())
    assert model.rankscope_projections is bank


def test_a_language_model_trains_in_place():
    torch.manual_seed(0)
    model = BertForMaskedLM(
        BertConfig(
            vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
            max_position_embeddings=12,
        )
    )  # fmt: skip
    spread_weights(model.eval())
    bank = linformerize(model, k=4, generator=seeded())
    ids = torch.randint(30, (4, 12), generator=seeded())
    optimizer = torch.optim.Adam(bank.parameters(), lr=0.05)
    losses = []
    for _ in range(8):
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


def test_public_names_are_the_modules_own():
    assert rankscope.linformerize is linformerize
    assert "linformerize" in dir(rankscope)
