"""Which samples come to which replica: each once before any comes twice, and a pure function of the step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflung.workloads.dealing import Deal, in_epochs, permuted

DEALS = [Deal(), Deal(3), Deal(3, apart=True), Deal(3, draws=True), Deal(3, apart=True, draws=True)]


@pytest.mark.parametrize("deal", DEALS)
@given(st.integers(0, 2**31), st.integers(0, 2), st.integers(0, 10**6), st.integers(3, 10**7))
@settings(max_examples=10)
def test_sample_ids_are_pure_and_in_range(deal: Deal, seed: int, replica: int, step: int, available: int) -> None:
    ids = deal.ids(seed, replica, step, 8, available)
    assert ids.shape == (8,) and ids.min() >= 0 and ids.max() < available
    assert np.array_equal(ids, deal.ids(seed, replica, step, 8, available))


@given(st.integers(1, 500), st.lists(st.integers(0, 2**63), min_size=1, max_size=3))
@settings(max_examples=20)
def test_each_key_permutes_all_numbers(count: int, key: list[int]) -> None:
    assert np.array_equal(np.sort(permuted(np.arange(count), count, key)), np.arange(count))


def test_keys_give_unlike_orders_and_each_number_comes_anywhere_alike_often() -> None:
    orders = np.stack([permuted(np.arange(10), 10, (key,)) for key in range(1000)])
    assert len(np.unique(orders[:, :5], axis=0)) > 950  # of 30,240
    assert all(np.abs(np.bincount(place, minlength=10) - 100).max() < 50 for place in orders.T)
    long = permuted(np.arange(10**4), 10**4, (1,))
    assert abs(np.corrcoef(long[1:], long[:-1])[0, 1]) < 0.05


@given(replicas=st.integers(1, 5), size=st.integers(2, 9), available=st.integers(5, 40), seed=st.integers(0, 99))
@settings(max_examples=10)
def test_a_sample_is_seen_once_before_any_is_seen_twice(replicas: int, size: int, available: int, seed: int) -> None:
    steps = range(3 * available // size + 1)
    together = [
        Deal(replicas).ids(seed, replica, step, size, available) for step in steps for replica in range(replicas)
    ]
    # In each epoch, the replicas' parts are disjoint and make up all.
    rounds = np.stack(together).reshape(len(steps), replicas, size).transpose(0, 2, 1).flatten()
    alone = np.concatenate([Deal().ids(seed, 7, step, size, available) for step in steps])
    for seen in (rounds, alone):
        epochs = [seen[begin : begin + available] for begin in range(0, len(seen) - available + 1, available)]
        assert all(len(set(epoch.tolist())) == available for epoch in epochs)
        assert available < 15 or not np.array_equal(epochs[0], epochs[1])
    apart = [
        {one for step in steps for one in Deal(replicas, apart=True).ids(seed, replica, step, size, available).tolist()}
        for replica in range(replicas)
    ]
    assert sum(map(len, apart)) == len(set.union(*apart)) == available // replicas * replicas


def test_places_far_on_are_found_without_those_before() -> None:
    far = np.array([10**15, 10**15 + 1])
    assert np.array_equal(
        in_epochs(far, 7, (1,)), [permuted(far[n : n + 1] % 7, 7, (1, far[n] // 7))[0] for n in (0, 1)]
    )
