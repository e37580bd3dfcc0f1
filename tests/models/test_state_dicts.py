"""Layers of other libraries give the same numbers here: their published forms as float64 twins, and the packages."""

import pytest
import torch

from rankscope._errors import RankscopeError
from rankscope.models.state_dicts import LAYOUTS, read_attention
from reference.foreign_linformer import fairseq_forward, lucidrains_forward, mlpen_forward, tatp22_forward

N, K, D, HEADS = 12, 4, 8, 2


def draws(shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(*shape, dtype=torch.float64, generator=generator) for name, shape in shapes.items()}


def tokens(n=N):
    return torch.randn(2, n, D, dtype=torch.float64, generator=torch.Generator().manual_seed(99))


def linears(*names, bias=True, d=D):
    return {f"{n}.weight": (d, d) for n in names} | ({f"{n}.bias": (d,) for n in names} if bias else {})


def fairseq_state(shared=False):
    shapes = linears("q_proj", "k_proj", "v_proj", "out_proj") | {"compress_k.weight": (K, N)}
    return draws(shapes if shared else shapes | {"compress_v.weight": (K, N)})


def lucidrains_state(share_kv=False, one_kv_head=False):
    wide = (D // HEADS, D) if one_kv_head else (D, D)
    shapes = {"to_q.weight": (D, D), "to_k.weight": wide, "proj_k": (N, K)} | linears("to_out")
    return draws(shapes if share_kv else shapes | {"to_v.weight": wide, "proj_v": (N, K)})


def tatp22_state(sharing, two_outputs=False):
    shapes = {f"{to}.{h}.weight": (D // HEADS, D) for to in ("to_q", "to_k", "to_v") for h in range(HEADS)}
    outputs = {"w_o_1.weight": (5, D), "w_o_1.bias": (5,), "w_o_2.weight": (D, 5), "w_o_2.bias": (D,)}
    state = draws(shapes | (outputs if two_outputs else linears("w_o")))
    for h in range(HEADS):
        for number, name in enumerate(("E", "F")):
            seed = {"none": 10 + 2 * h + number, "headwise": 10 + number, "kv": 10}[sharing]
            drawn = draws({"weight": (K, N), "bias": (K,)}, seed)
            state |= {f"heads.{h}.{name}.{part}": tensor for part, tensor in drawn.items()}
    return state


def mlpen_state():
    return draws(linears("W_q", "W_k", "W_v", "ff") | {"attn.E": (HEADS, K, N)})


FORK = {"q_proj": "self.query", "k_proj": "self.key", "v_proj": "self.value", "out_proj": "output.dense"}
FORK |= {"compress_k": "self.compress_k", "compress_v": "self.compress_v"}


def fork_state():
    """fairseq's layer under the names of its port to transformers."""
    return {f"{FORK[name.split('.')[0]]}.{name.split('.')[1]}": tensor for name, tensor in fairseq_state().items()}


def fork_forward(state, x, heads):
    back = {ours: theirs for theirs, ours in FORK.items()}
    named = {f"{back[name.rpartition('.')[0]]}.{name.rpartition('.')[2]}": t for name, t in state.items()}
    return fairseq_forward(named, x, heads)


CASES = {
    "fairseq": (fairseq_state(), fairseq_forward, "headwise"),
    "fairseq, one matrix": (fairseq_state(shared=True), fairseq_forward, "key_value"),
    "fairseq in transformers": (
        fork_state(),
        lambda state, x, heads: fairseq_forward(fairseq_state(), x, heads),
        "headwise",
    ),
    "lucidrains": (lucidrains_state(), lucidrains_forward, "headwise"),
    "lucidrains, share_kv": (lucidrains_state(share_kv=True), lucidrains_forward, "key_value"),
    "lucidrains, one_kv_head": (lucidrains_state(one_kv_head=True), lucidrains_forward, "headwise"),
    "tatp22, none": (tatp22_state("none"), tatp22_forward, "none"),
    "tatp22, headwise": (tatp22_state("headwise"), tatp22_forward, "headwise"),
    "tatp22, kv": (tatp22_state("kv"), tatp22_forward, "key_value"),
    "tatp22, two output maps": (tatp22_state("kv", two_outputs=True), tatp22_forward, "key_value"),
    "mlpen": (mlpen_state(), mlpen_forward, "none"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("prefix", ["", "encoder.layers.3.attention."])
def test_a_layer_gives_what_its_own_library_gives(case, prefix):
    state, forward, sharing = CASES[case]
    x = tokens()
    (found,) = read_attention({prefix + name: tensor for name, tensor in state.items()}, num_heads=HEADS)
    assert found.layout == case.split(",")[0]
    assert found.sharing == sharing
    layer = found.module()
    assert layer.training
    torch.testing.assert_close(layer(x), forward(state, x, HEADS), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("case", ["fairseq", "lucidrains"])
def test_a_shorter_sequence_takes_the_first_columns_as_theirs_does(case):
    state, forward, _ = CASES[case]
    (found,) = read_attention(state, num_heads=HEADS)
    torch.testing.assert_close(found.module()(tokens(7)), forward(state, tokens(7), HEADS), rtol=1e-11, atol=1e-12)


def test_padding_is_left_out_as_mlpen_does():
    state, x = mlpen_state(), tokens()
    padding = torch.zeros(2, N, dtype=torch.bool)
    padding[1, 8:] = True
    (found,) = read_attention(state)
    wanted = mlpen_forward(state, x, HEADS, (~padding).double())
    torch.testing.assert_close(found.module()(x, key_padding_mask=padding), wanted, rtol=1e-11, atol=1e-12)


def test_biases_of_keys_and_values_move_without_changing_a_number():
    """E X W + 1 bᵀ: the order of fairseq's trackers 2795 and 2923; with our (E 1) bᵀ the numbers would differ."""
    state, x = fairseq_state(), tokens()
    (found,) = read_attention(state, num_heads=HEADS)
    layer = found.module()
    assert layer.key.bias.abs().max() == layer.value.bias.abs().max() == 0
    with torch.no_grad():
        layer.value.bias.copy_(state["v_proj.bias"])
        layer.output.bias.copy_(state["out_proj.bias"])
    assert (layer(x) - fairseq_forward(state, x, HEADS)).abs().max() > 1e-2


def test_an_order_of_layers_is_by_number_not_by_letter():
    state = {}
    for number in (10, 2, 0):
        state |= {f"layers.{number}.self_attn.{name}": t + number for name, t in fairseq_state().items()}
    found = read_attention(state, num_heads=HEADS)
    assert [float(layer.E[0, 0] - found[0].E[0, 0]) for layer in found] == pytest.approx([0, 2, 10])


def test_a_loaded_layer_trains_and_its_matrices_keep_their_biases():
    (found,) = read_attention(tatp22_state("headwise"))
    layer = found.module()
    names = [name for name, _ in layer.named_parameters() if "projections" in name]
    assert names == [f"projections.layers.0.{side}.{part}" for side in "EF" for part in ("weight", "bias")]
    assert layer.plan(N).form == "textbook"
    layer(tokens()).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for name, p in layer.named_parameters() if "proj" in name)


def mixed_state():
    return {**{f"a.{k}": v for k, v in fairseq_state().items()}, **{f"b.{k}": v for k, v in mlpen_state().items()}}


def without(state, *names):
    return {name: tensor for name, tensor in state.items() if name not in names}


def convolution_state():
    state = tatp22_state("kv")
    for name in [name for name in state if name.startswith("heads") and name.endswith("weight")]:
        state[name] = torch.zeros(D // HEADS, D // HEADS, 3)
    return state


WRONG = {
    "nothing": ({}, {}, "none of the Linformer layouts .* Seen: nothing"),
    "unknown": ({"layer.0.weight": torch.zeros(2, 3)}, {}, r"Seen: layer.0.weight \(2, 3\)"),
    "mixed": (mixed_state(), {"num_heads": 2}, "mixes 2 layouts .fairseq: a.; mlpen: b."),
    "nested": ({"model": {"x": torch.zeros(1)}}, {}, r"got a dict under 'model'.*state\['model'\]"),
    "missing": (without(fairseq_state(), "v_proj.weight"), {"num_heads": 2}, "lacks 'v_proj.weight'"),
    "unasked": (fairseq_state() | {"bias_k": torch.zeros(1, 1, D)}, {"num_heads": 2}, "beside it, bias_k"),
    "no heads": (fairseq_state(), {}, "`num_heads` must be given"),
    "wrong heads": (fairseq_state(), {"num_heads": 3}, "must divide the width 8, got 3"),
    "other heads": (mlpen_state(), {"num_heads": 4}, "`num_heads` is 4, but `state` .mlpen. has 2"),
    "no_params": (
        without(tatp22_state("kv"), *(f"heads.{h}.{s}.{p}" for h in (0, 1) for s in "EF" for p in ("weight", "bias"))),
        {},
        "method 'no_params', which does not store E and F",
    ),
    "convolution": (convolution_state(), {}, "its kernels mix channels"),
    "head_dim": (
        lucidrains_state() | {"to_q.weight": torch.zeros(12, D), "to_k.weight": torch.zeros(12, D)},
        {"num_heads": 2},
        "heads × head_dim = 12 at width 8",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_read_is_named(case):
    state, options, message = WRONG[case]
    with pytest.raises(RankscopeError, match=message):
        read_attention(state, **options)


def test_every_layout_has_a_case():
    assert {case.split(",")[0] for case in CASES} == set(LAYOUTS)


@pytest.mark.parametrize("options", [{}, {"share_kv": True}, {"one_kv_head": True}])
def test_the_package_linformer_itself(options):
    package = pytest.importorskip("linformer")
    model = package.Linformer(D, N, 2, k=K, heads=HEADS, **options).double()
    layers = read_attention(model.state_dict(), num_heads=HEADS)
    theirs = [module for module in model.modules() if isinstance(module, package.LinformerSelfAttention)]
    assert len(layers) == len(theirs) == 2
    for ours, module in zip(layers, theirs, strict=True):
        for x in (tokens(), tokens(9)):
            torch.testing.assert_close(ours.module()(x), module(x), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("sharing", ["none", "headwise", "kv", "layerwise"])
@pytest.mark.parametrize("intermediate", [None, 5])
def test_the_package_linformer_pytorch_itself(sharing, intermediate):
    package = pytest.importorskip("linformer_pytorch")
    model = package.Linformer(
        N, D, K, nhead=HEADS, depth=2, parameter_sharing=sharing, w_o_intermediate_dim=intermediate
    )
    model = model.double().eval()
    layers = read_attention(model.state_dict())
    theirs = [module for module in model.modules() if isinstance(module, package.MHAttention)]
    assert len(layers) == len(theirs) == 2
    for ours, module in zip(layers, theirs, strict=True):
        torch.testing.assert_close(ours.module()(tokens()), module(tokens()), rtol=1e-11, atol=1e-12)
