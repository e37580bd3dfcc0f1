import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "theorems.md"

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="an installed package has no docs")


def test_page_holds_the_result_files_numbers():
    script = runpy.run_path(str(ROOT / "benchmarks" / "experiments" / "theory_document.py"))
    assert PAGE.read_text() == script["document"]()


def test_every_picture_of_the_page_is_there():
    pictures = re.findall(r"\]\((images/[^)]+)\)", PAGE.read_text())
    assert len(pictures) >= 10
    assert all((PAGE.parent / name).exists() for name in pictures)
