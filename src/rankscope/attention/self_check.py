"""Whether what is captured can be believed, on one example: against eager, row sums, causality, padding."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rankscope._errors import RankscopeError
from rankscope.attention._call import AttentionCall
from rankscope.attention._modules import forward_parameters, unwrapped
from rankscope.attention.capture import observe
from rankscope.attention.route import Route, map_difference, run_captured, run_forward

# P is made in float32 from the model's query and key, so against eager's float32 formula one bar serves all dtypes.
DIFFERENCE = 1e-6
ROW_SUM = 1e-5
HALF_ROW_SUM = 5e-2  # only by fallback: there P itself is rounded
# Relative RMS between a padded and an unpadded run: the model's own arithmetic at another length, through all layers.
PADDING = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 5e-2, torch.bfloat16: 5e-2}
PAD = 3
PADDED_TOKENS = 125
TOKEN_INPUTS = ("input_ids", "attention_mask", "token_type_ids")


def self_check(model: nn.Module, inputs: dict[str, Any], route: Route) -> dict[str, Any]:
    """Check the captured maps on the first example of a batch.

    Args:
        model: The model.
        inputs: Keyword arguments of its forward, one batch.
        route: What :func:`~rankscope.attention.route.find_route` found.

    Returns:
        Plain values: ``passed``, ``reasons`` (what failed), ``skipped`` (what could not be checked, and why),
        ``attentions`` (how many maps were checked), ``reached``, ``dtype``, ``max_difference`` from the model's own
        eager function on the same query and key in float32 (``None`` by fallback: the weights are the model's own),
        ``row_sum_error``, ``above_diagonal`` (largest entry above the diagonal in causal self-attention, ``None``
        where there is none), ``padding_right`` and ``padding_left`` (relative RMS from the unpadded run, ``None``
        where skipped).

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> from rankscope.attention.route import find_route
        >>> model = BertModel(BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        ...     intermediate_size=8))
        >>> inputs = {"input_ids": torch.tensor([[1, 2, 3, 4, 5, 6]])}
        >>> self_check(model, inputs, find_route(model, inputs))["passed"]
        True
    """
    example = first_example(inputs)
    dtype = next(model.parameters()).dtype
    found: dict[str, Any] = {
        "passed": True,
        "reasons": [],
        "skipped": [],
        "attentions": 0,
        "reached": route.reached,
        "dtype": str(dtype).removeprefix("torch."),
        "max_difference": None,
        "row_sum_error": 0.0,
        "above_diagonal": None,
        "padding_right": None,
        "padding_left": None,
    }
    _check_maps(model, example, route, found)
    row_bar = HALF_ROW_SUM if route.reached == "fallback" and dtype.itemsize == 2 else ROW_SUM
    _bar(found, "max_difference", DIFFERENCE, "P differs from the model's own eager weights")
    _bar(found, "row_sum_error", row_bar, "rows do not sum to 1")
    _bar(found, "above_diagonal", 0.0, "a causal attention sees later tokens")
    if reason := padding_unchecked(model, example):
        found["skipped"].append(f"padding: {reason}")
    else:
        _check_padding(model, example, route, found, PADDING.get(dtype, 1e-4))
    found["passed"] = not found["reasons"]
    return found


def _bar(found: dict[str, Any], name: str, bar: float, failure: str) -> None:
    value = found[name]
    if value is not None and not value <= bar:
        found["reasons"].append(f"{failure}: {name} is {value:.3g}, the bar is {bar:g}")


def first_example(inputs: dict[str, Any]) -> dict[str, Any]:
    """The first row of a batch, without its padding.

    Example:
        >>> ids, mask = torch.tensor([[7, 8, 0], [7, 8, 9]]), torch.tensor([[1, 1, 0], [1, 1, 1]])
        >>> first_example({"input_ids": ids, "attention_mask": mask})
        {'input_ids': tensor([[7, 8]]), 'attention_mask': tensor([[1, 1]])}
    """
    row = {name: given[:1] if isinstance(given, Tensor) else given for name, given in inputs.items()}
    for prefix, others in (("", (*TOKEN_INPUTS, "position_ids")), ("decoder_", ("input_ids", "attention_mask"))):
        mask = row.get(f"{prefix}attention_mask")
        if mask is None or mask.ndim != 2:
            continue
        keep = mask[0].bool()
        for name in (f"{prefix}{other}" for other in others):
            if name in row and row[name].shape[-1] == len(keep):
                row[name] = row[name][:, keep]
    return row


def _check_maps(model: nn.Module, example: dict[str, Any], route: Route, found: dict[str, Any]) -> None:
    def check(call: AttentionCall, own: Callable[[], Tensor | None] | None = None) -> None:
        found["attentions"] += 1
        if own is not None:
            found["max_difference"] = _worse(found["max_difference"], map_difference(call, own()))
        P = call.context_map()
        over = P.sum(dim=-1) - 1
        found["row_sum_error"] = _worse(
            found["row_sum_error"], _largest(over if call.sinks is not None else over.abs())
        )
        if call.kind == "self" and call.stack == "decoder" and P.shape[-1] == P.shape[-2]:
            found["above_diagonal"] = _worse(found["above_diagonal"], _largest(P.triu(1)))

    if route.reached == "routed":
        with observe(model, check):
            run_forward(model, example)
    else:
        run_captured(model, example, check, route=route)
    if found["attentions"] == 0:
        raise RankscopeError("`route` does not fit the model: no attention was seen in the self-check")


def _largest(x: Tensor) -> float:
    return float(x.max()) if not bool(x.isnan().any()) else float("nan")


def _worse(old: float | None, new: float) -> float:
    return new if old is None or new != new or new > old else old


def padding_unchecked(model: nn.Module, example: dict[str, Any]) -> str:
    """Why padding can't be checked with these inputs, or ``""``."""
    ids = example.get("input_ids")
    if not isinstance(ids, Tensor):
        return "the inputs are not tokens"
    if "attention_mask" not in forward_parameters(model):
        return "the model takes no attention_mask"
    if ids.shape[1] < PAD + 2:
        return f"the example has {ids.shape[1]} tokens, at least {PAD + 2} are needed"
    strangers = [
        name
        for name, given in example.items()
        if isinstance(given, Tensor) and name not in TOKEN_INPUTS and not name.startswith("decoder_")
    ]
    return f"{strangers[0]} was given" if strangers else ""


