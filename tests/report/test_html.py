import csv
import errno
import io
import re
from html.parser import HTMLParser
from urllib.parse import unquote

import numpy as np
import pytest

from rankscope._errors import MissingExtraError, RankscopeError
from rankscope.report import html, summary, table
from rankscope.report.html import write_report
from rankscope.spectrum.dataset import load, save
from report.synthetic import RISING, result

EVIL = '<script>alert("x")</script>'
VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """Collects tags and text, and insists that tags close in order."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.words = [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    def count(self, tag):
        return sum(name == tag for name, _ in self.tags)

    @property
    def text(self):
        return "".join(self.words).replace("\u00a0", " ")


def page_of(tmp_path, *datasets):
    return Page(write_report(list(datasets), tmp_path, pictures=False).read_text())


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    out = tmp_path_factory.mktemp("report")
    write_report([result()], out)
    return out


def test_the_folder_holds_the_page_its_table_and_every_picture(report):
    names = {path.name for path in report.iterdir()}
    pictures = {"layer-curves", "layer-panels", "heatmap", "depth-trend", "excess", "windows"}
    assert names == {"report.html", "heads.csv"} | {f"{name}.png" for name in pictures}
    for path in report.glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")


def test_nothing_on_the_page_is_fetched(report):
    text = (report / "report.html").read_text()
    page = Page(text)
    for tag, attrs in page.tags:
        assert tag not in {"link", "img", "iframe", "object", "embed"}
        for name in ("src", "href", "xlink:href", "action"):
            assert attrs.get(name, "data:").startswith("data:")
        assert not any(name.startswith("on") for name in attrs)
    assert "http://" not in text
    assert "https://" not in text
    assert "url(" not in text
    assert "@import" not in text
    policy = next(a["content"] for t, a in page.tags if t == "meta" and "http-equiv" in a)
    assert policy.startswith("default-src 'none'")


def test_the_policy_lets_the_pages_own_script_run(report):
    import base64
    import hashlib

    text = (report / "report.html").read_text()
    script = re.search(r"<script>(.*?)</script>", text, re.DOTALL).group(1)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"'sha256-{digest}'" in text


def test_the_page_says_every_statement_and_explains_itself(report):
    text = Page((report / "report.html").read_text()).text
    for sentence in summary.statements(result()):
        assert sentence in text
    for words in ("What a null is", "Read it so", "ranks are relative to", "matches eager", "windows left out"):
        assert words in text


def test_pictures_have_words_for_those_who_cannot_see_them(report):
    page = Page((report / "report.html").read_text())
    drawings = [attrs for tag, attrs in page.tags if tag == "svg" and "swatch" not in attrs.get("class", "")]
    assert len(drawings) == 1 + 6 + 4 + 1 + 1 + 1
    assert all(attrs["role"] == "img" and attrs["aria-label"] for attrs in drawings)
    assert page.count("html") == 1
    assert next(attrs for tag, attrs in page.tags if tag == "html")["lang"] == "en"


def test_names_from_the_data_are_escaped_everywhere(tmp_path):
    nulls = ((EVIL, 0.6),)
    ds = result(nulls=nulls, model=EVIL, corpus=f'{EVIL}"&', revision=EVIL, corpus_hash=EVIL, self_check=EVIL)
    ds = ds.assign_coords(module=("layer", [EVIL] * 6), kind=("layer", [EVIL] * 6), reached=("layer", [EVIL] * 6))
    for datasets in ([ds], [ds, ds]):
        page = page_of(tmp_path, *datasets)
        assert page.count("script") == 1
        assert page.text.count('alert("x")') > 10


def test_the_colour_scheme_follows_the_reader(report):
    text = (report / "report.html").read_text()
    assert "prefers-color-scheme:dark" in text
    used = set(re.findall(r"var\(--([a-z0-9-]+)\)", text))
    light, dark = (set(re.findall(r"--([a-z0-9-]+):#", block)) for block in text.split("@media", 1))
    assert used <= light
    assert used <= dark


@pytest.mark.parametrize("side", [0, 1], ids=["light", "dark"])
def test_every_colour_of_text_and_lines_stands_out_from_its_card(side):
    from rankscope.report.palette import COLORS

    def luminance(code):
        parts = [int(code[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        parts = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return float(np.dot(parts, (0.2126, 0.7152, 0.0722)))

    card = luminance(html.THEME["card"][side])
    for name, pair in COLORS.items():
        bright, dim = sorted((luminance(pair[side]), card), reverse=True)
        least = 4.5 if name in ("ink", "muted") else 2.4
        assert (bright + 0.05) / (dim + 0.05) >= least, name


def test_the_download_is_the_datasets_table(report):
    ds = result()
    page = Page((report / "report.html").read_text())
    href = next(attrs["href"] for tag, attrs in page.tags if tag == "a")
    content = unquote(href.split(",", 1)[1])
    assert content == (report / "heads.csv").read_text()
    rows = list(csv.DictReader(io.StringIO(content)))
    assert len(rows) == 4 * 6 * 12
    compared = 0
    for row in rows:
        place = {"baseline": row["baseline"], "layer": int(row["layer"]), "head": int(row["head"])}
        for name in table.scalar_names(ds):
            expected = ds[name].sel(place).astype(np.float64).mean("window").item()
            assert float(row[name]) == pytest.approx(expected, rel=1e-5)
            compared += 1
    assert compared == 288 * 13
    assert rows[0]["module"] == "encoder.layer.0.attention.self"


def test_absent_heads_have_no_row():
    rows = table.rows(result(absent_heads=4))
    assert len(rows) == 4 * (6 * 12 - 4)
    assert {row["head"] for row in rows if row["layer"] == 0} == set(range(8))


def test_a_formula_in_a_name_is_not_run_by_a_spreadsheet():
    assert table.to_csv([{"module": "=1+1", "layer": -1}]) == "module,layer\n'=1+1,-1\n"


def test_a_long_table_is_given_by_layer_and_whole_beside_the_page(tmp_path):
    ds = result(layers=tuple(np.linspace(0.4, 0.9, 40)), heads=32, windows=2, null_windows=2, n=32)
    page = page_of(tmp_path, ds)
    href = next(attrs["href"] for tag, attrs in page.tags if tag == "a")
    assert unquote(href).count("\n") == 4 * 40 + 1
    assert (tmp_path / "heads.csv").read_text().count("\n") == 4 * 40 * 32 + 1


def test_two_results_are_put_side_by_side(tmp_path):
    pair = [result(), result(layers=RISING, heads=8, n=128, model="other", nulls=(("gaussian", 0.6),))]
    write_report(pair, tmp_path)
    page = Page((tmp_path / "report.html").read_text())
    assert "2 results compared" in page.text
    assert "Side by side" in page.text
    for words in ("all-MiniLM-L6-v2 on pydoc", "other on pydoc", "of 512", "of 128"):
        assert words in page.text
    names = {path.name for path in tmp_path.iterdir()}
    assert {"compare.png", "1-heatmap.png", "2-heatmap.png", "1-heads.csv", "2-heads.csv"} <= names


@pytest.mark.parametrize(
    "kwargs",
    [
        {"layers": (0.7,), "heads": 1, "windows": 1, "nulls": ()},
        {"windows": 1},
        {"bands_only": True},
        {"sentences": True},
        {"absent_heads": 5},
        {"layers": RISING, "kinds": ["self/encoder"] * 4 + ["self/decoder", "cross/decoder"] * 2},
    ],
    ids=["least", "one window", "bounds", "sentences", "absent heads", "mixed kinds"],
)
def test_awkward_results_make_a_sound_page(kwargs, tmp_path):
    page = page_of(tmp_path, result(**kwargs))
    assert not re.search(r"\bnan\b", page.text)
    for tag, attrs in page.tags:
        if tag == "path":
            assert "nan" not in attrs["d"]


def test_a_result_with_bare_attributes_still_makes_a_page(tmp_path):
    ds = result()
    ds.attrs = {}
    ds = ds.drop_vars(["module", "kind", "reached", "document"])
    assert "unnamed model" in page_of(tmp_path, ds).text


def test_pages_of_large_models_stay_small(tmp_path):
    large = result(layers=tuple(np.linspace(0.4, 0.9, 96)), heads=64, windows=2, null_windows=2, n=32)
    assert write_report([large], tmp_path, pictures=False).stat().st_size < 2e6


def test_size_does_not_depend_on_n(tmp_path):
    sizes = [
        write_report([result(n=n, heads=2, windows=4)], tmp_path, pictures=False).stat().st_size for n in (512, 4096)
    ]
    assert sizes[1] < 1.1 * sizes[0]


def test_the_same_files_give_the_same_page(tmp_path):
    assert (
        write_report([result()], tmp_path / "a", pictures=False).read_bytes()
        == write_report([result()], tmp_path / "b", pictures=False).read_bytes()
    )


def test_a_result_read_from_its_file_gives_the_same_page(tmp_path):
    ds = result(heads=4)
    reread = load(save(ds, tmp_path / "spectrum.nc"))
    first = write_report([ds], tmp_path / "a", pictures=False).read_text()
    assert write_report([reread], tmp_path / "b", pictures=False).read_text() == first


def test_left_out_windows_and_a_failed_check_are_shown(tmp_path):
    ds = result(left_out='{"7": "layer 3, head 1: non-finite logits"}', self_check='{"row sums": false}')
    path = write_report([ds], tmp_path, pictures=False)
    assert "1: layer 3, head 1: non-finite logits" in Page(path.read_text()).text
    assert '<span class="bad">no</span>' in path.read_text()


def test_a_full_disk_leaves_the_old_page_whole(tmp_path, monkeypatch):
    old = write_report([result(heads=2)], tmp_path, pictures=False).read_bytes()

    def full(self, content):
        with self.open("wb") as file:
            file.write(content[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(RankscopeError, match="the disk is full"):
        write_report([result(heads=3)], tmp_path, pictures=False)
    monkeypatch.undo()
    assert (tmp_path / "report.html").read_bytes() == old
    assert sorted(path.name for path in tmp_path.iterdir()) == ["heads.csv", "report.html"]


def test_without_matplotlib_the_extra_is_named_and_nothing_written(tmp_path, monkeypatch):
    monkeypatch.setattr(html, "version_of", lambda package: None)
    with pytest.raises(MissingExtraError, match=r"rankscope\[report\]"):
        write_report([result(heads=2)], tmp_path / "new")
    assert not (tmp_path / "new").exists()
    assert write_report([result(heads=2)], tmp_path / "new", pictures=False).exists()


def test_no_result_or_something_else_is_refused(tmp_path):
    with pytest.raises(RankscopeError, match="one result at least"):
        write_report([], tmp_path)
    with pytest.raises(RankscopeError, match="lacks"):
        write_report([result().drop_vars("nuclear_fraction")], tmp_path)
