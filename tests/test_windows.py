import logging
from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope import windows as windows_module
from rankscope._errors import RankscopeError
from rankscope.windows import (
    Window,
    packed_windows,
    random_token_window,
    sentence_windows,
    sentences,
    special_tokens,
    token_ids,
)
from tiny_words import WORDS, word_tokenizer

TOKENIZERS = {special: word_tokenizer(special=special) for special in (True, False)}
CLS, SEP = 2, 3

words = st.lists(st.sampled_from(WORDS), max_size=30).map(" ".join)
corpora = st.lists(words, min_size=1, max_size=8)


def contents(windows, special):
    return [token for w in windows for token in (w.input_ids[1:-1] if special else w.input_ids)]


@given(corpora, st.integers(3, 12), st.booleans())
@settings(deadline=None)
def test_in_order_windows_are_the_documents_joined_and_cut(documents, n, special):
    tokenizer = TOKENIZERS[special]
    ids = [(token, number) for number, text in enumerate(documents) for token in token_ids(tokenizer, text)]
    room = n - 2 if special else n
    whole = len(ids) // room
    stream = packed_windows(documents, tokenizer, n, shuffle=False)
    if not whole:
        with pytest.raises(RankscopeError, match=rf"has {len(ids) + n - room} tokens .* n={n}"):
            next(stream)
        return
    windows = list(stream)
    assert len(windows) == whole
    assert [w.index for w in windows] == list(range(whole))
    assert {w.length for w in windows} == {n}
    assert contents(windows, special) == [token for token, _ in ids[: whole * room]]
    assert [w.document for w in windows] == [ids[i * room][1] for i in range(whole)]
    assert stream.left_out == {"tokens after the last whole window": len(ids) - whole * room}
    if special:
        assert {(w.input_ids[0], w.input_ids[-1]) for w in windows} == {(CLS, SEP)}


@given(corpora, st.integers(3, 6), st.integers(1, 10), st.integers(0, 5), st.booleans())
@settings(deadline=None)
def test_window_i_does_not_depend_on_the_limit(documents, n, limit, seed, shuffle):
    tokenizer = TOKENIZERS[True]
    documents = [*documents, " ".join(WORDS)]
    every = packed_windows(documents, tokenizer, n, seed=seed, shuffle=shuffle)
    first = packed_windows(documents, tokenizer, n, limit=limit, seed=seed, shuffle=shuffle)
    beginning = list(islice(every, limit))
    assert list(first) == beginning
    assert first.corpus_hash == every.corpus_hash
    assert len(beginning) == min(limit, len(beginning) + len(list(every)))


def test_shuffling_keeps_every_token_and_follows_the_seed():
    documents = [" ".join(WORDS[i : i + 4]) for i in range(0, 40, 4)]
    tokenizer = TOKENIZERS[False]
    in_order = list(packed_windows(documents, tokenizer, 4, shuffle=False))
    one, again, other = (list(packed_windows(documents, tokenizer, 4, seed=seed)) for seed in (1, 1, 2))
    assert one == again
    assert one != other
    assert sorted(w.document for w in one) == list(range(10))
    assert {w.document: w.input_ids for w in one} == {w.document: w.input_ids for w in in_order}


def test_shuffling_gives_each_order_about_equally_often():
    documents = ["w0 w0", "w1 w1", "w2 w2"]
    counts = {}
    for seed in range(600):
        order = tuple(w.document for w in packed_windows(documents, TOKENIZERS[False], 2, seed=seed))
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 6
    # 100 expected, standard deviation 9: five of them.
    assert max(abs(count - 100) for count in counts.values()) < 46


def test_shuffling_reads_only_as_much_as_its_buffer_holds(monkeypatch):
    monkeypatch.setattr(windows_module, "SHUFFLE_CHARACTERS", 100)
    read = []

    def documents():
        for i in range(1000):
            read.append(i)
            yield "w1 w2 w3 w4"

    next(packed_windows(documents(), TOKENIZERS[False], 4))
    assert len(read) == 10
    assert len(list(packed_windows(["w1 w2 w3 w4"] * 50, TOKENIZERS[False], 4))) == 50


def test_a_long_document_is_sampled_in_passages():
    documents = [" ".join(["w1"] * 4000), " ".join(["w2"] * 4000)]
    windows = list(packed_windows(documents, TOKENIZERS[False], 8))
    assert len(windows) == 1000
    assert {w.document for w in windows[:100]} == {0, 1}
    assert sum(len(set(w.input_ids)) == 2 for w in windows) < 200


