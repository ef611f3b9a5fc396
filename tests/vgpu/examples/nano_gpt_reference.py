"""The nano-GPT training step in float64 NumPy: what the device's results are compared with."""

import numpy as np

from .nano_gpt import Config, views
from .nano_gpt_kernels import GELU_CUBIC, GELU_SCALE


def layernorm(x, gain, bias):
    """LayerNorm of each row, and what its backward pass needs."""
    centred = x - x.mean(axis=1, keepdims=True)
    scale = 1 / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-5)
    return centred * scale * gain + bias, (centred * scale, scale)


def layernorm_backward(gradient, kept, gain):
    """Gradients of x, gain and bias."""
    normal, scale = kept
    inner = gradient * gain
    mean = inner.mean(axis=1, keepdims=True)
    weighted = (inner * normal).mean(axis=1, keepdims=True)
    return (
        (inner - mean - normal * weighted) * scale,
        (gradient * normal).sum(axis=0),
        gradient.sum(axis=0),
    )


def gelu(x):
    """GELU in its tanh form, and its slope."""
    t = np.tanh(GELU_SCALE * (x + GELU_CUBIC * x**3))
    slope = GELU_SCALE * (1 + 3 * GELU_CUBIC * x**2)
    return 0.5 * x * (1 + t), 0.5 * (1 + t + x * (1 - t * t) * slope)


def heads_of(matrix, config):
    """[rows, width] as [batch, heads, context, head size]."""
    split = matrix.reshape(config.batch, config.context, config.heads, -1)
    return split.transpose(0, 2, 1, 3)


def rows_of(heads, config):
    """The inverse of `heads_of`."""
    return heads.transpose(0, 2, 1, 3).reshape(config.rows, config.width)


def attention(qkv, config):
    """Causal attention of [rows, 3 * width], and what its backward pass needs."""
    q, k, v = (heads_of(part, config) for part in np.split(qkv, 3, axis=1))
    scores = q @ k.swapaxes(2, 3) / np.sqrt(q.shape[-1])
    scores[..., np.triu(np.ones(scores.shape[-2:], bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return rows_of(weights @ v, config), (q, k, v, weights)


def attention_backward(gradient, kept, config):
    """The gradient of qkv."""
    q, k, v, weights = kept
    outer = heads_of(gradient, config)
    inner = outer @ v.swapaxes(2, 3)
    scores = weights * (inner - (weights * inner).sum(axis=-1, keepdims=True))
    scores /= np.sqrt(q.shape[-1])
    parts = scores @ k, scores.swapaxes(2, 3) @ q, weights.swapaxes(2, 3) @ outer
    return np.concatenate([rows_of(part, config) for part in parts], axis=1)


def loss_and_gradients(config: Config, parameters: np.ndarray, tokens: np.ndarray,
                       targets: np.ndarray) -> tuple[float, np.ndarray]:
    """The mean loss and the flat float64 gradients of flat parameters."""
    p = views(np.asarray(parameters, np.float64), config)
    flat = np.zeros(len(parameters))
    g = views(flat, config)
    rows = np.arange(config.rows)
    positions = rows % config.context
    x = p["token"][tokens] + p["position"][positions]
    layers = []
    for n in range(config.layers):
        normal1, kept1 = layernorm(x, p[f"{n}.gain1"], p[f"{n}.bias1"])
        qkv = normal1 @ p[f"{n}.qkv"] + p[f"{n}.qkv_bias"]
        attended, kept = attention(qkv, config)
        x = x + attended @ p[f"{n}.project"] + p[f"{n}.project_bias"]
        normal2, kept2 = layernorm(x, p[f"{n}.gain2"], p[f"{n}.bias2"])
        active, slope = gelu(normal2 @ p[f"{n}.up"] + p[f"{n}.up_bias"])
        x = x + active @ p[f"{n}.down"] + p[f"{n}.down_bias"]
        layers.append((normal1, kept1, kept, attended, normal2, kept2, active, slope))
    normal, kept_last = layernorm(x, p["gain"], p["bias"])
    logits = normal @ p["token"].T
    logits -= logits.max(axis=1, keepdims=True)
    totals = np.exp(logits).sum(axis=1, keepdims=True)
    loss = (np.log(totals[:, 0]) - logits[rows, targets]).mean()

    logits = np.exp(logits) / totals
    logits[rows, targets] -= 1
    logits /= config.rows
    g["token"][:] = logits.T @ normal

    def linear_backward(gradient, x, name):
        g[name][:] = x.T @ gradient
        g[name + "_bias"][:] = gradient.sum(axis=0)
        return gradient @ p[name].T

    dx, g["gain"][:], g["bias"][:] = layernorm_backward(
        logits @ p["token"], kept_last, p["gain"])
    for n in reversed(range(config.layers)):
        normal1, kept1, kept, attended, normal2, kept2, active, slope = layers[n]
        inner = linear_backward(dx, active, f"{n}.down") * slope
        inner = linear_backward(inner, normal2, f"{n}.up")
        branch, g[f"{n}.gain2"][:], g[f"{n}.bias2"][:] = layernorm_backward(
            inner, kept2, p[f"{n}.gain2"])
        dx = dx + branch
        inner = attention_backward(linear_backward(dx, attended, f"{n}.project"), kept, config)
        inner = linear_backward(inner, normal1, f"{n}.qkv")
        branch, g[f"{n}.gain1"][:], g[f"{n}.bias1"][:] = layernorm_backward(
            inner, kept1, p[f"{n}.gain1"])
        dx = dx + branch
    np.add.at(g["token"], tokens, dx)
    np.add.at(g["position"], positions, dx)
    return loss, flat


def adamw(config: Config, parameters: np.ndarray, gradients: np.ndarray, rate: float = 1e-3,
          decay: float = 0.1) -> np.ndarray:
    """The float64 parameters after the first AdamW step."""
    decayed = np.arange(len(parameters)) < config.matrix_elements()
    update = gradients / (np.abs(gradients) + 1e-8) + decay * decayed * parameters
    return parameters - rate * update
