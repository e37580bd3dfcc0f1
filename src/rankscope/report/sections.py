"""The page's parts, each a function of results: cards of words, pictures and numbers, everything escaped."""

from collections.abc import Callable
from html import escape
from urllib.parse import quote

import xarray as xr

from rankscope.report import reading, summary, table
from rankscope.report.description import Cells, Figure
from rankscope.report.svg import draw, draw_legend

MOST_ROWS = 3000


def prose(words: str) -> str:
    r"""Return text escaped, a number and its sign kept on one line.

    Example:
        >>> prose("82 % <b>")
        '82\xa0% &lt;b&gt;'
    """
    for loose in (" %", "ρ = ", "p = ", "p < ", "n = "):
        words = words.replace(loose, loose.replace(" ", "\u00a0"))
    return escape(words)


def section(title: str, blocks: list[str], lead: str = "") -> str:
    """Return a section of cards."""
    words = f'<p class="lead">{escape(lead)}</p>' if lead else ""
    cards = "".join(f'<div class="card">{block}</div>' for block in blocks)
    return f"<section><h2>{escape(title)}</h2>{words}{cards}</section>"


def measured(datasets: list[xr.Dataset], names: list[str]) -> str:
    """Return what was measured, one card a result."""
    blocks = []
    for ds, name in zip(datasets, names, strict=True):
        facts = "".join(
            f"<div><dt>{escape(key)}</dt><dd>{escape(value)}</dd></div>" for key, value in facts_of(ds).items() if value
        )
        heading = f"<h3>{escape(name)}</h3>" if len(names) > 1 else ""
        blocks.append(f'{heading}<dl class="facts">{facts}</dl>')
    return section("What was measured", blocks)


def facts_of(ds: xr.Dataset) -> dict[str, str]:
    """Return a result's birth certificate as short lines."""
    environment = reading.attribute(ds, "environment", {})
    environment = environment if isinstance(environment, dict) else {}
    versions = environment.get("versions", {})
    versions = versions if isinstance(versions, dict) else {}
    counts = {name: reading.window_count(ds, name) for name in reading.baselines(ds)}
    own = counts.pop(reading.TRAINED)
    if len(set(counts.values())) == 1:
        windows = f"{own} trained, {next(iter(counts.values()))} for each null"
    else:
        windows = ", ".join([f"{own} trained", *(f"{count} {summary.plain(name)}" for name, count in counts.items())])
    layers = ", ".join(
        f"{summary.counted(len(at), 'layer')} of {reading.kind_label(kind)}" for kind, at in reading.kinds(ds).items()
    )
    told = {key: reading.attribute(ds, key, "") for key in ("revision", "packing", "dtype", "seed", "method")}
    return {
        "model": reading.model_name(ds),
        "revision": "" if told["revision"] in (None, "") else str(told["revision"]),
        "text": reading.corpus_name(ds),
        "text’s hash": str(reading.attribute(ds, "corpus_hash", ""))[:16],
        "n (tokens a window)": str(reading.attribute(ds, "n", "")),
        "windows": windows,
        "layers": layers,
        "heads": str(reading.head_count(ds)),
        "packing": str(told["packing"]),
        "dtype": str(told["dtype"]),
        "seed": str(told["seed"]),
        "decomposition": str(told["method"]),
        "ranks are relative to": str(reading.attribute(ds, "rank_relative_to", "n")),
        "machine": str(environment.get("processor", "")),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
    }


def said(datasets: list[xr.Dataset], names: list[str]) -> str:
    """Return the summary in plain words."""
    blocks = []
    for ds, name in zip(datasets, names, strict=True):
        lines = "".join(f"<li>{prose(sentence)}</li>" for sentence in summary.statements(ds))
        heading = f"<h3>{escape(name)}</h3>" if len(names) > 1 else ""
        blocks.append(f'{heading}<ul class="says">{lines}</ul>')
    cards = "".join(f'<div class="card">{block}</div>' for block in blocks)
    body = f'<div class="pair">{cards}</div>' if len(blocks) > 1 else cards
    return f"<section><h2>In plain words</h2>{body}</section>"


def explained(datasets: list[xr.Dataset]) -> str:
    """Return what a null is and which ones these are."""
    meanings = {name: words for ds in datasets for name, words in reading.null_meanings(ds).items()}
    if not meanings:
        return section(
            "No null was measured",
            [
                "<p>Without a null nobody can tell what training did from what softmax and scale do alone. Measure "
                "again with the nulls on.</p>"
            ],
        )
    listed = "".join(
        f"<dt>{escape(summary.plain(name))}</dt><dd>{escape(words)}</dd>" for name, words in meanings.items()
    )
    return section(
        "What a null is",
        [
            "<p>A null is the same measurement, on the same windows and under the same masks, of something that lacks "
            "what one would like to credit. Softmax and the size of the logits make a long tail out of pure noise, so "
            f'a curve alone proves nothing: what counts is its distance to a null.</p><dl class="null">{listed}</dl>'
        ],
    )


