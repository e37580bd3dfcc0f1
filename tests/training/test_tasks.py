"""Tasks: GLUE's files as they are, refusals in one line, metrics against plain counting."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope._errors import RankscopeError
from rankscope.training import tasks
from rankscope.training.listops import Grammar, listops_tokenizer, write_listops
from rankscope.training.tasks import TASKS, from_rows, grammar_for, load_split, score
from reference.listops import value

SST2 = ["sentence\tlabel", 'a "quoted film \t1', "dull and flat\t0", "a gem\t1"]


def write(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_quotes_are_text_and_the_folder_may_hold_the_tasks_folder(tmp_path):
    write(tmp_path / "SST-2" / "train.tsv", SST2)
    write(tmp_path / "SST-2" / "dev.tsv", SST2[:2])
    whole, inner = (load_split(TASKS["sst2"], folder, "train") for folder in (tmp_path, tmp_path / "SST-2"))
    assert whole.texts == inner.texts == [('a "quoted film ',), ("dull and flat",), ("a gem",)]
    assert whole.labels.tolist() == [1, 0, 1]
    assert whole.majority == pytest.approx(2 / 3)
    assert len(load_split(TASKS["sst2"], tmp_path, "eval")) == 1


def test_columns_are_found_by_name_and_labels_by_their_word(tmp_path):
    rows = ["index\tlabel\tsentence\tquestion", "0\tnot_entailment\tb\ta", "1\tentailment\td\tc"]
    write(tmp_path / "train.tsv", rows)
    split = load_split(TASKS["qnli"], tmp_path, "train")
    assert split.texts == [("a", "b"), ("c", "d")]
    assert split.labels.tolist() == [1, 0]


def test_a_rare_broken_row_is_left_out_and_counted_many_are_refused(tmp_path):
    header = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate"
    good = [f"{i}\t1\t2\ta{i}\tb{i}\t{i % 2}" for i in range(1999)]
    write(tmp_path / "train.tsv", [header, *good[:7], "7\t1\t2\tno second question", *good[7:]])
    split = load_split(TASKS["qqp"], tmp_path, "train")
    assert (len(split), split.left_out) == (1999, 1)
    write(tmp_path / "train.tsv", [header, *good[:7], "7\t1\t2\tno second question"])
    with pytest.raises(RankscopeError, match="line 9 does not have the 6 fields"):
        load_split(TASKS["qqp"], tmp_path, "train")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["sentense\tlabel", "a\t1"], "no column 'sentence'.*did you mean 'sentense'"),
        (["sentence\tgold", "a\t1"], "no column 'label'"),
        (["sentence\tlabel", "a\t1", "b\t2"], "line 3 has the label '2'.*wanted one of 0, 1"),
        (["sentence\tlabel", "a\t"], "line 2 has no label"),
        (["sentence\tlabel"], "holds no row of `task` 'sst2'"),
        ([""], "wants a header with sentence, label|no column 'sentence'"),
    ],
)
def test_what_a_file_lacks_is_one_line(tmp_path, lines, message):
    write(tmp_path / "train.tsv", lines)
    with pytest.raises(RankscopeError, match=message) as caught:
        load_split(TASKS["sst2"], tmp_path, "train")
    assert "\n" not in str(caught.value)


def test_a_folder_without_the_files_names_them(tmp_path):
    with pytest.raises(RankscopeError, match=re.escape("no dev.tsv for `task` 'sst2', nor has a folder SST-2")):
        load_split(TASKS["sst2"], tmp_path, "eval")


def test_latin_1_is_refused(tmp_path):
    (tmp_path / "train.tsv").write_bytes("sentence\tlabel\nfilm fran\xe7ais\t1\n".encode("latin-1"))
    with pytest.raises(RankscopeError, match="not UTF-8"):
        load_split(TASKS["sst2"], tmp_path, "train")


def test_an_unknown_task_gets_the_nearest():
    with pytest.raises(RankscopeError, match="did you mean 'sst2'"):
        TASKS["sst-2"]


def test_offline_says_how_to_give_a_folder(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        RankscopeError, match=r"offline mode.*give --data DIR.*train\.tsv and dev\.tsv.*sentence, label"
    ):
        load_split(TASKS["sst2"], None, "train")
    with pytest.raises(RankscopeError, match="no folder here"):
        load_split(TASKS["sst2"], "no/such", "train")
    with pytest.raises(RankscopeError, match="'/no/such/folder' does not exist: give --data DIR"):
        load_split(TASKS["sst2"], "/no/such/folder", "train")
    with pytest.raises(RankscopeError, match="not read from a hub"):
        load_split(TASKS["listops"], "no/such", "train")


def test_the_hubs_form_and_a_file_give_the_same_split(tmp_path):
    """Columns and label numbers of the hub, as published on the data sets' pages."""
    rows = [{"question": "a", "sentence": "b", "label": 1}, {"question": "c", "sentence": "d", "label": 0}]
    hub = from_rows(TASKS["qnli"], ["question", "sentence", "label", "idx"], rows, "hub")
    write(tmp_path / "train.tsv", ["question\tsentence\tlabel", "a\tb\tnot_entailment", "c\td\tentailment"])
    file = load_split(TASKS["qnli"], tmp_path, "train")
    assert (hub.texts, hub.labels.tolist()) == (file.texts, file.labels.tolist())
    with pytest.raises(RankscopeError, match="row 0 has the label -1"):  # GLUE's test split
        from_rows(TASKS["qnli"], ["question", "sentence", "label"], [{**rows[0], "label": -1}], "hub")
    with pytest.raises(RankscopeError, match="no column 'sentence'"):
        from_rows(TASKS["qnli"], ["question", "label"], rows, "hub")


