import errno
import os
import socket
import subprocess
import sys

import numpy as np
import pytest

from rankscope._errors import RankscopeError
from rankscope.spectrum import parts as parts_module
from rankscope.spectrum.accumulate import Moments
from rankscope.spectrum.parts import Part, RunFolder, gap, write_whole

SETTINGS = {"model": "m", "n": 8, "windows": 4, "workers": 2, "batch_size": 1, "seed": 0}


def make_part(start=0, stop=2):
    values = np.arange((stop - start) * 6, dtype=float).reshape(stop - start, 2, 3)
    return Part(
        start,
        stop,
        {"trained": {"sigma_1": values}},
        {"trained": {"nuclear_fraction": Moments.of(np.ones((2, 3, 8))).merge(Moments.of(np.zeros((2, 3, 8))))}},
        {"trained": list(range(start, stop))},
        [0] * (stop - start),
        ["abc"] * (stop - start),
        {7: "layer 0, head 1: non-finite logits"},
        {"retries": 1.0},
    )


def test_a_part_comes_back_as_it_was(tmp_path):
    folder = RunFolder(tmp_path)
    part = make_part()
    folder.save(part)
    back = folder.load(0, 2)
    assert folder.finished() == [(0, 2)]
    np.testing.assert_array_equal(back.scalars["trained"]["sigma_1"], part.scalars["trained"]["sigma_1"])
    for ours, theirs in ((back.curves, part.curves),):
        a, b = ours["trained"]["nuclear_fraction"], theirs["trained"]["nuclear_fraction"]
        assert a.count == b.count == 2
        np.testing.assert_array_equal(a.mean, b.mean)
        np.testing.assert_array_equal(a.m2, b.m2)
    assert (back.left_out, back.notes, back.documents, back.hashes) == (
        part.left_out,
        part.notes,
        part.documents,
        part.hashes,
    )


def test_gaps_are_what_no_part_holds():
    assert gap(0, 4, []) == (0, 4)
    assert gap(8, 12, [(0, 4), (8, 10)]) == (10, 12)
    assert gap(4, 8, [(6, 8)]) == (4, 6)
    assert gap(4, 6, [(4, 6)]) is None


def test_the_same_settings_go_on_and_free_ones_may_change(tmp_path):
    folder = RunFolder(tmp_path)
    folder.claim(SETTINGS)
    folder.claim(SETTINGS | {"windows": 9, "workers": 1, "batch_size": 4})


@pytest.mark.parametrize(("name", "value"), [("seed", 1), ("n", 16), ("model", "other")])
def test_other_settings_are_refused_by_name(tmp_path, name, value):
    folder = RunFolder(tmp_path)
    folder.claim(SETTINGS)
    with pytest.raises(RankscopeError, match=f"{name} is {value!r}, there it is"):
        folder.claim(SETTINGS | {name: value})


def test_windows_may_not_shrink(tmp_path):
    folder = RunFolder(tmp_path)
    folder.claim(SETTINGS)
    with pytest.raises(RankscopeError, match="may only grow"):
        folder.claim(SETTINGS | {"windows": 2})


@pytest.mark.parametrize("keep", [0, 9, 200])
def test_a_damaged_part_is_one_clear_line(tmp_path, keep):
    folder = RunFolder(tmp_path)
    folder.save(make_part())
    path = folder.part_path(0, 2)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(RankscopeError, match="is damaged"):
        folder.load(0, 2)


def test_leftovers_of_a_killed_run_are_no_parts_and_are_swept(tmp_path):
    folder = RunFolder(tmp_path)
    folder.save(make_part())
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    host, name = socket.gethostname(), "part-0000004-0000008.safetensors.tmp"
    writers = {"dead": f"{host}-{gone.pid}", "alive": f"{host}-{os.getppid()}", "elsewhere": f"{host}x-{gone.pid}"}
    leftovers = {who: folder.parts_path / f"{name}-{writer}" for who, writer in writers.items()}
    for leftover in leftovers.values():
        leftover.write_bytes(b"half")
    assert RunFolder(tmp_path).finished() == [(0, 2)]
    assert [who for who, leftover in leftovers.items() if leftover.exists()] == ["alive", "elsewhere"]


def test_a_full_disk_leaves_nothing_half_written(tmp_path, monkeypatch):
    def full(temporary, path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folder = RunFolder(tmp_path)
    folder.save(make_part())
    monkeypatch.setattr(parts_module, "publish", full)
    with pytest.raises(RankscopeError, match=r"disk is full.*Finished parts are kept"):
        folder.save(make_part(4, 6))
    with pytest.raises(RankscopeError, match="disk is full"):
        write_whole(tmp_path / "x.json", b"{}")
    assert [path.name for path in folder.parts_path.iterdir()] == ["part-0000000-0000002.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["parts"]


def test_a_file_in_the_folders_place_is_refused(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(RankscopeError, match="can't be used as a folder"):
        RunFolder(tmp_path / "out")
