"""The folder of token files that runs on the same text share."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from .errors import UserError
from .token_file import VERSION, TokenFile
from .tokenising import Tokenising
from .tokenizers import LEARNED, Tokenizer, tokenizer_from_dict

LEARNING = 1  # to be raised when the same text teaches a tokenizer something else
ABANDONED_SECONDS = 7 * 24 * 3600  # when what was left unfinished, and not gone on with, is removed


def cache_folder() -> Path:
    """Where token files are kept: below ANDREA_CACHE_DIR, XDG_CACHE_HOME or ~/.cache."""
    base = os.environ.get("ANDREA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    base = os.path.expanduser(base)
    if base.startswith("~"):  # nobody's home: this user has none
        base = tempfile.gettempdir()
    return Path(base, "andrea-numba", "tokens")


class TokenCache:
    """A folder of token files, or a temporary one when that folder cannot be written."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.temporary: tempfile.TemporaryDirectory | None = None
        self.notices: list[str] = []

    def tokenizer(self, name: str, identity: list, build: Callable[[], Tokenizer]) -> Tokenizer:
        """What `build` gives; a tokenizer that is learned is kept under what it depends on."""
        if name not in LEARNED:
            return build()
        digest = hashlib.sha256(json.dumps([LEARNING, name, *identity]).encode()).hexdigest()
        file = self.folder / f"{digest}.tokenizer.json"
        with contextlib.suppress(OSError, ValueError, RecursionError, UserError):
            return tokenizer_from_dict(json.loads(file.read_text(encoding="utf-8")))
        tokenizer = build()
        temporary = file.with_name(f"{file.name}.{secrets.token_hex(4)}.tmp")
        with contextlib.suppress(OSError):  # the ids cannot be kept there either, and that is said
            self.folder.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(tokenizer.to_dict()), encoding="utf-8")
            os.replace(temporary, file)
        return tokenizer

    def tokens(self, work: Tokenising) -> TokenFile:
        """The ids of a text: found, or else written."""
        identity = json.dumps([VERSION, work.survey.fingerprint, work.marks,
                               work.tokenizer.to_dict()])
        name = hashlib.sha256(identity.encode()).hexdigest() + ".tokens"
        try:
            return TokenFile.open(self.folder / name)
        except UserError:
            if os.path.lexists(self.folder / name):
                self.notices.append(f"the token ids in {self.folder / name} are damaged: they are "
                                    "made anew")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._remove_abandoned()
            work.write_resumably(self.folder / name)
        except OSError as error:
            self._fall_back(error)
            try:
                work.write(self.folder / name)
            except OSError as second:
                raise _no_space(self.folder, second) from None
        return TokenFile.open(self.folder / name)

    def _remove_abandoned(self) -> None:
        """Remove what was left unfinished long ago."""
        for file in (*self.folder.glob("*.tmp"), *self.folder.glob("*.partial*")):
            with contextlib.suppress(OSError):
                if time.time() - file.stat().st_mtime > ABANDONED_SECONDS:
                    file.unlink()

    def _fall_back(self, error: OSError) -> None:
        self.notices.append(f"cannot keep token ids in {self.folder} ({error.strerror}): they go "
                            "to a temporary folder and are made anew by the next run; set "
                            "ANDREA_CACHE_DIR to a folder with free space")
        try:
            self.temporary = tempfile.TemporaryDirectory(prefix="andrea-numba-")
        except OSError as second:
            raise _no_space(Path(tempfile.gettempdir()), second) from None
        self.folder = Path(self.temporary.name)


def _no_space(folder: Path, error: OSError) -> UserError:
    return UserError(f"cannot write token ids to {folder}: {error.strerror}; set ANDREA_CACHE_DIR "
                     "to a folder with free space")
