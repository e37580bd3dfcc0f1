"""ListOps by its words: the innermost bracket is replaced by its value until one digit is left."""

import re
from statistics import median


def value(source: str) -> int:
    rules = {"MIN": min, "MAX": max, "MED": lambda values: int(median(values)), "SM": lambda values: sum(values) % 10}
    innermost = re.compile(r"\[(MIN|MAX|MED|SM)((?: \d)+) \]")
    while len(source) > 1:
        source, count = innermost.subn(
            lambda found: str(rules[found[1]]([int(digit) for digit in found[2].split()])), source
        )
        assert count, f"no operator over digits alone in {source!r}"
    return int(source)


def depth_and_arguments(source: str) -> tuple[int, set[int]]:
    """Depth of the tree (a digit alone is 1), and the numbers of arguments its operators have."""
    deepest, counts, open_counts = 1, set(), []
    for token in source.split():
        if token == "]":
            counts.add(open_counts.pop())
            continue
        if open_counts:
            open_counts[-1] += 1
        deepest = max(deepest, len(open_counts) + 1)
        if token.startswith("["):
            open_counts.append(0)
    assert not open_counts
    return deepest, counts
