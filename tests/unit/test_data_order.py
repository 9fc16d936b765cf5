"""A keyed permutation that keeps no list."""

import numpy as np
import pytest

from trainer.data.batch_plan import Share, permuted, rows_at


@pytest.mark.parametrize("size", [0, 1, 2, 5, 9, 10, 17, 1009])
def test_every_place_has_one_row_and_every_row_one_place(size):
    found = permuted(np.arange(size), size, 7)
    assert found.dtype == np.int64 and sorted(found) == list(range(size))
    assert [int(permuted(np.array([place]), size, 7)[0]) for place in range(size)] == found.tolist()


def test_a_batch_is_spread_over_all_rows():
    """Rows of one file lie side by side: a batch that took neighbours would be no sample of the
    data.
    """
    for size in (10**4, 10**6, 10**8):
        found = permuted(np.arange(8192), size, 11)
        assert len(np.unique(found)) == len(found) and found.min() >= 0 and found.max() < size
        for buckets in (found * 64 // size, found % 64):
            counts = np.bincount(buckets, minlength=64)
            chi_square = ((counts - 128) ** 2 / 128).sum()
            assert chi_square < 63 + 4 * np.sqrt(2 * 63), "four standard deviations"
        assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 0.04


def test_rows_come_in_the_order_that_earlier_checkpoints_began():
    assert permuted(np.arange(12), 12, 7).tolist() == [11, 0, 6, 10, 4, 1, 7, 8, 2, 9, 3, 5]
    large = [9168611, 68877121, 56154411, 15819086, 34597115]
    assert permuted(np.arange(5), 10**8, 3).tolist() == large
    _, rows = rows_at(np.arange(8), (Share(8),), seed=1, epoch=0)
    assert rows.tolist() == [1, 7, 4, 2, 3, 0, 5, 6]
