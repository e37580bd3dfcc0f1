import pytest
import torch

from rankscope._errors import RankscopeError
from rankscope.attention._layout import TokenLayout, token_layout
from rankscope.models.projections import PROJECTIONS, SHARING, LinformerProjections, resample
from reference import linformer as reference


def bank(**changes):
    options = {
        "num_layers": 12,
        "num_heads": 12,
        "max_length": 16,
        "projected_length": 4,
        "sharing": "headwise",
        "kind": "learned",
        "width": 8,
        "generator": torch.Generator().manual_seed(0),
    }
    return LinformerProjections(**{**options, **changes})


@pytest.mark.parametrize("kind", ["learned", "gaussian", "dynamic", "convolution"])
@pytest.mark.parametrize(("sharing", "count"), [("none", 288), ("headwise", 24), ("key_value", 12), ("layerwise", 1)])
def test_twelve_layers_of_twelve_heads_have_the_papers_number_of_matrices(kind, sharing, count):
    assert bank(kind=kind, sharing=sharing).count == count
    stored = {tensor.data_ptr(): tensor for tensor in bank(kind=kind, sharing=sharing).state_dict().values()}
    per_matrix = {"learned": 4 * 16, "gaussian": 4 * 16, "dynamic": 4 * 8, "convolution": 4}[kind]
    assert sum(tensor.numel() for tensor in stored.values()) == count * per_matrix


@pytest.mark.parametrize("kind", ["mean", "max"])
def test_kinds_that_store_nothing_have_one_matrix_for_each_k(kind):
    assert bank(kind=kind).count == 1
    mixed = bank(kind=kind, projected_length=[4] * 6 + [2] * 6)
    assert mixed.count == 2
    assert not mixed.state_dict()


def test_a_shared_tensor_is_in_the_state_dict_once(tmp_path):
    from safetensors.torch import load_file, save_file

    for sharing in SHARING:
        state = bank(sharing=sharing).state_dict()
        assert len({tensor.data_ptr() for tensor in state.values()}) == len(state)
        save_file(state, tmp_path / "bank.safetensors")
        other = bank(sharing=sharing, generator=torch.Generator().manual_seed(1))
        other.load_state_dict(load_file(tmp_path / "bank.safetensors"))
        assert all(torch.equal(other.state_dict()[name], tensor) for name, tensor in state.items())


def test_names_in_the_state_dict():
    assert list(bank(num_layers=2).state_dict()) == [f"layers.{i}.{name}.weight" for i in (0, 1) for name in "EF"]
    assert list(bank(num_layers=2, sharing="key_value").state_dict()) == ["layers.0.E.weight", "layers.1.E.weight"]
    assert list(bank(num_layers=2, sharing="layerwise").state_dict()) == ["shared.weight"]


