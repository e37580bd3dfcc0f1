"""Attention layers of other Linformers as they are published, under their own names, in float64."""

import math

import torch

from reference.linformer import combine, softmax


def side(state, name, x):
    """The map of that name on the last axis."""
    y = x @ state[f"{name}.weight"].T
    return y + state[f"{name}.bias"] if f"{name}.bias" in state else y


def one_head(query, keys, values):
    """Row by row; ``keys`` and ``values`` are compressed."""
    scaling = query.shape[-1] ** -0.5
    rows = [softmax([scaling * (q * key).sum() for key in keys]) for q in query]
    return torch.stack([combine(P, list(values)) for P in rows])


def heads_of(query, keys, values):
    """All heads of one row of the batch, side by side; ``keys`` and ``values`` are lists, one entry a head."""
    cut = query.chunk(len(keys), dim=-1)
    return torch.cat([one_head(*head) for head in zip(cut, keys, values, strict=True)], dim=-1)


def fairseq_forward(state, x, heads):
    """Compress the input, then the maps with their biases (fairseq's ``examples/linformer``)."""
    n = x.shape[1]
    E = state["compress_k.weight"][:, :n]
    F = state.get("compress_v.weight", state["compress_k.weight"])[:, :n]
    rows = []
    for row in x:
        keys, values = side(state, "k_proj", E @ row), side(state, "v_proj", F @ row)
        rows.append(heads_of(side(state, "q_proj", row), keys.chunk(heads, -1), values.chunk(heads, -1)))
    return side(state, "out_proj", torch.stack(rows))


def lucidrains_forward(state, x, heads):
    """Maps without biases, then ``(n, k)`` matrices; one key head may serve all."""
    n, inner = x.shape[1], state["to_q.weight"].shape[0]
    keys = side(state, "to_k", x)
    values, F = keys, state["proj_k"][:n]
    if "to_v.weight" in state:
        values, F = side(state, "to_v", x), state["proj_v"][:n]
    copies = inner // keys.shape[-1]
    rows = []
    for row in range(len(x)):
        both = (state["proj_k"][:n].T @ keys[row], F.T @ values[row])
        parts = [[part] * heads if copies == heads else part.chunk(heads, -1) for part in both]
        rows.append(heads_of(side(state, "to_q", x[row]), *parts))
    return side(state, "to_out", torch.stack(rows))


def tatp22_forward(state, x, heads):
    """Each head its own maps; E and F are linear maps along the sequence, with biases."""
    rows = []
    for row in x:
        parts = []
        for h in range(heads):
            compressed = [
                side(state, f"heads.{h}.{name}", side(state, f"{to}.{h}", row).T).T
                for name, to in (("E", "to_k"), ("F", "to_v"))
            ]
            parts.append(one_head(side(state, f"to_q.{h}", row), *compressed))
        rows.append(torch.cat(parts, dim=-1))
    out = torch.stack(rows)
    return side(state, "w_o", out) if "w_o.weight" in state else side(state, "w_o_2", side(state, "w_o_1", out))


def mlpen_forward(state, x, heads, keep=None):
    """Maps with biases; padded keys and values are zeroed; one E a head, for keys and values."""
    keep = torch.ones(x.shape[:2], dtype=x.dtype) if keep is None else keep
    rows = []
    for row, kept in zip(x, keep, strict=True):
        parts = [
            list(state["attn.E"] @ torch.stack((side(state, name, row) * kept[:, None]).chunk(heads, -1)))
            for name in ("W_k", "W_v")
        ]
        rows.append(heads_of(side(state, "W_q", row), *parts))
    return side(state, "ff", torch.stack(rows))


def layer_norm(state, name, x):
    centred = x - x.mean(-1, keepdim=True)
    normal = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return normal * state[f"{name}.weight"] + state[f"{name}.bias"]


def gelu(x):
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def linformer_roberta_forward(state, ids, layers, heads):
    """fairseq's post-norm model without padding: logits of the masked-language-model head."""
    root = "encoder.sentence_encoder."
    n = ids.shape[1]
    x = state[f"{root}embed_tokens.weight"][ids] + state[f"{root}embed_positions.weight"][2 : 2 + n]
    x = layer_norm(state, f"{root}emb_layer_norm", x)
    for number in range(layers):
        at = f"{root}layers.{number}."
        attention = {name.removeprefix(f"{at}self_attn."): t for name, t in state.items() if f"{at}self_attn." in name}
        x = layer_norm(state, f"{at}self_attn_layer_norm", x + fairseq_forward(attention, x, heads))
        x = layer_norm(state, f"{at}final_layer_norm", x + side(state, f"{at}fc2", gelu(side(state, f"{at}fc1", x))))
    x = layer_norm(state, "encoder.lm_head.layer_norm", gelu(side(state, "encoder.lm_head.dense", x)))
    return x @ state["encoder.lm_head.weight"].T + state["encoder.lm_head.bias"]
