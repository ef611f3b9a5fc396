"""GPU residual addition: one thread per 4 elements, limited by memory speed."""

from ..common.access import ByAccess
from ..common.cuda import Floats, cuda, float32, int64, kernel
from ..common.launch import ceil_div

THREADS = 256


def forward(out, x, delta) -> None:
    """out = x + delta, any shape; out may be x."""
    words, add = _add.choose(x.size, out, x, delta)
    add.launch(ceil_div(x.size, THREADS * words), out, x, delta, x.size)


def backward(dx, dout, dbranch) -> None:
    """dx = dout + dbranch: the stream was used twice; dx may be either."""
    forward(dx, dout, dbranch)


def _make_add(words, load, store):
    @kernel(threads=THREADS, name=f"_add_{words}")
    def _add(out: Floats, x: Floats, delta: Floats, n: int64):
        values = cuda.local.array(words, float32)
        addends = cuda.local.array(words, float32)
        i = words * cuda.grid(1)
        if i < n:
            load(values, x, i)
            load(addends, delta, i)
            for j in range(words):
                values[j] += addends[j]
            store(out, i, values)

    return _add


_add = ByAccess(_make_add)
