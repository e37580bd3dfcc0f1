"""The only module that knows both mask conventions.

Inside rankscope ``key_padding_mask`` is boolean and **True means padding** (the sense of
``torch.nn.MultiheadAttention``). Hugging Face's ``attention_mask`` has 1 for a token to keep. Nothing else
converts between them.
"""

import torch
from torch import Tensor

from rankscope._errors import RankscopeError


def padding_from_attention_mask(attention_mask: Tensor) -> Tensor:
    """Turn a Hugging Face ``attention_mask`` (1 = keep) into a ``key_padding_mask`` (True = padding).

    Args:
        attention_mask: ``(b, n)``, integer, float or bool, values 0 and 1 only.

    Returns:
        A bool tensor ``(b, n)``.

    Raises:
        RankscopeError: The mask is not two-dimensional or holds other values, as an additive mask does.

    Example:
        >>> padding_from_attention_mask(torch.tensor([[1, 1, 0]]))
        tensor([[False, False,  True]])
    """
    if attention_mask.ndim != 2:
        raise RankscopeError(
            f"`attention_mask` must have shape (batch, n), got {tuple(attention_mask.shape)}: pass the "
            "tokenizer's mask, not an expanded one"
        )
    if attention_mask.dtype == torch.bool:
        return ~attention_mask
    return attention_mask == 0


def check_key_padding_mask(key_padding_mask: Tensor | None, batch: int, n: int) -> None:
    """Refuse a ``key_padding_mask`` that is not bool ``(batch, n)``; ``None`` passes.

    Raises:
        RankscopeError: Wrong dtype or shape.
    """
    if key_padding_mask is None:
        return
    if key_padding_mask.dtype != torch.bool:
        raise RankscopeError(
            f"`key_padding_mask` must be bool with True = padding, got {key_padding_mask.dtype}: "
            "from a Hugging Face mask use `attention_mask == 0`"
        )
    if tuple(key_padding_mask.shape) != (batch, n):
        raise RankscopeError(
            f"`key_padding_mask` must have shape (batch={batch}, n={n}), got {tuple(key_padding_mask.shape)}"
        )
