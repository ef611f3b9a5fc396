"""AdamW: Adam with decoupled weight decay, on flat arrays of all parameters.

    g = grads * min(1, clip / norm)                  clip = 0: g = grads
    w = w - lr * weight_decay * w                    for elements 0 .. n_decay-1 only
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g^2
    w = w - lr * (m / correction1) / (sqrt(v / correction2) + eps)

m and v start at 0 and so lean towards 0 at first; correction_i = 1 - beta_i^t at step t = 1, 2, ...
undoes that. The caller computes both in float64, and passes lr and them as an array: what changes
from step to step is in memory, so that a recorded step can be repeated. With eps negligible, the
first step moves each weight by lr times the sign of its gradient, whatever its size.

norm is the norm of all gradients, as kernels.grad_norm leaves it in memory: gradients longer than
clip are shortened to that length. If it is not finite, some gradient is not, and nothing changes.

weights_bf16, if given, gets the new weights rounded to bfloat16 in the same pass: the operands of
the next step's products. An update that changes nothing leaves it too, since it holds the rounded
weights already.

Decay comes first and does not pass through m and v: that is what "decoupled" means, and why the
elements with decay (matrices) are kept in front of those without (norms and biases).

Shapes      weights, weights_bf16, m, v, grads [P]; norm [1];
            rates [3]: lr, correction1, correction2
Dtypes      weights_bf16 is bfloat16 or None, all else float32
Write rule  weights, m and v are updated in place, weights_bf16 with them; all else is only read.
Cost        about 15*P operations (and a root and two divisions each), 28*P bytes, 30*P with
            weights_bf16. Bound by memory.

Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization" (2014), algorithm 1;
Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2017), algorithm 2; clipping as in
Pascanu, Mikolov and Bengio, "On the difficulty of training Recurrent Neural Networks" (2012).
"""

from ..common.dispatch import by_array_type

__all__ = ["update"]

update = by_array_type(__name__, "update")
