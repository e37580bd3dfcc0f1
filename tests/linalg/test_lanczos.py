from dataclasses import fields

import pytest
import torch

from rankscope._errors import RankscopeError
from rankscope.linalg import lanczos
from rankscope.linalg.context_map import ContextMap
from rankscope.linalg.lanczos import BlockLanczos, matrix_free_spectrum
from rankscope.linalg.rank import effective_rank, energy_curve, nuclear_curve, stable_rank


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def gaussian(n, deviation, *, d=32, seed=0, dtype=torch.float32, **masks):
    generator = seeded(seed)
    query, key = (torch.randn(n, d, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    return ContextMap(query * deviation, key, **masks)


def clustered(n):
    """Tokens near 24 centres, so that P is a few directions and a small tail."""
    generator = seeded(5)
    centres = 3 * torch.randn(24, 16, generator=generator)
    tokens = centres[torch.arange(n) % 24] + 0.1 * torch.randn(n, 16, generator=generator)
    return ContextMap(tokens, tokens + 0.1)


CASES = {
    "gaussian": lambda: gaussian(1000, 2.0),
    "causal": lambda: gaussian(1000, 1.0, is_causal=True),
    "cold": lambda: gaussian(1000, 4.0),
    "warm": lambda: gaussian(1000, 0.3),
    "window": lambda: gaussian(1000, 1.0, is_causal=True, window=300),
    "clustered": lambda: clustered(1000),
}


def outside(spectrum, sigma):
    """Largest distance of either true curve from its band."""
    worst = 0.0
    for name, curve in (("nuclear_fraction", nuclear_curve(sigma)), ("energy_fraction", energy_curve(sigma))):
        low, high = getattr(spectrum, f"{name}_low"), getattr(spectrum, f"{name}_high")
        worst = max(worst, float((low - curve).max()), float((curve - high).max()))
    return worst


@pytest.mark.parametrize("name", CASES)
def test_bands_hold_the_dense_curves_at_every_index_and_the_scalars(name):
    P = CASES[name]()
    sigma = torch.linalg.svdvals(P.dense().double())
    widths = []
    for seed in range(2):
        run = BlockLanczos(P, block=16, generator=seeded(seed))
        for passes in (12, 24):
            run.extend(passes - run.passes)
            spectrum = run.spectrum(32)
            assert not spectrum.is_exact
            assert outside(spectrum, sigma) < 1e-7
            for measure, (low, middle, high) in (
                (sigma.sum(), spectrum.nuclear_norm),
                (effective_rank(sigma), spectrum.effective_rank),
                (stable_rank(sigma), spectrum.stable_rank),
            ):
                assert low <= float(measure) * (1 + 1e-6)
                assert float(measure) <= high * (1 + 1e-6)
                assert low <= middle <= high
            error = (spectrum.sigma - sigma[:32]).abs()
            found = min(32, spectrum.found)
            assert bool((error[:found] <= spectrum.sigma_error[:found]).all())
            widths.append(spectrum.width)
    assert widths[1] < widths[0]
    assert widths[3] < widths[2]


def test_a_wished_width_stops_the_run_and_is_reached():
    P = gaussian(1000, 2.0)
    wide = matrix_free_spectrum(P, block=16, passes=40, width=0.08, generator=seeded(0))
    narrow = matrix_free_spectrum(P, block=16, passes=40, width=0.03, generator=seeded(0))
    assert wide.width <= 0.08
    assert narrow.width <= 0.03
    assert wide.passes < narrow.passes < 40


def test_extended_saved_and_loaded_runs_equal_one_run(tmp_path):
    P = gaussian(600, 1.5)
    whole = BlockLanczos(P, block=8, generator=seeded(3))
    whole.extend(9)
    parts = BlockLanczos(P, block=8, generator=seeded(3))
    parts.extend(4)
    parts.save_state(tmp_path / "state.safetensors")
    continued = BlockLanczos.load_state(tmp_path / "state.safetensors", gaussian(600, 1.5))
    continued.extend(5)
    assert continued.passes == 9
    one, other = whole.spectrum(8), continued.spectrum(8)
    assert torch.equal(one.sigma, other.sigma)
    assert torch.equal(one.nuclear_fraction_low, other.nuclear_fraction_low)
    assert [path.name for path in tmp_path.iterdir()] == ["state.safetensors"]


class Killed(Exception):
    pass


def killed_after(passes, monkeypatch):
    """Let so many passes be made from now on, whoever makes them; return the list they are counted in."""
    made = []
    original = ContextMap.gram_matmul

    def product(self, X):
        if len(made) == passes:
            raise Killed
        made.append(1)
        return original(self, X)

    monkeypatch.setattr(ContextMap, "gram_matmul", product)
    return made


@pytest.mark.parametrize("stop", [1, 12, 14])
def test_a_spectrum_that_was_cut_short_goes_on_from_its_last_pass_with_identical_values(stop, tmp_path, monkeypatch):
    monkeypatch.setattr(lanczos, "SAVE_EVERY", 0.0)
    state = tmp_path / "state"

    def run(path=state, **changes):
        options = {"block": 8, "width": 0.03, "generator": seeded(3), "state": path} | changes
        return matrix_free_spectrum(gaussian(600, 1.5), **options)

    whole = run(None)
    assert whole.passes > stop
    with monkeypatch.context() as patch:
        killed_after(stop, patch)
        with pytest.raises(Killed):
            run()
    made = killed_after(1000, monkeypatch)
    again = run()
    assert len(made) == whole.passes - stop
    for field in fields(whole):
        one, other = getattr(whole, field.name), getattr(again, field.name)
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other, field.name
    # Another start, fewer passes or a damaged file: the state is no use, and no harm.
    for change in ({"generator": seeded(4)}, {"passes": 3}):
        made.clear()
        run(**change)
        assert len(made) >= 3
    state.write_bytes(b"half")
    assert run().nuclear_norm == whole.nuclear_norm


def test_a_state_of_another_map_is_refused(tmp_path):
    run = BlockLanczos(gaussian(300, 1.5), block=4, generator=seeded(3))
    run.save_state(tmp_path / "state.safetensors")
    with pytest.raises(RankscopeError, match="a run on another map"):
        BlockLanczos.load_state(tmp_path / "state.safetensors", gaussian(300, 1.6))


@pytest.mark.parametrize("n", [1, 2, 63, 500])
def test_short_inputs_are_decomposed_whole(n):
    P = gaussian(n, 2.0, is_causal=True)
    spectrum = matrix_free_spectrum(P, generator=seeded(0))
    sigma = torch.linalg.svdvals(P.dense().double())
    assert spectrum.is_exact
    assert spectrum.width == 0
    assert float((spectrum.nuclear_fraction - nuclear_curve(sigma)).abs().max()) < 1e-6
    torch.testing.assert_close(spectrum.sigma, sigma[:64], rtol=1e-6, atol=1e-6)


def test_rank_one_map_breaks_nothing():
    P = ContextMap(torch.zeros(2000, 2), torch.randn(2000, 2, generator=seeded(0)))
    run = BlockLanczos(P, block=4, generator=seeded(1))
    run.extend(8)
    spectrum = run.spectrum(1)
    assert abs(float(spectrum.sigma) - 1.0) <= float(spectrum.sigma_error) < 2e-6
    assert float(spectrum.nuclear_fraction_high[0]) == pytest.approx(1.0, abs=1e-6)
    assert spectrum.nuclear_norm[0] <= 1 <= spectrum.nuclear_norm[2]


def test_identity_map_counts_every_direction():
    tokens = torch.nn.functional.one_hot(torch.arange(800)).float() * 100
    P = ContextMap(tokens, tokens, scaling=1.0)
    run = BlockLanczos(P, block=4, generator=seeded(1))
    run.extend(8)
    spectrum = run.spectrum(4)
    torch.testing.assert_close(spectrum.sigma, torch.ones(4, dtype=torch.float64), rtol=1e-5, atol=0)
    assert spectrum.nuclear_norm[1] == pytest.approx(800, rel=1e-3)
    assert float(spectrum.nuclear_fraction[399]) == pytest.approx(0.5, abs=1e-3)


def test_basis_stays_orthonormal_and_float64_agrees_with_float32():
    single, double = (
        BlockLanczos(gaussian(1000, 2.0, dtype=t), block=8, generator=seeded(2)) for t in (torch.float32, torch.float64)
    )
    for run in (single, double):
        run.extend(20)
        basis = torch.cat(run._basis, 1)
        assert float((basis.T @ basis - torch.eye(basis.shape[1], dtype=basis.dtype)).abs().max()) < 1e-12
    torch.testing.assert_close(single.spectrum(8).sigma, double.spectrum(8).sigma, rtol=1e-6, atol=0)


def test_float32_entries_widen_no_band_of_a_map_whose_tail_lies_below_the_root_of_their_rounding():
    # Nearly even rows: one value of 1, the others below 1e-3. With float32 products the band is .055 wide.
    single, double = (
        BlockLanczos(gaussian(1000, 1e-2, d=64, dtype=t), block=16, generator=seeded(2))
        for t in (torch.float32, torch.float64)
    )
    for run in (single, double):
        run.extend(24)
    sigma = torch.linalg.svdvals(double.context_map.dense())
    assert float(sigma[1]) < 2e-3
    assert outside(single.spectrum(), sigma) == 0
    assert single.spectrum().width < double.spectrum().width + 2e-3


def test_tall_maps_have_bands_and_wide_ones_are_refused():
    generator = seeded(4)
    query, key = 1.5 * torch.randn(1200, 8, generator=generator), 1.5 * torch.randn(700, 8, generator=generator)
    P = ContextMap(query, key)
    run = BlockLanczos(P, block=8, generator=seeded(0))
    run.extend(20)
    spectrum = run.spectrum(8)
    assert len(spectrum.nuclear_fraction) == 700
    assert outside(spectrum, torch.linalg.svdvals(P.dense().double())) < 1e-7
    with pytest.raises(RankscopeError, match="at least as many queries as keys"):
        BlockLanczos(ContextMap(key, query), block=8, generator=seeded(0)).extend(1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block": 1}, "`block` must be at least 2"),
        ({"passes": 0}, "`passes` must be at least 1"),
        ({"rank": 0}, "`rank` must be at least 1"),
        ({"width": 0.0}, "`width` must be positive"),
    ],
)
def test_refuses_what_is_out_of_range(change, message):
    with pytest.raises(RankscopeError, match=message):
        matrix_free_spectrum(gaussian(100, 1.0), **{"generator": seeded(0), **change})


def test_a_run_without_passes_says_so():
    with pytest.raises(RankscopeError, match="call `extend"):
        BlockLanczos(gaussian(1000, 1.0), generator=seeded(0)).spectrum()
