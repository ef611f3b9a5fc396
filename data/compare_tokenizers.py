#!/usr/bin/env python3
"""Tokenizers on a text none of them has seen, and on words whose morphemes are known.

    python data/compare_tokenizers.py --train TEXT... --held-out FILE [--vocab-size 8449]

One row a tokenizer: bytes a token on the held-out text, and how the places where it cuts words
agree with those of morphemes.txt: precision, recall and their harmonic mean.
"""

import resource
import sys
import time
from itertools import accumulate
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from andrea_numba.program import run_program

MORPHEMES = Path(__file__).with_name("morphemes.txt")


def morphemes() -> list[list[str]]:
    """The words of morphemes.txt, each as its morphemes."""
    lines = MORPHEMES.read_text(encoding="utf-8").splitlines()
    return [line.split("|") for line in lines if not line.startswith("#")]


def ends(pieces: list[str]) -> set[int]:
    """Where a word is cut: the ends of all pieces but the last."""
    return set(list(accumulate(map(len, pieces)))[:-1])


def agreement(tokenizer) -> tuple[float, float, float]:
    """Precision, recall and F1 of the cuts inside words, each encoded after a space."""
    right = cut = true = 0
    for word in morphemes():
        ids = tokenizer.encode(" " + "".join(word)).tolist()
        pieces = [tokenizer.token_bytes(token).decode("ascii") for token in ids]
        found = {end - 1 for end in ends(pieces)} - {0}  # the space is not part of the word
        expected = ends(word)
        right, cut, true = right + len(found & expected), cut + len(found), true + len(expected)
    precision, recall = right / max(1, cut), right / true
    return precision, recall, 2 * right / (cut + true)


def main() -> int:
    from andrea_numba.args import Parser
    from andrea_numba.sources import open_sources
    from andrea_numba.tokenizers import LEARNED, build_tokenizer, whole_words

    parser = Parser(prog="compare_tokenizers.py", description=__doc__.split("\n")[0])
    parser.add_argument("--train", nargs="+", required=True, help="text to learn from")
    parser.add_argument("--held-out", required=True, help="text to measure on")
    parser.add_argument("--vocab-size", type=int, default=8449, help="ids (default: 8449)")
    parser.add_argument("--tokenizer", action="append", choices=list(LEARNED),
                        help="only this one; may be given several times")
    options = parser.parse(None)
    documents = list(open_sources(options.train))
    held_out = "".join(text for document in open_sources([options.held_out])
                       for text in document.chunks())
    n_bytes = len(held_out.encode())
    print("| tokenizer | bytes a token | precision | recall | F1 | built in s | peak MiB so far "
          "| encodes MB/s | decodes MB/s |\n|---|---|---|---|---|---|---|---|---|")
    for name in options.tokenizer or LEARNED:
        started = time.perf_counter()
        chunks = (text for document in documents for text in whole_words(document.chunks()))
        tokenizer = build_tokenizer(name, chunks, len(documents), options.vocab_size)
        built = time.perf_counter() - started
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        tokenizer.decode(tokenizer.encode("compiled before it is timed"))
        started = time.thread_time()
        ids = tokenizer.encode(held_out)
        encoded = time.thread_time()
        same = tokenizer.decode(ids) == held_out
        decoded = time.thread_time()
        scores = " | ".join(f"{score:.3f}" for score in agreement(tokenizer))
        print(f"| {name} | {n_bytes / len(ids):.3f} | {scores} | {built:.1f} | {peak:.0f} | "
              f"{n_bytes / 1e6 / (encoded - started):.1f} | "
              f"{n_bytes / 1e6 / (decoded - encoded):.1f} |" + ("" if same else " not lossless"),
              flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_program("compare_tokenizers.py", main))