def test_a_limit_draws_the_same_rows_of_both_labels(tmp_path):
    """IMDB's own files are sorted by label, so the first rows would be of one class."""
    write(tmp_path / "train.tsv", ["text\tlabel", *(f"t{i}\t{int(i >= 50)}" for i in range(100))])
    one, two = (load_split(TASKS["imdb"], tmp_path, "train", limit=40) for _ in range(2))
    assert one.texts == two.texts
    assert len(set(one.texts)) == 40
    assert 8 < one.labels.sum() < 32
    assert "40 of 100 rows" in one.source
    order = [int(text[1:]) for (text,) in one.texts]
    assert order == sorted(order)


def test_listops_is_generated_to_fit_n_and_shares_nothing_with_its_test_split():
    tokenizer = listops_tokenizer()
    train = load_split(TASKS["listops"], None, "train", limit=200, n=24, seed=1)
    held_out = load_split(TASKS["listops"], None, "eval", n=24, seed=1)
    assert len(held_out) == 2000
    assert not set(train.texts) & set(held_out.texts)
    assert load_split(TASKS["listops"], None, "eval", limit=50, n=24, seed=1).texts == held_out.texts[:50]
    for (source,), label in zip(train.texts, train.labels, strict=True):
        assert label == value(source)
        assert len(tokenizer(source)["input_ids"]) <= 24
    with pytest.raises(RankscopeError, match="holds 2000 expressions out"):
        load_split(TASKS["listops"], None, "eval", limit=3000, n=24)


def test_written_listops_is_read_back_and_so_are_lras_own_files(tmp_path):
    write_listops(tmp_path / "ours", {"train": 9, "test": 5}, seed=0, grammar=Grammar(min_length=4, max_length=30))
    split = load_split(TASKS["listops"], tmp_path / "ours", "train")
    assert [value(source) for (source,) in split.texts] == split.labels.tolist()
    write(tmp_path / "lra" / "basic_train.tsv", ["Source\tTarget", "( ( ( [MAX 2 ) 9 ) ] )\t9"])
    split = load_split(TASKS["listops"], tmp_path / "lra", "train")
    assert (split.texts, split.labels.tolist()) == ([("( ( ( [MAX 2 ) 9 ) ] )",)], [9])


@settings(deadline=None)
@given(n=st.integers(16, 5000))
def test_generated_listops_always_fits(n):
    grammar = grammar_for(n)
    assert grammar.max_length - 1 + 2 <= max(n, 2)
    assert grammar.max_length <= 2000


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=30))
def test_metrics_equal_plain_counts(pairs):
    true, guess = np.array(pairs).T
    found = score(TASKS["qqp"], true, guess)
    hits = sum(a == b for a, b in pairs)
    both, ones = sum(a == b == 1 for a, b in pairs), sum(a for a, _ in pairs) + sum(b for _, b in pairs)
    assert found["accuracy"] == pytest.approx(hits / len(pairs))
    assert found["f1"] == pytest.approx(2 * both / ones if ones else 0.0)
    assert set(score(TASKS["sst2"], true, guess)) == {"accuracy"}


def test_every_row_of_the_table_is_complete():
    assert set(TASKS) == {"sst2", "qnli", "qqp", "imdb", "listops"}
    for name, task in TASKS.items():
        assert task.name == name
        assert len(set(task.labels)) == len(task.labels) >= 2
        assert set(task.files) == set(tasks.SPLITS)
        assert task.metrics[0] == "accuracy"
