"""Text to measure on: a built-in name, a file, a folder or strings, read lazily and in a fixed order."""

import codecs
import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import IO, Any

from rankscope._errors import RankscopeError, did_you_mean
from rankscope._hub import hub_problem

# A longer text is cut at the next line end, so that one huge file is never held whole. Novels fit uncut.
LONGEST_DOCUMENT = 2**21

_TITLE = re.compile(r" = (?!= )\S.*(?<! =) = ?")
_RULE_LINE = re.compile(r"^[ ]*[-*=+~^|#\"][-*=+~^|#\" ]{2,}\n?", re.MULTILINE)


@dataclass(frozen=True)
class Corpus:
    """Documents of text, iterated lazily, in the same order every time.

    Args:
        name: What the user called it.
        documents: Starts a new pass over the documents.
    """

    name: str
    documents: Callable[[], Iterator[str]] = field(repr=False)

    def __iter__(self) -> Iterator[str]:
        """Yield the documents that hold more than white space; none at all is an error."""
        empty = True
        for document in self.documents():
            if document and not document.isspace():
                empty = False
                yield document
        if empty:
            raise RankscopeError(f"`corpus` {self.name!r} holds no text: give a file with at least one document")


def open_corpus(corpus: str | Path | Iterable[str], *, column: str | None = None) -> Corpus:
    """Open a corpus and read its first document, so that a mistake shows at once.

    What is one document:

    * ``pydoc``: one topic of the language reference that CPython ships (``pydoc_data.topics``), sorted by
      key; lines that only draw a rule or a table's border are left out, since a tokenizer makes dozens of
      equal tokens of each.
    * ``wiki103``, ``imdb``, ``wikipedia``: one article, one review, one page of the hub's train split, streamed.
    * ``bookcorpus``: two million characters of the hub's sentences, which do not tell where a book ends.
    * ``.txt``, ``.tokens``, ``.raw``: the whole file (blank lines are paragraphs, not documents), unless it
      has WikiText's titles: a line `` = Title = `` (a space first, one equals sign on either side, at the
      file's start or after a blank line) begins an article. A text of more than 2²¹ characters is cut at
      the next line end.
    * ``.jsonl``, ``.csv``, ``.tsv``, ``.parquet``: one row. A ``.csv`` is quoted as usual, a ``.tsv`` not at
      all (as GLUE's files are).
    * a folder: its files of these kinds, sorted by path, with those of its subfolders; the others, and
      hidden ones, are passed over.
    * a list of strings: one string.

    Args:
        corpus: A built-in name, a path, or strings that can be iterated more than once.
        column: The text column of tables; ``text`` if not given.

    Returns:
        The corpus.

    Raises:
        RankscopeError: No such name or path, nothing to read, no such column, a broken file, or a hub that
            cannot be reached.

    Example:
        >>> len(list(open_corpus(["One document.", "Another.", " "])))
        2
        >>> next(iter(open_corpus("pydoc"))).splitlines()[0]
        'The "assert" statement'
    """
    if not isinstance(corpus, str | Path):
        opened = Corpus("texts", _from_strings(corpus))
        _refuse_column(column, "strings")
    elif str(corpus) in _BUILT_IN:
        opened = Corpus(str(corpus), _BUILT_IN[str(corpus)])
        _refuse_column(column, f"the built-in corpus {str(corpus)!r}")
    else:
        files = _files(Path(corpus).expanduser())
        if not any(file.suffix.lower() in _TABLES for file in files):
            _refuse_column(column, f"the text in {str(corpus)!r}")
        opened = Corpus(str(corpus), lambda: _from_files(files, column))
    next(iter(opened))
    return opened


def articles(lines: Iterable[str]) -> Iterator[str]:
    r"""Join lines to documents: a WikiText title after a blank line begins a new one.

    Args:
        lines: Lines with their line ends.

    Yields:
        The documents, nothing dropped: joined they are the lines joined.

    Example:
        >>> list(articles([" = One = \n", "a\n", " = = Part = = \n", " \n", " = Two = \n", "b\n"]))
        [' = One = \na\n = = Part = = \n \n', ' = Two = \nb\n']
    """
    gathered: list[str] = []
    length = 0
    after_blank = True
    for line in lines:
        title = after_blank and _TITLE.fullmatch(line.rstrip("\r\n")) is not None
        if gathered and (title or length >= LONGEST_DOCUMENT):
            yield "".join(gathered)
            gathered, length = [], 0
        gathered.append(line)
        length += len(line)
        after_blank = line.isspace()
    if gathered:
        yield "".join(gathered)


