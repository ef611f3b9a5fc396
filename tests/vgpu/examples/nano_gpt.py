"""A complete training step of a small GPT: forward, backward and AdamW on the device.

GPT-2's architecture: pre-norm blocks, GELU in its tanh form, the output layer tied to the token
embedding. All results are the same from run to run: no sum depends on the order of threads.
"""

from dataclasses import dataclass

import numpy as np
from numba import cuda, float32

from . import nano_gpt_kernels as kernels
from .matmul import launch_matmul, transposed
from .reductions import layernorm_rows

WARPS = 4


@dataclass(frozen=True)
class Config:
    """The size of the model and of a batch."""

    layers: int = 2
    width: int = 64
    heads: int = 4
    context: int = 32
    batch: int = 2
    vocabulary: int = 100

    @property
    def rows(self) -> int:
        return self.batch * self.context

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every parameter, in the order in which they lie: matrices first."""
        d, layers = self.width, range(self.layers)
        matrices = {"token": (self.vocabulary, d), "position": (self.context, d)}
        vectors = {}
        for n in layers:
            matrices |= {f"{n}.qkv": (d, 3 * d), f"{n}.project": (d, d),
                         f"{n}.up": (d, 4 * d), f"{n}.down": (4 * d, d)}
            vectors |= {f"{n}.gain1": (d,), f"{n}.bias1": (d,), f"{n}.gain2": (d,),
                        f"{n}.bias2": (d,), f"{n}.qkv_bias": (3 * d,), f"{n}.project_bias": (d,),
                        f"{n}.up_bias": (4 * d,), f"{n}.down_bias": (d,)}
        return matrices | vectors | {"gain": (d,), "bias": (d,)}

    def matrix_elements(self) -> int:
        """How many of the parameters are in matrices."""
        return sum(int(np.prod(shape)) for shape in self.shapes().values() if len(shape) == 2)


def views(flat, config: Config) -> dict:
    """Name -> view of every parameter in a flat array, on the host or on the device."""
    found, start = {}, 0
    for name, shape in config.shapes().items():
        size = int(np.prod(shape))
        found[name] = flat[start:start + size].reshape(shape)
        start += size
    return found


def initial_parameters(config: Config, seed: int = 0) -> np.ndarray:
    """Flat float32 parameters: normal 0.02 (plus 1 for gains), never exactly zero, to test all."""
    random = np.random.default_rng(seed)
    size = sum(int(np.prod(shape)) for shape in config.shapes().values())
    flat = (0.02 * random.standard_normal(size)).astype(np.float32)
    for name, view in views(flat, config).items():
        if "gain" in name:
            view += 1
        elif view.ndim == 2:
            view *= 4
    return flat


def over_matrix(kernel, shape: tuple[int, int], *arguments) -> None:
    """Launch with one thread per element of a matrix, in blocks of 32 x 4."""
    kernel[(-(-shape[1] // 32), -(-shape[0] // WARPS)), (32, WARPS)](*arguments)


def over_rows(kernel, rows: int, *arguments) -> None:
    """Launch with one warp per row, four warps in a block."""
    kernel[-(-rows // WARPS), (32, WARPS)](*arguments)


def over_vector(kernel, length: int, *arguments) -> None:
    """Launch with one thread per element, in blocks of 64."""
    kernel[-(-length // 64), 64](*arguments)


class NanoGPT:
    """The model on the device: parameters, their gradients, AdamW's moments and all activations."""

    def __init__(self, config: Config, parameters: np.ndarray):
        self.config = config
        self.parameters = cuda.to_device(parameters)
        self.gradients = cuda.device_array_like(parameters)
        self.first = cuda.to_device(np.zeros_like(parameters))
        self.second = cuda.to_device(np.zeros_like(parameters))
        self.p, self.g = views(self.parameters, config), views(self.gradients, config)
        rows, d, heads = config.rows, config.width, config.heads
        self.zeros = cuda.to_device(np.zeros((rows, d), np.float32))
        self.stream_gradient = cuda.device_array((rows, d), np.float32)
        widths = dict(x=d, normal1=d, qkv=3 * d, attended=d, middle=d, normal2=d, up=4 * d,
                      active=4 * d)
        self.layers = []
        for _ in range(config.layers):
            layer = {k: cuda.device_array((rows, w), np.float32) for k, w in widths.items()}
            layer |= {k: cuda.device_array(rows, np.float32)
                      for k in ("mean1", "scale1", "mean2", "scale2")}
            layer["weights"] = cuda.device_array(
                (config.batch, heads, config.context, config.context), np.float32)
            self.layers.append(layer)
        self.out, self.normal = (cuda.device_array((rows, d), np.float32) for _ in range(2))
        self.mean, self.scale, self.losses = (
            cuda.device_array(rows, np.float32) for _ in range(3))
        self.logits = cuda.device_array((rows, config.vocabulary), np.float32)
        # Scratch of the forward (branch) and of the backward pass.
        self.branch, self.narrow = (cuda.device_array((rows, d), np.float32) for _ in range(2))
        self.wide = cuda.device_array((rows, 4 * d), np.float32)
        self.qkv_gradient = cuda.device_array((rows, 3 * d), np.float32)
        self.score_gradient = cuda.device_array_like(self.layers[0]["weights"])
        self.steps = 0

    def forward(self, tokens, targets) -> float:
        """Run the model on device vectors of int32 tokens; returns the mean loss.

        The logits are overwritten with the gradient of the loss.
        """
        config, p = self.config, self.p
        rows, d = config.rows, config.width
        grid = (config.context, config.heads, config.batch)
        streams = [layer["x"] for layer in self.layers] + [self.out]
        over_matrix(kernels.embed, (rows, d), tokens, p["token"], p["position"], streams[0])
        for n, layer in enumerate(self.layers):
            over_rows(layernorm_rows, rows, layer["x"], p[f"{n}.gain1"], p[f"{n}.bias1"],
                      layer["normal1"], layer["mean1"], layer["scale1"])
            launch_matmul(layer["normal1"], p[f"{n}.qkv"], layer["qkv"])
            over_matrix(kernels.add_bias, (rows, 3 * d), layer["qkv"], p[f"{n}.qkv_bias"])
            kernels.attention[grid, 32](layer["qkv"], layer["weights"], layer["attended"])
            launch_matmul(layer["attended"], p[f"{n}.project"], self.branch)
            over_matrix(kernels.add_branch, (rows, d), layer["x"], self.branch,
                        p[f"{n}.project_bias"], layer["middle"])
            over_rows(layernorm_rows, rows, layer["middle"], p[f"{n}.gain2"], p[f"{n}.bias2"],
                      layer["normal2"], layer["mean2"], layer["scale2"])
            launch_matmul(layer["normal2"], p[f"{n}.up"], layer["up"])
            over_matrix(kernels.add_bias, (rows, 4 * d), layer["up"], p[f"{n}.up_bias"])
            over_matrix(kernels.gelu, (rows, 4 * d), layer["up"], layer["active"])
            launch_matmul(layer["active"], p[f"{n}.down"], self.branch)
            over_matrix(kernels.add_branch, (rows, d), layer["middle"], self.branch,
                        p[f"{n}.down_bias"], streams[n + 1])
        over_rows(layernorm_rows, rows, self.out, p["gain"], p["bias"],
                  self.normal, self.mean, self.scale)
        launch_matmul(self.normal, transposed(p["token"]), self.logits)
        over_rows(kernels.cross_entropy, rows, self.logits, targets, self.losses)
        return float(self.losses.copy_to_host().astype(np.float64).mean())

    def backward(self, tokens) -> None:
        """Fill the gradients of all parameters, after `forward` with the same tokens."""
        config, p, g = self.config, self.p, self.g
        rows, d = config.rows, config.width
        grid = (config.context, config.heads, config.batch)
        stream = self.stream_gradient
        stream.copy_to_device(self.zeros)
        launch_matmul(transposed(self.logits), self.normal, g["token"])
        launch_matmul(self.logits, p["token"], self.narrow)
        self.layernorm_backward(self.out, "gain", "bias", self.mean, self.scale)
        for n, layer in reversed(list(enumerate(self.layers))):
            self.linear_backward(stream, layer["active"], f"{n}.down", self.wide)
            over_matrix(kernels.gelu_backward, (rows, 4 * d), layer["up"], self.wide)
            self.linear_backward(self.wide, layer["normal2"], f"{n}.up", self.narrow)
            self.layernorm_backward(layer["middle"], f"{n}.gain2", f"{n}.bias2",
                                    layer["mean2"], layer["scale2"])
            self.linear_backward(stream, layer["attended"], f"{n}.project", self.narrow)
            for kernel in (kernels.attention_backward_scores, kernels.attention_backward_keys):
                kernel[grid, 32](self.narrow, layer["qkv"], layer["weights"],
                                 self.score_gradient, self.qkv_gradient)
            self.linear_backward(self.qkv_gradient, layer["normal1"], f"{n}.qkv", self.narrow)
            self.layernorm_backward(layer["x"], f"{n}.gain1", f"{n}.bias1",
                                    layer["mean1"], layer["scale1"])
        over_matrix(kernels.embed_backward_tokens, (config.vocabulary, d),
                    tokens, stream, g["token"])
        over_matrix(kernels.embed_backward_positions, (config.context, d), stream, g["position"])

    def linear_backward(self, gradient, x, name: str, x_gradient) -> None:
        """Gradients of weight and bias of a linear layer, and of its input x."""
        launch_matmul(transposed(x), gradient, self.g[name])
        over_vector(kernels.bias_backward, gradient.shape[1], gradient, self.g[name + "_bias"])
        launch_matmul(gradient, transposed(self.p[name]), x_gradient)

    def layernorm_backward(self, x, gain: str, bias: str, mean, scale) -> None:
        """Gradients of gain and bias; adds the input's gradient to that of the residual stream."""
        over_vector(kernels.layernorm_backward_parameters, self.config.width, self.narrow, x,
                    mean, scale, self.g[gain], self.g[bias])
        over_rows(kernels.layernorm_backward, self.config.rows, self.narrow, x, self.p[gain],
                  mean, scale, self.stream_gradient)

    def step(self, tokens: np.ndarray, targets: np.ndarray, rate: float = 1e-3,
             decay: float = 0.1) -> float:
        """One training step on int32 NumPy vectors of `rows` tokens; returns the loss before it."""
        tokens, targets = cuda.to_device(tokens), cuda.to_device(targets)
        loss = self.forward(tokens, targets)
        self.backward(tokens)
        self.steps += 1
        over_vector(
            kernels.adamw, self.parameters.shape[0], self.parameters, self.gradients, self.first,
            self.second, self.config.matrix_elements(), float32(rate), float32(decay),
            float32(1 - 0.9**self.steps), float32(1 - 0.95**self.steps),
        )
        return loss
