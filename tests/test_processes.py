"""The launcher of tests that need several processes (tests/support/processes.py)."""

import pytest
from processes import ProcessFailed, launch, runs


@pytest.mark.fault
def test_a_process_that_fails_ends_the_others_and_is_told(tmp_path):
    with pytest.raises(ProcessFailed, match=r"processes \[1\] of 3 failed") as failed:
        launch("process_tasks:fail_in", 3, tmp_path, arguments={"index": 1}, join=False)
    assert "process 1 has had enough" in str(failed.value)
    assert [o.returncode for o in failed.value.outcomes] == [None, 1, None]


@pytest.mark.fault
def test_a_process_that_hangs_is_killed_at_the_limit_and_named(tmp_path):
    with pytest.raises(ProcessFailed, match=r"processes \[0\] of 2 did not end in 2 s"):
        launch("process_tasks:hang_in", 2, tmp_path, arguments={"index": 0}, join=False, limit_s=2)
    pids = [int((tmp_path / f"pid-{i}").read_text()) for i in range(2)]
    assert not any(runs(pid) for pid in pids)
