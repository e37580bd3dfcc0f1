import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rankscope._errors import RankscopeError
from rankscope.models import linformer_attention
from rankscope.models.linformer_attention import LinformerSelfAttention, Plan, Weights, attend, choose_plan
from rankscope.models.projections import PROJECTIONS, SHARING, LinformerProjections
from reference import linformer as reference

KINDS = sorted(PROJECTIONS)
LINEAR = [kind for kind in KINDS if PROJECTIONS[kind].folds]
CASES = [
    (kind, form) for kind in KINDS for form in ("textbook", "folded", "absorbed") if form == "textbook" or kind != "max"
]


def build(kind="learned", sharing="headwise", n=12, k=3, d=8, heads=2, dtype=torch.float64, **options):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    layer = LinformerSelfAttention(
        d, heads, max_length=n, projected_length=k, kind=kind, sharing=sharing, generator=generator, **options
    )
    return layer.to(dtype)


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def some_mask(batch, n):
    mask = torch.zeros(batch, n, dtype=torch.bool)
    mask[0, :2] = mask[0, 5] = True
    mask[-1] = True
    return mask


def head_weights(projection, heads):
    """The kind's parameter for each head."""
    weight = getattr(projection, "weight", None)
    if weight is None:
        return [None] * heads
    if projection.heads is None:
        return [weight] * heads
    return list(weight.unflatten(0, (heads, -1)) if weight.shape[0] != heads else weight)


def loops(layer, x, mask, context=None):
    pair, shape = layer.projections[0], layer.projections[0].E.shape
    params = [(linear.weight, linear.bias) for linear in layer.weights]
    E, F = (head_weights(projection, layer.num_heads) for projection in pair[:2])
    return reference.layer(
        x, params, layer.projections.kind, E, F, shape.k, shape.n, layer.num_heads, mask, context,
        shape.length_rule, pair.normalize,
    )  # fmt: skip


def gradients(layer, output, *inputs):
    tensors = [*inputs, *layer.parameters()]
    weights = draw(*output.shape, seed=9)
    return torch.autograd.grad((output * weights).sum(), tensors)


