"""The model family: exactness, masks, counts, files, and that transformers' tools work with it."""

import json
import subprocess
import sys

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    RobertaConfig,
    RobertaForMaskedLM,
    Trainer,
    TrainingArguments,
    pipeline,
)

import rankscope
import tiny_measure
from rankscope import (
    LinformerConfig,
    LinformerForCausalLM,
    LinformerForMaskedLM,
    LinformerForQuestionAnswering,
    LinformerForSequenceClassification,
    LinformerForTokenClassification,
    LinformerModel,
)
from rankscope._errors import RankscopeError
from rankscope.models.linformer_attention import Plan
from tiny_words import word_tokenizer

KINDS = ("learned", "mean", "max", "convolution", "gaussian", "dynamic")
ENCODERS = (
    LinformerModel,
    LinformerForMaskedLM,
    LinformerForSequenceClassification,
    LinformerForTokenClassification,
    LinformerForQuestionAnswering,
)
N = 24


def config(**changes) -> LinformerConfig:
    sizes = {
        "vocab_size": 45,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": N,
        "projected_length": 6,
        "initializer_range": 0.2,
        "pad_token_id": 0,
    }
    return LinformerConfig(**{**sizes, **changes})


def fresh(model=LinformerForMaskedLM, seed=0, **changes):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return model(config(**changes)).eval()


def tokens(batch=2, n=20, seed=0):
    return torch.randint(5, 45, (batch, n), generator=torch.Generator().manual_seed(seed))


def first(output):
    return output[0]


