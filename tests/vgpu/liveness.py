"""Which registers a basic block must hand on."""

from collections.abc import Sequence, Set


def live_out(successors: Sequence[Sequence[int]], reads: Sequence[Set[str]],
             writes: Sequence[Set[str]], read_after: Sequence[Set[str]],
             written_after: Sequence[Set[str]]) -> list[set[str]]:
    """For each block the registers whose values are needed after it.

    successors     of each block, as indices
    reads          registers read before the block writes them; writes: those it writes
    read_after     registers read between the block and its successors (by a barrier), and
    written_after  those written there
    """
    live_in: list[set[str]] = [set(names) for names in reads]
    out: list[set[str]] = [set(names) for names in read_after]
    predecessors: list[list[int]] = [[] for _ in successors]
    for i, following in enumerate(successors):
        for j in following:
            predecessors[j].append(i)
    pending = set(range(len(successors)))
    while pending:
        i = max(pending)
        pending.discard(i)
        for j in successors[i]:
            out[i] |= live_in[j] - written_after[i]
        needed = out[i] - writes[i]
        if not needed <= live_in[i]:
            live_in[i] |= needed
            pending.update(predecessors[i])
    return out
