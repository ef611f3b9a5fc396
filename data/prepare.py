#!/usr/bin/env python3
"""Text to a token file: `python data/prepare.py TEXT... --output FILE.tokens`."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from andrea_numba.program import run_program


def main() -> int:
    from andrea_numba.args import Parser
    from andrea_numba.data import TokenFile, open_sources, write_token_file
    from andrea_numba.errors import UserError

    parser = Parser(prog="prepare.py", description=__doc__)
    parser.add_argument("text", nargs="+", help="text files, .jsonl files, folders of them")
    parser.add_argument("--tokenizer", default="byte", help="how text becomes token ids: byte, "
                        "char, harris, bpe, or a tokenizer.json (default: byte)")
    parser.add_argument("--vocab-size", type=int, default=0, help="ids that harris and bpe make; "
                        "0 = as many as the text has, at most 8449 (default: 0)")
    parser.add_argument("--special-tokens", action="store_true", help="names of the tokenizer's "
                        "special tokens in the text become their ids (bpe, tokenizer.json)")
    parser.add_argument("--encoding", default="utf-8", help="encoding of the text "
                        "(default: utf-8)")
    parser.add_argument("--output", required=True, help="token file to write")
    options = parser.parse(None)
    sources = open_sources(options.text, options.encoding)
    if os.path.realpath(options.output) in map(os.path.realpath, sources.paths):
        raise UserError(f"--output {options.output} is one of the texts; give another name")
    notices = write_token_file(options.output, sources, options.tokenizer,
                               options.vocab_size, options.special_tokens)
    for notice in (*sources.notices, *notices):
        print(notice, file=sys.stderr)
    written = TokenFile.open(options.output)
    print(f"{options.output}: {written.n_tokens:,} tokens of {written.vocab_size:,} kinds, from "
          f"{written.n_characters:,} characters ({written.n_bytes:,} bytes)")
    return 0


if __name__ == "__main__":
    sys.exit(run_program("prepare.py", main))
