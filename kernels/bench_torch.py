"""The same ops by PyTorch, to be timed beside ours.

Products go to cuBLAS, attention to SDPA, the optimizer to its fused AdamW. Operands are in the same
precision; what is fused in ours (GELU, the residual sum, adding to a gradient) is what a user of
PyTorch would write: further kernels, or left out where nobody would do it.
"""

import functools
import importlib.util
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from .common.spec import BFLOAT16


@functools.cache
def torch() -> Any:
    """The module, None without it or without its CUDA."""
    if not importlib.util.find_spec("torch"):
        return None
    module = importlib.import_module("torch")
    return module if module.cuda.is_available() else None


def peer(op: str, name: str, arguments: Mapping[str, Any]) -> Callable[[], Any] | None:
    """A call that does on a GPU what `<op>.<name>` does; None if there is none."""
    return peer_on("cuda", op, name, arguments) if torch() else None


def peer_on(device: str, op: str, name: str,
            arguments: Mapping[str, Any]) -> Callable[[], Any] | None:
    """The same on PyTorch's device, which must be there."""
    make = _PEERS.get((op, name))
    if not make:
        return None
    torch = importlib.import_module("torch")
    moved = {key: _tensor(torch, device, value) for key, value in arguments.items()}
    return make(torch, torch.nn.functional, SimpleNamespace(**moved))


def product(size: int, dtype: np.dtype) -> Callable[[], Any]:
    """A product of two square matrices, by cuBLAS."""
    a, b = (_tensor(torch(), "cuda", np.ones((size, size), dtype)) for _ in range(2))
    return lambda: torch().mm(a, b)


def _tensor(torch, device: str, value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype == BFLOAT16:
        return torch.from_numpy(value.view(np.int16)).to(device).view(torch.bfloat16)
    return torch.from_numpy(value).to(device)


def _linear(torch, F, a):
    weight = a.w if a.transpose_w else a.w.T
    bias = None if a.bias is None else a.bias.to(a.x.dtype)

    def call():
        y = F.linear(a.x, weight, bias)
        if a.pre_gelu is not None:
            y = F.gelu(y, approximate="tanh")
        return y if a.residual is None else y + a.residual

    return call


def _linear_gradients(torch, F, a):
    weight = a.w if a.transpose_w else a.w.T

    def call():
        if a.dx is not None:
            torch.mm(a.dy, weight)
        torch.mm(*((a.dy.T, a.x) if a.transpose_w else (a.x.T, a.dy)))
        if a.dbias is not None:
            a.dy.sum(0, dtype=torch.float32)

    return call


def _heads(a) -> list:
    batch, heads, length = a.lse.shape
    return [part.reshape(batch, length, heads, -1).transpose(1, 2)
            for part in a.qkv.chunk(3, dim=1)]


def _attention(torch, F, a):
    q, k, v = _heads(a)
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _attention_gradients(torch, F, a):
    inputs = [part.contiguous().requires_grad_() for part in _heads(a)]
    out = F.scaled_dot_product_attention(*inputs, is_causal=True)
    batch, heads, length = a.lse.shape
    dout = a.dout.reshape(batch, length, heads, -1).transpose(1, 2)
    return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)


def _norm(torch, F, a):
    x = a.x.to(a.y.dtype)
    gamma, beta = (None if p is None else p.to(x.dtype) for p in (a.gamma, a.beta))
    return lambda: F.layer_norm(x, x.shape[1:], gamma, beta, a.eps)


def _norm_gradients(torch, F, a):
    x = a.x.to(a.dy.dtype).requires_grad_()
    gamma = None if a.gamma is None else a.gamma.to(x.dtype).requires_grad_()
    y = F.layer_norm(x, x.shape[1:], gamma)
    inputs = [x] if gamma is None else [x, gamma]
    return lambda: torch.autograd.grad(y, inputs, a.dy, retain_graph=True)


def _loss(torch, F, a):
    logits, targets = a.logits[:, :a.vocab_size], a.targets.long()
    return lambda: F.cross_entropy(logits, targets, ignore_index=-1, reduction="none")


def _loss_gradient(torch, F, a):
    logits, targets = a.logits[:, :a.vocab_size].detach().requires_grad_(), a.targets.long()

    def call():
        loss = F.cross_entropy(logits, targets, ignore_index=-1, reduction="sum")
        return torch.autograd.grad(loss * a.scale, logits)

    return call


def _adamw(torch, F, a):
    weights = torch.nn.Parameter(a.weights)
    weights.grad = a.grads
    return torch.optim.AdamW([weights], lr=1e-3, fused=True).step


_PEERS = {
    ("matmul", "forward"): _linear, ("matmul", "backward"): _linear_gradients,
    ("attention", "forward"): _attention, ("attention", "backward"): _attention_gradients,
    ("layernorm", "forward"): _norm, ("layernorm", "backward"): _norm_gradients,
    ("cross_entropy", "forward"): _loss, ("cross_entropy", "backward"): _loss_gradient,
    ("adamw", "update"): _adamw,
}
