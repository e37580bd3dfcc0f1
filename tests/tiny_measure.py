"""Tiny random models and texts for tests of what is built on capture."""

import numpy as np
import torch
from transformers import BertModel, LlamaConfig, LlamaModel, PreTrainedTokenizerFast, T5Config, T5Model

import tiny_words
from tiny_words import WORDS, bert_config

VOCABULARY = 48


def documents(count: int = 24, seed: int = 0) -> list[str]:
    """Texts of 20 to 60 words."""
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, size=rng.integers(20, 60))) + " ." for _ in range(count)]


DOCUMENTS = documents()


def word_tokenizer() -> PreTrainedTokenizerFast:
    return tiny_words.word_tokenizer(model_max_length=512)


def seeded(build, seed: int):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build().eval()


def tiny_bert(seed: int = 0) -> BertModel:
    config = bert_config(hidden_size=32, num_attention_heads=4, max_position_embeddings=512, initializer_range=0.3)
    return seeded(lambda: BertModel(config), seed)


def tiny_causal(seed: int = 0) -> LlamaModel:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=256,
        initializer_range=0.3,
    )
    return seeded(lambda: LlamaModel(config), seed)


def tiny_t5(seed: int = 0) -> T5Model:
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return seeded(lambda: T5Model(config), seed)