@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize(("kind", "form"), CASES)
def test_every_order_equals_the_loops_in_output_and_every_gradient(kind, form, sharing):
    layer = build(kind, sharing, normalize=kind in ("gaussian", "convolution"))
    x, mask = draw(3, 10, 8).requires_grad_(), some_mask(3, 10)
    wanted = loops(layer, x, mask)
    got = layer(x, key_padding_mask=mask, plan=Plan(form))
    torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-12)
    pairs = zip(gradients(layer, got, x), gradients(layer, wanted, x), strict=True)
    compared = [torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12) for a, b in pairs]
    assert len(compared) == 9 + len(list(layer.projections.parameters()))
    with torch.no_grad():
        torch.testing.assert_close(layer(x, key_padding_mask=mask, plan=Plan(form, 3)), wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("n", [63, 500, 1000])
@pytest.mark.parametrize("kind", LINEAR)
def test_orders_agree_at_awkward_lengths_with_and_without_a_mask(kind, n):
    layer, x = build(kind, n=1000, k=7), draw(2, n, 8)
    mask = torch.zeros(2, n, dtype=torch.bool)
    mask[0, n // 3 :] = True
    for padding in (None, mask):
        with torch.no_grad():
            wanted = layer(x, key_padding_mask=padding, plan=Plan("textbook"))
            for plan in (Plan("folded"), Plan("absorbed"), Plan("folded", 100), Plan("absorbed", 100)):
                got = layer(x, key_padding_mask=padding, plan=plan)
                torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("left", [True, False])
def test_masks_padding_added_on_either_side_gives_the_unpadded_run(kind, left):
    layer, n, extra = build(kind, n=30, k=5), 17, 9
    x = draw(2, n, 8)
    where = (extra, 0) if left else (0, extra)
    padded = nn.functional.pad(x, (0, 0, *where), value=torch.nan)
    padded[..., 0] = 1e3
    kept = slice(extra, None) if left else slice(0, n)
    padded[:, kept] = x
    padded = torch.where(padded.isnan(), 1e3, padded)
    mask = nn.functional.pad(torch.zeros(2, n, dtype=torch.bool), where, value=True)
    for rule in ("slice", "interpolate") if kind in ("learned", "gaussian") else ("slice",):
        layer = build(kind, n=30, k=5, length_rule=rule)
        got = layer(padded, key_padding_mask=mask)[:, kept]
        torch.testing.assert_close(got, layer(x), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_masks_a_fully_padded_row_gives_zeros_and_finite_gradients(kind):
    layer, mask = build(kind), some_mask(2, 12)
    for form in ("textbook", "folded", "absorbed") if kind != "max" else ("textbook",):
        x = draw(2, 12, 8).requires_grad_()
        output = layer(x, key_padding_mask=mask, plan=Plan(form))
        assert output[1].abs().max() == 0
        assert output[0].abs().max() > 0
        assert all(gradient.isfinite().all() for gradient in gradients(layer, output, x))


def test_masks_all_but_one_token_padded_attends_to_that_token():
    layer = build(k=3)
    x, mask = draw(1, 12, 8), torch.ones(1, 12, dtype=torch.bool)
    mask[0, 7] = False
    torch.testing.assert_close(layer(x, key_padding_mask=mask)[:, 7:8], layer(x[:, 7:8]), rtol=1e-11, atol=1e-12)


def test_causality_is_not_offered_by_the_plain_layer():
    with pytest.raises(TypeError, match="is_causal"):
        build()(draw(1, 12, 8), is_causal=True)


@pytest.mark.parametrize("kind", KINDS)
def test_length_cross_attention_between_two_lengths(kind):
    layer, x, context = build(kind), draw(3, 5, 8), draw(3, 11, 8, seed=1)
    mask = some_mask(3, 11)
    wanted = loops(layer, x, mask, context)
    got = layer(x, context, key_padding_mask=mask)
    torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_length_any_below_the_maximum_in_any_order_leaves_no_state(kind):
    layer = build(kind, n=64, k=5)
    first = layer(draw(2, 64, 8))
    for n in (1, 3, 5, 31, 63):
        assert layer(draw(3, n, 8)).shape == (3, n, 8)
    assert torch.equal(layer(draw(2, 64, 8)), first)


def test_length_over_the_limit_is_refused_and_unlimited_kinds_go_on():
    x = draw(1, 13, 8)
    for kind in KINDS:
        if kind in ("learned", "gaussian"):
            with pytest.raises(RankscopeError, match="at most n=12 tokens got 13"):
                build(kind)(x)
        else:
            layer = build(kind)
            torch.testing.assert_close(layer(x), loops(layer, x, None), rtol=1e-11, atol=1e-12)


def test_length_interpolation_resamples_the_matrix():
    layer = build(length_rule="interpolate")
    x = draw(1, 7, 8)
    torch.testing.assert_close(layer(x), loops(layer, x, None), rtol=1e-11, atol=1e-12)
    assert (layer(x) - build()(x)).abs().max() > 1e-3


def test_length_a_batch_gives_each_row_its_own_run():
    layer, x = build(n=40), draw(4, 33, 8)
    rows = torch.cat([layer(row[None]) for row in x])
    torch.testing.assert_close(layer(x), rows, rtol=1e-11, atol=1e-12)


def test_weights_compressing_the_input_first_is_the_same_map():
    """E (X W + 1 bᵀ) = (E X) W + (E 1) bᵀ: the order other implementations and their checkpoints differ in."""
    E, X, W, b = draw(3, 12), draw(12, 8, seed=1), draw(8, 8, seed=2), draw(8, seed=3)
    torch.testing.assert_close(E @ (X @ W + b), (E @ X) @ W + E.sum(-1, keepdim=True) * b)


def test_heads_may_have_their_own_k():
    mixed = build(sharing="none", k=[3, 1])
    x = draw(2, 12, 8)
    got = mixed(x)
    torch.testing.assert_close(mixed(x, plan=Plan("absorbed")), got, rtol=1e-11, atol=1e-12)
    with torch.no_grad():
        mixed.projections[0].E.weight[1, 1:] = 1e3
        mixed.projections[0].F.weight[1, 1:] = 1e3
    torch.testing.assert_close(mixed(x), got, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["textbook", "folded"])
def test_precision_bfloat16_stays_near_float32(kind, form):
    if form == "folded" and kind == "max":
        pytest.skip("max has no folded order")
    layer = build(kind, n=256, k=32, d=64, heads=4, dtype=torch.bfloat16)
    x = draw(2, 256, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        got = layer(x, plan=Plan(form)).float()
        wanted = layer.float()(x.float(), plan=Plan(form))
    assert ((got - wanted).square().mean() / wanted.square().mean()).sqrt() < 1e-2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_precision_half_with_checkpointing_a_mask_and_backward_is_finite(kind, dtype):
    layer, mask = build(kind, dtype=dtype), some_mask(2, 12)
    x = (30 * draw(2, 12, 8)).to(dtype).requires_grad_()
    output = checkpoint(layer, x, key_padding_mask=mask, use_reentrant=False)
    output.float().square().mean().backward()
    assert output.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in [x, *layer.parameters()])


def test_precision_autocast_runs_every_order():
    layer, x = build(dtype=torch.float32), draw(2, 12, 8, dtype=torch.float32)
    wanted = layer(x)
    for form in ("textbook", "folded", "absorbed"):
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            for rows in (None, 5):
                got = layer(x, plan=Plan(form, rows)).float()
                assert ((got - wanted).square().mean() / wanted.square().mean()).sqrt() < 3e-2


@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("kind", KINDS)
def test_training_every_parameter_gets_a_gradient(kind, sharing):
    layer = build(kind, sharing, dropout=0.1)
    layer(draw(2, 12, 8)).square().sum().backward()
    missing = [name for name, p in layer.named_parameters() if p.grad is None or p.grad.abs().max() == 0]
    # A softmax ignores what is added to all logits of a query, so a key bias that E spreads evenly has none.
    assert [name for name in missing if name != "key.bias"] == []
    assert all(p.grad is not None for p in layer.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_training_checkpointing_gives_the_same_gradients(kind):
    layer, x = build(kind), draw(2, 12, 8).requires_grad_()
    plain = gradients(layer, layer(x), x)
    again = gradients(layer, checkpoint(layer, x, use_reentrant=False), x)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


@pytest.mark.parametrize("form", ["textbook", "folded", "absorbed"])
def test_gradients_are_right_in_double_precision(form):
    layer, mask = build(n=6, k=2, d=4), some_mask(2, 6)
    x = draw(2, 6, 4).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x, *_: layer(x, key_padding_mask=mask, plan=Plan(form)), (x, *layer.parameters())
    )


@pytest.mark.parametrize("form", ["textbook", "folded", "absorbed"])
def test_dropout_acts_on_probabilities_in_training_only_and_keeps_their_mean(form):
    layer, x = build(dropout=0.5), draw(1, 12, 8)
    plain = layer.eval()(x, plan=Plan(form))
    assert torch.equal(layer(x, plan=Plan(form)), plain)
    layer.train()
    torch.manual_seed(0)
    with torch.no_grad():
        runs = torch.stack([layer(x, plan=Plan(form)) for _ in range(2000)])
    # The output is linear in the probabilities, so its mean is the output without dropout: within 5 standard errors.
    error = (runs.mean(0) - plain).abs() / (runs.std(0) / math.sqrt(2000))
    assert runs.std(0).min() > 0
    assert error.max() < 5


def logit_sd(kind, n, k, normalize=False):
    """Standard deviation of the logits at initialisation, for unit-variance queries and keys."""
    bank = LinformerProjections(
        num_layers=1, num_heads=1, max_length=n, projected_length=k, kind=kind, width=16, normalize=normalize,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    key = draw(1, 1, n, 16, seed=1, dtype=torch.float32)
    query = draw(1, 1, 256, 16, seed=2, dtype=torch.float32)
    layout = linformer_attention.TokenLayout(n)
    with torch.no_grad():
        E = bank[0].E
        # Weights read off other tokens: those read off the keys themselves lean towards them.
        operator = E.operator(draw(1, n, 16, seed=3, dtype=torch.float32), layout)
        compressed = E.compress(operator, key, layout)
        if normalize:
            compressed = compressed / E.row_norm(operator, layout, key)
    return (query @ compressed.mT / 4).std().item()


def test_logit_scale_of_the_learned_kind_does_not_drift_with_n():
    found = [logit_sd("learned", n, 64) for n in (64, 256, 1024, 4096, 16384)]
    assert max(found) / min(found) < 1.5
    assert found[-1] == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize("n", [256, 4096])
def test_logit_scale_of_the_other_kinds_drifts_as_stated_and_normalisation_undoes_it(n):
    assert logit_sd("gaussian", n, 64) == pytest.approx(math.sqrt(n / 64), rel=0.1)
    assert logit_sd("mean", n, 64) == pytest.approx(math.sqrt(64 / n), rel=0.1)
    assert logit_sd("convolution", n, 64) == pytest.approx(1, rel=0.6)
    for kind in LINEAR:
        assert logit_sd(kind, n, 64, normalize=True) == pytest.approx(1, rel=0.15)


def test_speed_the_plan_is_the_one_with_the_fewest_multiplications_and_says_so():
    wide, narrow = build(n=4096, k=256, d=512, heads=8), build(n=4096, k=32, d=512, heads=8)
    assert wide.plan(4096, grad=True).form == "folded"
    assert narrow.plan(4096, grad=True).form == "absorbed"
    assert build("learned", "none", n=4096, k=256, d=512, heads=8).plan(4096).form == "textbook"
    assert "fewest multiplications" in str(wide.plan(4096))
    assert "not linear" in build("max").plan(12).why


def test_speed_blocks_only_without_gradients_on_long_inputs():
    layer = build(n=16384, k=64, d=64, heads=2)
    assert layer.plan(16384, grad=True).rows is None
    assert layer.plan(512, grad=False).rows is None
    plan = layer.plan(16384, grad=False)
    assert plan.rows == linformer_attention.BLOCK_ROWS
    assert f"in blocks of {plan.rows} query rows" in str(plan)


def test_half_precision_is_never_absorbed():
    layer = build(n=4096, k=32, d=512, heads=8, dtype=torch.bfloat16)
    assert layer.plan(4096).form == "folded"


def test_an_adapter_on_a_weight_is_honoured_by_taking_the_textbook_order():
    class Adapted(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1.0

    layer = build()
    layer.key = Adapted(8, 8).double()
    assert layer.plan(12).form == "textbook"
    assert "plain nn.Linear" in layer.plan(12).why
    x = draw(1, 12, 8)
    before = layer(x)
    layer.value = Adapted(8, 8).double()
    assert (layer(x) - before).abs().max() > 1e-3
    with pytest.raises(RankscopeError, match="take 'textbook'"):
        layer(x, plan=Plan("folded"))


def test_weights_and_projections_of_a_model_serve_without_the_module():
    layer, x = build(sharing="key_value"), draw(2, 12, 8)
    weights = Weights(layer.query, layer.key, layer.value, layer.output)
    got = attend(x, weights, layer.projections[0], num_heads=2)
    assert torch.equal(got, layer(x))
    assert choose_plan(weights, layer.projections[0], num_heads=2, n=12) == layer.plan(12)


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("kind", KINDS)
def test_compiles_into_one_graph_for_every_length_with_and_without_a_mask(kind):
    layer = build(kind, n=48, k=6)
    compiled = torch.compile(layer, backend="eager", fullgraph=True, dynamic=True)
    for n in (48, 31, 17):
        x, mask = draw(2, n, 8), some_mask(2, n)
        torch.testing.assert_close(compiled(x), layer(x), rtol=1e-10, atol=1e-12)
        got = compiled(x, key_padding_mask=mask)
        torch.testing.assert_close(got, layer(x, key_padding_mask=mask), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_exports_with_free_batch_and_length_up_to_the_maximum(kind):
    layer = build(kind, n=48, k=6, dtype=torch.float32).eval()

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x, mask):
            return self.layer(x, key_padding_mask=mask)

    batch, n = torch.export.Dim("batch", min=2, max=8), torch.export.Dim("n", min=2, max=48)
    example = (draw(3, 20, 8, dtype=torch.float32), torch.zeros(3, 20, dtype=torch.bool))
    program = torch.export.export(Wrapped(), example, dynamic_shapes=({0: batch, 1: n}, {0: batch, 1: n})).module()
    for b, length in ((2, 48), (5, 7), (3, 33)):
        x, mask = draw(b, length, 8, dtype=torch.float32), some_mask(b, length)
        torch.testing.assert_close(program(x, mask), layer(x, key_padding_mask=mask), rtol=1e-4, atol=1e-5)


def test_bad_input_is_refused_by_name():
    layer = build()
    with pytest.raises(RankscopeError, match=r"`hidden` must have shape \(batch=2, n, 8\), got \(2, 12, 7\)"):
        layer(draw(2, 12, 7))
    with pytest.raises(RankscopeError, match="`context` must have shape"):
        layer(draw(2, 12, 8), draw(3, 12, 8))
    with pytest.raises(RankscopeError, match="must be bool"):
        layer(draw(2, 12, 8), key_padding_mask=torch.zeros(2, 12))
    with pytest.raises(RankscopeError, match="must have shape"):
        layer(draw(2, 12, 8), key_padding_mask=torch.zeros(2, 11, dtype=torch.bool))
    with pytest.raises(RankscopeError, match="`num_heads` must divide"):
        build(heads=3)
    with pytest.raises(RankscopeError, match="`dropout` must be in"):
        build(dropout=1.0)
    with pytest.raises(RankscopeError, match="did you mean 'folded'"):
        Plan("fold")
    with pytest.raises(RankscopeError, match="`rows` must be at least 1"):
        Plan("folded", 0)
    with pytest.raises(RankscopeError, match="no_grad"):
        layer(draw(2, 12, 8), plan=Plan("folded", 4))
    with pytest.raises(RankscopeError, match="take 'textbook'"):
        build("max")(draw(2, 12, 8), plan=Plan("folded"))
