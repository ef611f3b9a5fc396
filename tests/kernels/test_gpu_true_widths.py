"""Every op once at the widths of andrea-120m, 768 / 12 heads / 3072 / 8449, with few rows."""

import pytest
import vgpu

from kernels.common.spec import label
from kernels.common.verify import ALIGNED_GUARD_WORDS, verify
from kernels.registry import load_op

pytest.importorskip("numba_cuda")

D, HEADS, MLP, V, PADDED = 768, 12, 3072, 8449, 8576
HEAD = {"B": 1, "H": HEADS, "D": D // HEADS, "d": D}
CASES = [
    ("embedding", "forward", {"B": 1, "T": 5, "d": D, "Vp": PADDED, "context": 1024, "start": 0}),
    ("embedding", "backward", {"B": 1, "T": 5, "d": D, "Vp": PADDED, "context": 1024, "start": 0}),
    ("layernorm", "forward", {"N": 5, "d": D}),
    ("layernorm", "backward", {"N": 5, "d": D}),
    ("layernorm", "forward", {"N": 5, "d": D, "precision": "bf16"}),
    ("layernorm", "backward", {"N": 5, "d": D, "precision": "bf16"}),
    ("matmul", "forward", {"M": 5, "N": 3 * D, "K": D}),
    ("matmul", "forward", {"M": 5, "N": MLP, "K": D, "gelu": True}),
    ("matmul", "backward", {"M": 5, "N": D, "K": MLP}),
    ("matmul", "forward", {"M": 2, "N": PADDED, "K": D, "transpose_w": True, "bias": False}),
    ("matmul", "backward", {"M": 2, "N": PADDED, "K": D, "transpose_w": True, "bias": False}),
    ("gelu", "backward", {"shape": (5, MLP)}),
    ("attention", "forward", {**HEAD, "T": 33}),
    ("attention", "backward", {**HEAD, "T": 33}),
    ("attention", "append", {**HEAD, "T": 1, "rows": 1, "context": 1024, "start": 1000}),
    ("attention", "decode", {**HEAD, "T": 1, "rows": 1, "context": 1024, "position": 1000}),
    ("cross_entropy", "forward", {"N": 5, "V": V, "Vp": PADDED}),
    ("cross_entropy", "backward", {"N": 5, "V": V, "Vp": PADDED}),
    ("cross_entropy", "forward", {"N": 5, "V": V, "Vp": PADDED, "precision": "bf16"}),
    ("cross_entropy", "backward", {"N": 5, "V": V, "Vp": PADDED, "precision": "bf16"}),
    ("adamw", "update", {"P": D * MLP + MLP, "n_decay": D * MLP, "step": 3}),
    ("adamw", "update", {"P": D * MLP, "n_decay": D * MLP, "step": 3, "precision": "bf16"}),
    ("grad_norm", "forward", {"P": D * MLP + MLP}),
]


@pytest.mark.parametrize(("op", "name", "case"), [
    pytest.param(*call, id=f"{call[0]}.{call[1]} {label(call[2])}") for call in CASES])
def test_true_width(op, name, case):
    implementation = getattr(load_op(op, "gpu"), name)
    with vgpu.options(approx="hostile"):
        assert verify(op, name, case, implementation, "gpu", ALIGNED_GUARD_WORDS) == []
