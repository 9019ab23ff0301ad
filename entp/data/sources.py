"""Where a corpus is read from: text files, the prose inside Python, or a dataset of the
HuggingFace hub.

A source gives out pieces of its documents in an order that never changes, and can go on after any
piece. A document of ordinary length is one piece; longer ones are cut where no tokenizer would
join.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

from entp.data.manifest import file_hash
from entp.errors import InputError
from entp.files import parse_json

PIECE = 1 << 20
"""Most characters of a piece."""
CHUNK = 1 << 20
"""Bytes read at a time."""
FORMATS = (".txt", ".jsonl")
COMPRESSIONS = ("", ".xz", ".gz", ".zst")
SUFFIXES = tuple(kind + packed for kind in FORMATS for packed in COMPRESSIONS)
READERS: dict[str, Callable[[BinaryIO], Any]] = {
    ".xz": lzma.LZMAFile,
    ".gz": lambda raw: gzip.GzipFile(fileobj=raw),
}
OPENWEBTEXT = "Skylion007/openwebtext"
OPENWEBTEXT_REVISIONS = (None, "refs/convert/parquet")
"""The second is for versions of datasets that refuse the repository's script."""


class Piece(NamedTuple):
    """A part of a document, none of them empty; `first` and `last` of its document."""

    text: str
    first: bool
    last: bool


class Source(Protocol):
    """Documents in a fixed order."""

    name: str
    has_many: bool
    """Whether three documents or more are sure to be there."""
    total: int | None
    """What `done` is at the end, for progress bars."""

    def described(self) -> list[dict[str, Any]]:
        """What the manifest says about each part of the source: name, sha256, bytes."""
        ...

    def pieces(self, position: Any = None) -> Iterator[Piece]:
        """All pieces, or those after a position."""
        ...

    def position(self) -> Any:
        """Where `pieces` is, as JSON: after the piece that it gave out last."""
        ...

    def done(self) -> int:
        """How much of `total` has been read."""
        ...


class Files:
    """Text files: each .txt is a document, and so is each line of a .jsonl, by its field `text`."""

    has_many = False

    def __init__(self, files: list[tuple[str, Path]], name: str) -> None:
        """`files`: what each is called in the manifest, and where it is."""
        self.files, self.name = files, name
        self.sizes = [path.stat().st_size for _, path in files]
        self.total: int | None = sum(self.sizes)
        self._at = (0, 0)
        self._raw: BinaryIO | None = None

    def described(self) -> list[dict[str, Any]]:
        return [
            {"name": name, "sha256": file_hash(path), "bytes": size}
            for (name, path), size in zip(self.files, self.sizes, strict=True)
        ]

    def pieces(self, position: Any = None) -> Iterator[Piece]:
        first, skip = position or (0, 0)
        for number in range(first, len(self.files)):
            self._at = (number, 0)
            for given, piece in enumerate(self._pieces_of(self.files[number][1]), 1):
                if given > skip:
                    self._at = (number, given)
                    yield piece
            skip = 0

    def position(self) -> list[int]:
        return list(self._at)

    def done(self) -> int:
        inside = self._raw.tell() if self._raw and not self._raw.closed else 0
        return sum(self.sizes[: self._at[0]]) + inside

    def _pieces_of(self, path: Path) -> Iterator[Piece]:
        with open(path, "rb") as self._raw, _named_errors(path):
            chunks = _unpacked(self._raw, path)
            if ".jsonl" in path.suffixes[-2:]:
                for text in _json_texts(chunks, path):
                    yield from cut([text[at : at + PIECE] for at in range(0, len(text), PIECE)])
            else:
                yield from cut(_decoded(chunks, path))


