"""Causal multi-head attention in NumPy, with a [T, T] matrix per head."""

import math

import numpy as np


def _heads(qkv: np.ndarray, B: int, T: int, H: int) -> np.ndarray:
    """View qkv [B*T, 3*H*D] as [3, B, H, T, D]; what is written to it reaches qkv."""
    return qkv.reshape(B, T, 3, H, -1).transpose(2, 0, 3, 1, 4)


def _scores(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Scaled scores of q, k [T, D]: [T, T], -infinity where the key is later than the query."""
    T, D = q.shape
    s = q @ k.T / math.sqrt(D)
    s[np.triu_indices(T, 1)] = -np.inf
    return s


def forward(out: np.ndarray, lse: np.ndarray, qkv: np.ndarray) -> None:
    """out = softmax(q · kᵀ / sqrt(D)) · v per head, lse the log-sum-exp of each query's scores."""
    B, H, T = lse.shape
    q, k, v = _heads(qkv, B, T, H)
    out_heads = out.reshape(B, T, H, -1).transpose(0, 2, 1, 3)
    for b, h in np.ndindex(B, H):
        s = _scores(q[b, h], k[b, h])
        largest = s.max(axis=1, keepdims=True)
        p = np.exp(s - largest)
        total = p.sum(axis=1, keepdims=True)
        out_heads[b, h] = (p / total) @ v[b, h]
        lse[b, h] = (largest + np.log(total))[:, 0]


def backward(
    dqkv: np.ndarray, dout: np.ndarray, out: np.ndarray, lse: np.ndarray, qkv: np.ndarray
) -> None:
    """Gradients of q, k and v, with the probabilities recomputed from lse."""
    B, H, T = lse.shape
    q, k, v = _heads(qkv, B, T, H)
    dq, dk, dv = _heads(dqkv, B, T, H)
    dout = dout.reshape(B, T, H, -1).transpose(0, 2, 1, 3)
    out = out.reshape(B, T, H, -1).transpose(0, 2, 1, 3)
    scale = 1 / math.sqrt(q.shape[-1])
    for b, h in np.ndindex(B, H):
        p = np.exp(_scores(q[b, h], k[b, h]) - lse[b, h][:, None])
        dp = dout[b, h] @ v[b, h].T
        delta = (dout[b, h] * out[b, h]).sum(axis=1, keepdims=True)
        ds = p * (dp - delta)
        dq[b, h] = scale * (ds @ k[b, h])
        dk[b, h] = scale * (ds.T @ q[b, h])
        dv[b, h] = p.T @ dout[b, h]


def append(k_cache: np.ndarray, v_cache: np.ndarray, qkv: np.ndarray,
           start: np.ndarray | None) -> None:
    """Write the keys and values of qkv to rows start..start+T-1 of the caches.

    start [1] is 0 where it is None.
    """
    first = 0 if start is None else start[0]
    B, H = k_cache.shape[:2]
    T = len(qkv) // B
    _, k, v = _heads(qkv, B, T, H)
    k_cache[:, :, first : first + T] = k
    v_cache[:, :, first : first + T] = v


def decode(
    out: np.ndarray, qkv: np.ndarray, k_cache: np.ndarray, v_cache: np.ndarray,
    position: np.ndarray
) -> None:
    """Attention of one query per sequence over cache rows 0..position; position [1]."""
    stop = position[0] + 1
    B, H, _, D = k_cache.shape
    q = _heads(qkv, B, 1, H)[0]
    out_heads = out.reshape(B, H, D)
    for b, h in np.ndindex(B, H):
        s = k_cache[b, h, :stop] @ q[b, h, 0] / math.sqrt(D)
        p = np.exp(s - s.max())
        out_heads[b, h] = (p / p.sum()) @ v_cache[b, h, :stop]
