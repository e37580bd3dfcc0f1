"""What the rivals' tests share: draws, gradients, errors, live memory."""

import torch

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1e-2}


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def draw(b, h, n, d, seed=0, count=3, dtype=torch.float64):
    generator = seeded(seed)
    return [torch.randn(b, h, n, d, dtype=torch.float64, generator=generator).to(dtype) for _ in range(count)]


def with_gradients(function, *tensors):
    """The output and every gradient, under a fixed random loss."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    output = function(*leaves)
    loss = torch.randn(output.shape, dtype=torch.float64, generator=seeded(99)).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, leaves, loss, allow_unused=True)]


def relative_error(x, y):
    return float((x.double() - y.double()).norm() / y.double().norm().clamp(min=1e-300))


def assert_all_close(got, wanted, tolerance):
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted, strict=True):
        b = torch.zeros_like(a) if b is None else b
        # A gradient that is zero by symmetry (a softmax over one key) leaves rounding only.
        assert relative_error(a, b) < tolerance or float((a - b).abs().max()) < tolerance


def heads(loop, *tensors):
    """Apply a loop over ``(n, d)`` to each batch row and head; the loop gets the row first."""
    b, h = tensors[0].shape[:2]
    return torch.stack(
        [torch.stack([loop(row, *(x[row, head] for x in tensors)) for head in range(h)]) for row in range(b)]
    )


def peak_bytes(function):
    """Largest number of bytes alive at once above the start, by the allocator's own record."""
    with torch.profiler.profile(profile_memory=True) as profile:
        kept = function()
    del kept
    alive = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            alive += event.nbytes()
            peak = max(peak, alive)
    assert peak > 0
    return peak