def test_the_hash_tells_other_tokens_and_other_windows():
    tokenizer = TOKENIZERS[False]
    hashes = set()
    for documents, n in [(["w1 w2 w3 w4"], 2), (["w1 w2 w3 w4"], 4), (["w1 w2 w3 w5"], 2)]:
        stream = packed_windows(documents, tokenizer, n)
        list(stream)
        hashes.add(stream.corpus_hash)
    assert len(hashes) == 3


def test_text_longer_than_the_model_gives_no_warning(caplog):
    logging.getLogger("transformers").addHandler(caplog.handler)
    try:
        tokenizer = word_tokenizer(model_max_length=8)
        assert len(list(packed_windows(["w1 " * 100], tokenizer, 5))) == 33
        assert caplog.records == []
        tokenizer("w1 " * 100)
        assert "longer than the specified maximum" in caplog.text
    finally:
        logging.getLogger("transformers").removeHandler(caplog.handler)


def test_truncation_and_padding_saved_with_a_tokenizer_are_not_applied():
    tokenizer = word_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=16)
    assert special_tokens(tokenizer) == ([CLS], [SEP])
    assert len(token_ids(tokenizer, "w1 " * 10)) == 10


def test_no_room_beside_the_special_tokens_is_refused():
    with pytest.raises(RankscopeError, match=r"`n` must be more than the tokenizer's 2 special tokens, got 2"):
        packed_windows(["w1"], TOKENIZERS[True], 2)


def test_sentences_outside_the_lengths_are_left_out_and_counted():
    fit = " ".join(["W1", *["w1"] * 14, "Ww."])  # with the stop a token of its own: 17 + 2 special
    text = f"{fit} W2 w3. {' '.join(['W5'] * 30)}.\n\n{fit}"
    stream = sentence_windows([text, fit], TOKENIZERS[True], 24, shuffle=False, min_length=16)
    windows = list(stream)
    assert [w.length for w in windows] == [19, 19, 19]
    assert [w.document for w in windows] == [0, 0, 1]
    assert stream.left_out == {"sentences longer than 24 tokens": 1, "sentences shorter than 16 tokens": 1}


def test_lengths_are_counted_with_special_tokens_at_both_ends():
    documents = [" ".join(["w1"] * count) for count in (13, 14, 18, 19)]
    stream = sentence_windows(documents, TOKENIZERS[True], 20)
    assert sorted(w.length for w in stream) == [16, 20]
    assert stream.left_out == {"sentences shorter than 16 tokens": 1, "sentences longer than 20 tokens": 1}


def test_no_fit_sentence_is_an_error_that_counts():
    with pytest.raises(RankscopeError, match="no sentence of 16 to 32 tokens among its 2"):
        list(sentence_windows(["w1", "w2"], TOKENIZERS[True], 32))
    with pytest.raises(RankscopeError, match="`n` must be at least `min_length`=16, got 8"):
        sentence_windows(["w1"], TOKENIZERS[True], 8)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One here. Two there! Three?", ["One here.", "Two there!", "Three?"]),
        ('He said "No." Then left.', ['He said "No."', "Then left."]),
        ("Mr. Smith met J. R. Jones.", ["Mr. Smith met J. R. Jones."]),
        ("It rose 3.5 percent e.g. here.", ["It rose 3.5 percent e.g. here."]),
        ("A line\nbroken. Next\n\n\nParagraph", ["A line broken.", "Next", "Paragraph"]),
        ("tokenised text . Second one .", ["tokenised text .", "Second one ."]),
        ("  \n ", []),
    ],
)
def test_sentences(text, expected):
    assert list(sentences(text)) == expected


@given(st.text(alphabet="aB. !?\n\"'", max_size=80))
def test_sentences_keep_every_word(text):
    assert " ".join(sentences(text)).split() == text.split()


def test_sentences_of_one_endless_word_take_linear_time():
    assert len(list(sentences("A" * 1_000_000))) == 1


def test_random_tokens_keep_the_special_ones_and_are_uniform():
    tokenizer = TOKENIZERS[True]
    window = Window(3, [CLS, *([5] * 8000), 1, SEP], 7)
    drawn = random_token_window(window, tokenizer, torch.Generator().manual_seed(0))
    assert (drawn.index, drawn.document, drawn.length) == (3, 7, window.length)
    assert drawn.input_ids[0] == CLS
    assert drawn.input_ids[-2:] == [1, SEP]
    counts = torch.bincount(torch.tensor(drawn.input_ids[1:-2]), minlength=45)
    assert counts[:5].sum() == 0
    # 200 expected of each of 40, standard deviation 14: five of them.
    assert (counts[5:] - 200).abs().max() < 70
    assert drawn == random_token_window(window, tokenizer, torch.Generator().manual_seed(0))
    assert drawn != random_token_window(window, tokenizer, torch.Generator().manual_seed(1))
