"""Files of rows: which ones a job names, how they are cut into chunks, and the raw rows of one chunk (no Ray here).

A chunk is a byte range of an uncompressed JSON Lines file, aligned to line ends by whoever reads it, or a whole file
where that cannot be cut (.gz, a JSON array). Rows are streamed: no more than one range is ever in memory.
"""

import codecs
import difflib
import fnmatch
import glob
import gzip
import hashlib
import io
import itertools
import json
import os
import pathlib
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pipeline.data.formats import RowError, shape_of, show
from pipeline.data.values import read_value, too_deep
from pipeline.errors import InputError
from pipeline.system import storage

CHUNK = 4 << 20  # bytes of a range: a worker's memory is some 50 times this
BLOCK = 1 << 20
ROW = 64 << 20  # bytes of the largest row: what has no end in sight is no row
EMPTY = 1_000_000  # lines in a row without one: what follows is not read
BARREN = 2 * ROW  # bytes of a gzip stream, unpacked, without a row: what follows is not read
SUFFIXES = (".jsonl", ".json", ".ndjson", ".jsonl.gz", ".json.gz", ".ndjson.gz")
FOREIGN = (".parquet", ".csv", ".tsv", ".zst", ".bz2", ".xz", ".zip", ".arrow")

Row = tuple[int, Any, bytes]  # (number from 1, the decoded row or a RowError, its bytes)
BLANKS = " \t\r\n"  # JSON's white space
BLANK = re.compile(f"[{BLANKS}]*")


@dataclass(frozen=True)
class File:
    path: str
    size: int
    mtime: int  # ns


@dataclass(frozen=True)
class Chunk:
    path: str
    split: str
    start: int = 0
    stop: int = -1  # -1: the whole file
    array: bool = False
    zipped: bool = False
    shape: str | None = None  # of the file's first row, where the driver has seen it
    shape_line: int = 1


# ---- which files -----------------------------------------------------------------------------------------------


def find(spec: str | list[str], key: str) -> list[File]:
    """The files of a path, glob, folder or URI, or of a list of them; `key` names the setting in errors."""
    files = [file for item in ([spec] if isinstance(spec, str) else spec) for file in find_one(item, key)]
    for file in files:
        if file.path.endswith(FOREIGN):
            raise InputError(
                f"{file.path} is not JSON; expected one of {', '.join(SUFFIXES)}; with the datasets library, "
                "`Dataset.from_parquet(path).to_json('rows.jsonl')` writes JSON Lines",
                key=key,
            )
    return files


def reach(item: str, key: str) -> None:
    """The first contact with the bucket or hub of a path. Raises InputError when it cannot be reached."""
    _readable(storage.reach, item, key)


def find_one(item: str, key: str) -> list[File]:
    """Raises InputError for a path that leads nowhere and for a bucket that cannot be reached."""
    reach(item, key)
    return _readable(lambda item: matching(item, key), item, key)


def _readable(read: Callable[[str], Any], item: str, key: str) -> Any:
    try:
        return read(item)
    except InputError:
        raise
    except Exception as error:  # pyarrow and each cloud's client raise types of their own
        reason = (str(error).splitlines() or [type(error).__name__])[0][:300]
        raise InputError(
            f"{item!r} cannot be read ({reason}); expected a path, a glob, a folder, or s3:// gs:// hf:// with "
            "the credentials for it in the environment",
            key=key,
        ) from error


def matching(item: str, key: str) -> list[File]:
    fs, inner = storage.filesystem(item)
    pattern = any(char in inner for char in "*?[") and not (
        not storage.is_remote(item) and os.path.exists(inner)
    )
    if pattern:
        paths = remote_glob(fs, inner) if storage.is_remote(item) else local_glob(inner)
        infos = [info for info in fs.get_file_info(paths) if info.is_file] if paths else []
        if not infos:
            raise InputError(
                f"the pattern {item!r} matches no file (looked in {os.getcwd()}); expected one that finds JSON "
                "files, such as jobs/demo/data/pref*.jsonl",
                key=key,
            )
        return [as_file(item, info) for info in infos]
    info = fs.get_file_info(inner)
    if info.is_file:
        return [as_file(item, info)]
    if info.type.name == "Directory":
        return folder(item, fs, inner, key)
    if info.type.name == "Unknown":
        raise InputError(
            f"{item!r} is neither a file nor a folder; rows are read more than once, so write what comes out of a "
            "pipe or a device into a file first",
            key=key,
        )
    parent = os.path.dirname(inner)
    names = os.listdir(parent) if not storage.is_remote(item) and os.path.isdir(parent) else []
    close = difflib.get_close_matches(os.path.basename(inner), names, 1)
    hint = f"; is {os.path.join(os.path.dirname(item), close[0])!r} meant?" if close else ""
    raise InputError(
        f"there is no file {item!r}{hint}; expected a path, a glob, a folder, or s3:// gs:// hf://", key=key
    )


