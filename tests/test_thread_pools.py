"""Threads: the same bits whatever their number, and pools that are told to share the cores."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Every op once, on sizes with partial blocks; products and parallel loops alternate.
DIGEST = """
import hashlib
import numpy as np
from kernels.registry import op_table
ops = op_table("cpu")
rng = np.random.default_rng(1)
def normal(*shape):
    return rng.standard_normal(shape, dtype=np.float32)
def empty(*shape):
    return np.full(shape, np.nan, np.float32)
B, T, H, D, V, Vp = 3, 70, 2, 20, 97, 128
d, N = H * D, B * T
ids = rng.integers(0, V, (B, T)).astype(np.int32)
targets = rng.integers(-1, V, N).astype(np.int32)
wte, wpe, gamma, beta = normal(Vp, d), normal(T, d), normal(d), normal(d)
wqkv, w1, b1 = normal(d, 3 * d), normal(d, 4 * d), normal(4 * d)
x, y, mean, rstd = empty(N, d), empty(N, d), empty(N), empty(N)
qkv, att, lse = empty(N, 3 * d), empty(N, d), empty(B, H, T)
pre, h, logits, losses = empty(N, 4 * d), empty(N, 4 * d), empty(N, Vp), empty(N)
ops.embedding.forward(x, ids, wte, wpe, None)
ops.layernorm.forward(y, mean, rstd, x, gamma, beta, 1e-5)
ops.matmul.forward(qkv, None, y, wqkv, None, None, False)
ops.attention.forward(att, lse, qkv)
ops.matmul.forward(h, pre, x, w1, b1, None, False)
ops.matmul.forward(logits, None, x, wte, None, None, True)
dlogits, dx, dh = empty(N, Vp), empty(N, d), normal(N, 4 * d)
grads = np.zeros(2 * (Vp * d + T * d + 4 * d * d), np.float32)
dwte = grads[:Vp * d].reshape(Vp, d)
dwpe = grads[Vp * d:Vp * d + T * d].reshape(T, d)
dw1 = grads[-4 * d * d:].reshape(d, 4 * d)
dgamma, dbeta, db1 = np.zeros(d, np.float32), np.zeros(d, np.float32), np.zeros(4 * d, np.float32)
ops.cross_entropy.backward(losses, dlogits, logits, targets, V, 1.0 / N)
ops.matmul.backward(dx, dwte, None, dlogits, x, wte, None, True)
ops.gelu.backward(dh, dh, pre)
ops.matmul.backward(dx, dw1, db1, dh, x, w1, None, False)
dqkv, dy = empty(N, 3 * d), empty(N, d)
ops.attention.backward(dqkv, dx, att, lse, qkv)
ops.matmul.backward(dy, np.zeros_like(wqkv), None, dqkv, y, wqkv, None, False)
ops.layernorm.backward(dy, None, dgamma, dbeta, dy.copy(), x, mean, rstd, gamma, x)
ops.embedding.backward(dwte, dwpe, dy, ids)
norm = empty(1)
ops.grad_norm.forward(norm, grads, None)
weights, m, v = normal(grads.size), np.zeros_like(grads), np.zeros_like(grads)
rates = np.array([1e-3, 0.1, 0.05], np.float32)
ops.adamw.update(weights, None, m, v, grads, norm, rates, 999, 0.9, 0.95, 1e-8, 0.1, 1.0)
row = empty(1, 4 * d)
ops.matmul.forward(row, None, x[:1], w1, b1, None, False)
k_cache, v_cache, last = empty(B, H, T, D), empty(B, H, T, D), empty(B, d)
ops.attention.append(k_cache, v_cache, qkv, None)
ops.attention.decode(last, np.ascontiguousarray(qkv[T - 1::T]), k_cache, v_cache,
                     np.array([T - 1], np.int32))
for name, array in {
    "qkv": qkv, "att": att, "lse": lse, "h": h, "losses": losses, "dlogits": dlogits,
    "grads": grads, "db1": db1, "dqkv": dqkv, "dgamma": dgamma, "dbeta": dbeta, "norm": norm,
    "weights": weights, "m": m, "v": v, "row": row, "last": last,
}.items():
    assert np.isfinite(array).all(), name
    print(name, hashlib.sha256(array.tobytes()).hexdigest())
"""

PREPARED = """
import os, sys
from andrea_numba.environment import prepare_threads
assert "numpy" not in sys.modules and "numba" not in sys.modules
prepare_threads(0)
assert "numpy" not in sys.modules
print(os.environ["GOMP_SPINCOUNT"], os.environ["OPENBLAS_THREAD_TIMEOUT"])
"""

INTERLEAVED = """
import numpy as np
from kernels.registry import op_table
ops = op_table("cpu")
rng = np.random.default_rng(2)
x = rng.standard_normal((192, 96), dtype=np.float32)
w = rng.standard_normal((96, 96), dtype=np.float32) / 10
y, z = np.empty_like(x), np.empty_like(x)
want = x.astype(np.float64)
first = None
for repeat in range(3):
    z[:] = x
    for step in range(20):
        ops.matmul.forward(y, None, z, w, None, None, False)
        ops.gelu.forward(z, y)
        if repeat == 0:
            a = want @ w
            want = 0.5 * a * (1 + np.tanh(np.sqrt(2 / np.pi) * (a + 0.044715 * a**3)))
    first = z.copy() if first is None else first
    assert np.array_equal(z, first)
print(np.abs(z - want).max() <= 1e-5 * np.abs(want).max(), z.tobytes().hex()[:4096])
"""


def run(code: str, **variables: str) -> str:
    drop = {"GOMP_SPINCOUNT", "OPENBLAS_THREAD_TIMEOUT", "NUMBA_NUM_THREADS",
            "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"}
    environment = {k: v for k, v in os.environ.items() if k not in drop}
    environment.update({"PYTHONPATH": str(ROOT), **variables})
    done = subprocess.run([sys.executable, "-c", code], env=environment, text=True, cwd=ROOT,
                          capture_output=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def with_threads(code: str, threads: int) -> str:
    return run(code, NUMBA_NUM_THREADS=str(threads), OPENBLAS_NUM_THREADS=str(threads),
               GOMP_SPINCOUNT="10000", OPENBLAS_THREAD_TIMEOUT="4")


def test_every_op_gives_the_same_bits_for_any_number_of_threads() -> None:
    one = with_threads(DIGEST, 1)
    assert len(one.splitlines()) == 17
    for threads in (2, 3):
        assert with_threads(DIGEST, threads).splitlines() == one.splitlines()


def test_products_and_parallel_loops_interleaved() -> None:
    one = with_threads(INTERLEAVED, 1)
    assert one.startswith("True ")
    assert with_threads(INTERLEAVED, 2) == one


def test_threads_are_prepared_before_numpy_loads() -> None:
    assert run(PREPARED) == "10000 4"


def test_the_users_thread_settings_are_kept() -> None:
    assert run(PREPARED, GOMP_SPINCOUNT="77", OPENBLAS_THREAD_TIMEOUT="9") == "77 9"
