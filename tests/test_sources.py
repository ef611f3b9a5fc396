"""Reading text: exactly as it is, in chunks, and with a useful line when it cannot be read."""

import contextlib
import json
import os
import tempfile
from encodings.aliases import aliases
from pathlib import Path
from random import Random

import pytest

from andrea_numba import sources
from andrea_numba.errors import UserError
from andrea_numba.sources import open_sources, read_text

NOBODY = 65534


def texts(*paths, encoding="utf-8"):
    opened = open_sources([str(p) for p in paths], encoding)
    return ["".join(document.chunks()) for document in opened]


def refusal(*paths, encoding="utf-8"):
    with pytest.raises(UserError) as error:
        texts(*paths, encoding=encoding)
    assert "\n" not in str(error.value)
    return str(error.value)


def file(folder, content, name="t.txt"):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return path


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(sources, "CHUNK_BYTES", 5)


@pytest.mark.parametrize("text", ["a\r\nb\r\n" * 50, "x\ry\r" * 50, "é∑😀\n" * 30, "\u2028\x85 a"])
def test_text_is_read_exactly(tmp_path, small_chunks, text):
    path = file(tmp_path, text)
    opened = open_sources([str(path)])
    for _ in range(2):  # documents can be read again
        assert [["".join(d.chunks()), d.name] for d in opened] == [[text, str(path)]]


