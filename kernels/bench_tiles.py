"""Which tile of the tensor-core product is fastest: python -m kernels.bench --tiles

The products of a training step at each preset's width, in every tile, and weight gradients with
their rows split among several blocks. `chosen` marks what the launcher takes today and `best` the
fastest: where they differ, gpu_bf16's choice is wrong for that GPU. Without a GPU it is the time
model that speaks, for each GPU that it knows. Nothing is chosen by this file.
"""

import inspect
import statistics
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from .common.gpus import CHIPS, ceilings
from .common.spec import BFLOAT16
from .common.timing import measure_gpu
from .common.verify import upload
from .registry import load_op
from .time_model import launches_of, predict

TOKENS = 16384
WIDTHS = (384, 768, 1536)  # of the presets
VOCABULARY = 8576
SPLITS = range(1, 9)
COLUMNS = ("gpu", "form", "M", "N", "K", "tile", "splits", "median_ms", "TFLOP/s", "model_ms",
           "chosen", "best")


def shapes() -> Iterator[tuple[int, int, bool]]:
    """(K, N, transpose_w) of a block's linear layers, and of the head."""
    for d in WIDTHS:
        yield from ((d, 3 * d, False), (d, d, False), (d, 4 * d, False), (4 * d, d, False),
                    (d, VOCABULARY, True))


def rows(gpu: str, seconds: float = 0.2, at_least: int = 5) -> Iterator[dict[str, str]]:
    """A row for each product and variant; gpu "": by the model, else measured as well."""
    known = ceilings(gpu)
    names = [known.name if known else gpu] if gpu else CHIPS
    for K, N, transpose_w in shapes():
        make = _ones if gpu else SimpleNamespace
        x, y, w = (make(shape=shape, dtype=BFLOAT16) for shape in
                   ((TOKENS, K), (TOKENS, N), (N, K) if transpose_w else (K, N)))
        dw = make(shape=w.shape, dtype=np.dtype(np.float32))
        none = {"pre_gelu": None, "bias": None, "residual": None}
        calls = (  # the gradient of x is a product with the other orientation of w
            ("y", "forward", {"y": y, "x": x, "w": w, **none, "transpose_w": transpose_w}),
            ("dx", "forward", {"y": x, "x": y, "w": w, **none, "transpose_w": not transpose_w}),
            ("dw", "backward", {"dx": None, "dw": dw, "dbias": None, "dy": y, "x": x, "w": w,
                                "pre_gelu": None, "transpose_w": transpose_w}))
        for form, name, given in calls:
            ordered = {key: given[key] for key in _parameters(name)}
            for chip in names:
                yield from _variants(form, name, ordered, chip, (TOKENS, N, K),
                                     (seconds, at_least) if gpu else None)


def _ones(shape: tuple[int, ...], dtype: np.dtype) -> Any:
    return upload(np.ones(shape, dtype), "gpu")


def _parameters(name: str) -> list[str]:
    return list(inspect.signature(getattr(load_op("matmul", "oracle"), name)).parameters)


def _variants(form: str, name: str, arguments: dict[str, Any], gpu: str, sizes: tuple,
              clock: tuple[float, int] | None) -> Iterator[dict[str, str]]:
    """The rows of one product on one GPU."""
    from .matmul import gpu_bf16

    product = getattr(load_op("matmul", "gpu"), name)
    chosen = None
    if gpu in CHIPS:
        launch = launches_of("matmul", name, arguments, CHIPS[gpu])[0]
        chosen = launch.kernel, launch.blocks
    found = []
    for tile in (gpu_bf16.LARGE, gpu_bf16.SMALL):
        for splits in SPLITS if form == "dw" else (1,):
            terms = -(-sizes[0] // splits // gpu_bf16.DEPTH) * gpu_bf16.DEPTH
            variant = tile, -(-sizes[0] // terms), terms
            with mock.patch.multiple(gpu_bf16, _choose=lambda *_, tile=tile: (tile, True),
                                     _choose_gradient=lambda *_, variant=variant: variant):
                measured = modelled = marked = None
                if gpu in CHIPS:
                    launch = launches_of("matmul", name, arguments, CHIPS[gpu])[0]
                    marked = (launch.kernel, launch.blocks) == chosen
                    modelled = sum(each.seconds for each in
                                   predict("matmul", name, arguments, gpu))
                if clock:
                    measured = statistics.median(
                        measure_gpu(lambda: product(*arguments.values()), *clock))
            found.append((measured or modelled or 0.0, measured, modelled, marked, tile, splits))
    fastest = min(seconds for seconds, *_ in found)
    for seconds, measured, modelled, marked, tile, splits in found:
        rate = 2e-12 * float(np.prod(sizes, dtype=np.float64)) / seconds if seconds else 0.0
        yield dict(zip(COLUMNS, (
            gpu, form, *map(str, sizes), str(tile), str(splits), _ms(measured), f"{rate:.1f}",
            _ms(modelled), "*" if marked else "", "*" if seconds == fastest else ""),
            strict=True))


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.4f}"