def _check_padding(model: nn.Module, example: dict[str, Any], route: Route, found: dict[str, Any], bar: float) -> None:
    # The example gives up its last tokens, so that the padded one is no longer than what the model has just taken;
    # a mask that is lost shows in a short text as in a long one.
    n = min(example["input_ids"].shape[1] - PAD, PADDED_TOKENS)
    # The decoder is shortened too: at the padded encoder's length its maps would be cut for the encoder's padding.
    short = {
        name: given[:, :n] if name.removeprefix("decoder_") in TOKEN_INPUTS else given
        for name, given in example.items()
    }
    short["attention_mask"] = torch.ones_like(short["input_ids"])
    reference = _maps(model, short, route, None)
    for side in ("right", "left"):
        padded = _padded(model, short, side)
        kept = slice(0, n) if side == "right" else slice(PAD, n + PAD)
        value = _distance(reference, _maps(model, padded, route, (n + PAD, kept)))
        takes_positions = "position_ids" in forward_parameters(model)
        if side == "left" and not value <= bar:
            if not takes_positions:
                found["skipped"].append("padding_left: the model counts absolute positions and takes no position_ids")
                continue
            padded["position_ids"] = (padded["attention_mask"].cumsum(dim=1) - 1).clamp_min(0)
            value = _distance(reference, _maps(model, padded, route, (n + PAD, kept)))
        found[f"padding_{side}"] = value
        _bar(found, f"padding_{side}", bar, f"padding on the {side} changes P at the tokens that are kept")


def _padded(model: nn.Module, short: dict[str, Any], side: str) -> dict[str, Any]:
    pad = getattr(getattr(unwrapped(model), "config", None), "pad_token_id", None) or 0
    fill = {"input_ids": pad, "attention_mask": 0, "token_type_ids": 0}
    at = (0, PAD) if side == "right" else (PAD, 0)
    return {
        name: nn.functional.pad(given, at, value=fill[name]) if name in fill else given for name, given in short.items()
    }


def _maps(model: nn.Module, inputs: dict[str, Any], route: Route, cut: tuple[int, slice] | None) -> list[Tensor]:
    maps: list[Tensor] = []

    def keep(call: AttentionCall) -> None:
        P = call.context_map()
        if cut is not None:
            length, kept = cut
            P = P[:, :, kept] if P.shape[2] == length else P
            P = P[..., kept] if P.shape[3] == length else P
        maps.append(P.cpu())

    run_captured(model, inputs, keep, route=route)
    return maps


def _distance(reference: list[Tensor], padded: list[Tensor]) -> float:
    if [P.shape for P in reference] != [P.shape for P in padded]:
        return float("inf")
    pairs = zip(reference, padded, strict=True)
    return max(float((P - other).norm() / P.norm()) for P, other in pairs)