@pytest.mark.parametrize("chunk", [2, 5, 100])
def test_one_leading_byte_order_mark_is_dropped(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(sources, "CHUNK_BYTES", chunk)
    assert texts(file(tmp_path, "\ufeffabc")) == ["abc"]
    assert texts(file(tmp_path, "\ufeff\ufeffab\ufeffc")) == ["\ufeffab\ufeffc"]
    assert texts(file(tmp_path, "\ufeffabc"), encoding="utf-8-sig") == ["abc"]
    assert texts(file(tmp_path, "aé".encode("utf-16")), encoding="utf-16") == ["aé"]
    assert texts(file(tmp_path, "\ufeffaé".encode("utf-16-be")), encoding="UTF_16BE") == ["aé"]


def test_other_encodings(tmp_path, small_chunks):
    for encoding, text in [("latin-1", "caf\xe9 au lait"), ("gb18030", "你好，世界" * 9),
                           ("shift_jis", "こんにちは" * 9), ("utf-32", "a😀" * 9)]:
        assert texts(file(tmp_path, text.encode(encoding)), encoding=encoding) == [text]


def test_invalid_bytes_name_file_offset_value_and_the_option(tmp_path):
    line = refusal(file(tmp_path, b"caf\xe9 au lait"))
    assert "t.txt" in line and "offset 3" in line and "0xE9" in line and "--encoding" in line


@pytest.mark.parametrize("before", [0, 1, 4, 5, 6, 9, 10, 11])
@pytest.mark.parametrize("bad", [b"\xff", b"\xe2\x82", b"\xe2\x82A", b"\xf0\x9f\x98"])
def test_offsets_are_exact_in_every_chunk(tmp_path, small_chunks, before, bad):
    for prefix in (b"x" * before, ("é" * 20).encode()[:2 * before]):
        line = refusal(file(tmp_path, prefix + bad))
        assert f"byte 0x{bad[0]:02X} at offset {len(prefix)} is" in line


def test_offsets_in_other_encodings(tmp_path, small_chunks):
    ok = "你好".encode("gb18030") * 4
    assert f"byte 0xFF at offset {len(ok)} " in refusal(file(tmp_path, ok + b"\xff\xff"),
                                                       encoding="gb18030")
    assert "offset 9 " in refusal(file(tmp_path, b"abcdefghi\xe9"), encoding="ascii")


def test_what_is_not_text_is_refused_helpfully(tmp_path, small_chunks):
    for encoding in ("utf-16", "utf-16-be", "utf-32"):
        mark = "\ufeff" if encoding == "utf-16-be" else ""
        assert "utf-16" in refusal(file(tmp_path, (mark + "text").encode(encoding)))
    line = refusal(file(tmp_path, b"plain tex\0t"))
    assert "not a text file" in line and "offset 9" in line
    assert "not a text file" in refusal(file(tmp_path, b"\x89PNG\0\0"))
    assert "utf-16-le" in refusal(file(tmp_path, "text".encode("utf-16-le")))


def test_missing_empty_and_odd_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert str(tmp_path / "nope.txt") in refusal("nope.txt")
    assert refusal("x" * 5000).startswith("File name too long: ")
    assert "is empty" in refusal(file(tmp_path, b""))
    assert "holds no text" in refusal(tmp_path)
    assert "regular file" in refusal("/dev/null")
    assert "no text given" in refusal()
    for encoding in ("klingon", "hex", "undefined", "a\0b"):
        assert "unknown text encoding" in refusal(file(tmp_path, b"a"), encoding=encoding)


@pytest.fixture
def unprivileged():
    """A folder of a user who is not root, whom this process is for a while."""
    with tempfile.TemporaryDirectory() as folder:
        if os.geteuid() == 0:
            os.chown(folder, NOBODY, NOBODY)
            os.seteuid(NOBODY)
            yield Path(folder)
            os.seteuid(0)
        else:
            yield Path(folder)


def test_what_may_not_be_read_is_named(unprivileged):
    path = file(unprivileged, "secret", "a/b/t.txt")
    file(unprivileged, "public", "a/t.txt")
    path.chmod(0)
    assert str(path) in refusal(path) and "Permission denied" in refusal(path)
    assert "Permission denied" in refusal(unprivileged / "a")
    path.parent.chmod(0)
    # Not a part of the text is left out in silence.
    assert refusal(unprivileged / "a") == f"cannot read folder {path.parent}: Permission denied"
    assert refusal(path) == f"Permission denied: {path}"
    path.parent.chmod(0o700)


def test_links(tmp_path):
    kept = file(tmp_path, "kept", "a/t.txt")
    (tmp_path / "a" / "again").symlink_to(tmp_path / "a")  # a circle
    (tmp_path / "a" / "none.txt").symlink_to(tmp_path / "none")
    (tmp_path / "a" / "self.md").symlink_to(tmp_path / "a" / "self.md")
    os.mkfifo(tmp_path / "a" / "pipe.txt")
    (tmp_path / "link.txt").symlink_to(kept)
    opened = open_sources([str(tmp_path / "a")])
    assert ["".join(d.chunks()) for d in opened] == ["kept"]
    assert sorted(opened.notices) == [
        f"{tmp_path / 'a'}: left out 1 link(s) to folders: give them by name",
        f"{tmp_path / 'a'}: left out 3 broken link(s) or special file(s)"]
    assert texts(tmp_path / "link.txt") == ["kept"] == texts(tmp_path / "a" / "again")
    assert "given twice" in refusal(tmp_path / "a", tmp_path / "link.txt")
    assert "Too many levels of symbolic links" in refusal(tmp_path / "a" / "self.md")
    assert "no such file" in refusal(tmp_path / "a" / "none.txt")
    assert "Not a directory" in refusal(tmp_path / "link.txt" / "t.txt")
    kept.unlink()
    assert "left out 3 broken" in refusal(tmp_path / "a")


def test_a_file_of_zeros_costs_nothing(tmp_path):
    path = file(tmp_path, "text")
    os.truncate(path, 5 << 30)  # sparse
    assert "zero byte at offset 4" in refusal(path)


def test_a_folder_is_read_recursively_in_sorted_order(tmp_path):
    for name in ("b.txt", "a/z.md", "a/b.txt", "c.jsonl", "skip.py", ".hidden/x.txt", "a/.x.txt"):
        file(tmp_path, json.dumps({"text": name}) if name.endswith("jsonl") else name, name)
    file(tmp_path, "", "empty.txt")
    opened = open_sources([str(tmp_path)])
    assert ["".join(d.chunks()) for d in opened] == ["a/b.txt", "a/z.md", "b.txt", "c.jsonl"]
    assert opened.notices == (f"{tmp_path}: left out 1 empty file(s)",)
    assert "given twice" in refusal(tmp_path, tmp_path / "a" / ".." / "b.txt")
    assert texts(tmp_path / "b.txt", tmp_path / "a") == ["b.txt", "a/b.txt", "a/z.md"]


def test_each_json_line_is_a_document(tmp_path, small_chunks):
    wanted = ["one\r\ntwo", "é \u2028 \x85", "<|endoftext|>"]
    lines = [json.dumps({"text": t, "id": 7}, ensure_ascii=i == 1) for i, t in enumerate(wanted)]
    path = file(tmp_path, "\r\n".join([lines[0], "", lines[1], '{"text": ""}', lines[2]]),
                "t.jsonl")
    assert texts(path) == wanted
    assert [d.name for d in open_sources([str(path)])][1] == f"{path}, line 3"


@pytest.mark.parametrize(("line", "expected"), [
    ("{", "not a JSON object"), ("[1]", "found: list"), ('{"txt": "a"}', "found: fields 'txt'"),
    ("{}", "found: fields none"), ('{"text": 3}', 'no string in the field "text"'),
    ('{"text": "\\ud800"}', "surrogate"), ("[" * 100_000, "not a JSON object"),
    ("9" * 5000, "not a JSON object")])
def test_bad_json_lines_name_file_and_line(tmp_path, line, expected):
    found = refusal(file(tmp_path, '{"text": "fine"}\n\n' + line + "\n", "t.jsonl"))
    assert "t.jsonl, line 3" in found and expected in found


def test_endless_json_lines_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "MAX_LINE_CHARACTERS", 100)
    monkeypatch.setattr(sources, "CHUNK_BYTES", 50)
    assert "longer than 100" in refusal(file(tmp_path, '{"text": "' + "a" * 500, "t.jsonl"))


def test_chunks_are_bounded(tmp_path):
    text = "x" * (3 * sources.CHUNK_BYTES + 5)
    path = file(tmp_path, text)
    lengths = [sources.CHUNK_BYTES] * 3 + [5]
    assert [len(c) for c in read_text(path)] == lengths
    [document] = open_sources([str(file(tmp_path, json.dumps({"text": text}), "t.jsonl"))])
    assert [len(c) for c in document.chunks()] == lengths


def test_every_codec_of_python_reads_or_refuses_any_bytes(tmp_path):
    random = Random(0)
    for encoding in sorted(set(aliases.values())):
        for size in (1, 3, 40):
            path = file(tmp_path, random.randbytes(size))
            with contextlib.suppress(UserError):
                assert texts(path, encoding=encoding) == [
                    path.read_bytes().decode(encoding).removeprefix("\ufeff")]
