"""The kernels of the nano-GPT training step, all float32, row-major and free of atomics.

Activations are matrices with one row per token, `rows` = batch * context of them.
"""

import math

from numba import cuda, float32

from .reductions import warp_max, warp_sum

WARP = 32
GELU_SCALE = 0.7978845608028654  # sqrt(2 / pi)
GELU_CUBIC = 0.044715


@cuda.jit
def embed(tokens, token_table, position_table, out):
    """out[i, j] = token_table[tokens[i], j] + position_table[i % context, j]."""
    column, row = cuda.grid(2)
    if row < out.shape[0] and column < out.shape[1]:
        position = row % position_table.shape[0]
        out[row, column] = token_table[tokens[row], column] + position_table[position, column]


@cuda.jit
def embed_backward_tokens(tokens, gradient, table_gradient):
    """Add to each row of the token table's gradient the rows of its tokens."""
    column, token = cuda.grid(2)
    if token < table_gradient.shape[0] and column < table_gradient.shape[1]:
        total = table_gradient[token, column]
        for row in range(tokens.shape[0]):
            if tokens[row] == token:
                total += gradient[row, column]
        table_gradient[token, column] = total


@cuda.jit
def embed_backward_positions(gradient, table_gradient):
    """The gradient of the position table: the sum over the batch."""
    column, position = cuda.grid(2)
    if position < table_gradient.shape[0] and column < table_gradient.shape[1]:
        total = float32(0)
        for row in range(position, gradient.shape[0], table_gradient.shape[0]):
            total += gradient[row, column]
        table_gradient[position, column] = total


@cuda.jit
def layernorm_backward(gradient, x, gain, means, scales, stream_gradient):
    """Add the gradient with respect to x to stream_gradient. One warp per row."""
    row = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
    if row >= x.shape[0]:
        return
    lane, width = cuda.threadIdx.x, x.shape[1]
    mean, scale = means[row], scales[row]
    plain, weighted = float32(0), float32(0)
    for column in range(lane, width, WARP):
        inner = gradient[row, column] * gain[column]
        plain += inner
        weighted += inner * (x[row, column] - mean) * scale
    plain = warp_sum(plain) / float32(width)
    weighted = warp_sum(weighted) / float32(width)
    for column in range(lane, width, WARP):
        normal = (x[row, column] - mean) * scale
        inner = gradient[row, column] * gain[column]
        stream_gradient[row, column] += (inner - plain - normal * weighted) * scale


@cuda.jit
def layernorm_backward_parameters(gradient, x, means, scales, gain_gradient, bias_gradient):
    """The gradients of gain and bias; one thread per column."""
    column = cuda.grid(1)
    if column >= x.shape[1]:
        return
    gain, bias = float32(0), float32(0)
    for row in range(x.shape[0]):
        gain += gradient[row, column] * (x[row, column] - means[row]) * scales[row]
        bias += gradient[row, column]
    gain_gradient[column] = gain
    bias_gradient[column] = bias


@cuda.jit
def add_bias(x, bias):
    """x[i, j] += bias[j]."""
    column, row = cuda.grid(2)
    if row < x.shape[0] and column < x.shape[1]:
        x[row, column] += bias[column]


@cuda.jit
def bias_backward(gradient, bias_gradient):
    """bias_gradient[j] = sum over i of gradient[i, j]."""
    column = cuda.grid(1)
    if column < gradient.shape[1]:
        total = float32(0)
        for row in range(gradient.shape[0]):
            total += gradient[row, column]
        bias_gradient[column] = total


@cuda.jit
def add_branch(stream, branch, bias, out):
    """out[i, j] = stream[i, j] + branch[i, j] + bias[j]: the end of a residual branch."""
    column, row = cuda.grid(2)
    if row < stream.shape[0] and column < stream.shape[1]:
        out[row, column] = stream[row, column] + branch[row, column] + bias[column]


@cuda.jit
def gelu(x, out):
    """GELU in its tanh form."""
    column, row = cuda.grid(2)
    if row < x.shape[0] and column < x.shape[1]:
        value = x[row, column]
        inner = float32(GELU_SCALE) * (value + float32(GELU_CUBIC) * value * value * value)
        out[row, column] = float32(0.5) * value * (float32(1) + math.tanh(inner))


@cuda.jit
def gelu_backward(x, gradient):
    """Multiply the gradient, in place, by the slope of GELU at x."""
    column, row = cuda.grid(2)
    if row < x.shape[0] and column < x.shape[1]:
        value = x[row, column]
        square = value * value
        t = math.tanh(float32(GELU_SCALE) * value * (float32(1) + float32(GELU_CUBIC) * square))
        slope = float32(GELU_SCALE) * (float32(1) + float32(3 * GELU_CUBIC) * square)
        gradient[row, column] *= float32(0.5) * (
            float32(1) + t + value * (float32(1) - t * t) * slope
        )


