"""Token and position embedding: the model's input.

    x[b*T + t] = wte[ids[b, t]] + wpe[start + t]

`start` [1] is the position of the first column, the number of tokens seen so far, when a sequence
is continued. It is in memory, so that a recorded step can be repeated at other positions. In
training it is None, which means 0.

Derivative: each row of dx is the gradient of the two rows that were added, so

    dwte[i] += sum of dx[b*T + t] over all (b, t) with ids[b, t] = i
    dwpe[t] += sum of dx[b*T + t] over b

Both sums run in a fixed order, so that two runs give the same bits.

Shapes      x, dx [B*T, d]; ids [B, T] int32; wte, dwte [Vp, d]; wpe, dwpe [context, d]
Write rule  x is overwritten; dwte and dwpe are added to. Rows that no id names stay untouched,
            as do rows of the padded vocabulary. Values in device memory are not checked beforehand:
            an id or a position outside its table makes its row of x NaN, and the id adds to no
            row of dwte.
Cost        forward: B*T*d additions; reads B*T rows of wte and T rows of wpe, writes x: about
            8*B*T*d + 4*T*d bytes. Backward: 2*B*T*d additions; about 12*B*T*d + 8*T*d bytes.

Source: Vaswani et al., "Attention Is All You Need" (2017), section 3.4; learned positions as in
Radford et al., "Improving Language Understanding by Generative Pre-Training" (2018).
"""

from ..common.dispatch import by_array_type

__all__ = ["backward", "forward"]

forward = by_array_type(__name__, "forward")
backward = by_array_type(__name__, "backward")
