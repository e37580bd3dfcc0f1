"""Real query, key and value for the benchmark's error: one layer of a model on a text, windows side by side."""

from math import ceil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from rankscope._errors import RankscopeError
from rankscope.attention.interface import AttentionCall, capture
from rankscope.corpora import open_corpus
from rankscope.pretrained import load, max_positions
from rankscope.spectrum.parts import write_whole
from rankscope.windows import packed_windows

LONGEST_WINDOW = 512


def captured(folder: Path, n: int, *, model: str | nn.Module, corpus: Any, tokenizer: Any = None) -> Path:
    """Write, or find written, query, key and value ``(1, h, >= n, head_dim)`` of the model's middle layer.

    Beyond the model's own length (512 at most) windows are put side by side: each window's tensors are real, the
    attention from one into another is not what the model computes.

    Args:
        folder: Where; the file is ``captured/qkv.safetensors`` in it.
        n: Tokens wanted.
        model: As for ``rankscope measure``.
        corpus: The same.
        tokenizer: For a module.

    Returns:
        The file's path.

    Raises:
        RankscopeError: The text is too short, or the model has no attention that can be captured.
    """
    path = folder / "captured" / "qkv.safetensors"
    name = model if isinstance(model, str) else type(model).__name__
    source = f"{name} on {corpus if isinstance(corpus, str) else 'a text'}"
    if held(path, source) >= n:
        return path
    pretrained = load(model, tokenizer=tokenizer)
    length = min(n, LONGEST_WINDOW, max_positions(pretrained.model) or LONGEST_WINDOW)
    calls: list[AttentionCall] = []
    pieces: list[tuple[Tensor, ...]] = []
    count, middle = ceil(n / length), 0
    for window in packed_windows(open_corpus(corpus), pretrained.tokenizer, length, limit=count):
        calls.clear()
        with torch.no_grad(), capture(pretrained.model, calls.append):
            pretrained.model(input_ids=torch.tensor([window.input_ids]))
        if not calls:
            raise RankscopeError(f"`model` {name!r} has no attention that can be captured: take another, or none")
        middle = len(calls) // 2
        pieces.append(tensors_of(calls[middle]))
    if len(pieces) < count:
        raise RankscopeError(f"`corpus` holds {len(pieces)} windows of {length} tokens, {count} are needed at n={n}")
    words = f"{source}, attention {middle}, windows of {length} tokens side by side"
    joined = {
        key: torch.cat(parts, dim=2).contiguous()
        for key, parts in zip(("query", "key", "value"), zip(*pieces, strict=True), strict=True)
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, save(joined, {"words": words, "source": source}))
    return path


def tensors_of(call: AttentionCall) -> tuple[Tensor, ...]:
    """Return query, key and value in float32, the model's scaling moved into the query as far as it is unusual."""
    assert call.query is not None
    assert call.scaling is not None
    query = call.query * (call.scaling * call.query.shape[-1] ** 0.5)
    return query.float(), call.key_expanded().float(), call.value_expanded().float()


def held(path: Path, source: str) -> int:
    """Return how many tokens a file holds, 0 where there is none of this source."""
    try:
        with safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get("source") != source:
                return 0
            return int(file.get_slice("query").get_shape()[2])
    except (OSError, ValueError, RuntimeError):
        return 0