class Pydoc:
    """The topics of Python's own help: prose that every Python brings along."""

    has_many = False

    def __init__(self) -> None:
        from pydoc_data.topics import topics

        self.name = "pydoc"
        self.texts = [topics[topic] for topic in sorted(topics)]
        self.total: int | None = sum(map(len, self.texts))
        self._at = 0

    def described(self) -> list[dict[str, Any]]:
        whole = json.dumps(self.texts).encode()
        size = sum(len(text.encode()) for text in self.texts)
        digest = hashlib.sha256(whole).hexdigest()
        return [{"name": "pydoc_data.topics", "sha256": digest, "bytes": size}]

    def pieces(self, position: Any = None) -> Iterator[Piece]:
        for at in range(position or 0, len(self.texts)):
            self._at = at + 1
            if self.texts[at]:
                yield Piece(self.texts[at], True, True)

    def position(self) -> int:
        return self._at

    def done(self) -> int:
        return sum(map(len, self.texts[: self._at]))


class HubDataset:
    """A dataset that HuggingFace's `datasets` streams, by its field `text`."""

    has_many = True
    total: int | None = None

    def __init__(self, path: str, name: str, revisions: tuple[str | None, ...] = (None,)) -> None:
        self.path, self.name = path, name
        self.revision, self._data = _streamed(path, revisions)
        self._documents = 0

    def described(self) -> list[dict[str, Any]]:
        return [{"name": self.path, "sha256": None, "bytes": None, "revision": self.revision}]

    def pieces(self, position: Any = None) -> Iterator[Piece]:
        """Documents are not cut, so that a position lies between two of them."""
        if position is not None:
            self._documents = position["documents"]
            self._data.load_state_dict(position["state"])
        with _network_errors(self.path):
            for row in self._data:
                self._documents += 1
                text = _text_field(row, f"{self.path}, document {self._documents}")
                if text:
                    yield Piece(text, True, True)

    def position(self) -> dict[str, Any]:
        return {"documents": self._documents, "state": self._data.state_dict()}

    def done(self) -> int:
        return self._documents


def openwebtext() -> HubDataset:
    """OpenWebText from the hub, about 8 million documents."""
    return HubDataset(OPENWEBTEXT, "openwebtext", OPENWEBTEXT_REVISIONS)


def text_files(paths: list[Path]) -> list[tuple[str, Path]]:
    """The files that paths stand for, each with its name: files themselves, and those in
    folders."""
    found = [pair for path in paths for pair in _files_of(path)]
    seen: set[Path] = set()
    for _, path in found:
        if path.resolve() in seen:
            raise InputError(f"{path} is given twice: each document may count only once.")
        seen.add(path.resolve())
    return found


def is_text(path: Path) -> bool:
    """Whether the name of a file is that of a text file."""
    return path.name.endswith(SUFFIXES)


def format_of(name: str) -> str:
    """The suffixes by which a file is read, such as .jsonl.xz; nothing for other sources."""
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), "")


def stem(path: Path) -> str:
    """The name of a file without its suffixes, or of a folder."""
    name = path.resolve().name
    return name.removesuffix(format_of(name))


def cut(chunks: Iterable[str]) -> Iterator[Piece]:
    """The pieces of a document that comes in chunks of any size: none, if it is empty."""
    held, first = "", True
    for chunk in chunks:
        held += chunk
        while len(held) > PIECE:
            at = _boundary(held[:PIECE])
            yield Piece(held[:at], first, False)
            held, first = held[at:], False
    if held:
        yield Piece(held, first, True)


def _boundary(window: str) -> int:
    """Where to cut: before the last space or line feed that follows something visible.

    BPE as GPT-2's never joins what is on its two sides. Without such a place, at the end.
    """
    at = len(window)
    while at > 1:
        at = max(window.rfind(" ", 1, at), window.rfind("\n", 1, at))
        while at > 1 and window[at - 1].isspace():  # to the beginning of a run of blanks
            at -= 1
        if at > 0 and window[at] in " \n" and not window[at - 1].isspace():
            return at
    return len(window)


def _files_of(path: Path) -> list[tuple[str, Path]]:
    if path.is_dir():
        inside = sorted(found for found in path.rglob("*") if is_text(found) and found.is_file())
        named = [(found.relative_to(path).as_posix(), found) for found in inside]
        shown = [pair for pair in named if not any(p.startswith(".") for p in Path(pair[0]).parts)]
        if not shown:
            raise InputError(f"{path} has no text files: allowed are {', '.join(SUFFIXES)}.")
        return shown
    if not path.exists():
        raise InputError(f"{path} does not exist: give text files, or folders of them.")
    if not path.is_file() or not is_text(path):
        raise InputError(f"{path} is not a text file: allowed are {', '.join(SUFFIXES)}.")
    return [(path.name, path)]


