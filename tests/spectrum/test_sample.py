import json
from itertools import combinations

import numpy as np
import pytest
import torch

import rankscope
from rankscope._errors import RankscopeError
from rankscope.cli.__main__ import main
from rankscope.spectrum.sample import drawn
from tiny_measure import DOCUMENTS, tiny_bert, word_tokenizer


def run(**options):
    given = {"n": 16, "windows": 2, "nulls": "none", "tokenizer": word_tokenizer(), **options}
    return rankscope.measure(tiny_bert(), DOCUMENTS, **given)


def test_every_set_is_as_likely_and_none_holds_a_number_twice():
    generator = torch.Generator().manual_seed(0)
    counts = dict.fromkeys(combinations(range(5), 2), 0)
    for _ in range(2000):
        counts[tuple(drawn("random:2", "heads", 5, generator))] += 1
    # 200 expected of each of ten, with a deviation of 13.4.
    assert all(abs(count - 200) < 5 * 13.4 for count in counts.values())


def test_a_sample_is_what_the_same_numbers_by_choice_give_and_is_told(tmp_path):
    sampled = run(layers="random:1", heads="random:2", seed=3)
    told = json.loads(sampled.attrs["drawn"])
    assert [len(told["layers"]), len(told["heads"])] == [1, 2]
    chosen = run(layers=told["layers"], heads=told["heads"], seed=3)
    assert "drawn" not in chosen.attrs
    for name, values in sampled.data_vars.items():
        np.testing.assert_array_equal(chosen[name], values, err_msg=str(name))
    assert int(np.isfinite(sampled.sigma_1.isel(baseline=0, window=0)).sum()) == 2


def test_a_resumed_run_draws_the_same_and_its_folder_holds_the_list(tmp_path):
    first = run(heads="random:2", out=tmp_path)
    again = run(heads="random:2", out=tmp_path, windows=6)
    assert first.attrs["drawn"] == again.attrs["drawn"]
    settings = json.loads((tmp_path / "settings.json").read_text())
    assert settings["heads"] == json.loads(first.attrs["drawn"])["heads"]
    draws = {run(heads="random:2", windows=1, seed=seed).attrs["drawn"] for seed in range(3)}
    assert len(draws) > 1


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("random:9", "`heads` asks for a sample of 9, but there are 4"),
        ("random:0", "`heads` must be numbers, or random:K"),
        ("random:-1", "`heads` must be numbers, or random:K"),
        ("random", "got 'random'"),
        ("0,1", "got '0,1'"),
    ],
)
def test_what_is_no_sample_is_refused(wanted, message):
    with pytest.raises(RankscopeError, match=message):
        run(heads=wanted)


def test_the_command_refuses_it_in_one_line_before_the_folder_is_made(tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["measure", "minilm", "pydoc", "--heads", "random:x", "--out", str(out)]) == 2
    assert "`heads` must be numbers, or random:K" in capsys.readouterr().err
    assert not out.exists()