def topic(pictures: list[Figure], names: list[str]) -> str:
    """Return one picture of every result, side by side."""
    blocks = [
        f'<div class="card">{f"<h3>{escape(name)}</h3>" if len(names) > 1 else ""}{picture(figure)}</div>'
        for figure, name in zip(pictures, names, strict=True)
    ]
    body = f'<div class="pair">{"".join(blocks)}</div>' if len(blocks) > 1 else blocks[0]
    title = (
        pictures[0].title if len({p.title for p in pictures}) == 1 else pictures[0].title.split(":")[0].split(",")[0]
    )
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def picture(figure: Figure) -> str:
    """Return a picture with its legend and how to read it; many panels fold away."""
    notes = "".join(f'<p class="note">{prose(note)}</p>' for note in figure.notes)
    if not figure.panels:
        return notes
    drawn = []
    for panel in figure.panels:
        heading = f"<h4>{escape(panel.title)}</h4>" if panel.title else ""
        alt = f"{figure.alt} {panel.title}".strip()
        drawn.append(f'<div class="panel">{heading}{draw(panel, alt)}</div>')
    size = {1: "one", 4: "four"}.get(len(drawn), "many") if figure.name != "layer-panels" else "small"
    body = f'<div class="panels {size}">{"".join(drawn)}</div>'
    caption = f"<figcaption>{draw_legend(figure)}<p>{prose(figure.reading)}</p>{notes}</figcaption>"
    many = len(drawn) > 6 and not isinstance(figure.panels[0].marks[0], Cells)
    folded = f"<details><summary>Show {len(drawn)} pictures</summary>{body}</details>" if many else body
    return f'<figure class="{size}">{folded}{caption}</figure>'


def comparison_table(datasets: list[xr.Dataset], names: list[str]) -> str:
    """Return the headline numbers, a column a result."""
    lines: list[tuple[str, Callable[[xr.Dataset, str], str]]] = [
        ("windows", lambda ds, name: str(reading.window_count(ds, name))),
        ("held at n/4", lambda ds, name: headline(ds, "nuclear_fraction_at_quarter", name, summary.percent)),
        ("effective rank", lambda ds, name: headline(ds, "effective_rank", name, rank_words(ds))),
        ("rank, 90 % of σ", lambda ds, name: headline(ds, "nuclear_rank_90", name, rank_words(ds))),
    ]
    baselines = list(dict.fromkeys(name for ds in datasets for name in reading.baselines(ds)))
    body = ""
    for baseline in baselines:
        for label, value in lines:
            cells = "".join(
                f"<td>{escape(value(ds, baseline)) if baseline in reading.baselines(ds) else '–'}</td>"
                for ds in datasets
            )
            mark = ' class="trained"' if baseline == reading.TRAINED else ""
            body += (
                f'<tr{mark}><td class="t">{escape(summary.plain(baseline))}</td><td class="t">{label}</td>{cells}</tr>'
            )
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    top = f'<tr><th class="t">baseline</th><th class="t">quantity</th>{head}</tr>'
    return scrolling(f"<thead>{top}</thead><tbody>{body}</tbody>", "Results side by side", whole=True)


def headline(ds: xr.Dataset, scalar: str, baseline: str, write: Callable[[float], str]) -> str:
    """Return a scalar's mean over everything, in words."""
    values = reading.layer_series(ds, scalar, baseline)
    return "–" if values is None else write(float(reading.mean_over(values, (0, 1))))


def rank_words(ds: xr.Dataset) -> Callable[[float], str]:
    """Return how a result's ranks are written: out of n where there is one."""
    if reading.is_fractional(ds):
        return lambda value: f"{value:.3g}"
    return lambda value: f"{value:.0f} of {reading.total(ds)}"


def scrolling(rows: str, label: str, *, whole: bool = False) -> str:
    """Return a table in a box that scrolls sideways, so that the page never does; and down unless ``whole``."""
    tall = " whole" if whole else ""
    return (
        f'<div class="scroll{tall}" tabindex="0" role="region" aria-label="{escape(label)}"><table>{rows}</table></div>'
    )