def _refuse_column(column: str | None, of: str) -> None:
    if column is not None:
        raise RankscopeError(
            f"`column` {column!r} has no meaning for {of}: leave it out (it names a column of a jsonl, csv, tsv "
            f"or parquet file)"
        )


def _from_strings(texts: Iterable[str]) -> Callable[[], Iterator[str]]:
    if not isinstance(texts, Iterable):
        raise RankscopeError(f"`corpus` must be a name, a path or strings, got {type(texts).__name__}")
    if isinstance(texts, Iterator):
        raise RankscopeError("`corpus` is an iterator, which can be read only once: pass list(texts) instead")

    def documents() -> Iterator[str]:
        for index, text in enumerate(texts):
            if not isinstance(text, str):
                raise RankscopeError(f"`corpus` must hold strings, got {type(text).__name__} at index {index}")
            yield text

    return documents


def _files(path: Path) -> list[Path]:
    readable = ", ".join(sorted(_READERS))
    if path.is_dir():
        files = sorted(
            file
            for file in path.rglob("*")
            if file.suffix.lower() in _READERS
            and file.is_file()
            and not any(part.startswith(".") for part in file.relative_to(path).parts)
        )
        if not files:
            raise RankscopeError(f"`corpus` folder {str(path)!r} holds no file to read: wanted one of {readable}")
        return files
    if not path.exists():
        siblings = [str(file) for file in path.parent.iterdir()] if path.parent.is_dir() else []
        near = get_close_matches(str(path), [*_BUILT_IN, *siblings], n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"give a path, or one of {', '.join(_BUILT_IN)}"
        raise RankscopeError(f"`corpus` {str(path)!r} is neither a file, a folder nor a built-in name: {hint}")
    if path.suffix.lower() not in _READERS:
        raise RankscopeError(
            f"`corpus` {str(path)!r} has a suffix that is not read: wanted one of {readable}; unpack or convert it"
        )
    return [path]


def _from_files(files: list[Path], column: str | None) -> Iterator[str]:
    for file in files:
        yield from _READERS[file.suffix.lower()](file, column)


@contextmanager
def _opened(path: Path, newline: str | None = None) -> Iterator[IO[str]]:
    try:
        with path.open(encoding="utf-8-sig", newline=newline) as stream:
            yield stream
    except UnicodeDecodeError:
        raise RankscopeError(f"{str(path)!r} is not UTF-8 text ({_first_bad_byte(path)}): {_cure(path)}") from None
    except OSError as error:
        raise RankscopeError(
            f"{str(path)!r} cannot be read ({error.strerror or error}): check the file and its permissions"
        ) from None


def _cure(path: Path) -> str:
    """What to do about bytes that are not UTF-8, by what they look like."""
    with path.open("rb") as stream:
        head = stream.read(4096)
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "it is UTF-16, convert it with `iconv -f utf-16 -t utf-8`"
    if b"\0" in head:
        return "it looks like binary data, give a text file"
    return "convert it, as with `iconv -f latin1 -t utf-8`"


def _first_bad_byte(path: Path) -> str:
    start = 0
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                return f"byte {line[error.start]:#04x} at offset {start + error.start}, line {number}"
            start += len(line)
    return "it ends within a character"


def _text(path: Path, column: str | None) -> Iterator[str]:
    """Read plain text; ``column`` concerns the tables that may lie in the same folder."""
    with _opened(path) as stream:
        # readline with a bound: a file may be one line of any length.
        yield from articles(iter(lambda: stream.readline(LONGEST_DOCUMENT), ""))


def _choose_column(columns: Iterable[str], column: str | None, where: str) -> str:
    names = list(columns)
    wanted = "text" if column is None else column
    if wanted in names:
        return wanted
    if column is None:
        raise RankscopeError(f"{where} has no column 'text': name the text's with `column`, one of {', '.join(names)}")
    raise RankscopeError(f"`column` {column!r} is not in {where}: {did_you_mean(column, names)}")


def _json_lines(path: Path, column: str | None) -> Iterator[str]:
    with _opened(path) as stream:
        for number, line in enumerate(stream, start=1):
            if line.isspace():
                continue
            where = f"{str(path)!r} line {number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise RankscopeError(
                    f"{where} is not JSON ({error.msg}, column {error.colno}): mend or delete the line"
                ) from None
            if not isinstance(row, Mapping):
                raise RankscopeError(f"{where} must be a JSON object with a text field, got {type(row).__name__}")
            value = row[_choose_column(row, column, where)]
            if value is None:
                continue
            if not isinstance(value, str):
                raise RankscopeError(
                    f"`column` {column or 'text'!r} must hold text, got {type(value).__name__} at {where}: "
                    f"choose another column"
                )
            yield value


