"""A run cut into shards, by folder or by launcher, has an unbroken run's values."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import rankscope
from rankscope._errors import RankscopeError
from rankscope.spectrum.merge import merge
from tiny_measure import DOCUMENTS, tiny_bert, word_tokenizer

OPTIONS = {"n": 24, "windows": 14, "null_windows": 6, "workers": 2}


def run(out, shard=(0, 1), **options):
    return rankscope.measure(
        tiny_bert(), DOCUMENTS, tokenizer=word_tokenizer(), out=out, shard=shard, **{**OPTIONS, **options}
    )


def same_values(a, b):
    assert set(a.data_vars) == set(b.data_vars)
    for name in a.data_vars:
        np.testing.assert_array_equal(a[name].values, b[name].values, err_msg=name)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("count", [2, 3])
def test_shards_in_their_own_folders_merge_to_the_whole(tmp_path, whole, count):
    for index in range(count):
        run(tmp_path / str(index), (index, count))
        assert not (tmp_path / str(index) / "spectrum.nc").exists()
    merged = merge([tmp_path / str(index) for index in range(count)], tmp_path / "merged")
    same_values(merged, whole)
    assert (tmp_path / "merged" / "spectrum.nc").exists()


def test_shards_in_one_folder_leave_the_result_to_the_last(tmp_path, whole):
    run(tmp_path, (1, 2))
    assert not (tmp_path / "spectrum.nc").exists()
    same_values(run(tmp_path, (0, 2)), whole)
    same_values(rankscope.load(tmp_path), whole)


def test_a_lost_shards_parts_are_named_and_finished_ones_kept(tmp_path):
    run(tmp_path / "0", (0, 3))
    run(tmp_path / "2", (2, 3))
    with pytest.raises(RankscopeError, match="windows are missing between 4 and 7"):
        merge([tmp_path / "0", tmp_path / "2"], tmp_path / "merged")


def test_shards_of_other_settings_are_refused_by_name(tmp_path):
    run(tmp_path / "0", (0, 2))
    run(tmp_path / "1", (1, 2), seed=1)
    with pytest.raises(RankscopeError, match="seed is 1, there it is 0"):
        merge([tmp_path / "0", tmp_path / "1"], tmp_path / "merged")


@pytest.mark.parametrize("shard", [(2, 2), (-1, 2), (0, 0)])
def test_a_shard_outside_its_count_is_refused(tmp_path, shard):
    with pytest.raises(RankscopeError, match="`shard` must be"):
        run(tmp_path, shard)


def test_early_stopping_is_refused_in_shards(tmp_path):
    with pytest.raises(RankscopeError, match="`half_width` needs every part in order"):
        run(tmp_path, (0, 2), half_width=0.1)


@pytest.mark.parametrize("count", [2, 3])
def test_launched_processes_share_one_run(tmp_path, count):
    tiny_bert().save_pretrained(tmp_path / "model")
    word_tokenizer().save_pretrained(tmp_path / "model")
    text = tmp_path / "text.jsonl"
    text.write_text("\n".join(json.dumps({"text": document}) for document in DOCUMENTS))
    command = ["measure", str(tmp_path / "model"), str(text), "--n", "24", "--windows", "14", "--null-windows", "6"]
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", str(count)]
    launch += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "-m", "rankscope"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_PORT": str(29500 + os.getpid() % 400 + count)}
    launched = subprocess.run(
        [*launch, *command, "--out", str(tmp_path / "run")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert launched.returncode == 0, launched.stderr
    one = rankscope.measure(str(tmp_path / "model"), str(text), **OPTIONS)
    same_values(rankscope.load(tmp_path / "run"), one)