def folder(item: str, fs: Any, inner: str, key: str) -> list[File]:
    import pyarrow.fs as pafs

    below = pafs.FileSelector(inner, recursive=True) if storage.is_remote(item) else files_below(inner)
    infos = fs.get_file_info(below)
    infos = [i for i in infos if i.is_file and i.path.endswith(SUFFIXES) and not hidden(i.path[len(inner) :])]
    if not infos:
        raise InputError(
            f"the folder {item!r} holds no data file; expected files named *{', *'.join(SUFFIXES)}", key=key
        )
    return [as_file(item, info) for info in sorted(infos, key=lambda info: info.path)]


def files_below(folder: str) -> list[str]:
    """All files below a local folder, each once: links that lead back to a folder above would go round for ever."""
    seen: set[tuple[int, int]] = set()
    paths = []

    def refuse(error: OSError) -> None:
        raise error

    for path, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        folders.sort()
        status = os.stat(path)
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        paths += [os.path.join(path, name) for name in names]
    return paths


def local_glob(pattern: str) -> list[str]:
    """The paths that match, in order. `**` does not follow links to folders (pathlib's does not): they may go round for ever."""
    before, double, after = (pattern + "/" * pattern.endswith("/**")).partition("/**/")
    if not double:
        return sorted(glob.glob(pattern))
    below = (
        (str(path), start)
        for start in glob.glob(before or "/")
        for path in pathlib.Path(start).glob(f"**/{after or '*'}")
    )
    return sorted(path for path, start in below if not hidden(path[len(start) :]) or "/." in after)


def hidden(path: str) -> bool:
    return any(part.startswith(".") for part in path.strip("/").split("/"))


def remote_glob(fs: Any, pattern: str) -> list[str]:
    import pyarrow.fs as pafs

    parts = pattern.split("/")
    fixed = next(i for i, part in enumerate(parts) if any(char in part for char in "*?["))
    selector = pafs.FileSelector("/".join(parts[:fixed]), recursive=True, allow_not_found=True)
    return sorted(
        info.path
        for info in fs.get_file_info(selector)
        if info.is_file and fnmatch.fnmatch(info.path, pattern)
    )


def as_file(item: str, info: Any) -> File:
    scheme = item.split("://")[0] + "://" if storage.is_remote(item) else ""
    path = item if scheme and item.endswith(info.path) else scheme + info.path
    return File(path if scheme else shown(info.path), info.size or 0, info.mtime_ns or 0)


