"""Cross-entropy of the next token: softmax and negative log-likelihood in one.

For a row of logits x with V = vocab_size used columns and target t:

    largest = max(x)
    loss    = log(sum(exp(x - largest))) - (x[t] - largest)  =  -log softmax(x)[t]

Taking the maximum out first keeps exp from overflowing, and taking it out of x[t] as well keeps
the loss exact when the logits are huge.

Derivative of scale * (sum of the losses):

    dlogits = scale * (softmax(x) - onehot(t))

`backward` computes the losses again with the gradients, in one pass over the logits: a training
step calls it alone. A mean over the targets is scale = 1 / (number of targets).

Columns from vocab_size on are padding: they are not read into the result, and their gradient is
exactly 0. A row with target -1 is ignored: loss and gradient exactly 0. A NaN in a used column
gives a NaN loss, and so does a target in device memory that is outside the vocabulary: targets
there are not checked beforehand.

Shapes      logits, dlogits [N, Vp]; losses [N]; targets [N] int32, -1 or below vocab_size
Dtypes      logits and dlogits are operands: float32 or bfloat16; the losses and all sums are
            float32
Write rule  losses and dlogits are overwritten; dlogits may be logits itself.
Cost        forward: about 4*N*V operations (and an exp each), 4*N*Vp bytes; backward: about
            7*N*V, 8*N*Vp bytes, in bfloat16 half of that. Each logit is read from memory once (on
            a GPU in rows of up to 47 KB; twice in wider ones). Bound by memory.

Source: Bridle, "Probabilistic Interpretation of Feedforward Classification Network Outputs"
(1990); Goodfellow, Bengio and Courville, "Deep Learning" (2016), section 6.2.2.3.
"""

from ..common.dispatch import by_array_type

__all__ = ["backward", "forward"]

forward = by_array_type(__name__, "forward")
backward = by_array_type(__name__, "backward")
