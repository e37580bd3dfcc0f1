"""Cases are data: what makes no sense is refused by name, what does is found without a list."""

import pytest

from rankscope._errors import RankscopeError
from rankscope.attention.mechanisms import MECHANISMS
from rankscope.bench.cases import Case, causalities, choose_mechanisms, grid, has_length_knob


def test_all_takes_every_mechanism_that_can_do_it():
    plain, causal = (set(choose_mechanisms("all", causal=c)) for c in (False, True))
    assert plain | causal == set(MECHANISMS)
    assert "linformer_causal" not in plain
    assert not {"linformer", "nystrom"} & causal


def test_a_misspelt_mechanism_gets_the_nearest():
    with pytest.raises(RankscopeError, match="did you mean 'performer'"):
        choose_mechanisms("sdpa,preformer", causal=False)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"repeats": 0}, "`repeats` must be at least 1, got 0"),
        ({"n": 0}, "`n` must be at least 1"),
        ({"mode": "trian"}, "did you mean 'train'"),
        ({"view": "layers"}, "did you mean 'layer'"),
        ({"dtype": "float8"}, "`dtype`"),
        ({"padding": 1.0}, "`padding`"),
        ({"k": 8}, "leave k out"),
        ({"mechanism": "linformer"}, "it is its 'k'"),
        ({"mechanism": "linformer", "k": 65}, "at most n=64"),
        ({"mechanism": "linformer", "k": 8, "causal": True}, "no causal form"),
        ({"mechanism": "linformer_causal", "k": 8}, "no non-causal form"),
    ],
)
def test_a_case_that_makes_no_sense_is_refused(wrong, words):
    with pytest.raises(RankscopeError, match=words):
        Case(**{"mechanism": "sdpa", "n": 64} | wrong)


def test_the_grid_holds_sizes_below_n_and_only_where_they_mean_something():
    cases = grid(choose_mechanisms("all", causal=False), [32, 64], [16, 32])
    assert all(case.k is None or case.k < case.n for case in cases)
    assert all((case.k is not None) == has_length_knob(case.mechanism) for case in cases)
    sized = [name for name in MECHANISMS if has_length_knob(name) and False in causalities(name)]
    assert len(sized) == 4
    assert len(cases) == len(sized) * 3 + 2 * (len(choose_mechanisms("all", causal=False)) - len(sized))


def test_a_grid_without_a_case_says_why():
    with pytest.raises(RankscopeError, match="at least every `n`"):
        grid(["linformer"], [32], [32])


def test_other_settings_have_another_name():
    names = {Case("sdpa", 64, **more).name for more in ({}, {"seed": 1}, {"repeats": 6}, {"causal": True})}
    assert len(names) == 4


def test_a_window_gets_half_of_k_to_each_side():
    assert Case("local", 64, 16).knobs() == {"window": 8}
    assert Case("local", 64, 16, causal=True).knobs() == {"window": 16}