def shown(path: str) -> str:
    """A path as a person would write it: relative below the current folder."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


# ---- chunks ----------------------------------------------------------------------------------------------------


def plan(files: list[File], split: str, stage: str, chunk_bytes: int = CHUNK) -> list[Chunk]:
    """The chunks of the files, in order. Only the first bytes of each file are read here."""
    chunks = []
    for file in files:
        head = read_head(file)
        if head[:2] == b"\x1f\x8b" or file.path.endswith(".gz"):
            chunks.append(Chunk(storage.absolute(file.path), split, zipped=True))
        elif head.removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"[":
            chunks.append(Chunk(storage.absolute(file.path), split, array=True))
        else:
            line, shape = first_shape(head, stage)
            starts = range(0, max(file.size, 1), chunk_bytes)
            chunks += [
                Chunk(
                    storage.absolute(file.path),
                    split,
                    start,
                    min(start + chunk_bytes, file.size),
                    shape=shape,
                    shape_line=line,
                )
                for start in starts
            ]
    return chunks


def first_rows(spec: str | list[str], key: str, stage: str, count: int = 3) -> list[Any]:
    """The first rows of a set as its files have them, to look at; `key` is what the job calls the set (`data.train`)."""
    chunk = plan(find(spec, key), "train", stage)[0]
    return [row for _, row, _ in itertools.islice(rows(chunk, hashlib.sha256()), count)]


def read_head(file: File) -> bytes:
    try:
        with open_bytes(file.path) as stream:
            return stream.read(BLOCK // 4)
    except OSError as error:  # a folder opens, but does not read
        raise InputError(f"data: {file.path} cannot be read: {error}") from error


def first_shape(head: bytes, stage: str) -> tuple[int, str | None]:
    """(line, shape) of the first line of a file that is a row of a known shape."""
    for number, line in enumerate(head.split(b"\n"), 1):
        row = decode(line.removeprefix(codecs.BOM_UTF8))  # what is not a row is reported by its own chunk
        if isinstance(row, dict) and (shape := shape_of(row, stage)):
            return number, shape
    return 1, None


def open_bytes(path: str) -> Any:
    try:
        if not storage.is_remote(path):
            return open(path, "rb")
        fs, inner = storage.filesystem(path)
        return fs.open_input_file(inner)
    except OSError as error:
        raise InputError(f"data: {path} cannot be read: {error}") from error


# ---- rows of a chunk -------------------------------------------------------------------------------------------


def rows(chunk: Chunk, digest: "hashlib._Hash") -> Iterator[Row]:
    """The rows of a chunk with their numbers *inside the chunk*; `digest` is fed with every byte of them.

    Blank lines are passed over, but counted. What cannot be decoded comes as a RowError in place of the row.
    """
    with open_bytes(chunk.path) as raw:
        if not chunk.zipped and not chunk.array:
            yield from lines(range_lines(raw, chunk, digest))
            return
        if not chunk.zipped:
            yield from elements(raw, digest)
            return
        unpacked = Gunzip(raw)
        stream: Any = io.BufferedReader(unpacked)
        array = peek_array(stream)
        for row in elements(stream, digest) if array else lines(stream_lines(stream, digest)):
            unpacked.barren = 0
            yield row


class Gunzip(io.RawIOBase):
    """A gzip stream whose damage shows as the end of the stream, with `.damage` saying what it was.

    What stands before the damage can be read: so an error has a line number. A stream may unpack to a thousand times its
    size, and repeated rows do; but only to so many bytes in which whoever reads it finds no row (`barren`).
    """

    def __init__(self, raw: Any):
        self.raw, self.inner, self.damage, self.barren = raw, gzip.GzipFile(fileobj=raw), "", 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self.damage:
            return 0
        try:
            data = self.inner.read1(len(buffer))
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            self.damage = f"breaks off here ({error})"
            return 0
        self.barren += len(data)
        if self.barren > BARREN:
            self.damage = f"unpacks to {BARREN >> 20} MiB without a row"
            return 0
        buffer[: len(data)] = data
        return len(data)


def damage_of(stream: Any) -> str:
    return getattr(getattr(stream, "raw", None), "damage", "")


def damaged(stream: Any) -> RowError:
    return RowError(
        "truncated_gzip", "", f"a gzip stream that {damage_of(stream)}", "a whole .gz file of rows"
    )


def peek_array(stream: io.BufferedReader) -> bool:
    return stream.peek(4096).removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["


def unit(chunk: Chunk) -> Literal["line", "element"]:
    """What the numbers of the chunk's rows count."""
    if not chunk.zipped:
        return "element" if chunk.array else "line"
    with open_bytes(chunk.path) as raw:
        return "element" if peek_array(io.BufferedReader(Gunzip(raw))) else "line"


