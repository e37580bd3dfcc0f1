"""fairseq's ``linformer_roberta``, whole: its state dict as a LinformerForMaskedLM."""

import re

import torch
from torch import Tensor, nn

from rankscope._errors import RankscopeError
from rankscope.models.checkpoint import built
from rankscope.models.positions import position_table, tiled
from rankscope.models.state_dicts import AttentionState, State, layers_of, read_attention

# RoBERTa's padding_idx + 1.
SKIP = 2
LAYER = {
    "self_attn_layer_norm": "attention.output.LayerNorm",
    "fc1": "intermediate.dense",
    "fc2": "output.dense",
    "final_layer_norm": "output.LayerNorm",
}
# What read_attention reads, the matrix it shares under further names, and a buffer of no weight.
READ_ELSEWHERE = re.compile(r"\.self_attn\.|compress_layer\.|\.version$")


def read_model(state: State, *, num_heads: int) -> nn.Module:
    """Read a state dict of fairseq's ``linformer_roberta`` (post-norm, the released form) as our model.

    fairseq's model does not leave padding out of its keys; ours does, so they agree on texts without padding.
    Classification heads are left behind.

    Args:
        state: Names as fairseq saves them (``…sentence_encoder.…``).
        num_heads: Number of heads, which the tensors do not say.

    Returns:
        ``LinformerForMaskedLM``, or ``LinformerModel`` where there is no ``lm_head``; in eval mode.

    Raises:
        RankscopeError: Another layout (of which :func:`~rankscope.models.state_dicts.read_attention` gives the layers),
            pre-norm layers, tensors that are missing or unknown.
    """
    from rankscope.models.configuration_linformer import LinformerConfig

    layout, prefixes = layers_of(state)
    root = prefixes[0].removesuffix("layers.0.self_attn.")
    if layout != "fairseq" or root == prefixes[0]:
        raise RankscopeError(
            f"`state` has the layout {layout!r} with layers such as {prefixes[0]!r}, whose models are built otherwise "
            "than Linformer's here (pre-norm layers, other embeddings): read_attention gives its attention layers"
        )
    if any(name.startswith(f"{root}layer_norm.") for name in state):
        raise RankscopeError(
            "`state` is of a pre-norm model (a norm after the last layer), and ours is post-norm, as the released "
            "linformer_roberta: read_attention gives its attention layers"
        )
    layers = read_attention(state, num_heads=num_heads)
    encoder = _encoder(state, root, layers)
    head = _head(state, root)
    words, table = (encoder[f"embeddings.{name}_embeddings.weight"] for name in ("word", "position"))
    n = min(table.shape[0] - SKIP, layers[0].E.shape[-1])
    sharing, projections = _projections(layers, n)
    lengths = [layer.E.shape[-2] for layer in layers]
    config = LinformerConfig(
        vocab_size=words.shape[0],
        hidden_size=words.shape[1],
        num_hidden_layers=len(layers),
        num_attention_heads=num_heads,
        intermediate_size=state[f"{prefixes[0].removesuffix('self_attn.')}fc1.weight"].shape[0],
        hidden_act="gelu",
        type_vocab_size=1,
        layer_norm_eps=1e-5,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        max_position_embeddings=n,
        projected_length=lengths[0] if len(set(lengths)) == 1 else lengths,
        projection_sharing=sharing,
        projection="learned",
        length_rule="slice",
    )
    model = built(config, head=bool(head), pooler=False)
    offset = position_table(model)[2]
    encoder["embeddings.position_embeddings.weight"] = tiled(table, n, skip=SKIP, offset=offset)
    encoder["embeddings.token_type_embeddings.weight"] = words.new_zeros(1, words.shape[1])
    encoder |= {f"encoder.projections.{name}": tensor for name, tensor in projections.items()}
    prefix = f"{model.base_model_prefix}." if head else ""
    model.to(words.dtype).load_state_dict({prefix + name: tensor for name, tensor in encoder.items()} | head)
    return model.eval()


def _encoder(state: State, root: str, layers: list[AttentionState]) -> dict[str, Tensor]:
    """The encoder's tensors under RoBERTa's names; positions still as they were, projections apart."""
    # The embeddings' norm was renamed once.
    names = {"embed_tokens": "word_embeddings", "embed_positions": "position_embeddings"}
    names |= dict.fromkeys(("emb_layer_norm", "layernorm_embedding"), "LayerNorm")
    found, unknown = {}, []
    for name, tensor in state.items():
        if not name.startswith(root):
            continue
        first, _, part = name.removeprefix(root).rpartition(".")
        inside = re.fullmatch(r"layers\.(\d+)\.(\w+)", first)
        if first in names:
            found[f"embeddings.{names[first]}.{part}"] = tensor
        elif inside and inside[2] in LAYER:
            found[f"encoder.layer.{inside[1]}.{LAYER[inside[2]]}.{part}"] = tensor
        elif not READ_ELSEWHERE.search(name):
            unknown.append(name)
    if unknown:
        raise RankscopeError(f"`state` of fairseq's layout holds {', '.join(unknown[:6])}, which has no place in ours")
    for number, layer in enumerate(layers):
        for ours in ("query", "key", "value", "output"):
            place = f"attention.{'output.dense' if ours == 'output' else f'self.{ours}'}"
            weight, bias = getattr(layer, ours)
            found |= {f"encoder.layer.{number}.{place}.weight": weight, f"encoder.layer.{number}.{place}.bias": bias}
    lacking = [name for name in ("word", "position") if f"embeddings.{name}_embeddings.weight" not in found]
    if lacking or "embeddings.LayerNorm.weight" not in found:
        raise RankscopeError(
            f"`state` of fairseq's layout lacks its embeddings ({root}embed_tokens, {root}embed_positions, "
            f"{root}emb_layer_norm): give the whole of it, or take read_attention for the layers alone"
        )
    return found


def _head(state: State, root: str) -> dict[str, Tensor]:
    """The masked-language-model head, whose decoder is stored as the head's own weight and bias."""
    prefix = f"{root.removesuffix('sentence_encoder.')}lm_head."
    found = {}
    for name, tensor in state.items():
        if name.startswith(prefix):
            part = name.removeprefix(prefix)
            found[f"lm_head.decoder.{part}" if part in ("weight", "bias") else f"lm_head.{part}"] = tensor
    if found:
        found["lm_head.bias"] = found["lm_head.decoder.bias"]
    return found


def _projections(layers: list[AttentionState], n: int) -> tuple[str, dict[str, Tensor]]:
    """The sharing that the tensors show, and a bank's state dict, cut to n tokens."""
    first = layers[0].E
    if all(layer.E is layer.F and layer.E.shape == first.shape and torch.equal(layer.E, first) for layer in layers):
        return "layerwise", {"shared.weight": first[:, :n]}
    both = any(layer.E is not layer.F for layer in layers)
    state = {f"layers.{i}.E.weight": layer.E[:, :n] for i, layer in enumerate(layers)}
    if not both:
        return "key_value", state
    return "headwise", state | {f"layers.{i}.F.weight": layer.F[:, :n] for i, layer in enumerate(layers)}
