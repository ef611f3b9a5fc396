"""What can be wrong with a text or with ids, said in one line."""

from __future__ import annotations

import numpy as np

from ..errors import UserError

_LISTED = 8


class UnknownCharacters(UserError):
    """The text holds characters that the tokenizer does not know.

    `unknown` is [(character, position)], positions counted from 0 in the encoded text; each
    character stands once, at its first place.
    """

    def __init__(self, unknown: list[tuple[str, int]], where: str = ""):
        self.unknown = unknown
        listed = ", ".join(f"{c!r} (U+{ord(c):04X}) at position {p}" for c, p in unknown[:_LISTED])
        more = f" and {len(unknown) - _LISTED} more" if len(unknown) > _LISTED else ""
        plural = "s" if len(unknown) > 1 else ""
        super().__init__(
            f"{where}character{plural} not in the tokenizer's vocabulary: {listed}{more} (counted "
            f"from 0); use only characters of the training text, or train with --tokenizer byte")

    def moved(self, offset: int, where: str) -> UnknownCharacters:
        """The same complaint about a text of which the encoded piece began at `offset`."""
        return UnknownCharacters([(c, p + offset) for c, p in self.unknown], where)


def lone_surrogates(text: str) -> UserError:
    """The refusal of a text that is not valid Unicode."""
    position = next(i for i, c in enumerate(text) if "\ud800" <= c <= "\udfff")
    return UserError(f"position {position} of the text (counted from 0) is U+"
                     f"{ord(text[position]):04X}, half of a surrogate pair and not a character; "
                     "give text that can be written as UTF-8")


def checked_ids(ids, vocab_size: int) -> np.ndarray:
    """`ids` as an integer array, or UserError for the first one outside the vocabulary."""
    ids = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids))
    if ids.size == 0:
        return np.zeros(0, np.int64)
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if outside.size:
        raise UserError(f"token id {ids[outside[0]]} at position {outside[0]} is outside the "
                        f"vocabulary, 0 to {vocab_size - 1}; tokenizer and ids do not belong "
                        "together")
    return ids


def too_little_text(name: str, vocab_size: int, possible: int) -> UserError:
    """The refusal of a vocabulary larger than the text has pieces for."""
    return UserError(f"--vocab-size {vocab_size:,} is more than this text gives: --tokenizer "
                     f"{name} finds {possible:,} ids in it, the 256 bytes and the mark included; "
                     f"give more text, or --vocab-size {possible} or less (0 = what the text has)")
