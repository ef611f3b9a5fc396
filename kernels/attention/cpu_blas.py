"""Causal attention by NumPy's BLAS, for processors without the vectors that cpu_vector needs.

QUERIES queries of a head at a time, with all keys that they see.
"""

import math

import numpy as np

QUERIES = 128


def forward(out, lse, qkv) -> None:
    """out [N,d] and lse [B,H,T] of qkv [N,3d]; see cpu.forward."""
    for head, block, seen in _blocks(lse):
        q, k, v = _parts(qkv, 3, lse, head)
        s = _scores(q, k, block, seen)
        largest = s.max(axis=1)
        np.exp(s - largest[:, None], out=s)
        total = s.sum(axis=1)
        _parts(out, 1, lse, head)[0, block] = s @ v[:seen] / total[:, None]
        lse[head][block] = largest + np.log(total)


def backward(dqkv, dout, out, lse, qkv) -> None:
    """dqkv [N,3d] of dout, out [N,d], lse [B,H,T] and qkv [N,3d]; see cpu.backward."""
    dqkv[...] = 0
    for head, block, seen in _blocks(lse):
        q, k, v = _parts(qkv, 3, lse, head)
        dq, dk, dv = _parts(dqkv, 3, lse, head)
        upstream = np.ascontiguousarray(_parts(dout, 1, lse, head)[0, block])
        p = np.exp(_scores(q, k, block, seen) - lse[head][block, None])
        delta = (upstream * _parts(out, 1, lse, head)[0, block]).sum(axis=1, keepdims=True)
        ds = p * (upstream @ v[:seen].T - delta) * np.float32(1 / math.sqrt(q.shape[1]))
        dq[block] = ds @ k[:seen]
        dk[:seen] += ds.T @ q[block]
        dv[:seen] += p.T @ upstream


def _blocks(lse):
    """Head, queries, and the number of keys that the last of them sees."""
    batch, heads, length = lse.shape
    for head in np.ndindex(batch, heads):
        for first in range(0, length, QUERIES):
            last = min(first + QUERIES, length)
            yield head, slice(first, last), last


def _parts(array, parts: int, lse, head) -> np.ndarray:
    """A view [parts, T, D] of one head of [B*T, parts, H, D]."""
    batch, heads, length = lse.shape
    rows = array.reshape(batch, length, parts, heads, -1)
    return rows[head[0], :, :, head[1]].transpose(1, 0, 2)


def _scores(q, k, block: slice, seen: int) -> np.ndarray:
    """Scaled scores of the queries of a block, -infinity where the key is later."""
    s = q[block] @ k[:seen].T * np.float32(1 / math.sqrt(q.shape[1]))
    s[:, block.start:][np.triu_indices(seen - block.start, 1)] = -np.inf
    return s
