"""The same measurements by PyTorch, in a process that compare.py asks (process.py).

The model is the one of model.py as a user of PyTorch would write it for speed: one product for
q, k and v, SDPA for attention, a vocabulary padded to even edges, fused AdamW, `torch.compile`
where asked. Products in bf16 are autocast's; a decoder in bf16 holds its weights in it, one in
int8 is dynamically quantised.
"""

from __future__ import annotations

import sys
import warnings

import torch
from torch import nn
from torch.nn import functional as F

from ..config import ModelConfig
from .ours import DECODED, PROMPT, _random_ids, peak
from .process import Call, serve


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, cache=None, start: int = 0):
        batch, length, width = x.shape
        qkv = self.qkv(self.ln_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        if cache is not None:
            cache[0, :, :, start:start + length], cache[1, :, :, start:start + length] = k, v
            k, v = cache[:, :, :, :start + length]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=length > 1)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        width, self.config = config.d_model, config
        self.tokens = nn.Embedding(config.padded_vocab_size, width)
        self.positions = nn.Embedding(config.context, width)
        self.blocks = nn.ModuleList(Block(width, config.n_head) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(width)
        self.head = nn.Linear(width, config.padded_vocab_size, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def rows(self, ids, caches=None, start: int = 0):
        """The final norm's rows."""
        x = self.tokens(ids) + self.positions.weight[start:start + ids.shape[1]]
        for block, cache in zip(self.blocks, caches or [None] * len(self.blocks), strict=True):
            x = block(x, cache, start)
        return self.ln_f(x)

    def loss(self, ids, targets):
        return F.cross_entropy(self.head(self.rows(ids)).flatten(0, 1), targets.flatten())

    def caches(self, dtype, samples: int) -> list:
        c = self.config
        shape = (2, samples, c.n_head, c.context, c.head_dim)
        return [torch.zeros(shape, dtype=dtype) for _ in self.blocks]


def train(model: dict, batch: int, precision: str, compiled: bool = False) -> tuple[Call, dict]:
    """One training step, from the batch to the updated weights."""
    gpt = Gpt(ModelConfig(**model))
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-4, betas=(0.9, 0.99), weight_decay=0.1,
                                  fused=True)
    loss_of = torch.compile(gpt.loss) if compiled else gpt.loss
    ids, targets = torch.randint(model["vocab_size"], (2, batch, model["context"]))

    def step() -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = loss_of(ids, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step, {"tokens": ids.numel()}


def op(op: str, name: str, case: dict) -> tuple[Call, dict]:
    """What `<op>.<name>` does, on the same numbers."""
    from kernels.bench_torch import peer_on
    from kernels.common.verify import as_stored, build_arguments
    from kernels.registry import load_spec

    function = load_spec(op).FUNCTIONS[name]
    arguments = as_stored(function, case, build_arguments(op, name, case))
    return peer_on("cpu", op, name, arguments), {}


def decode(model: dict, weights: str, samples: int = 1) -> tuple[Call, dict]:
    """One token of each sample: its logits from the key-value cache, and the likeliest of them."""
    gpt, caches = _generator(model, weights, samples)
    ids = torch.from_numpy(_random_ids(model, PROMPT)).expand(samples, -1)
    position, tokens = PROMPT, torch.zeros((samples, 1), dtype=torch.int64)

    @torch.inference_mode()
    def call():
        nonlocal position
        tokens[:] = gpt.head(gpt.rows(tokens, caches, position)).argmax(-1)
        position = PROMPT + (position + 1) % DECODED

    with torch.inference_mode():
        gpt.rows(ids, caches)
    return call, {"tokens": samples}


def prefill(model: dict, length: int) -> tuple[Call, dict]:
    """A prompt of `length` tokens, up to the logits of the next one."""
    gpt, caches = _generator(model, "fp32")
    ids = torch.from_numpy(_random_ids(model, length)[None])

    @torch.inference_mode()
    def call():
        return gpt.head(gpt.rows(ids, caches)[:, -1])

    return call, {"tokens": length}


def _generator(model: dict, weights: str, samples: int = 1):
    gpt, dtype = Gpt(ModelConfig(**model)).eval(), torch.float32
    if weights == "bf16":
        dtype = torch.bfloat16
        gpt = gpt.to(dtype)
    elif weights == "int8":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its successor is a package of its own
            gpt = torch.ao.quantization.quantize_dynamic(gpt, {nn.Linear}, dtype=torch.qint8)
    return gpt, gpt.caches(dtype, samples)


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]))
    serve({f.__name__: f for f in (train, op, decode, prefill)},
          {"peak": peak})