def _separated(path: Path, column: str | None) -> Iterator[str]:
    # newline="" leaves line ends inside a quoted field to the csv module.
    with _opened(path, newline="") as stream:
        if path.suffix.lower() == ".tsv":
            rows: Iterator[list[str]] = (line.rstrip("\r\n").split("\t") for line in stream)
        else:
            # Process-wide, and only ever raised: csv's own limit of 131,072 characters refuses long documents.
            csv.field_size_limit(max(csv.field_size_limit(), 2**30))
            rows = csv.reader(stream, strict=True)
        number = 0
        try:
            header = next(rows, [])
            if not header:
                return
            index = header.index(_choose_column(header, column, repr(str(path))))
            for number, row in enumerate(rows, start=1):
                if not any(row):
                    continue
                if len(row) != len(header):
                    raise RankscopeError(
                        f"{str(path)!r} row {number} has {len(row)} fields where the header has {len(header)}: mend "
                        f"the row, or check the file's separator and quoting"
                    )
                yield row[index]
        except csv.Error as error:
            raise RankscopeError(f"{str(path)!r} breaks after row {number} ({error}): check its quoting") from None


def _parquet(path: Path, column: str | None) -> Iterator[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as table:
            schema = table.schema_arrow
            name = _choose_column(schema.names, column, repr(str(path)))
            kind = schema.field(name).type
            value_kind = kind.value_type if pa.types.is_dictionary(kind) else kind
            if not (pa.types.is_string(value_kind) or pa.types.is_large_string(value_kind)):
                raise RankscopeError(
                    f"`column` {name!r} of {str(path)!r} must hold text, got {kind}: choose another column of "
                    f"{', '.join(schema.names)}"
                )
            for batch in table.iter_batches(batch_size=256, columns=[name]):
                yield from (value for value in batch.column(0).to_pylist() if value is not None)
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise RankscopeError(f"{str(path)!r} cannot be read as parquet ({reason}): fetch the file again") from None


def _pydoc() -> Iterator[str]:
    from pydoc_data.topics import topics

    for key in sorted(topics):
        yield _RULE_LINE.sub("", topics[key])


def _wiki103() -> Iterator[str]:
    return articles(_hub_column("wiki103", "Salesforce/wikitext", "wikitext-103-raw-v1"))


def _imdb() -> Iterator[str]:
    return _hub_column("imdb", "stanfordnlp/imdb", None)


def _wikipedia() -> Iterator[str]:
    return _hub_column("wikipedia", "wikimedia/wikipedia", "20231101.en")


def _bookcorpus() -> Iterator[str]:
    # Its rows are single sentences.
    return articles(f"{line}\n" for line in _hub_column("bookcorpus", "SamuelYang/bookcorpus", None))


def _hub_column(name: str, repository: str, configuration: str | None) -> Iterator[str]:
    advice = (
        f"`corpus` {name!r} is streamed from the hub, which failed: %s. Give a file or folder instead "
        f"(.txt, .jsonl, .csv, .tsv or .parquet), or 'pydoc', which needs no network"
    )
    problem = hub_problem()
    if problem is not None:
        raise RankscopeError(advice % problem)
    import datasets

    try:
        rows: Any = datasets.load_dataset(repository, configuration, split="train", streaming=True)
        for row in rows:
            yield row["text"]
    except (OSError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise RankscopeError(advice % (str(error).splitlines() or [type(error).__name__])[0]) from None


_BUILT_IN: dict[str, Callable[[], Iterator[str]]] = {
    "pydoc": _pydoc,
    "wiki103": _wiki103,
    "imdb": _imdb,
    "wikipedia": _wikipedia,
    "bookcorpus": _bookcorpus,
}
_TABLES: dict[str, Callable[[Path, str | None], Iterator[str]]] = {
    ".jsonl": _json_lines,
    ".csv": _separated,
    ".tsv": _separated,
    ".parquet": _parquet,
}
_READERS = {".txt": _text, ".tokens": _text, ".raw": _text, **_TABLES}
