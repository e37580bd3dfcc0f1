"""What the pages tell to type, runs."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def test_the_models_page_runs():
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "models.md").read_text(), re.DOTALL)
    assert len(blocks) == 2
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)
    assert names["logits"].shape == (2, 700, 8_000)
    assert names["model"].projection_count == 4
