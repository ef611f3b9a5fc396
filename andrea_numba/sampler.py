"""From the scores of one position to the next token id.

Order of the steps, the field's usual one: repetition penalty, temperature, top-k, top-p, draw.
Everything is computed in float64 and the candidates stay in id order, so a limit that removes
nothing changes nothing: the same seed gives the same text with `top_k` 10000 as without one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .errors import UserError

# A set whose probability misses top_p by rounding alone has reached it.
ROUNDING = 1e-12


@dataclass(frozen=True)
class Sampling:
    """How to choose among the tokens; the values are checked where they enter (config.py)."""

    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = all tokens
    top_p: float = 1.0  # 1 = all tokens
    repetition_penalty: float = 1.0  # 1 = none


def sample_rng(seed: int, index: int) -> np.random.Generator:
    """The random stream of sample number `index`, whatever other samples are drawn."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, index])))


def sample(
    logits: np.ndarray, window_ids: np.ndarray, sampling: Sampling, rng: np.random.Generator
) -> int:
    """Choose the next token.

    `logits` [V] are the scores of the ids that may be chosen: the caller cuts off ids that the
    tokenizer does not know. `window_ids` [n], all below V, are the tokens in the model's window,
    which the repetition penalty counts as seen. Takes exactly one uniform number from `rng`, or
    none at temperature 0, where the first of equal maxima wins. Raises UserError when no
    probability can be computed.
    """
    scores = logits.astype(np.float64)  # [V], a copy
    if sampling.repetition_penalty != 1.0:
        seen = scores[window_ids]
        penalty = sampling.repetition_penalty
        # Dividing a negative score would reward it. (Keskar et al., CTRL, arXiv:1909.05858,
        # divide all scores; the split by sign is what common samplers do since.)
        scores[window_ids] = np.where(seen > 0, seen / penalty, seen * penalty)
    best = scores.max()  # NaN if any score is
    if not np.isfinite(best):
        raise UserError(f"the model is broken: its best next-token score is {best}; "
                        "use a checkpoint from before training diverged")
    if sampling.temperature == 0:
        return int(scores.argmax())
    # The subtraction comes first: no temperature, however small, then overflows upwards.
    with np.errstate(over="ignore"):
        weights = np.exp((scores - best) / sampling.temperature)  # [V], the largest is 1
    if sampling.top_k or sampling.top_p < 1:
        _limit(weights, scores, sampling)
    cumulative = np.cumsum(weights)
    # Inverse distribution function: the first id whose cumulative weight exceeds the target. It
    # has a weight above 0; the clip is for a target that rounding lifts to the total.
    target = min(rng.random() * cumulative[-1], np.nextafter(cumulative[-1], 0))
    return int(np.searchsorted(cumulative, target, side="right"))


def _limit(weights: np.ndarray, scores: np.ndarray, sampling: Sampling) -> None:
    """Set to 0 the weights [V] outside top-k, then those outside top-p of what is left."""
    kept = min(sampling.top_k or len(scores), len(scores))
    # Those that may be among the best, in id order: sorting all of them takes ten times as long.
    ranked = np.flatnonzero(scores >= np.partition(scores, -kept)[-kept])
    ranked = ranked[np.argsort(-scores[ranked], kind="stable")]  # best first, equals in id order
    if sampling.top_p < 1:
        cumulative = np.cumsum(weights[ranked[:kept]])
        wanted = sampling.top_p * cumulative[-1] * (1 - ROUNDING)
        kept = int(np.searchsorted(cumulative, wanted, side="left")) + 1
    outside = np.ones(len(weights), bool)
    outside[ranked[:kept]] = False
    weights[outside] = 0
