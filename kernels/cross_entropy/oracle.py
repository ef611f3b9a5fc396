"""Cross-entropy in NumPy."""

import numpy as np


def forward(
    losses: np.ndarray, logits: np.ndarray, targets: np.ndarray, vocab_size: int
) -> None:
    """losses = -log softmax(logits)[target] over the first vocab_size columns; 0 if ignored."""
    _losses_and_probabilities(losses, logits, targets, vocab_size)


def backward(
    losses: np.ndarray,
    dlogits: np.ndarray,
    logits: np.ndarray,
    targets: np.ndarray,
    vocab_size: int,
    scale: float,
) -> None:
    """Losses, and dlogits = scale * (softmax - onehot); dlogits may be logits itself."""
    p = _losses_and_probabilities(losses, logits, targets, vocab_size)
    counted = targets != -1
    p[counted, targets[counted]] -= 1
    dlogits[:] = 0
    dlogits[counted, :vocab_size] = scale * p[counted]


def _losses_and_probabilities(
    losses: np.ndarray, logits: np.ndarray, targets: np.ndarray, vocab_size: int
) -> np.ndarray:
    used = logits[:, :vocab_size]
    shifted = used - used.max(axis=1, keepdims=True)
    exponentials = np.exp(shifted)
    total = exponentials.sum(axis=1)
    at_target = shifted[np.arange(len(targets)), targets]
    losses[:] = np.where(targets == -1, 0, np.log(total) - at_target)
    return exponentials / total[:, None]
