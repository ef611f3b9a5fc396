"""Batches: every window possible, none twice in an epoch, resumable exactly."""

import json
from collections import Counter

import numpy as np
import pytest

from andrea_numba.errors import UserError
from andrea_numba.loader import Loader, permute, validation_windows


def keys(seed):
    return np.random.SeedSequence(seed).generate_state(8, np.uint64)


@pytest.mark.parametrize("sizes", [range(1, 260), (1023, 1024, 1025, 65_537, 300_007)])
def test_permute_is_a_permutation(sizes):
    for n in sizes:
        assert np.array_equal(np.sort(permute(np.arange(n), n, keys(n))), np.arange(n)), n


def test_permute_computes_single_indices_of_huge_ranges():
    n = 3_000_000_000_001
    index = np.array([0, 1, n // 2, n - 1])
    there = permute(index, n, keys(5))
    assert len(set(there.tolist())) == 4 and there.min() >= 0 and there.max() < n
    assert np.array_equal(permute(index[2:3], n, keys(5)), there[2:3])


def test_permutations_differ_and_are_spread():
    # 6000 draws of the 6 orders of three: 1000 each, standard deviation 29; 5 of them allowed.
    orders = Counter(tuple(permute(np.arange(3), 3, keys([1, e])).tolist()) for e in range(6000))
    assert len(orders) == 6 and all(abs(c - 1000) < 145 for c in orders.values())
    # Neighbours must not stay neighbours: 2 of 1000 steps are expected to be +1 or -1.
    steps = np.abs(np.diff(permute(np.arange(1000), 1000, keys(2))))
    assert np.count_nonzero(steps == 1) < 12


@pytest.mark.parametrize(("n", "windows"), [(5, 1), (6, 2), (7, 3), (8, 4), (9, 5), (30, 26)])
def test_every_window_is_possible_and_the_last_token_is_a_target(n, windows):
    loader = Loader(np.arange(n), batch_size=1, seq_len=4, seed=0)
    assert loader.n_possible_windows == windows
    seen = set()
    for _ in range(60 * windows):
        ids, targets = loader.next()
        assert np.array_equal(targets, ids + 1)
        seen.add(int(ids[0, 0]))
    # Starts that fit; every one is met, the last has the last token as its last target.
    assert seen == set(range(windows)) and max(seen) + 4 == n - 1


def test_too_few_tokens_are_refused():
    with pytest.raises(UserError, match=r"4 tokens .* at least 5"):
        Loader(np.arange(4), batch_size=1, seq_len=4, seed=0)
    for wrong in ({"batch_size": 0}, {"seq_len": 0}, {"seed": -1}):
        with pytest.raises(ValueError):
            Loader(np.arange(9), **{"batch_size": 1, "seq_len": 4, "seed": 0} | wrong)


def test_windows_of_an_epoch_do_not_overlap_and_leave_nothing_out():
    n, length = 1003, 10
    loader = Loader(np.arange(n), batch_size=1, seq_len=length, seed=3)
    orders = []
    for epoch in range(12):
        starts = []
        offset = None
        while loader.epoch == epoch and (not starts or loader.index < loader.epoch_windows):
            starts.append(int(loader.next()[0][0, 0]))
            offset = loader.offset
        assert sorted(starts) == list(range(offset, n - length, length))
        orders.append(starts)
        if loader.index == loader.epoch_windows:
            loader._start_epoch(epoch + 1)
    assert len({min(o) for o in orders}) > 4, "offsets hardly vary"
    assert orders[0] != sorted(orders[0])


def test_batches_cross_epochs_and_have_the_right_type():
    tokens = np.arange(7, dtype=np.uint16)
    loader = Loader(tokens, batch_size=5, seq_len=3, seed=1)  # one or two windows an epoch
    ids, targets = loader.next()
    assert ids.shape == targets.shape == (5, 3) and loader.epoch >= 2
    assert ids.dtype == targets.dtype == np.int32
    assert ids.flags.c_contiguous and targets.flags.c_contiguous
    assert np.array_equal(ids[:, 1:], targets[:, :-1])


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("before", [0, 1, 7, 40])
def test_a_saved_state_continues_exactly(before, shuffle):
    make = [np.arange(333), 4, 8]
    loader = Loader(*make, seed=5, shuffle=shuffle)
    for _ in range(before):
        loader.next()
    state = json.loads(json.dumps(loader.state()))
    other = Loader(*make, seed=99, shuffle=shuffle)
    other.load_state(state)
    for _ in range(30):
        for a, b in zip(loader.next(), other.next(), strict=True):
            assert np.array_equal(a, b)
    assert loader.state() == other.state()


def test_order_depends_on_the_seed_alone():
    def first(seed):
        return Loader(np.arange(500), 8, 4, seed).next()[0].tolist()
    assert first(1) == first(1) != first(2)


def test_impossible_states_are_refused():
    loader = Loader(np.arange(100), 4, 8, 0)
    for state in ({}, {"seed": 0, "epoch": 0, "index": -1}, {"seed": 0, "epoch": 0, "index": 13},
                  {"seed": 0, "epoch": 0.5, "index": 0}, {"seed": "0", "epoch": 0, "index": 0}):
        with pytest.raises(UserError, match="saved data order"):
            loader.load_state(state)


def test_without_shuffling_the_text_is_read_in_order():
    loader = Loader(np.arange(50), 3, 8, 0, shuffle=False)
    ids = np.concatenate([loader.next()[0] for _ in range(4)])
    assert ids[:, 0].tolist() == [0, 8, 16, 24, 32, 40] * 2


class Endless:
    """Five thousand million tokens, each its own position modulo 2^31 - 1."""

    def __len__(self):
        return 5_000_000_000

    def __getitem__(self, positions):
        assert positions.dtype == np.int64
        self.largest = int(positions.max())
        return positions % (2**31 - 1)


def test_positions_beyond_32_bits():
    tokens = Endless()
    loader = Loader(tokens, 64, 16, 0)
    ids, targets = loader.next()
    assert 2**32 < tokens.largest < len(tokens)
    assert np.array_equal(targets, (ids.astype(np.int64) + 1) % (2**31 - 1))


@pytest.mark.parametrize("n", [0, 1, 2, 4, 5, 6, 9, 100])
def test_validation_windows_cover_every_target_once(n):
    windows = list(validation_windows(np.arange(n), 4))
    targets = [t for start, length in windows for t in range(start + 1, start + length + 1)]
    assert targets == list(range(1, n))
    assert all(length == 4 for _, length in windows[:-1])
