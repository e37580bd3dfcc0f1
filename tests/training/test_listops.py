"""ListOps: labels by a slow twin, the grammar's bounds, and splits that are functions of their seed."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope import _errors
from rankscope.training.listops import (
    OPERATORS,
    VOCABULARY,
    Expression,
    Grammar,
    apply,
    draw,
    expressions,
    listops_tokenizer,
    write_listops,
)
from reference.listops import depth_and_arguments, value

SHORT = Grammar(min_length=4, max_length=40)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    depth=st.integers(2, 6),
    arguments=st.integers(2, 10),
    least=st.integers(0, 30),
    width=st.integers(20, 200),
)
def test_each_label_is_the_twins_value_and_each_tree_within_the_grammar(seed, depth, arguments, least, width):
    grammar = Grammar(depth, arguments, min_length=least, max_length=least + width)
    random, kept = Random(seed), 0
    for _ in range(40):
        found = draw(random, grammar)
        if found is None:
            continue
        kept += 1
        assert found.target == value(found.source)
        assert least < len(found.source.split()) < least + width
        deepest, counts = depth_and_arguments(found.source)
        assert deepest <= depth
        assert counts <= set(range(2, arguments + 1))
    assert kept or least


def test_long_labels_too():
    found = list(expressions("train", 12, seed=5))
    assert len(found) == 12
    for expression in found:
        assert expression.target == value(expression.source)
        assert 500 < len(expression.source.split()) < 2000


def test_the_twin_by_hand():
    assert value("[MAX 2 9 [MIN 4 7 ] 0 ]") == 9
    assert value("[MED 1 2 5 [SM 9 9 1 ] ]") == 3  # median of 1 2 5 9 is 3.5, truncated


@settings(deadline=None)
@given(values=st.lists(st.integers(0, 9), min_size=2, max_size=10), operator=st.sampled_from(OPERATORS))
def test_an_operator_does_not_see_the_order(values, operator):
    assert apply(operator, values) == apply(operator, values[::-1])
    assert 0 <= apply(operator, values) <= 9


def test_a_drawn_tree_is_long_as_often_as_published():
    """8.4 % of LRA's trees are kept, mean length about 1,050; four standard errors of 6,000 draws are 1.4 points."""
    random, grammar = Random(0), Grammar()
    lengths = [len(e.source.split()) for e in (draw(random, grammar) for _ in range(6000)) if e is not None]
    assert abs(len(lengths) / 6000 - 0.084) < 0.0144
    assert abs(sum(lengths) / len(lengths) - 1045) < 80


def test_without_bounds_three_of_four_trees_are_one_digit_and_operators_are_uniform():
    grammar = Grammar(min_length=0, max_length=3000)
    random = Random(1)
    found = [draw(random, grammar) for _ in range(3000)]
    kept = [e for e in found if e is not None]
    digits = sum(len(e.source) == 1 for e in kept) / len(found)
    assert abs(digits - 0.75) < 4 * (0.75 * 0.25 / 3000) ** 0.5
    first = Counter(e.source.split()[0] for e in kept if len(e.source) > 1)
    total = sum(first.values())
    assert set(first) == {f"[{name}" for name in OPERATORS}
    assert all(abs(n / total - 0.25) < 5 * (0.25 * 0.75 / total) ** 0.5 for n in first.values())


def test_a_split_is_a_function_of_name_and_seed_and_a_shorter_one_begins_a_longer():
    def drawn(split, count, seed):
        return list(expressions(split, count, seed=seed, grammar=SHORT))

    long = drawn("train", 30, 0)
    assert drawn("train", 10, 0) == long[:10]
    assert drawn("train", 30, 1) != long
    assert drawn("dev", 30, 0) != long
    assert len({e.source for e in long}) == 30


def test_the_first_expressions_of_a_seed_stay_what_they_are():
    first = next(expressions("test", 1, seed=0, grammar=Grammar(min_length=6, max_length=14)))
    assert first == Expression(FIRST, value(FIRST))


FIRST = "[MIN 1 3 1 4 6 7 6 2 ]"


def test_files_share_no_expression_and_a_longer_train_split_moves_nothing(tmp_path):
    tight = Grammar(max_arguments=2, min_length=3, max_length=5)  # [OP a b ]: 400 expressions, so splits collide
    counts = write_listops(tmp_path / "a", {"train": 150, "dev": 30, "test": 30}, seed=0, grammar=tight)
    write_listops(tmp_path / "b", {"train": 40, "dev": 30, "test": 30}, seed=0, grammar=tight)
    rows = {path.stem: path.read_text().splitlines() for path in (tmp_path / "a").iterdir()}
    assert set(rows) == {"train", "dev", "test"}
    assert all(lines[0] == "Source\tTarget" for lines in rows.values())
    sources = {name: {line.split("\t")[0] for line in lines[1:]} for name, lines in rows.items()}
    assert counts == {name: len(found) for name, found in sources.items()}
    assert counts["train"] < 150
    assert counts["test"] == 30
    assert not sources["train"] & (sources["dev"] | sources["test"])
    assert not sources["dev"] & sources["test"]
    for name in ("dev", "test"):
        assert (tmp_path / "a" / f"{name}.tsv").read_bytes() == (tmp_path / "b" / f"{name}.tsv").read_bytes()


def test_one_token_for_each_sign():
    tokenizer = listops_tokenizer()
    assert len(tokenizer) == len(VOCABULARY) == 19
    for expression in expressions("dev", 20, seed=3, grammar=SHORT):
        ids = tokenizer(expression.source)["input_ids"]
        assert len(ids) == len(expression.source.split()) + 2
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids[1:-1]) == expression.source


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Grammar(max_depth=1), "`max_depth` must be at least 2"),
        (lambda: Grammar(digit_share=1.0), r"`digit_share` must be in \[0, 1\)"),
        (lambda: Grammar(min_length=10, max_length=11), "`max_length` must be at least"),
        (lambda: next(expressions("valid", 1, seed=0)), "`split` must be one of test, dev, train"),
        (
            lambda: list(expressions("dev", 11, seed=0, grammar=Grammar(min_length=0, max_length=2))),
            "after 10 expressions",
        ),
    ],
)
def test_what_cannot_be_drawn_is_refused(call, message):
    with pytest.raises(_errors.RankscopeError, match=message):
        call()
