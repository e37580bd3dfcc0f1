"""The data of a run: each example a pure function of (seed, t); packing, masking and the held-out part."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from rankscope._errors import RankscopeError
from rankscope.corpora import open_corpus
from rankscope.training import data
from rankscope.training.data import (
    HELD_OUT_CHARACTERS,
    IGNORED,
    MaskedWindows,
    Masking,
    RunOrder,
    keyed_uniform,
    pack,
    split_text,
    tokenizer_hash,
)
from rankscope.training.tokenizer import LEAST_VOCABULARY, load_tokenizer, train_tokenizer
from rankscope.windows import token_ids

TEXT = ["The quick brown fox jumps over the lazy dog. " * 40, "Pack my box with five dozen liquor jugs. " * 30]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXT, 300)


@pytest.fixture(scope="module")
def windows(tokenizer, tmp_path_factory):
    return pack(TEXT, tokenizer, 32, tmp_path_factory.mktemp("windows") / "train.bin")


def test_tokenizer_is_roberta_shaped_and_deterministic(tokenizer, tmp_path):
    again = train_tokenizer(TEXT, 300)
    assert tokenizer_hash(again) == tokenizer_hash(tokenizer)
    assert [tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id] == [0, 1, 2]
    text = "Ünïcode, tabs\tand  spaces\n 漢字 🙂"
    assert tokenizer.decode(token_ids(tokenizer, text), clean_up_tokenization_spaces=False) == text
    assert tokenizer.unk_token_id not in token_ids(tokenizer, text)
    pair = tokenizer("a", "b")["input_ids"]
    assert [pair[0], pair[2], pair[3], pair[5]] == [0, 2, 2, 2]
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer_hash(load_tokenizer(tmp_path)) == tokenizer_hash(tokenizer)


@pytest.mark.parametrize("vocab_size", [0, LEAST_VOCABULARY - 1])
def test_a_vocabulary_without_room_is_refused(vocab_size):
    with pytest.raises(RankscopeError, match="`vocab_size` must be at least 261"):
        train_tokenizer(TEXT, vocab_size)


def test_a_missing_tokenizer_is_refused(tmp_path):
    with pytest.raises(RankscopeError, match=r"`tokenizer` .* can't be loaded"):
        load_tokenizer(tmp_path)


def test_packed_windows_are_the_text_in_order(tokenizer, windows):
    flat = np.concatenate([windows.ids[i][1:-1] for i in range(len(windows))]).tolist()
    ids = [i for text in TEXT for i in token_ids(tokenizer, text)]
    assert flat == ids[: len(flat)]
    assert len(ids) - len(flat) == windows.tokens_left_out < 30
    assert (windows.ids[:, 0] == 0).all()
    assert (windows.ids[:, -1] == 2).all()


def test_packing_reads_no_more_than_it_needs(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "SHUFFLE_BLOCK", 4)
    read = 0

    def corpus():
        nonlocal read
        for _ in range(1000):
            read += 1
            yield "The quick brown fox jumps over the lazy dog. " * 4

    few = pack(corpus(), tokenizer, 16, tmp_path / "w.bin", least=5)
    assert len(few) == 8  # whole blocks
    assert not few.whole
    assert read < 20
    kept = few.ids.copy()
    read = 0
    more = pack(corpus(), tokenizer, 16, tmp_path / "w.bin", least=9)
    assert len(more) == 12
    np.testing.assert_array_equal(more.ids[:8], kept)
    read = 0
    pack(corpus(), tokenizer, 16, tmp_path / "w.bin", least=7)
    assert read == 0  # taken as it is


def test_a_damaged_or_foreign_file_is_made_anew(tokenizer, tmp_path):
    path = tmp_path / "w.bin"
    good = pack(TEXT, tokenizer, 16, path).ids.copy()
    path.write_bytes(path.read_bytes()[:-2])
    np.testing.assert_array_equal(pack(TEXT, tokenizer, 16, path).ids, good)
    (tmp_path / "w.bin.json").write_text("{")
    np.testing.assert_array_equal(pack(TEXT, tokenizer, 16, path).ids, good)
    assert pack(TEXT, tokenizer, 20, path).ids.shape[1] == 20
    assert json.loads((tmp_path / "w.bin.json").read_text())["n"] == 20
    assert sorted(p.name for p in tmp_path.iterdir()) == ["w.bin", "w.bin.json"]


def test_a_text_shorter_than_a_window_leaves_nothing_behind(tokenizer, tmp_path):
    with pytest.raises(RankscopeError, match="a window needs n=512"):
        pack(["short"], tokenizer, 512, tmp_path / "w.bin")
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**63 - 1),
    windows=st.integers(1, 50),
    block=st.sampled_from([1, 4, 7]),
    epoch=st.integers(0, 5),
)
def test_each_epoch_holds_each_window_once(seed, windows, block, epoch):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "SHUFFLE_BLOCK", block)
        order = RunOrder(seed, windows)
        drawn = [order(t) for t in range(epoch * windows, (epoch + 1) * windows)]
        assert {e for e, _ in drawn} == {epoch}
        assert sorted(window for _, window in drawn) == list(range(windows))
        # A corpus read further begins with the same examples, up to the last whole block.
        longer = RunOrder(seed, windows + 13)
        whole = windows // block * block
        assert [longer(t) for t in range(whole)] == [order(t) for t in range(whole)]


def test_order_differs_by_epoch_and_seed():
    def epoch(seed, number):
        return [RunOrder(seed, 64)(t)[1] for t in range(64 * number, 64 * (number + 1))]

    orders = {tuple(epoch(seed, number)) for seed in range(3) for number in range(3)}
    assert len(orders) == 9


def test_keyed_numbers_are_those_of_philox_itself():
    # Fixed by the generator's definition: a change here would break every run that is to be resumed.
    raw = np.random.Philox(key=np.array([7, 2], np.uint64), counter=np.array([0, 3, 11, 0], np.uint64)).random_raw(4)
    expected = [(int(x) >> 11) / 2**53 for x in raw]
    assert keyed_uniform(7, 2, 3, 11, 4).tolist() == expected
    assert keyed_uniform(7, 2, 3, 11, 4).tolist() != keyed_uniform(7, 2, 11, 3, 4).tolist()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 9), index=st.integers(0, 10**9), length=st.integers(3, 80))
def test_masking_touches_only_chosen_ordinary_tokens(tokenizer, seed, epoch, index, length):
    masking = Masking(tokenizer, seed)
    ids = np.full(length, 40)
    ids[0], ids[-1] = 0, 2
    given_ids, labels = masking(ids, epoch, index)
    chosen = labels != IGNORED
    assert 1 <= chosen.sum() <= length - 2
    assert not chosen[[0, -1]].any()
    np.testing.assert_array_equal(labels[chosen], ids[chosen])
    np.testing.assert_array_equal(given_ids[~chosen], ids[~chosen])
    assert set(given_ids[chosen]) <= {tokenizer.mask_token_id, *masking.ordinary.tolist()}
    again, same = masking(ids, epoch, index)
    np.testing.assert_array_equal(again, given_ids)
    np.testing.assert_array_equal(same, labels)


def test_masking_has_bert_proportions(tokenizer):
    masking = Masking(tokenizer, seed=1)
    ids = np.full(200_000, 40)
    given_ids, labels = masking(ids, 0, 0)
    chosen = labels != IGNORED
    masked = given_ids[chosen] == tokenizer.mask_token_id
    random_ = ~masked & (given_ids[chosen] != 40)
    # Five standard errors; a drawn token is the true one again once in 295 times.
    count = chosen.sum()
    assert abs(chosen.mean() - 0.15) < 5 * (0.15 * 0.85 / len(ids)) ** 0.5
    assert abs(masked.mean() - 0.8) < 5 * (0.8 * 0.2 / count) ** 0.5
    assert abs(random_.mean() - 0.1 * (1 - 1 / len(masking.ordinary))) < 5 * (0.1 * 0.9 / count) ** 0.5
    assert len(set(given_ids[chosen].tolist())) > 200
    assert not set(masking.special.tolist()) & set(masking.ordinary.tolist())


def test_masks_are_dynamic(tokenizer, windows):
    masking = Masking(tokenizer, seed=0)
    masks = {tuple((masking(windows.ids[0], epoch, 0)[1] != IGNORED).tolist()) for epoch in range(8)}
    assert len(masks) == 8


def test_examples_do_not_depend_on_batches_workers_or_processes(tokenizer, windows):
    run = MaskedWindows(windows, Masking(tokenizer, 5), RunOrder(5, len(windows)), length=2 * len(windows) + 8)
    alone = [run[t] for t in range(len(run))]
    for batch_size, workers in ((1, 0), (4, 0), (3, 2)):
        batches = list(DataLoader(run, batch_size=batch_size, num_workers=workers))
        for name in ("input_ids", "labels"):
            joined = torch.cat([batch[name] for batch in batches])
            assert torch.equal(joined, torch.stack([example[name] for example in alone]))
    # A process that starts in the middle of an epoch reads the same.
    later = MaskedWindows(windows, Masking(tokenizer, 5), RunOrder(5, len(windows)), length=len(run))
    middle = len(windows) + 3
    assert torch.equal(later[middle]["input_ids"], alone[middle]["input_ids"])
    with pytest.raises(IndexError):
        run[len(run)]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, 3 * HELD_OUT_CHARACTERS), min_size=1, max_size=30),
    st.sampled_from(["word and ", "x"]),
)
def test_held_out_and_training_text_are_the_corpus(lengths, unit):
    documents = [(f"{i} " + unit * (length // len(unit) + 1))[:length] for i, length in enumerate(lengths)]
    parts = {part: list(split_text(documents, held_out=part)) for part in (True, False)}
    assert sum(map(len, parts[True])) + sum(map(len, parts[False])) == sum(lengths)
    assert sorted("".join(parts[True] + parts[False])) == sorted("".join(documents))
    assert parts[True]
    assert all(0 < len(piece) <= HELD_OUT_CHARACTERS for part in parts.values() for piece in part)


def test_a_twentieth_is_held_out():
    corpus = open_corpus("pydoc")
    whole = sum(map(len, corpus))
    held = sum(map(len, split_text(corpus, held_out=True)))
    assert 0.02 < held / whole < 0.15
