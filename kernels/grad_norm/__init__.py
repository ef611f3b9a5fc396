"""Global norm of the gradients.

    norm[0] = sqrt(sum(grads^2))

over all parameters as one vector: the number that is logged, and by which gradients are clipped
(see kernels.adamw). A NaN or an infinity in any element makes the norm not finite: it is the one
check that guards an update, so nothing may swallow it.

A loop that does not wait for the GPU learns of it some steps later. Until then no update may
change the weights, or what is saved, resumed and reported would not be the state before the bad
step. So a norm that is not finite is passed on: where `previous`, the norm of the step before, is
not finite, the norm is NaN, whatever the gradients are. With previous = norm everything stands
still until the host sets norm to a finite number.

Shapes      grads [P]; norm, previous [1]
Write rule  norm is overwritten; it may be previous itself. previous may be None.
Cost        2*P operations, 4*P bytes; bound by memory. The sum runs in a fixed order.

Source: Pascanu, Mikolov and Bengio, "On the difficulty of training Recurrent Neural Networks"
(2012), section 3.2.
"""

from ..common.dispatch import by_array_type

__all__ = ["forward"]

forward = by_array_type(__name__, "forward")
