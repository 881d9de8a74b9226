"""The soak of rollouts with few pages: a short one is clean, and counts what a fault breaks."""

import pytest

from benchmarks import page_soak
from spec.page_table import PageTable


@pytest.mark.parametrize("is_planted", [False, True])
def test_failures_are_counted_and_named(monkeypatch, is_planted):
    if is_planted:  # the last page of a prompt is not copied
        share = PageTable.share
        monkeypatch.setattr(PageTable, "share", lambda *given: (x := share(*given)) and x[:-1])
    found = page_soak.measure(60, 0)
    assert found["rollouts"] == sum(kind["rollouts"] for kind in found["by_parts"].values()) == 60
    assert (found["failures"] > 0) == is_planted and bool(found["failed"]) == is_planted
    assert found["tokens"] > 0
