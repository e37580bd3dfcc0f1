"""The self-check passes on models as they are and fails on models, or captures, that are broken in one way."""

import json

import pytest
import torch

from rankscope._errors import RankscopeError
from rankscope.attention._call import AttentionCall
from rankscope.attention.interface import find_route, self_check
from zoo import MODELS, REACHED, tiny_inputs, tiny_model


def checked(name: str, model: torch.nn.Module | None = None, **inputs: object) -> dict:
    model = tiny_model(name) if model is None else model
    given = tiny_inputs(name, **inputs)
    return self_check(model, given, find_route(model, given))


@pytest.mark.parametrize("name", REACHED)
def test_a_sound_model_passes(name: str) -> None:
    found = checked(name)
    assert found["passed"], found["reasons"]
    assert found["attentions"] == MODELS[name].maps
    assert json.loads(json.dumps(found)) == found
    if MODELS[name].reached == "routed":
        assert found["max_difference"] <= 1e-6
    if MODELS[name].causal:
        assert found["above_diagonal"] == 0
    if MODELS[name].pads:
        assert found["padding_right"] < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["bert", "llama", "gpt_oss", "t5"])
def test_half_precision_is_held_to_the_float32_formula(name: str, dtype: torch.dtype) -> None:
    found = checked(name, tiny_model(name).to(dtype))
    assert found["max_difference"] <= 1e-6
    assert found["above_diagonal"] in (None, 0)


def test_what_can_not_be_checked_is_said() -> None:
    assert checked("vit")["skipped"] == ["padding: the inputs are not tokens"]
    assert checked("bart")["skipped"] == ["padding_left: the model counts absolute positions and takes no position_ids"]
    assert "at least 5 are needed" in checked("bert", length=4)["skipped"][0]


def test_absolute_positions_are_given_where_they_can_be() -> None:
    for name in ("bert", "gpt2", "mpnet"):
        assert checked(name)["padding_left"] < 1e-4


def test_the_example_is_taken_without_its_padding() -> None:
    inputs = tiny_inputs("llama", padding="left")
    inputs = {name: x.flip(0) for name, x in inputs.items()}
    model = tiny_model("llama")
    assert self_check(model, inputs, find_route(model, inputs))["passed"]


def test_a_captured_map_of_another_scale_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = tiny_model("bert"), tiny_inputs("bert")
    found = find_route(model, inputs)
    own = AttentionCall.context_map
    monkeypatch.setattr(AttentionCall, "context_map", lambda call, rows=None: own(call, rows).square())
    check = self_check(model, inputs, found)
    assert not check["passed"]
    assert any("eager" in reason for reason in check["reasons"])
    assert any("sum to 1" in reason for reason in check["reasons"])


def test_a_mask_that_is_lost_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reported as transformers 30652 and 45811: the mask is lost without a word."""
    model, inputs = tiny_model("llama"), tiny_inputs("llama")
    found = find_route(model, inputs)
    monkeypatch.setattr(AttentionCall, "bias", lambda call, dtype=torch.float32: None)
    check = self_check(model, inputs, found)
    assert not check["passed"]
    assert check["above_diagonal"] > 0.01
    assert any("later tokens" in reason for reason in check["reasons"])


def test_a_model_that_ignores_its_padding_mask_fails() -> None:
    model = tiny_model("bert")
    model.register_forward_pre_hook(
        lambda _module, args, kwargs: (args, {**kwargs, "attention_mask": None}), with_kwargs=True
    )
    check = checked("bert", model)
    assert check["padding_right"] > 0.01
    assert any("padding on the right" in reason for reason in check["reasons"])
    assert not check["passed"]


def test_not_a_number_fails() -> None:
    model = tiny_model("bert")
    inputs = tiny_inputs("bert")
    found = find_route(model, inputs)
    with torch.no_grad():
        model.encoder.layer[1].attention.self.query.weight[0, 0] = torch.nan
    check = self_check(model, inputs, found)
    assert not check["passed"]


def test_a_route_that_does_not_fit_is_refused() -> None:
    model = tiny_model("bert")
    routed = find_route(model, tiny_inputs("bert"))
    with pytest.raises(RankscopeError, match="does not fit"):
        self_check(tiny_model("mpnet"), tiny_inputs("mpnet"), routed)


@pytest.mark.parametrize("name", ["t5", "bart"])
@pytest.mark.parametrize("length", [12, 40])
def test_a_decoder_as_long_as_its_encoder_passes(name: str, length: int) -> None:
    """At the padded encoder's length the decoder's own maps were cut too, and no shape agreed."""
    model = tiny_model(name)
    ids = torch.arange(4, 4 + length).remainder(20).add(4).unsqueeze(0)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "decoder_input_ids": ids}
    check = self_check(model, inputs, find_route(model, inputs))
    assert check["passed"], check["reasons"]
    assert check["padding_right"] is not None
