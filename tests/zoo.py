"""Tiny random models of many architectures: one table that tests read.

``tiny_model("llama")`` builds one, ``tiny_inputs("llama", padding="left")`` feeds it. Weights are drawn large enough
that attention is far from uniform, so a lost mask or a wrong scaling shows.
"""

from dataclasses import dataclass, field

import torch
import transformers
from torch import Tensor, nn

VOCABULARY = 61
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
BERT = {**SIZES, "intermediate_size": 32, "max_position_embeddings": 40}
BART = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
}
LLAMA = {**BERT, "num_key_value_heads": 2}
LENGTH, DECODER_LENGTH = 11, 7


@dataclass(frozen=True)
class TinyModel:
    """One architecture.

    ``reached`` is how capture must reach it, or "refused"; ``maps`` how many attention maps one forward makes;
    ``takes`` what it reads: "tokens", "tokens and decoder", "pixels" or "audio"; ``pads`` whether it takes a mask.
    """

    model: str
    config: str
    sizes: dict[str, object]
    reached: str = "routed"
    maps: int = 2
    takes: str = "tokens"
    pads: bool = True
    causal: bool = False
    extra: dict[str, object] = field(default_factory=dict)


def _row(name: str, sizes: dict[str, object], **rest: object) -> TinyModel:
    return TinyModel(f"{name}Model", f"{name}Config", sizes, **rest)  # type: ignore[arg-type]


MODELS: dict[str, TinyModel] = {
    "bert": _row("Bert", BERT),
    "roberta": _row("Roberta", {**BERT, "pad_token_id": 1}),
    "albert": _row("Albert", {**BERT, "embedding_size": 8, "num_hidden_layers": 3}, maps=3),
    "distilbert": _row(
        "DistilBert", {"vocab_size": VOCABULARY, "dim": 16, "n_layers": 2, "n_heads": 4, "hidden_dim": 32}
    ),
    "electra": _row("Electra", {**BERT, "embedding_size": 8}),
    "modernbert": _row(
        "ModernBert",
        {
            **BERT,
            "local_attention": 6,
            "global_attn_every_n_layers": 2,
            "pad_token_id": 0,
            "bos_token_id": 2,
            "eos_token_id": 3,
            "cls_token_id": 2,
            "sep_token_id": 3,
        },
    ),
    "gpt2": _row(
        "GPT2", {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 40}, causal=True
    ),
    "llama": _row("Llama", LLAMA, causal=True),
    "qwen3": _row("Qwen3", {**LLAMA, "head_dim": 6}, causal=True),
    "mistral": _row("Mistral", {**LLAMA, "sliding_window": 4}, causal=True),
    "gemma2": _row(
        "Gemma2",
        {**LLAMA, "head_dim": 6, "sliding_window": 4, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 3},
        causal=True,
    ),
    "gemma3": _row(
        "Gemma3Text",
        {**LLAMA, "head_dim": 6, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
        causal=True,
    ),
    "gpt_neox": _row("GPTNeoX", BERT, causal=True),
    "opt": _row(
        "OPT",
        {**SIZES, "ffn_dim": 32, "word_embed_proj_dim": 16, "max_position_embeddings": 40},
        causal=True,
    ),
    "deepseek_v3": _row(
        "DeepseekV3",
        {
            **BERT,
            "num_key_value_heads": 4,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 6,
            "v_head_dim": 5,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 8,
            "first_k_dense_replace": 1,
        },
        causal=True,
    ),
    "gpt_oss": _row(
        "GptOss",
        {**LLAMA, "head_dim": 8, "sliding_window": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
        causal=True,
    ),
    "t5": _row(
        "T5",
        {"vocab_size": VOCABULARY, "d_model": 16, "num_layers": 2, "num_heads": 4, "d_kv": 6, "d_ff": 32},
        maps=6,
        takes="tokens and decoder",
    ),
    "bart": _row("Bart", BART, maps=6, takes="tokens and decoder"),
    "whisper": _row(
        "Whisper",
        {
            **BART,
            "num_mel_bins": 8,
            "max_source_positions": 9,
            "max_target_positions": 20,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
            "suppress_tokens": None,
        },
        maps=6,
        takes="audio",
        pads=False,
    ),
    "vit": _row(
        "ViT",
        {
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 32,
            "image_size": 12,
            "patch_size": 4,
        },
        takes="pixels",
        pads=False,
    ),
    "mpnet": _row("MPNet", {**BERT, "pad_token_id": 1}, reached="fallback"),
    "deberta_v2": _row(
        "DebertaV2",
        {
            **BERT,
            "relative_attention": True,
            "pos_att_type": ["c2p", "p2c"],
            "position_buckets": 8,
            "type_vocab_size": 0,
        },
        reached="fallback",
    ),
    "bloom": _row(
        "Bloom",
        {"vocab_size": VOCABULARY, "hidden_size": 16, "n_layer": 2, "n_head": 4},
        reached="fallback",
        causal=True,
    ),
    "xlnet": _row(
        "XLNet", {"vocab_size": VOCABULARY, "d_model": 16, "n_layer": 2, "n_head": 4, "d_inner": 32}, reached="fallback"
    ),
    "gpt_neo": _row(
        "GPTNeo",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "num_layers": 2,
            "num_heads": 4,
            "window_size": 4,
            "attention_types": [[["global", "local"], 1]],
            "max_position_embeddings": 40,
            "intermediate_size": 32,
        },
        reached="fallback",
        causal=True,
    ),
    "fnet": _row("FNet", {**BERT, "use_tpu_fourier_optimizations": False}, reached="refused", pads=False),
    "mamba": _row(
        "Mamba",
        {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4},
        reached="refused",
        causal=True,
    ),
    "squeezebert": _row("SqueezeBert", {**BERT, "embedding_size": 16}, reached="refused"),
    "longformer": _row("Longformer", {**BERT, "attention_window": [4, 4]}, reached="refused"),
    "big_bird": _row(
        "BigBird",
        {**BERT, "attention_type": "block_sparse", "block_size": 2, "num_random_blocks": 1},
        reached="refused",
    ),
    "prophetnet": _row(
        "ProphetNet",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "encoder_ffn_dim": 32,
            "decoder_ffn_dim": 32,
            "num_encoder_layers": 2,
            "num_decoder_layers": 2,
            "num_encoder_attention_heads": 4,
            "num_decoder_attention_heads": 4,
            "max_position_embeddings": 40,
        },
        reached="refused",
        takes="tokens and decoder",
    ),
    "funnel": _row(
        "Funnel",
        {"vocab_size": VOCABULARY, "d_model": 16, "block_sizes": [1, 1], "n_head": 4, "d_head": 4, "d_inner": 32},
        reached="refused",
    ),
}