def range_lines(raw: Any, chunk: Chunk, digest: "hashlib._Hash") -> Iterator[bytes]:
    """The lines that begin in [start, stop); the last one is read to its end, or until it is too large for a row."""
    at = max(chunk.start - 1, 0)
    raw.seek(at)
    data = raw.read(chunk.stop - at)
    if chunk.start:
        cut = data.find(b"\n") + 1
        if not cut:
            return
        data = data[cut:]
    if not data:
        return
    last, tail = len(data) - data.rfind(b"\n") - 1, [data]
    while not tail[-1].endswith(b"\n") and last <= ROW and (more := raw.read(BLOCK // 16)):
        end = more.find(b"\n") + 1
        tail.append(more[:end] if end else more)
        last += len(tail[-1])
    data = b"".join(tail) if len(tail) > 1 else data
    digest.update(data)
    at = 0
    while at < len(data):
        end = data.find(b"\n", at)
        end = len(data) if end < 0 else end
        yield data[at:end]
        at = end + 1


def stream_lines(stream: io.BufferedReader, digest: "hashlib._Hash") -> Iterator[bytes | RowError]:
    while line := stream.readline(ROW + 1):
        if damage_of(stream):
            break  # the line is cut short, too
        digest.update(line)
        yield line
        if len(line) > ROW:
            while line and not line.endswith(b"\n"):  # passed over to its end
                line = stream.readline(ROW)
    if damage_of(stream):
        yield damaged(stream)


def lines(source: Iterator[bytes | RowError]) -> Iterator[Row]:
    empty = 0
    for number, line in enumerate(source, 1):
        if isinstance(line, RowError):
            yield number, line, b""
            continue
        if len(line) > ROW:
            yield number, too_large(), b""
            continue
        line = line.removeprefix(codecs.BOM_UTF8).strip()
        if line:
            empty = 0
            yield number, decode(line), line
        elif (empty := empty + 1) > EMPTY:
            yield number, RowError("not_json", "", f"{empty:,} empty lines", "rows"), b""
            return


def decode(line: bytes) -> Any:
    try:
        text = line.decode("utf-8").strip(BLANKS)
        row, end = read_value(text)
        if end < len(text):
            raise json.JSONDecodeError("Extra data", text, end)
        return row
    except UnicodeDecodeError as error:
        found = f"byte 0x{line[error.start]:02x} at position {error.start + 1} of the line"
        return RowError("not_utf8", "", found, "UTF-8 text")
    except json.JSONDecodeError as error:
        found = f"{show(error.doc[:40])} ({error.msg} at column {error.colno})"
        return RowError("not_json", "", found, "one JSON object on each line, or one JSON array in the file")
    except RecursionError:
        return too_deep()


def too_large() -> RowError:
    return RowError("too_large", "", f"more than {ROW >> 20} MiB without an end of the row", "a smaller row")


def elements(stream: Any, digest: "hashlib._Hash") -> Iterator[Row]:
    """The elements of a JSON array, read block by block; what is not JSON ends the file."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    text, at, number, ended, block = "", 0, 0, False, BLOCK
    opened, last = False, ""
    while True:
        at = BLANK.match(text, at).end()  # type: ignore[union-attr]
        char = text[at : at + 1]
        if opened and char == "]" and last != ",":
            yield from behind_array(stream, text[at + 1 :], number, digest)
            return
        if char and not opened:
            opened, at = True, at + 1  # the caller has seen the bracket
            continue
        if char and char == "," * (last == "element"):
            last, at = ",", at + 1
            continue
        if (char and char in (",", "]")) or (char and last == "element"):
            found = f"{show(text[at : at + 40])} behind {'a comma' if last == ',' else 'an element' if number else 'the bracket'}"
            yield number + 1, RowError("not_json", "", found, "elements with one comma between them"), b""
            return
        value, stop, failure, wrong = None, -1, "the array is not closed", None
        if char:
            try:
                value, stop = read_value(text, at)
            except RecursionError:
                ended, wrong = True, too_deep()
            except json.JSONDecodeError as error:
                failure = f"{show(text[at : at + 40])} ({error.msg})"
                # An error well inside the text is real; one near its end may only mean that more is to be read.
                ended = ended or (error.pos < len(text) - 4096 and not error.msg.startswith("Unterminated"))
        if stop >= 0:
            number, last = number + 1, "element"
            yield number, value, text[at:stop].encode("utf-8", "surrogatepass")
            at, block = stop, BLOCK
            continue
        if not ended and len(text) - at > ROW:
            ended, wrong = True, too_large()
        if ended:
            wrong = damaged(stream) if damage_of(stream) else wrong
            wrong = wrong or RowError("not_json", "", failure, "a JSON array of objects")
            wrong.expected += "; what stands behind it was not read"
            yield number + 1, wrong, b""
            return
        data = stream.read(block)
        digest.update(data)
        ended, block = not data, min(block * 2, ROW >> 2)
        try:
            text, at = text[at:] + decoder.decode(data, final=ended), 0
        except UnicodeDecodeError as error:
            found = f"byte 0x{error.object[error.start]:02x}"
            yield number + 1, RowError("not_utf8", "", found, "UTF-8 text"), b""
            return


def behind_array(stream: Any, rest: str, number: int, digest: "hashlib._Hash") -> Iterator[Row]:
    """Nothing, or the error that something stands behind the closing bracket or that the gzip stream is damaged."""
    extra = rest.strip()
    while data := stream.read(BLOCK):
        digest.update(data)
        extra = extra or data.decode("utf-8", "replace").strip()
    if damage_of(stream):
        yield number + 1, damaged(stream), b""
    elif extra:
        found = f"{show(extra[:40])} behind the closing bracket"
        yield number + 1, RowError("not_json", "", found, "one JSON array in the file"), b""


def lines_before(chunk: Chunk) -> int:
    """How many lines of the file begin before the chunk's first one: read only when an error must be placed."""
    if chunk.start == 0:
        return 0
    count, left = 0, chunk.start - 1
    with open_bytes(chunk.path) as raw:
        while left and (data := raw.read(min(left, BLOCK))):
            count, left = count + data.count(b"\n"), left - len(data)
        while data := raw.read(BLOCK // 16):  # the line that runs into the chunk ends with this one
            if b"\n" in data:
                return count + 1
    return count
