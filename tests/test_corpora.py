import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants
from hypothesis import given
from hypothesis import strategies as st

from rankscope import corpora
from rankscope._errors import RankscopeError
from rankscope.corpora import articles, open_corpus

WIKITEXT = " \n = One = \n \n first . \n = = Part = = \n x = 2 \n \n = Two = \n \n second\n"


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def save_parquet(path, **columns):
    pq.write_table(pa.table(columns), path)
    return path


def test_a_text_file_is_one_document_however_many_paragraphs(tmp_path):
    path = write(tmp_path / "a.txt", "One.\n\nTwo.\n")
    assert list(open_corpus(path)) == ["One.\n\nTwo.\n"]


@pytest.mark.parametrize("suffix", [".txt", ".tokens", ".raw"])
def test_wikitext_titles_begin_articles(tmp_path, suffix):
    path = write(tmp_path / f"wiki{suffix}", WIKITEXT)
    documents = list(open_corpus(path))
    assert "".join(documents).strip() == WIKITEXT.strip()
    assert [document.split("\n")[0] for document in documents] == [" = One = ", " = Two = "]
    assert " = = Part = = " in documents[0]


def test_a_line_like_a_title_within_a_paragraph_begins_nothing():
    assert len(list(articles([" = A = \n", "text\n", " = B = \n", "\n", " = = C = = \n", "\n", "= D =\n"]))) == 1


@given(st.lists(st.sampled_from([" = T = \n", " = = S = = \n", "\n", "text\n", " \n"])))
def test_articles_drop_nothing(lines):
    assert "".join(articles(lines)) == "".join(lines)


def test_a_huge_text_is_cut_at_line_ends_and_a_huge_line_too(tmp_path, monkeypatch):
    monkeypatch.setattr(corpora, "LONGEST_DOCUMENT", 10)
    text = "line one\nline two\nline three\n" + "x" * 25
    documents = list(open_corpus(write(tmp_path / "a.txt", text)))
    assert "".join(documents) == text
    assert documents[0] == "line one\nline two\n"
    assert max(map(len, documents)) <= 20


def test_a_byte_order_mark_and_dos_line_ends_are_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    assert list(open_corpus(tmp_path / "a.txt")) == ["one\ntwo\n"]


def test_json_lines(tmp_path):
    rows = [{"text": "one", "body": "b1"}, {"text": None, "body": "b2"}, {"text": " ", "body": "b3"}]
    path = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)) + "\n\n")
    assert list(open_corpus(path)) == ["one"]
    assert list(open_corpus(path, column="body")) == ["b1", "b2", "b3"]


def test_csv_is_quoted_and_tsv_is_not(tmp_path):
    csv_file = write(tmp_path / "a.csv", 'label,text\n1,"one, ""two""\nthree"\n')
    tsv_file = write(tmp_path / "b.tsv", 'text\tlabel\nsay "hi\t1\nunclosed "quote\t0\n')
    assert list(open_corpus(csv_file)) == ['one, "two"\nthree']
    assert list(open_corpus(tsv_file)) == ['say "hi', 'unclosed "quote']


def test_a_csv_field_longer_than_the_modules_own_limit_is_read(tmp_path):
    path = write(tmp_path / "a.csv", "text\n" + "x" * 200_000 + "\n")
    assert [len(document) for document in open_corpus(path)] == [200_000]


def test_parquet(tmp_path):
    path = save_parquet(tmp_path / "a.parquet", text=["one", None, "two"], other=["x", "y", "z"], label=[1, 2, 3])
    assert list(open_corpus(path)) == ["one", "two"]
    assert list(open_corpus(path, column="other")) == ["x", "y", "z"]
    with pytest.raises(RankscopeError, match=r"`column` 'label' of .* must hold text, got int64.*text, other, label"):
        open_corpus(path, column="label")


def test_parquet_with_a_dictionary_column(tmp_path):
    path = save_parquet(tmp_path / "a.parquet", text=pa.array(["one", "one", "two"]).dictionary_encode())
    assert list(open_corpus(path)) == ["one", "one", "two"]


def test_a_folder_is_its_readable_files_in_order(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / ".hidden").mkdir()
    write(tmp_path / "b.txt", "b")
    write(tmp_path / "a.jsonl", '{"text": "a"}\n')
    write(tmp_path / "sub" / "c.tsv", "text\nc\n")
    write(tmp_path / "README.md", "not read")
    write(tmp_path / ".hidden" / "d.txt", "not read")
    write(tmp_path / ".e.txt", "not read")
    corpus = open_corpus(str(tmp_path))
    assert list(corpus) == ["a", "b", "c"]
    assert list(corpus) == ["a", "b", "c"]
    assert corpus.name == str(tmp_path)


def test_files_are_read_lazily(tmp_path):
    write(tmp_path / "a.jsonl", '{"text": "fine"}\n{"text": "fine too"}\nnot json\n')
    documents = iter(open_corpus(tmp_path / "a.jsonl"))
    assert [next(documents), next(documents)] == ["fine", "fine too"]
    with pytest.raises(RankscopeError, match="line 3 is not JSON"):
        next(documents)


def test_pydoc_needs_no_network_and_draws_no_lines():
    corpus = open_corpus("pydoc")
    documents = list(corpus)
    assert len(documents) > 50
    assert documents == list(corpus)
    assert not [line for text in documents for line in text.splitlines() if line.strip("*=-+| ") == "" and line.strip()]
    assert sum("assert_stmt" in text for text in documents) >= 1