def test_exact_attention_of_the_family_is_roberta_weight_for_weight():
    sizes = {**config().to_dict(), "model_type": "roberta", "max_position_embeddings": N + 1}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        roberta = RobertaForMaskedLM(RobertaConfig(**{k: v for k, v in sizes.items() if hasattr(RobertaConfig(), k)}))
    ours = fresh(projected_length=None)
    state = {name.replace("roberta.", "linformer."): tensor for name, tensor in roberta.state_dict().items()}
    assert set(state) == set(ours.state_dict())
    ours.load_state_dict(state)
    ids, keep = tokens(), torch.ones(2, 20, dtype=torch.long)
    ids[0, :5], keep[0, :5] = 0, 0
    with torch.no_grad():
        torch.testing.assert_close(
            ours(ids, keep).logits[keep.bool()], roberta.eval()(ids, keep).logits[keep.bool()], rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("sharing", ["none", "headwise", "key_value", "layerwise"])
def test_full_length_identity_projections_are_exact_attention(sharing):
    ours, exact = fresh(projected_length=N, projection_sharing=sharing), fresh(projected_length=None)
    state = exact.state_dict()
    for name, tensor in ours.state_dict().items():
        if ".projections." in name:
            state[name] = torch.eye(N).expand_as(tensor)
    ours.load_state_dict(state)
    ids = tokens(n=N)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, exact(ids).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_kept_position_never_depends_on_padding(kind, side):
    model, ids = fresh(projection=kind), tokens(1, 13)
    pad = torch.full((1, 7), 0)
    keep = torch.cat([torch.zeros(1, 7), torch.ones(1, 13)][:: 1 if side == "left" else -1], dim=1).long()
    with torch.no_grad():
        alone = model(ids).logits
        for filler in (pad, pad + 9, tokens(1, 7, seed=3)):
            padded = torch.cat([filler, ids][:: 1 if side == "left" else -1], dim=1)
            torch.testing.assert_close(model(padded, keep).logits[keep.bool()], alone[0], rtol=0, atol=2e-5)


@pytest.mark.parametrize("model", [LinformerForSequenceClassification, LinformerModel])
@pytest.mark.parametrize("k", [None, 6])
def test_a_sequence_is_classified_by_its_own_first_token_on_either_side_of_padding(model, k):
    model = fresh(model, projected_length=k)
    ids, pad = tokens(1, 9), torch.zeros(1, 4, dtype=torch.long)
    left, right = torch.cat([pad, ids], dim=1), torch.cat([ids, pad], dim=1)
    with torch.no_grad():
        outputs = [model(x, (x != 0).long()) for x in (ids, left, right)]
    read = [getattr(one, "logits", None) if hasattr(one, "logits") else one.pooler_output for one in outputs]
    torch.testing.assert_close(read[1], read[0], rtol=0, atol=2e-5)
    torch.testing.assert_close(read[2], read[0], rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_fully_padded_row_has_finite_outputs_and_gradients(kind):
    model, ids = fresh(projection=kind), tokens()
    keep = torch.ones_like(ids)
    keep[0] = 0
    output = model(ids, keep, labels=ids)
    output.loss.backward()
    assert output.logits.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(("sharing", "count"), [("none", 288), ("headwise", 24), ("key_value", 12), ("layerwise", 1)])
def test_twelve_layers_of_twelve_heads_have_the_papers_number_of_projections(sharing, count):
    with torch.device("meta"):
        model = LinformerModel(
            config(num_hidden_layers=12, num_attention_heads=12, hidden_size=48, projection_sharing=sharing)
        )
    assert model.projection_count == count
    stored = [p for name, p in model.named_parameters() if ".projections." in name]
    assert sum(p.numel() for p in stored) == count * 6 * N == model.parameter_report()["projections"]


def test_the_papers_long_model_shows_what_its_projections_weigh():
    with torch.device("meta"):
        long = LinformerModel(
            LinformerConfig(
                num_hidden_layers=1,
                hidden_size=512,
                num_attention_heads=8,
                intermediate_size=2048,
                max_position_embeddings=16_384,
                projected_length=256,
            )
        )
    assert long.parameter_report()["projections"] == 2 * 256 * 16_384


def test_positions_reach_65536():
    model = fresh(LinformerModel, max_position_embeddings=65_536, projected_length=4, projection="mean")
    with torch.no_grad():
        assert model(tokens(1, 65_536)).last_hidden_state.isfinite().all()
    with pytest.raises(RankscopeError, match=r"holds 65537 tokens, the model at most 65536"):
        model(tokens(1, 65_537))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", ENCODERS)
def test_a_saved_model_comes_back_the_same(model, kind, tmp_path):
    before = fresh(model, projection=kind, seed=1)
    before.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    after = model.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(first(after(tokens())), first(before(tokens())))


def test_auto_classes_load_the_family_and_a_light_import_stays_light(tmp_path):
    autos = {
        AutoModel: LinformerModel,
        AutoModelForMaskedLM: LinformerForMaskedLM,
        AutoModelForCausalLM: LinformerForCausalLM,
        AutoModelForSequenceClassification: LinformerForSequenceClassification,
        AutoModelForTokenClassification: LinformerForTokenClassification,
        AutoModelForQuestionAnswering: LinformerForQuestionAnswering,
    }
    fresh(LinformerModel).save_pretrained(tmp_path)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), LinformerConfig)
    for auto, model in autos.items():
        assert type(auto.from_config(config(projection="mean"))) is model
    assert type(AutoModel.from_pretrained(tmp_path)) is LinformerModel
    light = "import rankscope, sys; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", light], check=True)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"projected_length": 5}, "projected_length is 6 in the checkpoint and 5 here"),
        ({"max_position_embeddings": 32}, "max_position_embeddings is 24 in the checkpoint and 32 here"),
        ({"projection_sharing": "none"}, "projection_sharing is 'headwise' in the checkpoint and 'none' here"),
        ({"projection": "mean"}, "projection is 'learned' in the checkpoint and 'mean' here"),
    ],
)
def test_a_checkpoint_of_other_projections_is_refused_by_name(changes, named, tmp_path):
    fresh().save_pretrained(tmp_path)
    with pytest.raises(RankscopeError, match=named):
        LinformerForMaskedLM.from_pretrained(tmp_path, **changes)
    with pytest.raises(RankscopeError, match=named):
        LinformerForMaskedLM.from_pretrained(tmp_path, config=config(**changes))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"projected_length": 5}, r"layers\.0\.E\.weight' is \(6, 24\) in the file and \(5, 24\)"),
        ({"projection_sharing": "none"}, r"layers\.0\.E\.weight' is \(6, 24\) in the file and \(4, 6, 24\)"),
        ({"projection_sharing": "layerwise"}, "lacks 1 projections its config.json asks for, as .*shared"),
    ],
)
def test_a_file_that_is_not_its_configs_is_refused_in_one_line(changes, named, tmp_path):
    fresh().save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | changes))
    with pytest.raises(RankscopeError, match=named) as caught:
        LinformerForMaskedLM.from_pretrained(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_file_cut_short_is_refused_in_one_line(tmp_path):
    fresh().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(RankscopeError, match="broken") as caught:
        LinformerForMaskedLM.from_pretrained(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"projected_length": 25}, "must be in 1..max_length=24, got 25"),
        ({"projected_length": 0}, "must be in 1..max_length=24, got 0"),
        ({"projected_length": "6"}, "must be one k"),
        ({"projected_length": [6, 7, 8]}, "one for each of 2 layers"),
        ({"projected_length": [6, 7], "projection_sharing": "layerwise"}, "one k under"),
        ({"projection": "learnt"}, "did you mean 'learned'"),
        ({"projection_sharing": "head_wise"}, "did you mean 'headwise'"),
        ({"length_rule": "sliced"}, "did you mean 'slice'"),
        ({"projected_lenght": 6}, "did you mean 'projected_length'"),
        ({"num_attention_heads": 5}, "must divide `hidden_size`=32"),
        ({"is_decoder": True, "projection": "max"}, "`projection` has no 'max'"),
    ],
)
def test_settings_no_model_can_have_are_refused(changes, match):
    with pytest.raises(RankscopeError, match=match):
        LinformerModel(config(**changes))