def _unpacked(raw: BinaryIO, path: Path) -> Iterator[bytes]:
    """The contents of a file, chunk by chunk."""
    if path.suffix == ".zst":
        return _zstd(raw, path)
    opened = READERS[path.suffix](raw) if path.suffix in READERS else raw
    return iter(lambda: opened.read(CHUNK), b"")


def _zstd(raw: BinaryIO, path: Path) -> Iterator[bytes]:
    """The contents of a file of zstd frames; EOFError if the last is cut off."""
    try:
        import zstandard
    except ImportError:
        raise InputError(f"{path} needs the zstandard library: pip install 'entp[text]'.") from None
    new = zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj
    frame, begun = new(), False
    try:
        while chunk := raw.read(CHUNK >> 3):
            while chunk:
                yield frame.decompress(chunk)
                begun, chunk = True, frame.unused_data
                if frame.eof:
                    frame, begun = new(), False
    except zstandard.ZstdError as error:
        raise OSError(str(error)) from None
    if begun:
        raise EOFError("its last frame is cut off")


def _decoded(chunks: Iterable[bytes], path: Path) -> Iterator[str]:
    """The text of a file of UTF-8."""
    decoder, before = codecs.getincrementaldecoder("utf-8")(), 0
    for chunk in _with_end(chunks):
        pending = len(decoder.getstate()[0])
        try:
            yield decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            at = before - pending + error.start
            raise InputError(
                f"{path} is not UTF-8: byte {at:,} cannot be read ({error.reason}). Convert it."
            ) from None
        before += len(chunk)


def _with_end(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The chunks, then an empty one."""
    yield from chunks
    yield b""


def _json_texts(chunks: Iterable[bytes], path: Path) -> Iterator[str]:
    """The field `text` of each line."""
    for number, line in enumerate(_lines(chunks), 1):
        if line.strip():
            where = f"{path}, line {number}"
            try:
                row = parse_json(line)
            except ValueError as error:
                raise InputError(f"{where} is not JSON: {error}. Correct or remove it.") from None
            yield _text_field(row, where)


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """What stands between line feeds."""
    held: list[bytes] = []
    for chunk in chunks:
        first, *others = chunk.split(b"\n")
        held.append(first)
        for line in others:
            yield b"".join(held)
            held = [line]
    yield b"".join(held)


def _text_field(row: Any, where: str) -> str:
    text = row.get("text") if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise InputError(f"{where} is not an object with the text in a field `text`.")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"{where} has half of a surrogate pair: it is no Unicode text.") from None
    return text


@contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    """InputErrors that name the file, for one that is cut off or of another format."""
    try:
        yield
    except EOFError:
        raise InputError(f"{path} is cut off: it ends within its compressed data.") from None
    except (lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path} cannot be decompressed: {error}.") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from None


@contextmanager
def _network_errors(path: str) -> Iterator[None]:
    """InputErrors for whatever the hub's libraries raise: their kinds differ by version."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"{path} cannot be read from the HuggingFace hub ({type(error).__name__}: "
            f"{_one_line(error)}). Check the network, and run the same command again: it goes on "
            "where it was."
        ) from None


def _streamed(path: str, revisions: tuple[str | None, ...]) -> tuple[str | None, Any]:
    """The dataset as a stream, by the first revision that can be read."""
    try:
        import datasets
    except ImportError:
        raise InputError(
            f"{path} needs the datasets library: pip install 'entp[openwebtext]'."
        ) from None
    with _network_errors(path):
        for revision in revisions[:-1]:
            try:
                return revision, _load(datasets, path, revision)
            except ConnectionError:
                raise
            except Exception:  # such as a script, which newer versions refuse
                continue
        return revisions[-1], _load(datasets, path, revisions[-1])
    raise AssertionError("unreachable")


def _load(datasets: Any, path: str, revision: str | None) -> Any:
    return datasets.load_dataset(path, split="train", streaming=True, revision=revision)


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return lines[0][:200]