def test_strings(tmp_path):
    corpus = open_corpus(("one", "", "two"))
    assert (corpus.name, list(corpus), list(corpus)) == ("texts", ["one", "two"], ["one", "two"])
    with pytest.raises(RankscopeError, match="can be read only once: pass list"):
        open_corpus(text for text in ["one"])
    with pytest.raises(RankscopeError, match="must hold strings, got int at index 1"):
        list(open_corpus(["one", 2]))
    with pytest.raises(RankscopeError, match="must be a name, a path or strings, got int"):
        open_corpus(3)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "", r"holds no text"),
        ("a.txt", " \n\n", r"holds no text"),
        ("a.csv", "", r"holds no text"),
        ("a.jsonl", "\n", r"holds no text"),
        ("a.jsonl", '{"text": "x"', r"line 1 is not JSON \(.*column 13\)"),
        ("a.jsonl", '["x"]', r"line 1 must be a JSON object .* got list"),
        ("a.jsonl", '{"txt": "x"}', r"line 1 has no column 'text': .*one of txt"),
        ("a.jsonl", '{"text": 3}', r"`column` 'text' must hold text, got int at .* line 1"),
        ("a.csv", "label,sentence\n1,x\n", r"has no column 'text': name .*one of label, sentence"),
        ("a.csv", "text,label\nx\n", r"row 1 has 1 fields where the header has 2"),
        ("a.csv", 'text\n"never closed\n', r"breaks after row 0 .*check its quoting"),
        ("a.parquet", "no parquet at all", r"cannot be read as parquet"),
        ("a.txt.gz", "x", r"suffix that is not read: wanted one of \.csv, .*unpack"),
    ],
)
def test_a_bad_file_is_one_clear_line(tmp_path, name, content, message):
    path = write(tmp_path / name, content)
    with pytest.raises(RankscopeError, match=message) as caught:
        open_corpus(path)
    assert "\n" not in str(caught.value)
    assert name in str(caught.value)


def test_a_misspelt_column_gets_the_nearest(tmp_path):
    path = write(tmp_path / "a.tsv", "sentence\tlabel\nx\t1\n")
    with pytest.raises(RankscopeError, match=r"'sentense' is not in .*did you mean 'sentence'"):
        open_corpus(path, column="sentense")


def test_bytes_that_are_no_utf8_are_placed(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"fine\ncaf\xe9\n")
    with pytest.raises(RankscopeError, match=r"byte 0xe9 at offset 8, line 2"):
        open_corpus(tmp_path / "a.txt")


def test_a_truncated_parquet_file_is_one_clear_line(tmp_path):
    path = save_parquet(tmp_path / "a.parquet", text=["word " * 50] * 100)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(RankscopeError, match="cannot be read as parquet") as caught:
        open_corpus(path)
    assert "\n" not in str(caught.value)


def test_a_path_that_is_not_there(tmp_path):
    write(tmp_path / "reviews.txt", "x")
    with pytest.raises(RankscopeError, match=r"did you mean '.*reviews\.txt'\?"):
        open_corpus(tmp_path / "review.txt")
    with pytest.raises(RankscopeError, match=r"did you mean 'pydoc'\?"):
        open_corpus("pydok")
    with pytest.raises(RankscopeError, match=r"give a path, or one of pydoc, wiki103, imdb"):
        open_corpus(tmp_path / "nowhere" / "zzz")


def test_a_folder_with_nothing_to_read(tmp_path):
    write(tmp_path / "notes.md", "x")
    with pytest.raises(RankscopeError, match=r"holds no file to read: wanted one of \.csv"):
        open_corpus(tmp_path)


def test_a_column_where_there_are_none_is_refused(tmp_path):
    write(tmp_path / "a.txt", "x")
    for corpus in (tmp_path, tmp_path / "a.txt", "pydoc", ["x"]):
        with pytest.raises(RankscopeError, match="`column` 'text' has no meaning"):
            open_corpus(corpus, column="text")


@pytest.mark.parametrize("name", ["wiki103", "imdb"])
def test_without_the_hub_a_file_is_proposed(monkeypatch, name):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(RankscopeError, match=r"failed: offline mode is on .* Give a file or folder instead") as caught:
        open_corpus(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "expected"), [("wiki103", 2), ("imdb", 6)])
def test_rows_of_the_hub_become_documents(monkeypatch, name, expected):
    import datasets

    asked = []

    def rows(*arguments, **keywords):
        asked.append((arguments, keywords))
        lines = WIKITEXT.splitlines(keepends=True)
        return datasets.Dataset.from_dict({"text": lines}).to_iterable_dataset()

    monkeypatch.setattr(corpora, "hub_problem", lambda: None)
    monkeypatch.setattr(datasets, "load_dataset", rows)
    assert len(list(open_corpus(name))) == expected
    assert asked[-1][1] == {"split": "train", "streaming": True}


def test_a_hub_that_breaks_off_is_one_clear_line(monkeypatch):
    import datasets

    def broken(*arguments, **keywords):
        raise ConnectionError("Couldn't reach it\nlong story")

    monkeypatch.setattr(corpora, "hub_problem", lambda: None)
    monkeypatch.setattr(datasets, "load_dataset", broken)
    with pytest.raises(RankscopeError, match=r"failed: Couldn't reach it\. Give a file"):
        open_corpus("imdb")


@pytest.mark.parametrize(
    ("content", "cure"),
    [
        ("some text".encode("utf-16"), "it is UTF-16"),
        (b"PK\x03\x04\x00\x00\xff\xfe\x00", "looks like binary data"),
        ("caf\xe9".encode("latin1"), "iconv -f latin1"),
    ],
)
def test_text_of_another_encoding_is_told_apart_from_data(content, cure, tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    with pytest.raises(RankscopeError, match=cure):
        list(open_corpus(path))
