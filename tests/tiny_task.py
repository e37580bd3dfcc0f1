"""A tiny encoder in a folder and a task it can learn: whether w0 is in the sentence."""

import numpy as np
from transformers import BertForMaskedLM

from tiny_measure import seeded, word_tokenizer
from tiny_words import WORDS, bert_config

FIRST, OTHER = WORDS[0], WORDS[1:]


def save_encoder(folder, **changes):
    config = bert_config(hidden_size=32, num_hidden_layers=1, **changes)
    seeded(lambda: BertForMaskedLM(config), 0).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


def sentences(count: int, seed: int):
    rng = np.random.default_rng(seed)
    for row in range(count):
        words = list(rng.choice(OTHER[:8], size=rng.integers(3, 7)))
        if row % 2:
            words[rng.integers(len(words))] = FIRST
        yield " ".join(words), row % 2


def save_task(folder, train: int = 64, dev: int = 32):
    folder.mkdir(parents=True, exist_ok=True)
    for name, count, seed in (("train", train, 0), ("dev", dev, 1)):
        rows = [f"{text}\t{label}" for text, label in sentences(count, seed)]
        (folder / f"{name}.tsv").write_text("\n".join(["sentence\tlabel", *rows]) + "\n")
    return folder
