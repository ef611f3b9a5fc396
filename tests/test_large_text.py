"""Memory does not grow with the text: the short form of `python -m tests.large_text`."""

import pytest
from large_text import peak

pytest.importorskip("resource", reason="measures as POSIX does")


@pytest.mark.parametrize("form", ["one line of text", "long JSON lines"])
def test_memory_stays_bounded(tmp_path, form):
    sizes = [24 << 20, 64 << 20]  # of several lines of JSON; in bytes
    peaks = []
    for size in sizes:
        folder = tmp_path / str(size)
        folder.mkdir()
        peaks.append(peak(form, size, folder))
    # A quarter of what the larger text's ids take more than the smaller one's.
    assert peaks[1] - peaks[0] < 2 * (sizes[1] - sizes[0]) // 4, peaks
