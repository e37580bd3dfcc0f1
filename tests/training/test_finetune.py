"""Finetuning: it learns, a seed decides everything, finished seeds are kept, and each mistake is one line."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification

from rankscope._errors import RankscopeError
from rankscope.models import LinformerConfig, LinformerForMaskedLM
from rankscope.training.classifiers import resolve
from rankscope.training.classify import (
    Encoded,
    OrderedRows,
    Padding,
    Plan,
    batches_by_length,
    encode,
    predict,
    rate_shape,
    train_and_score,
)
from rankscope.training.finetune import FinetuneArgs, finetune, summary
from rankscope.training.table_2 import COLUMNS, TABLE_2, Ours, table_2
from rankscope.training.tasks import TASKS, Split, load_split
from tiny_measure import seeded, word_tokenizer
from tiny_task import save_encoder, save_task
from tiny_words import bert_config


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finetune")
    save_encoder(folder / "model")
    save_task(folder / "data")
    return folder


@pytest.fixture
def args(place):
    return FinetuneArgs(
        "sst2",
        str(place / "model"),
        str(place / "data"),
        n=12,
        max_steps=4,
        batch_size=16,
        learning_rate=1e-2,
        device="cpu",
    )


def test_it_learns_what_can_be_learnt_and_sums_up_over_seeds(args, tmp_path):
    result = finetune(replace(args, max_steps=40, seeds=2), tmp_path / "run")
    each = [run["metrics"]["accuracy"] for run in result["runs"]]
    assert min(each) > 0.9
    assert result["metrics"]["accuracy"]["mean"] == pytest.approx(np.mean(each))
    assert result["metrics"]["accuracy"]["standard_error"] == pytest.approx(np.std(each, ddof=1) / 2**0.5)
    assert result["loss"]["mean"] < 0.4
    for name in ("seeds", "steps", "tokens", "loss", "metrics", "environment", "cpu_seconds"):
        assert name in result
    for run in result["runs"]:
        assert run["steps"] == 40
        assert run["loss_curve"][0][1] > run["loss_curve"][-1][1]
    assert result == json.loads((tmp_path / "run" / "result.json").read_text())


def test_a_seed_decides_and_finished_seeds_are_kept(args, tmp_path):
    first = finetune(args, tmp_path / "a")
    kept = (tmp_path / "a" / "seed-0.json").read_bytes()
    longer = finetune(replace(args, seeds=2), tmp_path / "a")
    assert (tmp_path / "a" / "seed-0.json").read_bytes() == kept
    assert longer["seeds"] == [0, 1]
    losses = [run["loss_curve"] for run in longer["runs"]]
    assert losses[0] == first["runs"][0]["loss_curve"] != losses[1]
    again = finetune(replace(args, seeds=2), tmp_path / "b")
    for one, other in zip(again["runs"], longer["runs"], strict=True):
        assert [loss for _, loss in one["loss_curve"]] == pytest.approx([loss for _, loss in other["loss_curve"]], 1e-5)


def test_a_seed_that_was_cut_short_is_run_again(args, tmp_path):
    first = finetune(args, tmp_path)
    (tmp_path / "seed-0.json").write_text('{"seed": 0, "st')
    again = finetune(args, tmp_path)
    assert again["runs"][0]["loss"] == pytest.approx(first["runs"][0]["loss"], 1e-5)


def test_the_callers_random_state_is_left_alone(args, tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    finetune(args, tmp_path)
    assert torch.equal(torch.rand(3), expected)


def test_micro_batches_change_nothing_but_rounding(place):
    """Dropout off: with it each forward draws its own."""
    task = TASKS["sst2"]
    words = word_tokenizer()
    data = encode(load_split(task, place / "data", "train"), words, 12)
    curves = []
    for micro in (None, 4):
        config = bert_config(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        model = seeded(lambda config=config: BertForSequenceClassification(config), 0)
        plan = Plan(5, 16, micro, learning_rate=1e-2, device="cpu")
        curves.append(train_and_score(model, words, task, data, data, plan, n=12, seed=0)["loss_curve"])
    assert [step for step, _ in curves[0]] == [1, 2, 3, 4, 5]
    np.testing.assert_allclose(curves[0], curves[1], rtol=2e-5)


def test_the_loss_and_the_update_are_adamws(place):
    """One step by hand: mean cross-entropy, gradient norm clipped to 1, AdamW without decay at half the peak rate."""
    task, words = TASKS["sst2"], word_tokenizer()
    data = encode(load_split(task, place / "data", "train"), words, 12)
    config = bert_config(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model, twin = (seeded(lambda: BertForSequenceClassification(config), 3) for _ in range(2))
    plan = Plan(1, 8, learning_rate=1e-2, warmup_share=0.0, weight_decay=0.0, device="cpu")
    result = train_and_score(model, words, task, data, data, plan, n=12, seed=7)
    rows = OrderedRows(data, 7, 8)
    batch = Padding(words, 12)([rows[t] for t in range(8)])
    loss = twin(**batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
    torch.optim.AdamW(twin.parameters(), lr=0.5e-2, weight_decay=0.0).step()
    assert result["loss"] == pytest.approx(loss.item(), rel=2e-6)
    assert result["tokens"] == int(batch["attention_mask"].sum())
    compared = 0
    for (name, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        # Where the gradient is all rounding (a key's bias) its sign, and so AdamW's step, is chance.
        if other.grad is not None and other.grad.abs().max() > 1e-6:
            compared += 1
            torch.testing.assert_close(one, other, rtol=0, atol=2e-4, msg=name)
    assert compared > 20


def test_the_order_is_the_seeds_and_every_epoch_holds_each_row_once():
    data = Encoded([{"input_ids": np.zeros(i + 1, np.int32)} for i in range(10)], np.zeros(10, np.int64), 0)
    rows = OrderedRows(data, 3, 30)
    places = [rows.place(t) for t in range(30)]
    for epoch in range(3):
        assert sorted(places[10 * epoch : 10 * epoch + 10]) == list(range(10))
    assert places[:10] != places[10:20]
    assert rows.tokens == 3 * 55
    assert [OrderedRows(data, 3, 12).place(t) for t in range(12)] == places[:12]


def test_a_file_sorted_by_label_is_mixed_whatever_its_size():
    labels = np.repeat([0, 1], 10_000)
    rows = OrderedRows(Encoded([], labels, 0), 0, 20_000)
    first = labels[rows.places()[:1000]]
    assert abs(first.mean() - 0.5) < 4 * 0.5 / 1000**0.5


def test_predictions_do_not_depend_on_the_batch(place):
    model = seeded(lambda: BertForSequenceClassification(bert_config(initializer_range=0.3)), 1)
    words = word_tokenizer()
    data = encode(load_split(TASKS["sst2"], place / "data", "eval"), words, 12)
    with torch.inference_mode():
        alone = torch.cat(
            [model(input_ids=torch.from_numpy(row["input_ids"])[None].long()).logits for row in data.rows]
        )
        # The border is put between the two middle rows, so that both classes are found and none by rounding.
        lead = (alone[:, 1] - alone[:, 0]).sort().values
        border = (lead[15] + lead[16]) / 2
        model.classifier.bias[1] -= border
        alone[:, 1] -= border
    assert lead[16] - lead[15] > 1e-5
    assert predict(model, words, data, 12).tolist() == alone.argmax(dim=1).tolist()
    assert alone.argmax(dim=1).sum() == 16


def test_batches_by_length_hold_each_row_once():
    lengths = np.array([5, 9000, 3, 9000, 1])
    batches = [list(batch) for batch in batches_by_length(lengths)]
    assert batches == [[1], [3], [0, 2, 4]]


def test_long_rows_are_cut_and_counted_the_longer_of_a_pair_first():
    split = Split([("w1 w2", "w3 w4 w5 w6 w7 w8"), ("w1", "w2")], np.array([0, 1]), "test")
    data = encode(split, word_tokenizer(), 7)
    assert data.truncated == 1
    assert data.lengths.max() == 7
    kept = word_tokenizer().convert_ids_to_tokens(data.rows[0]["input_ids"])
    assert {"w1", "w2"} <= set(kept)


def test_rows_that_no_step_comes_to_are_not_encoded(place):
    split = load_split(TASKS["sst2"], place / "data", "train")
    whole = encode(split, word_tokenizer(), 12)
    some = encode(split, word_tokenizer(), 12, places=[5, 2, 5])
    assert len(some) == len(whole) == 64
    assert np.flatnonzero(some.lengths).tolist() == [2, 5]
    assert some.rows[5]["input_ids"].tolist() == whole.rows[5]["input_ids"].tolist()
    visited = OrderedRows(whole, 0, 20).places()
    seen = encode(split, word_tokenizer(), 12, places=visited)
    assert OrderedRows(seen, 0, 20).tokens == OrderedRows(whole, 0, 20).tokens


def test_n_beyond_512_is_kept_where_the_model_holds_it(tmp_path):
    save_encoder(tmp_path, max_position_embeddings=4096)
    source = resolve(TASKS["imdb"], str(tmp_path), n=4096)
    split = Split([(" ".join(["w1"] * 5000),)], np.array([0]), "test")
    assert encode(split, source.tokenizer, source.n).lengths.tolist() == [4096]
    assert resolve(TASKS["imdb"], str(tmp_path)).n == 512


def test_listops_takes_the_architecture_with_its_own_vocabulary(place, tmp_path):
    args = FinetuneArgs(
        "listops", str(place / "model"), n=24, max_steps=2, batch_size=4, train_rows=20, eval_rows=20, device="cpu"
    )
    result = finetune(args, tmp_path)
    assert result["plan"]["learning_rate"] == 5e-4
    assert result["data"]["train"]["truncated"] == 0
    source = resolve(TASKS["listops"], str(place / "model"), n=24)
    model = source.build(0)
    assert model.config.vocab_size == 19
    assert model.config.num_labels == 10
    (tmp_path / "shape").mkdir()
    (tmp_path / "shape" / "config.json").write_bytes((place / "model" / "config.json").read_bytes())
    assert resolve(TASKS["listops"], str(tmp_path / "shape"), n=24).config.hidden_size == 32
    weights = [next(iter(source.build(seed).parameters())) for seed in (0, 0, 1)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_loaded_weights_are_the_checkpoints_and_the_head_is_the_seeds(place):
    source = resolve(TASKS["sst2"], str(place / "model"), n=12)
    one, other = source.build(0), source.build(1)
    stored = BertForMaskedLM.from_pretrained(place / "model").state_dict()
    compared = 0
    for name, tensor in one.state_dict().items():
        if name in stored:
            compared += 1
            assert torch.equal(tensor, stored[name])
    assert compared > 10
    assert not torch.equal(one.classifier.weight, other.classifier.weight)
    assert source.rate(one) == pytest.approx(2e-5 * 768 / 32)


def test_bfloat16_follows_float32(args, tmp_path):
    """Autocast: the first loss to 1e-2, the matrices kept in float32."""
    losses = [
        finetune(replace(args, precision=precision, save_models=True), tmp_path / precision)["runs"][0]["loss_curve"]
        for precision in ("float32", "bfloat16")
    ]
    assert losses[0] != losses[1]
    assert losses[1][0][1] == pytest.approx(losses[0][0][1], rel=1e-2)
    model = BertForSequenceClassification.from_pretrained(tmp_path / "bfloat16" / "model-seed-0")
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}


def test_fresh_weights_are_the_seeds_and_not_the_checkpoints(place):
    source = resolve(TASKS["sst2"], str(place / "model"), n=12, fresh=True)
    trained = resolve(TASKS["sst2"], str(place / "model"), n=12).build(0)
    one, again, other = (source.build(seed).bert.embeddings.word_embeddings.weight for seed in (0, 0, 1))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert not torch.equal(one, trained.bert.embeddings.word_embeddings.weight)
    assert one.shape == trained.bert.embeddings.word_embeddings.weight.shape


def test_a_kept_model_gives_the_same_predictions(args, tmp_path, place):
    finetune(replace(args, save_models=True), tmp_path)
    model = BertForSequenceClassification.from_pretrained(tmp_path / "model-seed-0")
    data = encode(load_split(TASKS["sst2"], place / "data", "eval"), word_tokenizer(), 12)
    hits = float(np.mean(predict(model, word_tokenizer(), data, 12) == data.labels))
    kept = json.loads((tmp_path / "seed-0.json").read_text())
    assert hits == pytest.approx(kept["metrics"]["accuracy"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "sst3"}, "did you mean 'sst2'"),
        ({"seeds": 0}, "`seeds` must be at least 1"),
        ({"max_steps": 0}, "`max_steps` must be at least 1"),
        ({"epochs": 0.0}, "`epochs` must be above 0"),
        ({"n": 4000}, "`n` is 4000, but .* holds 24 positions"),
        ({"n": 4}, "`n` must be at least 8"),
        ({"batch_size": 6, "micro_batch_size": 4}, "`micro_batch_size` must divide"),
        ({"learning_rate": -1.0}, "`learning_rate` must be above 0"),
        ({"warmup_share": 1.0}, "`warmup_share` must be in"),
        ({"precision": "float16"}, "`precision` must be one of"),
        ({"model": "no/such/model/"}, "no/such/model/"),
        ({"task": "qnli"}, "no column 'question'"),
        ({"train_rows": 0}, "`limit` must be at least 1"),
        ({"learning_rate": 1e30}, "the loss is (nan|inf) at step"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_no_result(args, tmp_path, changes, message):
    with pytest.raises(RankscopeError, match=message) as caught:
        finetune(replace(args, **changes), tmp_path / "run")
    assert "\n" not in str(caught.value)
    if "learning_rate" not in changes or changes["learning_rate"] < 0:
        assert not (tmp_path / "run").exists()
    assert not list(tmp_path.rglob("seed-*"))


def test_a_tokenizer_that_does_not_fit_is_refused(args, place, tmp_path):
    small = BertConfig(**{**bert_config().to_dict(), "vocab_size": 20})
    seeded(lambda: BertForMaskedLM(small), 0).save_pretrained(tmp_path / "small")
    with pytest.raises(RankscopeError, match=r"`tokenizer` has ids up to 44, but .* embeds only 20"):
        finetune(replace(args, model=str(tmp_path / "small"), tokenizer=str(place / "model")), tmp_path / "run")
    with pytest.raises(RankscopeError, match=r"no tokenizer|has no padding token"):
        finetune(replace(args, model=str(tmp_path / "small")), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_other_settings_into_the_same_folder_are_refused_and_named(args, tmp_path, place):
    finetune(args, tmp_path / "run")
    before = (tmp_path / "run" / "result.json").read_bytes()
    with pytest.raises(RankscopeError, match="max_steps is 5, there it is 4"):
        finetune(replace(args, max_steps=5), tmp_path / "run")
    save_task(tmp_path / "other", train=60)
    with pytest.raises(RankscopeError, match="train_hash is"):
        finetune(replace(args, data=str(tmp_path / "other")), tmp_path / "run")
    assert (tmp_path / "run" / "result.json").read_bytes() == before


def test_a_run_that_failed_does_not_bar_its_folder(args, tmp_path):
    with pytest.raises(RankscopeError, match="the loss is"):
        finetune(replace(args, learning_rate=1e30), tmp_path)
    assert finetune(args, tmp_path)["seeds"] == [0]
    with pytest.raises(RankscopeError, match=r"learning_rate is 1e\+30, there it is 0.01"):
        finetune(replace(args, learning_rate=1e30), tmp_path)


def test_a_checkpoint_of_another_configuration_is_one_line(args, place, tmp_path):
    shutil.copytree(place / "model", tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "hidden_size": 64}))
    with pytest.raises(RankscopeError, match="cannot be loaded from") as caught:
        finetune(replace(args, model=str(tmp_path / "model")), tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_several_processes_are_refused(args, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RankscopeError, match="one process, but 2 were started"):
        finetune(args, tmp_path)


@pytest.mark.parametrize("k", [None, 4])
def test_our_own_checkpoints_are_finetuned_with_or_without_projections(args, tmp_path, k):
    config = LinformerConfig(
        vocab_size=45,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=24,
        projected_length=k,
        pad_token_id=0,
    )
    seeded(lambda: LinformerForMaskedLM(config), 0).save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    result = finetune(replace(args, model=str(tmp_path / "model"), max_steps=60), tmp_path / "run")
    assert result["model"]["projected_length"] == k
    assert result["loss"]["mean"] < 0.4
    model = resolve(TASKS["sst2"], str(tmp_path / "model")).build(0)
    stored = LinformerForMaskedLM.from_pretrained(tmp_path / "model").state_dict()
    shared = [name for name in model.state_dict() if name in stored]
    assert len(shared) > 15
    assert all(torch.equal(model.state_dict()[name], stored[name]) for name in shared)
    with pytest.raises(RankscopeError, match="holds 24 positions"):
        resolve(TASKS["sst2"], str(tmp_path / "model"), n=25)


def test_the_schedule_rises_and_falls_in_lines():
    assert rate_shape(0.0, 0.0) == 1.0
    shape = [rate_shape(p, 0.1) for p in np.linspace(0, 1, 101)]
    assert np.argmax(shape) == 10
    assert shape[10] == pytest.approx(1.0)
    assert np.ptp(np.diff(shape[:11])) < 1e-12
    assert np.ptp(np.diff(shape[10:])) < 1e-12
    assert shape[-1] == 0


def test_one_seed_has_no_error():
    assert summary([0.5]) == {"mean": 0.5, "standard_error": None, "seeds": 1}


def test_the_printed_averages_are_the_means_of_the_printed_scores():
    """Rounded by the paper to two places."""
    assert len(TABLE_2) == 12
    for row in TABLE_2:
        assert row.average == pytest.approx(sum(row.scores) / 4, abs=0.0051)


def test_the_table_has_our_row_above_the_printed_ones():
    scores = dict.fromkeys(COLUMNS, (0.8, 0.01))
    lines = table_2([Ours(128, "tiny", scores), Ours(64, "part", {"qqp": (0.7, None)})], "scale").splitlines()
    assert lines[2] == "| 128 | tiny (ours) | 80.0 ± 1.0 | 80.0 ± 1.0 | 80.0 ± 1.0 | 80.0 ± 1.0 | 80.0 |"
    assert lines[3] == "| 64 | part (ours) | – | – | – | 70.0 | – |"
    assert lines[4] == "| 512 | RoBERTa-base (BERT's corpus) | 93.1 | 94.1 | 90.9 | 90.9 | 92.25 |"
    assert "scale" in lines[-1]
