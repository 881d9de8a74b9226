"""Bytes are taken and given back; small requests have a quarter that large ones cannot take."""

from __future__ import annotations

import pytest

from reprise.rl.http.account import SMALL_BYTES, Account, Busy, Hold


def test_large_requests_leave_room_for_small_ones():
    account = Account(8 * SMALL_BYTES)
    large, small = Hold(account), Hold(account)
    large.take(5 * SMALL_BYTES)
    with pytest.raises(Busy):
        large.take(2 * SMALL_BYTES)
    small.take(SMALL_BYTES // 2)
    small.take(SMALL_BYTES // 2)
    with pytest.raises(Busy):
        small.take(SMALL_BYTES)  # now it is large
    assert account.used == 6 * SMALL_BYTES
    large.release()
    large.release()
    assert account.used == small.hand_over() == SMALL_BYTES
    account.give(SMALL_BYTES)
    assert account.used == 0
