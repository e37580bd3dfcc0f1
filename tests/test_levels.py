"""The layout's law: a package imports strictly lower levels, siblings never import each other."""

import ast
from pathlib import Path

import rankscope

ROOT = Path(rankscope.__file__).parent
LEVELS = [
    {"_errors", "_masks", "_registry", "_environment", "_hub", "corpora", "windows", "pretrained"},
    {"linalg", "attention"},
    {"models", "spectrum", "theory", "probes"},
    {"bench", "training"},
    {"report", "claims"},
    {"cli"},
    {"__main__"},
]
LEVEL = {name: level for level, names in enumerate(LEVELS) for name in names}


def package_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("rankscope."):
            yield node.module.split(".")[1]
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith("rankscope."))


def test_every_package_has_a_level():
    assert {package_of(path) for path in ROOT.rglob("*.py")} - {"__init__"} <= set(LEVEL)


def test_imports_go_strictly_down():
    wrong, compared = [], 0
    for path in ROOT.rglob("*.py"):
        here = package_of(path)
        if here == "__init__":
            continue
        for there in imported(path):
            compared += 1
            sibling_file = LEVEL[here] == LEVEL[there] == 0  # the level of single files that serve each other
            if here != there and not sibling_file and LEVEL[there] >= LEVEL[here]:
                wrong.append(f"{path.relative_to(ROOT)} imports {there}")
    assert compared > 20
    assert not wrong
