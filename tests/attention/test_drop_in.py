"""Every mechanism of the table in a real architecture, by name: padding is invisible, causality kept."""

import pytest
import torch

import rankscope
from rankscope._errors import RankscopeError
from rankscope.attention.mechanisms import MECHANISMS
from zoo import tiny_inputs, tiny_model

# Small enough that the pattern of each is not the whole map of a tiny text.
OPTIONS = {
    "linformer": {"k": 3},
    "linformer_causal": {"chunk": 2, "window": 3},
    "local": {"window": 2},
    "sparse_strided": {"stride": 3},
    "sparse_fixed": {"stride": 3, "summary": 1},
    "lsh": {"chunk": 4, "rounds": 2},
    "performer": {"features": 16},
    "nystrom": {"landmarks": 3},
}
ENCODERS = sorted(name for name in MECHANISMS if name != "linformer_causal")
DECODERS = sorted(name for name, row in MECHANISMS.items() if row.causal)


def run(model, name, inputs):
    row = MECHANISMS[name]
    generator = torch.Generator().manual_seed(0) if row.random else None
    with torch.no_grad(), rankscope.replace_attention(model, name, generator=generator, **OPTIONS.get(name, {})):
        return model(**inputs).last_hidden_state


def unpadded(inputs, row):
    keep = inputs["attention_mask"][row].bool()
    return {name: tensor[row : row + 1, keep] for name, tensor in inputs.items() if tensor.ndim == 2}


CASES = [
    *(("bert", name) for name in ENCODERS),
    *(("roberta", name) for name in ENCODERS),
    *(("gpt2", name) for name in DECODERS),
    *(("llama", name) for name in DECODERS),
]


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize(("architecture", "name"), CASES)
def test_padding_is_invisible_whatever_it_holds(architecture, name, padding):
    model, inputs = tiny_model(architecture), tiny_inputs(architecture, padding=padding)
    if architecture in ("gpt2", "llama"):
        # Decoders count positions over padding; those of the tokens themselves make the runs comparable.
        inputs["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    keep = inputs["attention_mask"].bool()
    output = run(model, name, inputs)
    if architecture != "roberta":  # RoBERTa reads positions off the padding token's id
        changed = dict(inputs, input_ids=torch.where(keep, inputs["input_ids"], inputs["input_ids"].flip(1)))
        torch.testing.assert_close(run(model, name, changed)[keep], output[keep], rtol=0, atol=1e-5)
    if architecture == "bert" and padding == "left":
        return  # its positions are the batch's, so a row alone is another text
    if name == "lsh":
        return  # its number of buckets is the padded length's, as its docstring says
    for row in range(len(keep)):
        alone = run(model, name, unpadded(inputs, row))[0]
        torch.testing.assert_close(output[row, keep[row]], alone, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", DECODERS)
def test_in_a_decoder_no_output_moves_before_a_changed_token(name):
    model, inputs = tiny_model("llama"), tiny_inputs("llama")
    before = run(model, name, inputs)
    t = inputs["input_ids"].shape[1] // 2
    if name == "lsh":
        # Buckets are sorted over the whole row: what changes at t may move which earlier keys share a chunk.
        t = inputs["input_ids"].shape[1] - 1
    changed = inputs["input_ids"].clone()
    changed[:, t] = (changed[:, t] + 1) % 40
    after = run(model, name, dict(inputs, input_ids=changed))
    if name != "lsh":
        torch.testing.assert_close(after[:, :t], before[:, :t], rtol=0, atol=1e-5)
    assert not torch.allclose(after[:, t:], before[:, t:], atol=1e-4)


def test_a_mechanism_as_wide_as_the_text_changes_nothing():
    model, inputs = tiny_model("bert"), tiny_inputs("bert", padding="right")
    keep = inputs["attention_mask"].bool()
    with torch.no_grad():
        expected = model(**inputs).last_hidden_state
        for name, options in (("exact_naive", {}), ("sdpa", {}), ("local", {"window": 100})):
            with rankscope.replace_attention(model, name, **options):
                torch.testing.assert_close(model(**inputs).last_hidden_state[keep], expected[keep], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("architecture", "name", "given", "match"),
    [
        ("bert", "lhs", {}, "did you mean 'lsh'"),
        ("bert", "lsh", {}, "give `generator`"),
        ("bert", "local", {"generator": torch.Generator()}, "draws no numbers"),
        ("bert", "local", {"windows": 3}, "did you mean 'window'"),
        ("llama", "nystrom", {}, "has no causal form: choose one of"),
        ("llama", "linformer", {}, "has no causal form"),
    ],
)
def test_mistakes_are_refused_and_leave_the_model_as_it_was(architecture, name, given, match):
    model = tiny_model(architecture)
    with pytest.raises(RankscopeError, match=match):
        rankscope.replace_attention(model, name, **given)
    with rankscope.replace_attention(model, "sdpa"):
        pass


def test_attention_dropout_is_refused_not_ignored():
    model = tiny_model("bert").train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
    with (
        rankscope.replace_attention(model, "local", window=2),
        pytest.raises(RankscopeError, match="attention dropout to 0"),
    ):
        model(**tiny_inputs("bert"))
