"""Text generation: the token loop at the context edge, streaming and stop strings."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from helpers import dataset, tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels.registry
from andrea_numba import model
from andrea_numba.buffers import Buffers
from andrea_numba.config import ModelConfig
from andrea_numba.decoder import Decoder, stored_views
from andrea_numba.errors import UserError
from andrea_numba.generate import (
    StopFilter,
    generate_ids,
    generate_text,
    generate_texts,
    prompt_ids,
)
from andrea_numba.initialize import initialize
from andrea_numba.parameters import ParameterTable
from andrea_numba.sampler import Sampling, sample, sample_rng
from andrea_numba.tokenizers import ByteTokenizer, CharTokenizer
from andrea_numba.trainer import Trainer

GREEDY = Sampling(temperature=0)
ASCII = CharTokenizer.build(["".join(map(chr, range(32, 127)))], 1)


class ScoresFromWindow:
    """Stands in for a decoder: its scores depend on every token in the window and their order."""

    def __init__(self, context: int, vocab_size: int):
        self.context, self.vocab_size = context, vocab_size
        self.window: list[int] = []
        self.prefilled: list[list[int]] = []
        self.steps = 0

    @property
    def length(self) -> int:
        return len(self.window)

    def prefill(self, ids):
        assert 1 <= len(ids) <= self.context
        self.window = [int(i) for i in ids]
        self.prefilled.append(list(self.window))
        return self._scores()

    def step(self, token):
        assert self.length < self.context, "step in a full window"
        self.window.append(token)
        self.steps += 1
        return self._scores()

    def _scores(self):
        return np.random.default_rng(self.window).normal(0, 2, self.vocab_size).astype(np.float32)


class Script:
    """A decoder that makes greedy sampling say `ids`."""

    context = 4

    def __init__(self, ids, vocab_size: int):
        self.ids, self.vocab_size, self.length = iter(ids), vocab_size, 0

    def prefill(self, ids):
        self.length = len(ids)
        return self._scores()

    def step(self, token):
        self.length += 1
        return self._scores()

    def _scores(self):
        scores = np.zeros(self.vocab_size, np.float32)
        scores[next(self.ids)] = 1
        return scores


def scripted(text: str | bytes, tokens: int | None = None, stop=()):
    """Generate the bytes of `text`; returns (result, pieces as streamed)."""
    tokenizer = ByteTokenizer()
    ids = list(text.encode() if isinstance(text, str) else text)
    pieces: list[str] = []
    result = generate_text(Script(ids, 257), tokenizer, "x", tokens or len(ids), GREEDY,
                           sample_rng(0, 0), stop, pieces.append)
    return result, pieces


def small_decoder(context: int, vocab_size: int, cache: bool) -> Decoder:
    """A random model, sharper than a fresh one so that rounding decides no maximum."""
    config = ModelConfig(d_model=32, n_head=2, n_layer=2, context=context, vocab_size=vocab_size)
    table = ParameterTable(config)
    weights = table.zeros()
    initialize(table, weights, np.random.default_rng(4))
    weights[:table.n_decay] *= 10
    return Decoder(config, table.views(weights), kernels.registry.op_table("cpu"), cache)


# ---- the token loop

@pytest.mark.parametrize("context", [1, 2, 3, 8, 9])
@pytest.mark.parametrize("prompt_length", [1, 7, 8, 9, 30])
@pytest.mark.parametrize("max_tokens", [0, 1, 27])
def test_exact_count_and_window(context, prompt_length, max_tokens):
    vocab_size, sampling = 11, Sampling(1.0, repetition_penalty=1.2)
    prompt = np.arange(prompt_length, dtype=np.int32) % vocab_size
    decoder = ScoresFromWindow(context, vocab_size)
    ids = list(generate_ids(decoder, prompt, max_tokens, sampling, sample_rng(1, 0), vocab_size))

    # The same, written as plainly as possible.
    window, expected, rng = prompt.tolist()[-context:], [], sample_rng(1, 0)
    plain = ScoresFromWindow(context, vocab_size)
    for _ in range(max_tokens):
        expected.append(sample(plain.prefill(window), np.array(window), sampling, rng))
        window.append(expected[-1])
        if len(window) > context:
            window = window[-max(1, context // 2):]
    assert len(ids) == max_tokens
    assert ids == expected
    # No pass through the model that no token needs.
    assert len(decoder.prefilled) + decoder.steps == max_tokens


def test_a_longer_run_begins_with_the_shorter_one():
    runs = [generate_text(ScoresFromWindow(64, 95), ASCII, "Once upon ", n, Sampling(0.8),
                          sample_rng(7, 0)) for n in (200, 40)]
    assert [len(run.tokens) for run in runs] == [200, 40]
    assert runs[0].tokens[:40] == runs[1].tokens


def test_greedy_ignores_the_seed():
    texts = {generate_text(ScoresFromWindow(8, 95), ASCII, "a", 50, GREEDY, sample_rng(s, 0)).text
             for s in (1, 2)}
    assert len(texts) == 1


def test_long_prompt_conditions_by_its_end():
    decoder = ScoresFromWindow(64, 95)
    prompt = "".join(chr(32 + i % 95) for i in range(200))
    result = generate_text(decoder, ASCII, prompt, 50, GREEDY, sample_rng(0, 0))
    assert (result.prompt_tokens, result.prompt_tokens_used, len(result.tokens)) == (200, 64, 50)
    assert decoder.prefilled[0] == ASCII.encode(prompt[-64:]).tolist()


def test_empty_prompt_is_the_start_token():
    tokenizer = ByteTokenizer(start_token=256)
    assert prompt_ids(tokenizer, "").tolist() == [256]
    decoder = ScoresFromWindow(8, 257)
    result = generate_text(decoder, tokenizer, "", 3, GREEDY, sample_rng(0, 0))
    assert decoder.prefilled[0] == [256]
    assert (result.prompt_tokens_used, len(result.tokens)) == (1, 3)


def test_unknown_prompt_characters_are_listed():
    with pytest.raises(UserError, match=r"'ï'.* position 2.*'é'.* position 9"):
        generate_text(ScoresFromWindow(8, 95), ASCII, "naïve café", 1, GREEDY, sample_rng(0, 0))


def test_ids_the_tokenizer_does_not_know_are_never_sampled():
    tokenizer = CharTokenizer.build([chr(33 + i) for i in range(65)], 1)
    run = generate_text(ScoresFromWindow(64, 128), tokenizer, "A", 10_000, Sampling(100.0),
                        sample_rng(0, 0))
    assert len(run.tokens) == 10_000 and set(run.tokens) == set(range(65))
    wide = generate_ids(ScoresFromWindow(64, 128), np.array([0]), 500, Sampling(100.0),
                        sample_rng(0, 0), 128)
    assert max(wide) >= 65  # negative control: without the limit they come


def test_broken_model_is_refused():
    decoder = ScoresFromWindow(8, 95)
    decoder._scores = lambda: np.full(95, np.nan, np.float32)
    with pytest.raises(UserError, match="model is broken"):
        generate_text(decoder, ASCII, "a", 5, GREEDY, sample_rng(0, 0))


# ---- streaming

def test_streamed_text_is_the_text_and_never_half_a_character():
    text = "héllo 🙂🇨🇭 日本\n"
    result, pieces = scripted(text)
    assert "".join(pieces) == result.text == text
    assert "\ufffd" not in "".join(pieces)
    assert len(pieces) > 5 and "🙂" in pieces


@pytest.mark.parametrize("raw", [b"ab\xf0\x9f\x99", b"\xff\xfea", b"\xe2\x28\xa1", b"\x80"])
def test_invalid_bytes_read_as_in_one_piece(raw):
    result, pieces = scripted(raw)
    assert "".join(pieces) == result.text == ByteTokenizer().decode(list(raw))
    assert "\ufffd" in result.text


# ---- stop strings

def test_text_ends_before_the_stop_string():
    result, pieces = scripted("one. two. END three", stop=["END", "\n"])
    assert "".join(pieces) == result.text == "one. two. "
    assert result.stopped_by == "END"
    assert len(result.tokens) == len("one. two. END")


def test_a_beginning_of_a_stop_string_is_shown_in_the_end():
    result, pieces = scripted("so be it EN", stop=["END"])
    assert "".join(pieces) == result.text == "so be it EN"
    assert result.stopped_by is None
    assert pieces[-1] == "EN"  # held back until the end


def test_stop_string_of_multi_byte_characters():
    result, pieces = scripted("a🙂b🙂🙂c", stop=["🙂🙂"])
    assert "".join(pieces) == result.text == "a🙂b"
    assert "\ufffd" not in result.text


def test_no_stop_string_holds_nothing_back():
    _, pieces = scripted("abc")
    assert pieces == ["a", "b", "c"]


def cut_by_definition(text: str, stop: list[str]) -> tuple[str, str | None]:
    for end in range(len(text) + 1):
        ending = [s for s in stop if text[:end].endswith(s)]
        if ending:
            longest = max(ending, key=len)
            return text[:end - len(longest)], longest
    return text, None


@settings(max_examples=300, deadline=None)
@given(st.text("abc", max_size=14),
       st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
       st.lists(st.integers(0, 14), max_size=6))
def test_stop_does_not_depend_on_how_the_text_is_cut(text, stop, cuts):
    stops = StopFilter(stop)
    edges = [0, *sorted(min(c, len(text)) for c in cuts), len(text)]
    expected, stopped_by = cut_by_definition(text, stop)
    shown = ""
    for a, b in itertools.pairwise(edges):
        shown += stops.push(text[a:b])
        assert expected.startswith(shown)
    shown += stops.flush()
    assert (shown, stops.stopped_by) == (expected, stopped_by)


# ---- with the model

@pytest.mark.parametrize("context", [1, 2, 63, 64])
def test_cached_and_uncached_text_agree_across_the_context_edge(context):
    runs = [generate_text(small_decoder(context, 95, cache), ASCII, "Once upon ", 200, GREEDY,
                          sample_rng(0, 0)) for cache in (True, False)]
    assert runs[0].tokens == runs[1].tokens
    assert len(runs[0].tokens) == 200
    assert context < 3 or len(set(runs[0].tokens)) > 5  # not one token over and over


def test_cached_and_uncached_logits_agree():
    cached, plain = (small_decoder(16, 95, cache) for cache in (True, False))
    ids = np.random.default_rng(2).integers(0, 95, 16)
    pairs = [(cached.prefill(ids[:4]).copy(), plain.prefill(ids[:4]).copy())]
    pairs += [(cached.step(t).copy(), plain.step(t).copy()) for t in ids[4:].tolist()]
    for a, b in pairs:
        # float32 sums of 32 to 128 terms in two orders, through two blocks
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * np.abs(b).max())
    assert not np.allclose(pairs[0][0], pairs[1][0], rtol=0, atol=1e-2)


def test_untrained_model_never_says_a_padded_token():
    tokenizer = CharTokenizer.build([chr(33 + i) for i in range(65)], 1)
    run = generate_text(small_decoder(64, 65, True), tokenizer, "A", 10_000, Sampling(100.0),
                        sample_rng(0, 0))
    assert len(run.tokens) == len(run.text) == 10_000
    assert max(run.tokens) < 65


@pytest.mark.parametrize("context", [6, 64])
def test_samples_drawn_together_are_those_drawn_alone(context):
    """Bit for bit, also where the window is full and is read again; fewer than `batch` too."""
    config = ModelConfig(d_model=32, n_head=2, n_layer=2, context=context, vocab_size=95)
    table = ParameterTable(config)
    weights = table.zeros()
    initialize(table, weights, np.random.default_rng(4))
    ops = kernels.registry.op_table("cpu")
    alone, together = (Decoder(config, table.views(weights), ops, stored="int8", batch=batch)
                       for batch in (1, 5))
    stop = ("e", "t")
    expected = [generate_text(alone, ASCII, "Once", 30, Sampling(), sample_rng(1, index), stop)
                for index in range(5)]
    assert len({len(result.tokens) for result in expected}) > 1
    for count in (5, 2):
        pieces = []
        assert generate_texts(together, ASCII, "Once", 30, Sampling(),
                              [sample_rng(1, index) for index in range(count)], stop,
                              pieces.append) == expected[:count]
        assert "".join(pieces) == expected[0].text


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    config = tiny_config(steps=150, lr=1e-2, d_model=32)
    data = dataset(config, tmp_path_factory.mktemp("data"))
    trainer = Trainer(config, kernels.registry.op_table("cpu"), data)
    losses = [trainer.step().loss for _ in range(150)]
    assert losses[-1] < losses[0] / 2
    return trainer


@pytest.mark.parametrize(("kind", "percent"), [("fp32", 1e-4), ("bf16", 0.1), ("int8", 1.0)])
def test_stored_weights_change_perplexity_little(trained, kind, percent):
    """Read as a prompt, and token by token from the cache, which is in bfloat16 beside them."""
    config = trained.config.model
    rows = trained.dataset.train[:64 * (config.context + 1)].astype(np.int32).reshape(64, -1)
    ids, targets = (np.ascontiguousarray(part) for part in (rows[:, :-1], rows[:, 1:]))
    ops = kernels.registry.op_table("cpu")
    a = Buffers(config, *ids.shape, training=True).views(*ids.shape)
    perplexities = []
    for p in (trained.p, stored_views(trained.p, kind)):
        model.losses(ops, p, a, ids, targets.reshape(-1), config.vocab_size)
        perplexities.append(np.exp(a.losses.mean(dtype=np.float64)))
    decoder, logits = Decoder(config, trained.p, ops, stored=kind, batch=8), []
    for some in np.split(ids, len(ids) // 8):  # few rows, as in generation
        steps = [decoder.prefill_rows(some[:, :1])]
        steps += [decoder.step_rows(column) for column in some.T[1:]]
        logits.append(np.stack(steps, axis=1))                                    # [8, T, V]
    losses = np.empty(ids.size, np.float32)
    ops.cross_entropy.forward(losses, np.concatenate(logits).reshape(ids.size, -1),
                              targets.reshape(-1), config.vocab_size)
    perplexities.append(np.exp(losses.mean(dtype=np.float64)))
    for changed in perplexities[1:]:
        assert 100 * abs(changed / perplexities[0] - 1) < percent
