"""Long work on documents: how far it is, and several threads that keep the order."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numba
import numpy as np
from tqdm import tqdm

from .sources import Document


def watched(documents: Iterable[Document], n_characters: int, doing: str) -> Iterator[Document]:
    """The documents; on a terminal, a bar shows how much of them is read."""
    with tqdm(total=n_characters, desc=doing, unit=" characters", unit_scale=True, delay=1,
              leave=False, disable=None, file=sys.stderr) as bar:
        def chunks(document: Document) -> Iterator[str]:
            for text in document.chunks():
                yield text
                bar.update(len(text))

        for document in documents:
            yield Document(document.name, partial(chunks, document))


def in_order(jobs: Iterable[Callable[[], np.ndarray]]) -> Iterator[np.ndarray]:
    """What the jobs give, in their order, computed by as many threads as Numba has."""
    threads = numba.config.NUMBA_NUM_THREADS
    running: deque[Future] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for job in jobs:
            running.append(pool.submit(job))
            if len(running) > 2 * threads:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