@cuda.jit
def attention(qkv, probabilities, out):
    """Causal attention of one query, one head, one sequence per warp.

    qkv [rows, 3 * width], probabilities [batch, heads, context, context], out [rows, width].
    """
    query, head, batch = cuda.blockIdx.x, cuda.blockIdx.y, cuda.blockIdx.z
    lane, context, width = cuda.threadIdx.x, probabilities.shape[2], out.shape[1]
    size = width // probabilities.shape[1]
    first, column = batch * context, head * size
    weights = probabilities[batch, head, query]
    scale = float32(1) / math.sqrt(float32(size))
    largest = float32(-math.inf)
    for key in range(lane, query + 1, WARP):
        score = float32(0)
        for i in range(column, column + size):
            score += qkv[first + query, i] * qkv[first + key, width + i]
        weights[key] = score * scale
        largest = max(largest, score * scale)
    largest = warp_max(largest)
    total = float32(0)
    for key in range(lane, context, WARP):
        weight = math.exp(weights[key] - largest) if key <= query else float32(0)
        weights[key] = weight
        total += weight
    total = warp_sum(total)
    for key in range(lane, context, WARP):
        weights[key] /= total
    cuda.syncthreads()
    for i in range(column + lane, column + size, WARP):
        value = float32(0)
        for key in range(query + 1):
            value += weights[key] * qkv[first + key, 2 * width + i]
        out[first + query, i] = value


@cuda.jit
def attention_backward_scores(gradient, qkv, probabilities, score_gradient, qkv_gradient):
    """The gradients of the scores (times the scale) and of the queries; grid as in `attention`."""
    query, head, batch = cuda.blockIdx.x, cuda.blockIdx.y, cuda.blockIdx.z
    lane, context, width = cuda.threadIdx.x, probabilities.shape[2], gradient.shape[1]
    size = width // probabilities.shape[1]
    first, column = batch * context, head * size
    weights = probabilities[batch, head, query]
    scores = score_gradient[batch, head, query]
    scale = float32(1) / math.sqrt(float32(size))
    mean = float32(0)
    for key in range(lane, query + 1, WARP):
        inner = float32(0)
        for i in range(column, column + size):
            inner += gradient[first + query, i] * qkv[first + key, 2 * width + i]
        scores[key] = inner
        mean += weights[key] * inner
    mean = warp_sum(mean)
    for key in range(lane, query + 1, WARP):
        scores[key] = weights[key] * (scores[key] - mean) * scale
    cuda.syncthreads()
    for i in range(column + lane, column + size, WARP):
        value = float32(0)
        for key in range(query + 1):
            value += scores[key] * qkv[first + key, width + i]
        qkv_gradient[first + query, i] = value


@cuda.jit
def attention_backward_keys(gradient, qkv, probabilities, score_gradient, qkv_gradient):
    """The gradients of one key and one value per warp; grid as in `attention`, keys for queries."""
    key, head, batch = cuda.blockIdx.x, cuda.blockIdx.y, cuda.blockIdx.z
    context, width = probabilities.shape[2], gradient.shape[1]
    size = width // probabilities.shape[1]
    first, column = batch * context, head * size
    for i in range(column + cuda.threadIdx.x, column + size, WARP):
        key_total, value_total = float32(0), float32(0)
        for query in range(key, context):
            row = first + query
            key_total += score_gradient[batch, head, query, key] * qkv[row, i]
            value_total += probabilities[batch, head, query, key] * gradient[row, i]
        qkv_gradient[first + key, width + i] = key_total
        qkv_gradient[first + key, 2 * width + i] = value_total


@cuda.jit
def cross_entropy(logits, targets, losses):
    """The loss of each row; logits become the gradient of the mean loss. One warp per row."""
    row = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
    if row >= logits.shape[0]:
        return
    lane, width = cuda.threadIdx.x, logits.shape[1]
    largest = float32(-math.inf)
    for column in range(lane, width, WARP):
        largest = max(largest, logits[row, column])
    largest = warp_max(largest)
    total = float32(0)
    for column in range(lane, width, WARP):
        total += math.exp(logits[row, column] - largest)
    total = warp_sum(total)
    share = float32(1) / float32(logits.shape[0])
    for column in range(lane, width, WARP):
        shifted = logits[row, column] - largest
        hit = float32(0)
        if column == targets[row]:
            losses[row] = math.log(total) - shifted
            hit = float32(1)
        logits[row, column] = (math.exp(shifted) / total - hit) * share


@cuda.jit
def adamw(parameters, gradients, first, second, decayed, rate, decay, correction1, correction2):
    """One AdamW step (0.9, 0.95); weight decay for the first `decayed` parameters only."""
    index = cuda.grid(1)
    if index >= parameters.shape[0]:
        return
    gradient = gradients[index]
    first[index] += float32(0.1) * (gradient - first[index])
    second[index] += float32(0.05) * (gradient * gradient - second[index])
    update = first[index] / correction1 / (math.sqrt(second[index] / correction2) + float32(1e-8))
    if index < decayed:
        update += decay * parameters[index]
    parameters[index] -= rate * update
