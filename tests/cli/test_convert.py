"""``rankscope convert``: from a saved model and a text file to a table, a report and projections that load."""

import json

import pytest
import torch
from transformers import (
    BertForMaskedLM,
    DebertaV2Config,
    DebertaV2Model,
    ElectraConfig,
    ElectraForPreTraining,
    GPT2Config,
    GPT2LMHeadModel,
)

import rankscope
from rankscope.cli.__main__ import main
from rankscope.pretrained import load
from tiny_words import WORDS, bert_config, word_tokenizer
from zoo import spread_weights

SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
HEADS = {"hidden_size": 16, "num_attention_heads": 2}


@pytest.fixture
def folder(tmp_path):
    model = BertForMaskedLM(bert_config())
    spread_weights(model)
    model.save_pretrained(tmp_path / "model")
    word_tokenizer(model_max_length=24).save_pretrained(tmp_path / "model")
    generator = torch.Generator().manual_seed(0)
    words = [WORDS[i] for i in torch.randint(len(WORDS), (400,), generator=generator)]
    (tmp_path / "text.txt").write_text(" ".join(words))
    return tmp_path


def command(folder, *more: str) -> list[str]:
    text, out = str(folder / "text.txt"), str(folder / "out")
    options = ["--k", "4", "--n", "16", "--windows", "8", "--steps", "5", "--calibrate", text, "--out", out]
    return ["convert", str(folder / "model"), *options, *more]


def texts(*names):
    return torch.randint(5, 45, names, generator=torch.Generator().manual_seed(1))


def test_the_command_writes_checkpoint_projections_report_and_table(folder, capsys):
    assert main(command(folder)) == 0
    printed = capsys.readouterr().out
    assert "masked-LM loss" in printed
    assert "LinformerForMaskedLM.from_pretrained" in printed
    report = json.loads((folder / "out" / "report.json").read_text())
    assert [(row["layer"], row["k"]) for row in report["layers"]] == [(i, k) for i in (0, 1) for k in (2, 4, 8)]
    assert all(row["floor"] <= row["after"] for row in report["layers"])
    assert report["positions"] == 16
    assert report["difference_from_in_place"] < 1e-5
    model = BertForMaskedLM.from_pretrained(folder / "model").eval()
    bank = rankscope.load_projections(model, folder / "out" / "projections.safetensors")
    assert bank.settings.k == 4
    assert bank.settings.length_rule == "interpolate"
    checkpoint = rankscope.LinformerForMaskedLM.from_pretrained(folder / "out").eval()
    assert not list(folder.glob(".*"))
    for n in (16, 5):
        with torch.no_grad():
            torch.testing.assert_close(checkpoint(texts(2, n)).logits, model(texts(2, n)).logits, rtol=1e-4, atol=1e-4)


def test_longer_positions_than_the_model_has(folder, capsys):
    assert main(command(folder, "--n", "32", "--positions", "64", "--method", "mean")) == 0
    assert "at most 64 tokens" in capsys.readouterr().out
    loaded = load(folder / "out", head=True)
    assert loaded.tokenizer.model_max_length == 64
    with torch.no_grad():
        assert loaded.model(texts(1, 64)).logits.isfinite().all()


def test_an_electra_discriminator_gives_an_encoder(folder):
    config = ElectraConfig(**{name: getattr(bert_config(), name) for name in SIZES}, embedding_size=16)
    ElectraForPreTraining(config).save_pretrained(folder / "model")
    assert main(command(folder, "--method", "mean")) == 0
    assert json.loads((folder / "out" / "config.json").read_text())["architectures"] == ["LinformerModel"]


def test_an_interrupted_command_leaves_nothing(folder, monkeypatch):
    def save(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("rankscope.models.in_place.save_projections", save)
    assert main(command(folder, "--method", "mean")) == 130
    assert sorted(path.name for path in folder.iterdir()) == ["model", "text.txt"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--k", "17"), "1..max_length=16"),
        (("--kind", "maen"), "did you mean 'mean'"),
        (("--method", "distil"), "did you mean 'distill'"),
        (("--windows", "900"), "of 900 windows"),
        (("--n", "2"), "special tokens"),
        (("--n", "25"), "takes at most 24 tokens: pass a smaller --n, or --positions 25"),
        (("--positions", "15"), "`positions` must be at least `n`=16, got 15"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(folder, capsys, more, words):
    assert main(command(folder, *more)) == 2
    error = capsys.readouterr().err
    assert words in error
    assert "Traceback" not in error
    assert not (folder / "out").exists()


def test_another_thing_in_the_folder_is_not_overwritten(folder, capsys):
    (folder / "out").mkdir()
    (folder / "out" / "notes.txt").write_text("mine")
    assert main(command(folder)) == 2
    assert "is not an empty folder: choose another" in capsys.readouterr().err
    assert [path.name for path in (folder / "out").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: GPT2LMHeadModel(GPT2Config(vocab_size=45, n_embd=16, n_layer=1, n_head=2)), "it is a decoder"),
        (
            lambda: DebertaV2Model(DebertaV2Config(vocab_size=45, num_hidden_layers=1, **HEADS)),
            "relative-position",
        ),
    ],
)
def test_a_model_that_cannot_become_one_is_refused_before_it_is_loaded(folder, capsys, model, words):
    model().save_pretrained(folder / "model")
    (folder / "model" / "model.safetensors").write_bytes(b"never read")
    assert main(command(folder)) == 2
    assert words in capsys.readouterr().err
    assert not (folder / "out").exists()