def test_wrong_inputs_are_refused():
    model = fresh()
    with pytest.raises(RankscopeError, match="holds 25 tokens, the model at most 24"):
        model(tokens(n=25))
    with pytest.raises(RankscopeError, match="must have shape"):
        model(tokens(), torch.ones(2, 1, 20, 20))
    with pytest.raises(RankscopeError, match=r"must have shape \(2, 20\)"):
        model(tokens(), torch.ones(2, 19))
    with pytest.raises(RankscopeError, match="output_attentions"):
        model(tokens(), output_attentions=True)


@pytest.mark.parametrize("k", [None, 6])
def test_hidden_states_are_given_layer_by_layer(k):
    output = fresh(LinformerModel, projected_length=k)(tokens(), output_hidden_states=True)
    assert len(output.hidden_states) == 3
    assert torch.equal(output.hidden_states[-1], output.last_hidden_state)


@pytest.mark.parametrize("k", [None, 6])
def test_compiles_into_one_graph_and_checkpoints_gradients(k):
    model, ids = fresh(projected_length=k), tokens()
    keep = torch.ones_like(ids)
    keep[0, :4] = 0
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(ids, keep).logits, model(ids, keep).logits, rtol=0, atol=1e-5)
    grads = []
    for checkpointing in (False, True):
        model.zero_grad()
        model.train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
            if hasattr(module, "dropout") and isinstance(module.dropout, float):
                module.dropout = 0.0
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model(ids, keep, labels=ids).loss.backward()
        grads.append(model.linformer.embeddings.word_embeddings.weight.grad.clone())
    torch.testing.assert_close(grads[0], grads[1])


