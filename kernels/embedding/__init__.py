"""Token and position embedding: the model's input.

    x[b*T + t] = wte[ids[b, t]] + wpe[start + t]

`start` is the position of the first column: 0 in training, the number of tokens seen so far when
a sequence is continued.

Derivative: each row of dx is the gradient of the two rows that were added, so

    dwte[i]         += sum of dx[b*T + t] over all (b, t) with ids[b, t] = i
    dwpe[start + t] += sum of dx[b*T + t] over b

Both sums run in a fixed order, so that two runs give the same bits.

Shapes      x, dx [B*T, d]; ids [B, T] int32; wte, dwte [Vp, d]; wpe, dwpe [context, d]
Write rule  x is overwritten; dwte and dwpe are added to. Rows that no id names stay untouched,
            as do rows of the padded vocabulary. Ids in device memory are not checked beforehand:
            one outside the table makes its row of x NaN and adds to no row of dwte.
Cost        forward: B*T*d additions; reads B*T rows of wte and T rows of wpe, writes x: about
            8*B*T*d + 4*T*d bytes. Backward: 2*B*T*d additions; about 12*B*T*d + 8*T*d bytes.

Source: Vaswani et al., "Attention Is All You Need" (2017), section 3.4; learned positions as in
Radford et al., "Improving Language Understanding by Generative Pre-Training" (2018).
"""

from ..common.dispatch import by_array_type

__all__ = ["backward", "forward"]

forward = by_array_type(__name__, "forward")
backward = by_array_type(__name__, "backward")
