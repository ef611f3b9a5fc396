"""Tokenizers: lossless on any text, strict about ids, and the same when streamed."""

import json

import numpy as np
import pytest
from helpers import ALL_TOKENIZERS, TEXT
from hypothesis import given, settings
from hypothesis import strategies as st

from andrea_numba.errors import UserError
from andrea_numba.tokenizers import (
    ByteTokenizer,
    CharTokenizer,
    TextStream,
    build_tokenizer,
    read_tokenizer,
    tokenizer_from_dict,
)

TEXTS = st.text(max_size=60)  # no surrogates, by hypothesis' default
NAMES = pytest.mark.parametrize("name", ALL_TOKENIZERS)
HARD = ["a\r\nb\r\n" * 500, "one\rtwo\r", "\ufefftext", "naïve café ∑ 😀 e\u0301", "\x00\t\"\\\n",
        "before <|endoftext|> after <|endoftext|>", "\n\n\n\n", "\u2028\u0085\x0b"]


def stream(tokenizer, ids):
    pieces = TextStream(tokenizer)
    return "".join([*(pieces.push(i) for i in ids), pieces.flush()])


@NAMES
@settings(max_examples=300, deadline=None)
@given(text=TEXTS.filter(bool), documents=st.integers(1, 3))
def test_any_text_survives_encoding_saving_and_streaming(name, text, documents):
    tokenizer = build_tokenizer(name, [text[:7], text[7:]], documents)
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32 and ids.ndim == 1
    assert tokenizer.decode(ids) == text == stream(tokenizer, ids)
    assert tokenizer.document_mark not in ids.tolist()
    assert tokenizer.count_text(ids) == (len(text.encode()), len(text))
    loaded = tokenizer_from_dict(json.loads(json.dumps(tokenizer.to_dict())))
    assert loaded.to_dict() == tokenizer.to_dict()
    assert (loaded.vocab_size, loaded.start_token) == (tokenizer.vocab_size, tokenizer.start_token)
    assert np.array_equal(loaded.encode(text), ids)


@NAMES
@pytest.mark.parametrize("text", HARD)
def test_hard_texts(name, text):
    tokenizer = build_tokenizer(name, [text], 2)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert 0 <= tokenizer.start_token < tokenizer.vocab_size


@NAMES
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_ids_decode_and_stream_to_the_same_text(name, data):
    tokenizer = build_tokenizer(name, ["aé∑😀\n"], 2)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    assert tokenizer.decode(np.array(ids, np.int64)) == stream(tokenizer, ids)
    assert tokenizer.decode(ids) == tokenizer.decode(iter(ids))


def test_a_stream_holds_incomplete_characters_back():
    tokenizer = ByteTokenizer()
    pieces = TextStream(tokenizer)
    assert [pieces.push(i) for i in tokenizer.encode("😀é")] == ["", "", "", "😀", "", "é"]
    assert pieces.flush() == ""
    assert pieces.push(0xF0) == "" and pieces.flush() == "\ufffd"
    assert pieces.push(ord("a")) == "a"  # nothing is left over after a flush
    assert pieces.push(0xC3) == "" and pieces.push(256) == "\ufffd\n\n"


@pytest.mark.parametrize("name", [n for n in ALL_TOKENIZERS if n != "char"])
def test_ten_thousand_strings_of_bytes_come_back(name):
    tokenizer = build_tokenizer(name, [TEXT], 2)
    rng = np.random.default_rng(0)
    words = [word.encode() for word in TEXT.split(" ")]
    for _ in range(10_000):
        data = b"".join(words[rng.integers(len(words))] if rng.random() < 0.5
                        else rng.bytes(rng.integers(6)) for _ in range(rng.integers(8)))
        assert tokenizer.decode_bytes(tokenizer.encode_bytes(data)) == data


def test_ten_thousand_texts_of_all_latin_letters_come_back_from_characters():
    tokenizer = build_tokenizer("char", ["".join(map(chr, range(256)))], 2)
    rng = np.random.default_rng(0)
    for _ in range(10_000):
        text = rng.bytes(rng.integers(30)).decode("latin-1")
        assert tokenizer.decode(tokenizer.encode(text)) == text


@NAMES
def test_saved_tokenizers_are_read_from_files(name, tmp_path):
    tokenizer = build_tokenizer(name, [TEXT], 2)
    path = tmp_path / "saved.json"
    path.write_text(json.dumps(tokenizer.to_dict()))
    assert build_tokenizer(str(path), [], 1).to_dict() == tokenizer.to_dict()


@pytest.mark.parametrize(("content", "words"), [("{", "not a JSON file"), ("[]", "damaged")])
def test_other_files_are_refused(content, words, tmp_path):
    (tmp_path / "saved.json").write_text(content)
    with pytest.raises(UserError, match=words):
        read_tokenizer(tmp_path / "saved.json")


