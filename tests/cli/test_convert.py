"""``rankscope convert``: from a saved model and a text file to a table, a report and projections that load."""

import json

import pytest
import torch
from transformers import BertForMaskedLM

import rankscope
from rankscope.cli.__main__ import main
from tiny_words import WORDS, bert_config, word_tokenizer
from zoo import spread_weights


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


def test_the_command_writes_projections_report_and_table(folder, capsys):
    assert main(command(folder)) == 0
    printed = capsys.readouterr().out
    assert "masked-LM loss" in printed
    report = json.loads((folder / "out" / "report.json").read_text())
    assert [(row["layer"], row["k"]) for row in report["layers"]] == [(i, k) for i in (0, 1) for k in (2, 4, 8)]
    assert all(row["floor"] <= row["after"] for row in report["layers"])
    model = BertForMaskedLM.from_pretrained(folder / "model").eval()
    bank = rankscope.load_projections(model, folder / "out" / "projections.safetensors")
    assert bank.settings.k == 4
    assert bank.settings.length_rule == "interpolate"
    assert model(torch.tensor([[2, 5, 6, 3]])).logits.isfinite().all()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--k", "17"), "1..max_length=16"),
        (("--kind", "maen"), "did you mean 'mean'"),
        (("--method", "distil"), "did you mean 'distill'"),
        (("--windows", "900"), "of 900 windows"),
        (("--n", "2"), "special tokens"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(folder, capsys, more, words):
    assert main(command(folder, *more)) == 2
    error = capsys.readouterr().err
    assert words in error
    assert "Traceback" not in error