@pytest.mark.parametrize("sharing", ["none", "headwise", "key_value", "layerwise"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_every_parameter_gets_a_gradient(kind, sharing):
    model, ids = fresh(projection=kind, projection_sharing=sharing).train(), tokens()
    model(ids, labels=ids).loss.backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_stays_near_single(dtype, kind):
    model, ids = fresh(projection=kind, initializer_range=0.05), tokens()
    with torch.no_grad():
        single = model(ids).logits
        half = model.to(dtype)(ids).logits
    assert half.dtype == dtype
    assert float((half.float() - single).abs().max() / single.abs().max()) < 0.05


def test_the_plan_says_which_order_runs():
    plan = fresh().plan(N)
    assert isinstance(plan, Plan)
    assert plan.form in str(plan)
    with pytest.raises(RankscopeError, match="one order only"):
        fresh(projected_length=None).plan(N)


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, i):
        row = tokens(1, 12, seed=i % 2)[0]
        return {"input_ids": row, "labels": row}


@pytest.mark.parametrize("k", [None, 6])
def test_trainer_trains_it(k, tmp_path):
    model = fresh(projected_length=k)
    with torch.no_grad():
        before = float(model(tokens(1, 12), labels=tokens(1, 12)).loss)
    settings = TrainingArguments(
        tmp_path, max_steps=20, learning_rate=3e-3, report_to=[], disable_tqdm=True, use_cpu=True, save_strategy="no"
    )
    Trainer(model, settings, train_dataset=Rows()).train()
    model.eval()
    with torch.no_grad():
        assert float(model(tokens(1, 12), labels=tokens(1, 12)).loss) < 0.8 * before


def test_pipelines_take_it(tmp_path):
    tokenizer = word_tokenizer(model_max_length=N)
    fill = pipeline("fill-mask", fresh(), tokenizer=tokenizer, device="cpu")
    assert len(fill("w1 w2 [MASK] w3")) == 5
    classify = pipeline(
        "text-classification", fresh(LinformerForSequenceClassification), tokenizer=tokenizer, device="cpu"
    )
    alone = [classify(text)[0]["score"] for text in ("w1 w2 w3", "w4")]
    together = [row["score"] for row in classify(["w1 w2 w3", "w4"], batch_size=2)]
    assert alone == pytest.approx(together, abs=1e-5)


def test_exact_attention_of_the_family_is_measured_through_the_interface():
    model = fresh(LinformerModel, projected_length=None, max_position_embeddings=64)
    result = rankscope.measure(
        model, tiny_measure.DOCUMENTS, tokenizer=word_tokenizer(model_max_length=64), n=16, windows=2, nulls="none"
    )
    assert set(result["reached"].values) == {"routed"}
    assert json.loads(result.attrs["self_check"])["passed"]


def test_from_spectrum_takes_each_layers_k_from_the_measured_curve():
    result = rankscope.measure(
        tiny_measure.tiny_bert(), tiny_measure.DOCUMENTS, tokenizer=word_tokenizer(), n=32, windows=3, nulls="none"
    )
    curve = result["nuclear_fraction"].sel(baseline="trained").values
    by_hand = (curve < 0.8).sum(-1) + 1
    for sharing, wanted in (
        ("none", by_hand.tolist()),
        ("headwise", by_hand.max(1).tolist()),
        ("layerwise", int(by_hand.max())),
    ):
        made = LinformerConfig.from_spectrum(
            result, 0.8, projection_sharing=sharing, hidden_size=32, vocab_size=45, intermediate_size=16
        )
        assert made.projected_length == wanted
        assert LinformerModel(made)(tokens(n=32)).last_hidden_state.shape == (2, 32, 32)
    with pytest.raises(RankscopeError, match=r"in \(0, 1\)"):
        LinformerConfig.from_spectrum(result, 1.5)
    with pytest.raises(RankscopeError, match="self/decoder"):
        LinformerConfig.from_spectrum(
            rankscope.measure(
                tiny_measure.tiny_causal(),
                tiny_measure.DOCUMENTS,
                tokenizer=word_tokenizer(),
                n=16,
                windows=2,
                nulls="none",
            )
        )
