"""CPU causal attention in tiles of 64 queries by 64 keys; no [T, T] array exists at any time.

All products of a tile have one form, C[r, :] += sum_k A[r, k] * B[k, :], with contiguous rows of
C and B: scores are kept transposed, [key][query], so that keys and values enter as scalars A
straight from their rows, and the softmax over keys needs no horizontal sums. Rows of B and C lie
in panels of 32 columns, which makes their distance a constant that LLVM can vectorise over.

Forward runs over (sequence, head, pair of query tiles), backward over (sequence, head) with query
tiles in order, so sums have a fixed order without atomics. Scratch of one task, allocated inside
it, for head_dim 64: 112 KB forward, 210 KB backward.
"""

import math

import numpy as np
from numba import prange

from ..common.cache import njit
from ..common.cpu_math import FAST, FAST_SUM, F, exp, exp2, pointer, stack_array
from ..common.cpu_tile import PANEL, multiply_add
from .cpu_tile import (
    LOW,
    TILE,
    add_rows,
    fill,
    hide_future,
    pack_panels,
    pack_rows,
    pack_transposed,
)

_LOG2_E = 1.4426950408889634
_LN_2 = 0.6931471805599453


def forward(out, lse, qkv) -> None:
    """out [N,d] = softmax(q·kᵀ/sqrt(D), causal)·v per head; lse [B,H,T] natural log-sum-exp."""
    _forward(out, lse, qkv, F(_LOG2_E / math.sqrt(out.shape[1] // lse.shape[1])))


def backward(dqkv, dout, out, lse, qkv) -> None:
    """dqkv [N,3d] from dout, out [N,d], lse [B,H,T] and qkv [N,3d] of forward."""
    _backward(dqkv, dout, out, lse, qkv, F(1.0 / math.sqrt(out.shape[1] // lse.shape[1])))


def append(k_cache, v_cache, qkv, start) -> None:
    """Rows start..start+T-1 of k_cache and v_cache [B,H,context,D] from qkv [B*T,3d].

    start [1] is 0 where it is None.
    """
    batch, heads, context, head_dim = k_cache.shape
    rows = qkv.reshape(batch, -1, 3, heads, head_dim)
    first = 0 if start is None else int(start[0])
    stop = first + rows.shape[1]
    if first < 0 or stop > context:
        raise ValueError(f"positions {first}..{stop - 1} do not fit a key/value cache of "
                         f"{context} positions: start a new window")
    k_cache[:, :, first:stop] = rows[:, :, 1].transpose(0, 2, 1, 3)
    v_cache[:, :, first:stop] = rows[:, :, 2].transpose(0, 2, 1, 3)


def decode(out, qkv, k_cache, v_cache, position) -> None:
    """out [B,d]: the query of qkv [B,3d] over rows 0..position of the caches [B,H,context,D].

    position [1]: in memory, as on a GPU.
    """
    last = int(position[0])
    if not 0 <= last < k_cache.shape[2]:
        raise ValueError(f"position {last} is outside a key/value cache of "
                         f"{k_cache.shape[2]} positions")
    _decode(out, qkv, k_cache, v_cache, last, F(1.0 / math.sqrt(k_cache.shape[3])))


@njit(fastmath=FAST)
def _online_softmax(scores, base, keys, acc, acc_start, width, largest, total):
    """Scores of one panel -> exponentials; rescales total and acc to the new maximum.

    Four rows at a time, so that one load and store of a maximum or sum serves four.
    """
    highest = stack_array(PANEL)
    factor = stack_array(PANEL)
    for i in range(PANEL):
        highest[i] = largest[i]
    for j in range(0, keys, 4):
        rows = scores[base + j * PANEL:]
        for i in range(PANEL):
            x = highest[i]
            x = rows[i] if rows[i] > x else x
            x = rows[PANEL + i] if rows[PANEL + i] > x else x
            x = rows[2 * PANEL + i] if rows[2 * PANEL + i] > x else x
            x = rows[3 * PANEL + i] if rows[3 * PANEL + i] > x else x
            highest[i] = x
    for i in range(PANEL):
        factor[i] = exp2(largest[i] - highest[i])
        largest[i] = highest[i]
        total[i] *= factor[i]
    for j in range(0, keys, 4):
        rows = scores[base + j * PANEL:]
        for i in range(PANEL):
            e0 = exp2(rows[i] - highest[i])
            e1 = exp2(rows[PANEL + i] - highest[i])
            e2 = exp2(rows[2 * PANEL + i] - highest[i])
            e3 = exp2(rows[3 * PANEL + i] - highest[i])
            rows[i] = e0
            rows[PANEL + i] = e1
            rows[2 * PANEL + i] = e2
            rows[3 * PANEL + i] = e3
            total[i] += (e0 + e1) + (e2 + e3)
    for j in range(0, width, 4):
        rows = acc[acc_start + j * PANEL:]
        for i in range(PANEL):
            rows[i] *= factor[i]
            rows[PANEL + i] *= factor[i]
            rows[2 * PANEL + i] *= factor[i]
            rows[3 * PANEL + i] *= factor[i]


@njit(fastmath=FAST)
def _forward_tile(out, lse, qkv, b, h, tile, scale):
    """Rows tile*64.. of one head: over its key tiles, keep maximum, sum and weighted values."""
    length = lse.shape[2]
    d_model = out.shape[1]
    head_dim = d_model // lse.shape[1]
    width = (head_dim + 3) // 4 * 4
    first = b * length
    count = min(TILE, length - tile * TILE)
    panels = (count + PANEL - 1) // PANEL
    queries = np.empty(width * TILE, np.float32)
    keys = np.empty(width * TILE, np.float32)
    values = np.empty(width * TILE, np.float32)
    acc = np.empty(width * TILE, np.float32)
    scores = np.empty(TILE * TILE, np.float32)
    largest = np.empty(TILE, np.float32)
    total = np.empty(TILE, np.float32)
    pack_transposed(queries, width, qkv, first + tile * TILE, count, h * head_dim, head_dim,
                     scale)
    fill(acc, F(0.0))
    fill(largest, LOW)
    fill(total, F(0.0))
    for other in range(tile + 1):
        n_keys = min(TILE, length - other * TILE)
        rows = (n_keys + 3) // 4 * 4
        start = first + other * TILE
        pack_rows(keys, width, qkv, start, n_keys, d_model + h * head_dim, head_dim)
        pack_rows(values, width, qkv, start, n_keys, 2 * d_model + h * head_dim, head_dim)
        for panel in range(panels):
            s = panel * TILE * PANEL
            q = panel * width * PANEL
            used = min(rows, (panel + 1) * PANEL) if other == tile else rows
            multiply_add(scores, s, PANEL, used, PANEL, keys, 0, width, 1, head_dim,
                         pointer(queries, q), True)
            if other == tile:
                hide_future(scores, s, used, panel)
            _online_softmax(scores, s, used, acc, q, width, largest[panel * PANEL:],
                            total[panel * PANEL:])
            multiply_add(acc, q, PANEL, width, PANEL, values, 0, 1, width, used, pointer(scores, s),
                         False)
    for i in range(count):
        inverse = F(1.0) / total[i]
        lse[b, h, tile * TILE + i] = (largest[i] + F(math.log2(total[i]))) * F(_LN_2)
        row = out[first + tile * TILE + i, h * head_dim:(h + 1) * head_dim]
        source = (i // PANEL) * width * PANEL + i % PANEL
        for j in range(row.size):
            row[j] = acc[source + j * PANEL] * inverse


@njit(parallel=True, fastmath=FAST)
def _forward(out, lse, qkv, scale):
    """A task takes query tiles p and last - p: every task has the same number of key tiles."""
    batch, heads, length = lse.shape
    tiles = (length + TILE - 1) // TILE
    pairs = (tiles + 1) // 2
    for task in prange(batch * heads * pairs):
        head = task // pairs
        pair = task - head * pairs
        b = head // heads
        h = head - b * heads
        mirror = tiles - 1 - pair
        for side in range(1 if mirror == pair else 2):
            _forward_tile(out, lse, qkv, b, h, mirror if side else pair, scale)


@njit(fastmath=FAST)
def _score_gradient(scores, dscores, base, keys, lse2, delta, scale):
    """P = exp2(S - lse) in scores; dS = scale * P * (dP - delta) in dscores."""
    for j in range(keys):
        s = scores[base + j * PANEL:]
        ds = dscores[base + j * PANEL:]
        for i in range(PANEL):
            p = exp2(s[i] - lse2[i])
            s[i] = p
            ds[i] = p * (ds[i] - delta[i]) * scale


@njit(fastmath=FAST_SUM)
def _row_dots(delta, dout, out, first, count, column, head_dim):
    """delta[i] = dout[i]·out[i], the sum over keys of P * dP for query i."""
    for i in range(count):
        x = dout[first + i, column:column + head_dim]
        y = out[first + i, column:column + head_dim]
        total = F(0.0)
        for j in range(x.size):
            total += x[j] * y[j]
        delta[i] = total


@njit(fastmath=FAST)
def _backward_head(dqkv, dout, out, lse, qkv, b, h, scale):
    """One head: dK and dV of a key tile are summed over query tiles in order, dQ over keys."""
    length = lse.shape[2]
    d_model = out.shape[1]
    head_dim = d_model // lse.shape[1]
    width = (head_dim + 3) // 4 * 4
    wide = (head_dim + PANEL - 1) // PANEL * PANEL
    column = h * head_dim
    queries_t = np.empty(width * TILE, np.float32)
    douts_t = np.empty(width * TILE, np.float32)
    dqueries_t = np.empty(width * TILE, np.float32)
    keys = np.empty(width * TILE, np.float32)
    values = np.empty(width * TILE, np.float32)
    queries = np.empty(wide * TILE, np.float32)
    douts = np.empty(wide * TILE, np.float32)
    dkeys = np.empty(wide * TILE, np.float32)
    dvalues = np.empty(wide * TILE, np.float32)
    scores = np.empty(TILE * TILE, np.float32)
    dscores = np.empty(TILE * TILE, np.float32)
    lse2 = np.zeros(TILE, np.float32)
    delta = np.zeros(TILE, np.float32)
    for t in range(length):
        for part in range(1, 3):
            start = part * d_model + column
            fill(dqkv[b * length + t, start:start + head_dim], F(0.0))
    for tile in range((length + TILE - 1) // TILE):
        first = b * length + tile * TILE
        count = min(TILE, length - tile * TILE)
        panels = (count + PANEL - 1) // PANEL
        pack_transposed(queries_t, width, qkv, first, count, column, head_dim,
                         scale * F(_LOG2_E))
        pack_transposed(douts_t, width, dout, first, count, column, head_dim, F(1.0))
        pack_panels(queries, qkv, first, count, column, head_dim)
        pack_panels(douts, dout, first, count, column, head_dim)
        _row_dots(delta, dout, out, first, count, column, head_dim)
        for i in range(count):
            lse2[i] = lse[b, h, tile * TILE + i] * F(_LOG2_E)
        for i in range(TILE - count):  # queries beyond T: exp2(0 - 200) leaves no trace
            lse2[count + i] = F(200.0)
            delta[count + i] = F(0.0)
        fill(dqueries_t, F(0.0))
        for other in range(tile + 1):
            start = b * length + other * TILE
            n_keys = min(TILE, length - other * TILE)
            rows = (n_keys + 3) // 4 * 4
            pack_rows(keys, width, qkv, start, n_keys, d_model + column, head_dim)
            pack_rows(values, width, qkv, start, n_keys, 2 * d_model + column, head_dim)
            fill(dkeys, F(0.0))
            fill(dvalues, F(0.0))
            for panel in range(panels):
                s = panel * TILE * PANEL
                q = panel * width * PANEL
                used = min(rows, (panel + 1) * PANEL) if other == tile else rows
                multiply_add(scores, s, PANEL, used, PANEL, keys, 0, width, 1, head_dim,
                             pointer(queries_t, q), True)
                multiply_add(dscores, s, PANEL, used, PANEL, values, 0, width, 1, head_dim,
                             pointer(douts_t, q), True)
                if other == tile:
                    hide_future(scores, s, used, panel)
                _score_gradient(scores, dscores, s, used, lse2[panel * PANEL:],
                                delta[panel * PANEL:], scale)
                multiply_add(dqueries_t, q, PANEL, width, PANEL, keys, 0, 1, width, used,
                             pointer(dscores, s), False)
                for strip in range(wide // PANEL):
                    c = strip * TILE * PANEL
                    r = c + panel * PANEL * PANEL
                    multiply_add(dvalues, c, PANEL, used, PANEL, scores, s, PANEL, 1, PANEL,
                                 pointer(douts, r), False)
                    multiply_add(dkeys, c, PANEL, used, PANEL, dscores, s, PANEL, 1, PANEL,
                                 pointer(queries, r), False)
            add_rows(dqkv, start, n_keys, d_model + column, head_dim, dkeys)
            add_rows(dqkv, start, n_keys, 2 * d_model + column, head_dim, dvalues)
        for i in range(count):
            row = dqkv[first + i, column:column + head_dim]
            source = (i // PANEL) * width * PANEL + i % PANEL
            for j in range(row.size):
                row[j] = dqueries_t[source + j * PANEL]


@njit(parallel=True, fastmath=FAST)
def _backward(dqkv, dout, out, lse, qkv, scale):
    batch, heads, _ = lse.shape
    for head in prange(batch * heads):
        b = head // heads
        _backward_head(dqkv, dout, out, lse, qkv, b, head - b * heads, scale)


@njit(parallel=True, fastmath=FAST_SUM)
def _decode(out, qkv, k_cache, v_cache, position, scale):
    batch, heads, _, head_dim = k_cache.shape
    for head in prange(batch * heads):
        b = head // heads
        h = head - b * heads
        query = qkv[b, h * head_dim:(h + 1) * head_dim]
        scores = np.empty(position + 1, np.float32)
        largest = LOW
        for t in range(position + 1):
            key = k_cache[b, h, t]
            total = F(0.0)
            for j in range(key.size):
                total += query[j] * key[j]
            scores[t] = total * scale
            largest = scores[t] if scores[t] > largest else largest
        total = F(0.0)
        for t in range(scores.size):
            e = exp(scores[t] - largest)
            scores[t] = e
            total += e
        row = out[b, h * head_dim:(h + 1) * head_dim]
        for j in range(row.size):
            row[j] = F(0.0)
        for t in range(scores.size):
            value = v_cache[b, h, t]
            weight = scores[t] / total
            for j in range(value.size):
                row[j] += weight * value[j]