REFUSED = [name for name, row in MODELS.items() if row.reached == "refused"]
REACHED = [name for name in MODELS if name not in REFUSED]
ROUTED = [name for name in REACHED if MODELS[name].reached == "routed"]
FALLBACK = [name for name in REACHED if MODELS[name].reached == "fallback"]
PADDED = [name for name in REACHED if MODELS[name].pads]


def spread_weights(model: nn.Module, seed: int = 0) -> None:
    """Draw every matrix anew with a deviation at which attention is far from uniform."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 or "sinks" in name:
                parameter.normal_(0, 0.3, generator=generator)


def tiny_model(name: str, *, attention: str | None = None, seed: int = 0, **changes: object) -> nn.Module:
    """The table's model in eval mode; ``attention`` is the implementation, by default transformers' own choice."""
    row = MODELS[name]
    config = getattr(transformers, row.config)(**{**row.sizes, **changes})
    made = {} if attention is None else {"attn_implementation": attention}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, row.model)._from_config(config, **made)
    spread_weights(model, seed)
    return model.eval()


def tiny_inputs(name: str, *, padding: str | None = None, batch: int = 2, length: int = LENGTH) -> dict[str, Tensor]:
    """One batch: the second row has three tokens of padding on the side that ``padding`` names, if any."""
    row = MODELS[name]
    generator = torch.Generator().manual_seed(1)
    if row.takes == "pixels":
        return {"pixel_values": torch.randn(batch, 3, 12, 12, generator=generator)}
    ids = torch.randint(5, VOCABULARY, (batch, length), generator=generator)
    decoder = {"decoder_input_ids": ids.flip(1)[:, :DECODER_LENGTH]}
    if row.takes == "audio":
        return {"input_features": torch.randn(batch, 8, 18, generator=generator), **decoder}
    inputs = {"input_ids": ids}
    if row.takes == "tokens and decoder":
        inputs |= decoder
    if padding is not None:
        mask = torch.ones_like(ids)
        places = slice(0, 3) if padding == "left" else slice(length - 3, length)
        mask[1, places] = 0
        ids[1, places] = MODELS[name].sizes.get("pad_token_id", 0)  # type: ignore[assignment]
        inputs["attention_mask"] = mask
    return inputs
