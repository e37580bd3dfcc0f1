"""What a case runs: tensors, the mechanism with its knobs, the layer around it, and its error against exact."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rankscope.attention.mechanisms import MECHANISMS
from rankscope.bench.cases import DTYPES, Case
from rankscope.models.linformer_attention import LinformerSelfAttention

#: Rows of the output that are compared with exact attention, at most: in float64, and still linear in n.
COMPARED_ROWS = 256


def pooling_matrix(k: int, n: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """Return E ``(k, n)`` as a dense matrix whose rows average k runs of tokens: a learned E's cost, a known error.

    Example:
        >>> pooling_matrix(2, 4)
        tensor([[0.5000, 0.5000, 0.0000, 0.0000],
                [0.0000, 0.0000, 0.5000, 0.5000]])
    """
    row = torch.arange(k)[:, None]
    token = torch.arange(n)
    member = ((token >= row * n // k) & (token < (row + 1) * n // k)).to(torch.float64)
    return (member / member.sum(dim=-1, keepdim=True)).to(device=device, dtype=dtype)


def attention_of(case: Case, n: int, device: str | None = None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return the case's mechanism with everything but query, key and value given.

    Linformer gets one dense E, shared by keys, values and heads (the paper's layerwise sharing).
    """
    mechanism = MECHANISMS[case.mechanism]
    keywords: dict[str, Any] = dict(case.knobs())
    device = case.device if device is None else device
    if mechanism.causal:
        keywords["is_causal"] = case.causal
    mask = padding_mask(case, n, device)
    if mask is not None:
        keywords["key_padding_mask"] = mask
    if case.mechanism == "linformer":
        keywords["E"] = pooling_matrix(keywords.pop("k"), n, DTYPES[case.dtype], device)

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if mechanism.random:
            keywords["generator"] = torch.Generator().manual_seed(case.seed)
        return mechanism.function(query, key, value, **keywords)

    return run


def padding_mask(case: Case, n: int, device: str) -> Tensor | None:
    """Return bool ``(batch, n)``, True at each row's end, or ``None`` without padding."""
    if case.padding == 0:
        return None
    mask = torch.arange(n, device=device) >= case.valid
    return mask.expand(case.batch, n).contiguous()


class Layer(nn.Module):
    """Hidden states to hidden states around any mechanism."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        width = case.heads * case.head_dim
        self.heads = case.heads
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))
        self.attention = attention_of(case, case.n)

    def forward(self, hidden: Tensor) -> Tensor:
        """Attend from ``hidden (b, n, d)`` over itself."""
        tensors = (
            linear(hidden).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        return self.output(self.attention(*tensors).transpose(1, 2).flatten(2))


def gaussian(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value of standard normal numbers, ``(batch, heads, n, head_dim)``."""
    generator = torch.Generator().manual_seed(case.seed)
    shape = (case.batch, case.heads, case.n, case.head_dim)
    query, key, value = (
        torch.randn(shape, generator=generator).to(device=case.device, dtype=DTYPES[case.dtype]) for _ in range(3)
    )
    return query, key, value


def prepare(case: Case) -> Callable[[], None]:
    """Return a call that runs the case once, its inputs and weights made."""
    if case.view == "layer":
        torch.manual_seed(case.seed)
        width = case.heads * case.head_dim
        hidden = torch.randn(case.batch, case.n, width).to(device=case.device, dtype=DTYPES[case.dtype])
        layer = layer_of(case).to(device=case.device, dtype=DTYPES[case.dtype])
        return caller(layer, [hidden], list(layer.parameters()), case)
    return caller(attention_of(case, case.n), list(gaussian(case)), [], case)


def layer_of(case: Case) -> nn.Module:
    """Return the layer; Linformer's own chooses the order of its products."""
    if case.mechanism != "linformer" or case.padding:
        return Layer(case)
    assert case.k is not None
    width = case.heads * case.head_dim
    return LinformerSelfAttention(
        width, case.heads, max_length=case.n, projected_length=case.k, sharing="key_value", generator=None
    )


def caller(
    function: Callable[..., Tensor], inputs: list[Tensor], weights: list[nn.Parameter], case: Case
) -> Callable[[], None]:
    """Return forward, or forward and backward of the output's sum."""
    if case.mode == "forward":
        for weight in weights:
            weight.requires_grad_(False)

        def run() -> None:
            with torch.no_grad():
                function(*inputs)

        return run
    leaves = [x.requires_grad_() for x in inputs]

    def train() -> None:
        for leaf in (*leaves, *weights):
            leaf.grad = None
        function(*leaves).sum().backward()

    return train


def relative_error(case: Case, query: Tensor, key: Tensor, value: Tensor) -> float:
    """Return the relative RMS of the mechanism's output against exact attention in float64, over sampled rows."""
    n = query.shape[-2]
    valid = min(case.valid, n)
    rows = torch.linspace(0, valid - 1, min(COMPARED_ROWS, valid)).round().long()
    with torch.no_grad():
        got = attention_of(case, n, "cpu" if query.device.type == "cpu" else str(query.device))(query, key, value)
        got = got[:, :, rows].double()
        keys, values = key[:, :, :valid].double(), value[:, :, :valid].double()
        logits = query[:, :, rows].double() @ keys.mT * query.shape[-1] ** -0.5
        if case.causal:
            later = torch.arange(valid, device=query.device) > rows[:, None].to(query.device)
            logits.masked_fill_(later, -torch.inf)
        wanted = logits.softmax(dim=-1) @ values
    return float(((got - wanted).square().mean() / wanted.square().mean()).sqrt())