def test_the_generator_decides_and_a_gaussian_is_a_buffer():
    first, second = (bank(kind="gaussian", generator=torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(first[3].E.weight, second[3].E.weight)
    assert not torch.equal(first[3].E.weight, first[3].F.weight)
    assert not list(first.parameters())
    wide = bank(num_layers=1, max_length=4096, projected_length=64, kind="gaussian")[0].E.weight
    assert wide.var().item() == pytest.approx(1 / 64, rel=0.02)


def test_k_may_differ_by_layer_and_by_head():
    by_layer = bank(num_layers=2, projected_length=[4, 2])
    assert [pair.E.shape.k for pair in by_layer] == [4, 2]
    by_head = bank(num_layers=1, num_heads=2, sharing="none", projected_length=[[4, 1]])
    absent = by_head[0].E.absent(TokenLayout(16), torch.device("cpu"))
    assert absent.tolist() == [[[[False] * 4], [[False, True, True, True]]]]


@pytest.mark.parametrize("kind", sorted(PROJECTIONS))
@pytest.mark.parametrize("m", [1, 3, 9, 16])
def test_every_kind_equals_its_loops_on_the_rows_own_tokens(kind, m):
    projection = bank(num_layers=1, kind=kind)[0].E.double()
    generator = torch.Generator().manual_seed(m)
    x = torch.randn(1, 16, 8, dtype=torch.float64, generator=generator)
    mask = torch.ones(1, 16, dtype=torch.bool)
    mask[0, torch.randperm(16, generator=generator)[:m]] = False
    from rankscope.attention._layout import compact

    layout = token_layout(mask, 1, 16)
    packed = compact(x, layout)
    with torch.no_grad():
        operator = projection.operator(packed, layout)
        got = projection.compress(operator, packed[:, None], layout)[0, 0]
        norms = projection.row_norm(operator, layout, packed) if projection.folds else None
        absent = projection.absent(layout, x.device)
    tokens = reference.valid_rows(x, mask)[0]
    weight = getattr(projection, "weight", None)
    weight = None if weight is None else weight.detach()
    wanted = reference.project(kind, tokens, 4, 16, weight, tokens)
    there = slice(None) if absent is None else ~absent[0, 0, 0]
    torch.testing.assert_close(got[there], torch.stack(wanted), rtol=1e-12, atol=1e-12)
    if norms is not None:
        wanted_norms = torch.stack(reference.row_norms(kind, m, 4, 16, weight, tokens))
        torch.testing.assert_close(norms[0, 0, :, 0][there], wanted_norms, rtol=1e-12, atol=1e-12)


def test_resampling_equals_the_integral_and_keeps_pooling_a_pooling():
    E = torch.randn(3, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mask = torch.arange(12) >= torch.tensor([[12], [7], [1], [0]])
    padded = resample(E, token_layout(mask, 4, 12))
    for row, m in enumerate((12, 7, 1)):
        wanted = reference.resampled(E, m)
        torch.testing.assert_close(resample(E, TokenLayout(m)), wanted, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(padded[row, 0, :, :m], wanted, rtol=1e-12, atol=1e-12)
        assert padded[row, 0, :, m:].abs().max() == 0 if m < 12 else True
        torch.testing.assert_close(wanted.sum(-1), E.sum(-1))
    assert padded[3].abs().max() == 0
    mean = torch.eye(3).repeat_interleave(4, dim=1) / 4
    torch.testing.assert_close(resample(mean, TokenLayout(6)), torch.eye(3).repeat_interleave(2, dim=1) / 2)


def test_more_tokens_than_columns_is_an_error_for_matrices_and_fine_for_the_rest():
    x = torch.randn(1, 20, 8, generator=torch.Generator().manual_seed(0))
    for kind in PROJECTIONS:
        projection = bank(num_layers=1, kind=kind)[0].E
        if kind in ("learned", "gaussian"):
            with pytest.raises(RankscopeError, match="at most n=16 tokens got 20"):
                projection.operator(x, TokenLayout(20))
        else:
            operator = projection.operator(x, TokenLayout(20))
            compressed = projection.compress(operator, x[:, None], TokenLayout(20))
            assert compressed.shape[-2] == (5 if kind == "convolution" else 4)


def test_a_batch_padded_past_the_limit_counts_its_tokens_not_its_padding():
    projection = bank(num_layers=1)[0].E
    mask = torch.zeros(1, 20, dtype=torch.bool)
    mask[0, 16:] = True
    x = torch.randn(1, 20, 8, generator=torch.Generator().manual_seed(0)).masked_fill(mask[..., None], 0)
    layout = token_layout(mask, 1, 20)
    got = projection.compress(projection.operator(x, layout), x[:, None], layout)
    torch.testing.assert_close(got[0, 0], projection.weight @ x[0, :16])
    mask[0, 16] = False
    with pytest.raises(RankscopeError, match="at most n=16 tokens got 17"):
        projection.operator(x, token_layout(mask, 1, 20))


def test_bad_input_is_refused_by_name():
    wrong = [
        ({"kind": "gausian"}, "did you mean 'gaussian'"),
        ({"sharing": "key-value"}, "did you mean 'key_value'"),
        ({"length_rule": "slcie"}, "did you mean 'slice'"),
        ({"length_rule": "interpolate", "kind": "mean"}, "needs a kind with a matrix"),
        ({"projected_length": 0}, r"must be in 1..max_length=16, got 0"),
        ({"projected_length": 17}, r"must be in 1..max_length=16, got 17"),
        ({"projected_length": [4] * 11}, "one for each of 12 layers"),
        ({"projected_length": [4] * 11 + [2], "sharing": "layerwise"}, "one matrix serves all layers"),
        ({"projected_length": [[4] * 11 + [2]] * 12}, "needs `projection_sharing`='none'"),
        ({"projected_length": [[4] * 11 + [2]] * 12, "sharing": "none", "kind": "mean"}, "learned, gaussian, dynamic"),
        ({"kind": "max", "normalize": True}, "`normalize` needs a linear kind"),
        ({"kind": "dynamic", "width": None}, "`width` must be given"),
    ]
    for changes, message in wrong:
        with pytest.raises(RankscopeError, match=message):
            bank(**changes)
