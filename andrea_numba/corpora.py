"""What the positional arguments of `andrea-train` name: built-in corpora, files, token files."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .config import DataConfig
from .data import (
    Dataset,
    Document,
    is_token_file,
    load_token_file,
    open_sources,
    prepare,
)
from .errors import UserError
from .tokenizers import Tokenizer


@dataclass
class Corpus:
    """A named dataset. `source_entropy` is -log p per character (nats) of its validation text
    under the law that generated it; None where no such law is known."""

    name: str
    dataset: Dataset
    source_entropy: float | None = None


def open_corpus(config: DataConfig, context: int, tokenizer: Tokenizer | None = None,
                vocab_size: int = 0) -> Corpus:
    """The text that `config.data` names, as token ids: `stories`, `pydocs`, one token file, or
    text files and folders. A file with a built-in's name is given as ./stories.

    `tokenizer` is the one of the run that is resumed; else one of `vocab_size` ids is learned, if
    it is of a kind that is. Raises UserError for what cannot be read.
    """
    documents: Iterable[Document]
    notices: list[str] = []
    log_probabilities = None
    if not config.data:
        raise UserError("no data given; name text files, a folder, stories or pydocs")
    built_in = [name for name in config.data if name in ("stories", "pydocs")]
    if built_in and len(config.data) > 1:
        raise UserError(f"the built-in corpus {built_in[0]} cannot be mixed with other data: "
                        f"{' '.join(config.data)}; give it alone")
    for given in (*config.data, *config.val_data):
        if not given or "\0" in given:
            raise UserError(f"{given!r} was given as the name of a file")
        close = difflib.get_close_matches(given, ("stories", "pydocs"), n=1)
        if close and not built_in and not os.path.exists(given):
            raise UserError(f"no such file or folder: {Path(given).absolute()}; did you mean the "
                            f"built-in corpus {close[0]}?")
    name = built_in[0] if built_in else Path(os.path.realpath(config.data[0])).stem or "text"
    only = config.data[0] if len(config.data) == 1 else ""
    if os.path.isfile(only) and is_token_file(only):
        if config.val_data:
            raise UserError(f"{only} is a token file: its last part is the validation "
                            "text (--val-fraction), and --val-data cannot be given")
        dataset = load_token_file(only, config.val_fraction, context)
        if config.special_tokens and not dataset.tokenizer.special_names:
            raise UserError(f"{only} is a token file, made without --special-tokens; give it to "
                            "data/prepare.py")
        return Corpus(name, dataset)
    if name == "stories" and built_in:
        from .stories import generate_stories

        stories = generate_stories()
        documents = [Document.from_text(f"story {i}", s.text) for i, s in enumerate(stories)]
        log_probabilities = [s.log_probability for s in stories]
    elif built_in:
        from .pydocs import collect_docstrings

        documents = [Document.from_text(f"docstring {i}", text)
                     for i, text in enumerate(collect_docstrings())]
    else:
        documents = open_sources(config.data, config.encoding)
        notices += documents.notices
    val_documents = None
    if config.val_data:
        val_documents = open_sources(config.val_data, config.encoding)
        notices += val_documents.notices
        used = {os.path.realpath(path) for path in getattr(documents, "paths", ())}
        for path in val_documents.paths:
            if os.path.realpath(path) in used:
                raise UserError(f"{path} is training text and validation text at once; leave it "
                                "out of one of them")
    dataset = prepare(documents, config.tokenizer, config.val_fraction, context,
                      tokenizer=tokenizer, val_documents=val_documents, vocab_size=vocab_size,
                      special_tokens=config.special_tokens)
    dataset.notices[:0] = notices
    entropy = None
    starts_at_document = dataset.train[-1:] == dataset.tokenizer.document_mark
    if log_probabilities and len(dataset.val) and not val_documents and starts_at_document:
        # Validation holds whole documents, the last ones, each followed by its mark.
        nats = -sum(log_probabilities[-dataset.n_val_documents:])
        entropy = nats / dataset.val_characters
    return Corpus(name, dataset, entropy)