def test_vocabularies():
    assert CharTokenizer.build(["a\r\nb\r\n" * 500], 1).vocab_size == 4
    assert CharTokenizer.build(["ba", "ab", "c"], 1).to_dict()["characters"] == "abc"
    one, two = (CharTokenizer.build(["ab"], n) for n in (1, 2))
    assert (one.vocab_size, one.document_mark) == (2, None)
    assert (two.vocab_size, two.document_mark) == (3, 2)
    byte = build_tokenizer("byte", [], 1)
    assert (byte.vocab_size, byte.document_mark) == (257, 256)


@NAMES
def test_a_mark_reads_as_a_blank_line_and_is_no_text(name):
    tokenizer = build_tokenizer(name, ["ab"], 2)
    a, b = (tokenizer.encode(letter)[0] for letter in "ab")
    ids = np.array([a, tokenizer.document_mark, b, tokenizer.document_mark])
    assert tokenizer.decode(ids) == "a\n\nb\n\n"
    assert tokenizer.count_text(ids) == (2, 2)


@pytest.mark.parametrize(("text", "documents", "start"), [
    ("ab\n c", 2, None), ("ab\n c", 1, "\n"), ("ab c", 1, " "), ("abc", 1, "a")])
def test_the_start_token_is_one_the_model_has_seen(text, documents, start):
    tokenizer = CharTokenizer.build([text], documents)
    expected = tokenizer.document_mark if start is None else tokenizer.encode(start)[0]
    assert tokenizer.start_token == expected
    assert ByteTokenizer.build([text], documents).start_token == (256 if documents > 1 else 10)


def test_unknown_characters_are_listed_with_their_positions():
    ascii_model = CharTokenizer.build(["".join(map(chr, range(32, 127)))], 1)
    with pytest.raises(UserError) as error:
        ascii_model.encode("naïve café")
    line = str(error.value)
    assert "'ï' (U+00EF) at position 2" in line and "'é' (U+00E9) at position 9" in line
    assert "\n" not in line
    with pytest.raises(UserError, match=r"'\\n' \(U\+000A\) at position 1"):
        ascii_model.encode("a\nb\nc")
    with pytest.raises(UserError, match="and 12 more"):
        ascii_model.encode("".join(map(chr, range(0x400, 0x414))))
    with pytest.raises(UserError, match="position 0"):  # far above every known character
        ascii_model.encode("\U0010ffff")
    with pytest.raises(UserError, match="position 0"):  # below the largest, but a gap
        CharTokenizer.build(["az"], 1).encode("m")


@NAMES
def test_half_a_surrogate_pair_is_refused(name):
    with pytest.raises(UserError, match="position 2"):
        build_tokenizer("byte", [], 1).encode("ab\udce9")
    if name == "byte":  # which looks at no text
        return
    with pytest.raises(UserError, match="U\\+DCE9"):
        build_tokenizer(name, ["ab\udce9"], 1)


@NAMES
@pytest.mark.parametrize("wrong", [-1, 10_000])
def test_ids_outside_the_vocabulary_are_refused(name, wrong):
    tokenizer = build_tokenizer(name, ["ab"], 1)
    with pytest.raises(UserError, match=f"{wrong} at position 1"):
        tokenizer.decode([0, wrong])
    with pytest.raises(UserError, match=f"{wrong}"):
        TextStream(tokenizer).push(wrong)


@pytest.mark.parametrize("saved", [
    None, [], {}, {"name": "bpe"}, {"name": ["char"]}, {"name": "byte"},
    {"name": "byte", "start_token": 257}, {"name": "byte", "start_token": True},
    {"name": "char", "characters": "ba", "document_mark": False},
    {"name": "char", "characters": "aa", "document_mark": False},
    {"name": "char", "characters": "", "document_mark": False},
    {"name": "char", "characters": "a\ud800", "document_mark": False},
    {"name": "harris"}, {"name": "harris", "segments": ["ab"]},
    {"name": "harris", "segments": ["ab", "ab"], "start_token": 10},
    {"name": "harris", "segments": ["a"], "start_token": 10},
    {"name": "harris", "segments": ["a\ud800"], "start_token": 10},
    {"name": "harris", "segments": ["ab"], "start_token": 258},
    {"name": "bpe", "tokenizer": {}, "start_token": 0},
    {"name": "bpe", "tokenizer": [], "start_token": 0},
    {"name": "char", "characters": "ab"}, {"name": "char", "characters": 3,
                                           "document_mark": True}])
def test_damaged_saved_tokenizers_are_refused(saved):
    with pytest.raises(UserError):
        tokenizer_from_dict(saved)


def test_unknown_names_and_empty_texts_are_refused():
    with pytest.raises(UserError, match="--tokenizer words: expected byte, char, harris, bpe"):
        build_tokenizer("words", ["a"], 1)
    with pytest.raises(UserError, match="empty"):
        build_tokenizer("char", ["", ""], 1)
