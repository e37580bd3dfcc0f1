"""The gallery page's commands and snippets run, with a tiny model in MiniLM's place."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from transformers import BertModel

from rankscope.cli.__main__ import main
from tiny_words import WORDS, bert_config, word_tokenizer
from zoo import spread_weights

PAGE = (Path(__file__).parents[2] / "docs" / "gallery" / "replace-attention-in-minilm.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = BertModel(bert_config())
    spread_weights(model)
    model.save_pretrained("model")
    word_tokenizer(model_max_length=24).save_pretrained("model")
    generator = torch.Generator().manual_seed(0)
    Path("text.txt").write_text(" ".join(WORDS[i] for i in torch.randint(len(WORDS), (400,), generator=generator)))
    return {"minilm": "model", "pydoc": "text.txt", "128": "4", "512": "16"}


def test_the_pages_commands_and_snippets_run_in_order(tiny):
    assert [language for language, _ in BLOCKS] == ["python", "", "python"]
    for language, text in BLOCKS:
        if language == "python":
            exec(text.replace('"minilm"', '"model"').replace("k=128", "k=4"), {})
        else:
            name, *arguments = shlex.split(text)
            assert name == "rankscope"
            small = [tiny.get(argument, argument) for argument in arguments]
            assert main([*small, "--windows", "8", "--steps", "5"]) == 0
    assert Path("runs/minilm-linformer/report.json").exists()
    main(
        [
            "convert",
            "model",
            "--k",
            "4",
            "--n",
            "16",
            "--calibrate",
            "text.txt",
            "--method",
            "mean",
            "--windows",
            "8",
            "--positions",
            "2048",
            "--out",
            "runs/longer",
        ]
    )
    assert '"max_position_embeddings": 2048' in Path("runs/longer/config.json").read_text()