def numbers(ds: xr.Dataset, name: str, rows: list[table.Row], *, many: bool) -> str:
    """Return the table by layer, sortable, with the whole table by head to download."""
    layers = table.layer_rows(rows)
    fits = len(rows) <= MOST_ROWS
    content = table.to_csv(rows if fits else layers)
    what = "every head" if fits else "means over heads; every head is in heads.csv beside this page"
    link = (
        f'<a class="button" download="rankscope.csv" href="data:text/csv;charset=utf-8,{quote(content, safe=", .-")}">'
        f'Download CSV</a> <span class="note">{len(rows) if fits else len(layers)} rows: {what}</span>'
    )
    columns = {key: words for key, words in table.SHOWN.items() if any(key in row for row in layers)}
    head = "".join(
        f'<th class="{"t" if words in ("baseline", "kind", "module") else ""}"><button>{escape(words)}</button></th>'
        for words in ("baseline", "layer", "kind", "module", "heads", "windows", *columns.values())
    )
    body = "".join(table_row(row, list(columns)) for row in layers)
    heading = f"<h3>{escape(name)}</h3>" if many else ""
    grid = scrolling(f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>", f"Numbers by layer, {name}")
    reading_it = "Means over windows and heads. Press a column’s name to sort by it."
    return f'{heading}{link}{grid}<p class="note">{reading_it}</p>'


def table_row(row: table.Row, columns: list[str]) -> str:
    """Return one row of the page's table."""
    keys = f'<td class="t">{escape(summary.plain(str(row["baseline"])))}</td><td>{row["layer"]}</td>'
    keys += f'<td class="t">{escape(str(row["kind"]))}</td><td class="t">{escape(str(row["module"]))}</td>'
    keys += f"<td>{row['heads']}</td><td>{row['windows']}</td>"
    cells = ""
    for name in columns:
        value = float(str(row.get(name, "nan")))
        words = "" if value != value else f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
        cells += f'<td data-v="{"" if value != value else f"{value:.6g}"}">{words}</td>'
    return f"<tr{mark_of(row)}>{keys}{cells}</tr>"


def mark_of(row: table.Row) -> str:
    """Return the attribute that sets trained rows off."""
    return ' class="trained"' if row["baseline"] == reading.TRAINED else ""


def trust(ds: xr.Dataset, name: str) -> str:
    """Return the self-check's outcome, how modules were reached, and the caveats."""
    check = reading.attribute(ds, "self_check", None)
    outcome = pairs(check) if check else [("self-check", "the result holds none")]
    left_out = reading.attribute(ds, "left_out", None)
    lost = len(left_out) if isinstance(left_out, dict | list) else 0
    caveats = [
        ("windows left out", f"{lost}" if not lost else f"{lost}: {'; '.join(v for _, v in pairs(left_out)[:3])}"),
        ("text passed over", "; ".join(f"{k} {v}" for k, v in pairs(reading.attribute(ds, "skipped_text", {})))),
        ("mask policy", str(reading.attribute(ds, "mask_policy", ""))),
        ("text’s hash", str(reading.attribute(ds, "corpus_hash", ""))),
        ("modules reached", reached(ds)),
        (
            "intervals",
            "Student’s t over windows, clustered by the document a window starts in; Spearman’s ρ by bootstrap",
        ),
    ]
    lines = "".join(
        f'<tr><td class="t">{escape(key)}</td><td class="t w">{verdict(value)}</td></tr>'
        for key, value in [*outcome, *caveats]
        if value
    )
    return (
        f"<h3>{escape(name)}</h3>{scrolling(f'<tbody>{lines}</tbody>', f'Self-check and caveats, {name}', whole=True)}"
    )


def reached(ds: xr.Dataset) -> str:
    """Return how the attention modules were reached, counted."""
    told = [str(way) for way in ds["reached"].values] if "reached" in ds.coords else []
    if told:
        return ", ".join(f"{summary.counted(told.count(way), 'module')} {way}" for way in dict.fromkeys(told))
    return "; ".join(f"{key}: {value}" for key, value in pairs(reading.attribute(ds, "reached", {}))[:8])


def pairs(value: object, prefix: str = "") -> list[tuple[str, str]]:
    """Return nested facts as flat pairs of words.

    Example:
        >>> pairs({"rows": {"error": 1e-07, "ok": True}})
        [('rows: error', '1e-07'), ('rows: ok', 'yes')]
    """
    if isinstance(value, dict):
        return [pair for key, item in value.items() for pair in pairs(item, f"{prefix}{': ' if prefix else ''}{key}")]
    if isinstance(value, list):
        return [pair for i, item in enumerate(value) for pair in pairs(item, f"{prefix} {i}".strip())]
    words = {True: "yes", False: "no", None: "not checked"}.get(value) if isinstance(value, bool | None) else str(value)
    return [(prefix.replace("_", " "), str(words))]


def verdict(words: str) -> str:
    """Return an outcome, coloured where it is plainly good or bad."""
    kind = {"yes": "good", "passed": "good", "no": "bad", "failed": "bad"}.get(words)
    return f'<span class="{kind}">{escape(words)}</span>' if kind else escape(words)
