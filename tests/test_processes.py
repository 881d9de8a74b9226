"""The launcher of tests that need several processes (tests/support/processes.py)."""

import pytest
from processes import ProcessFailed, launch


@pytest.mark.fault
def test_a_process_that_fails_ends_the_others_and_is_told(tmp_path):
    with pytest.raises(ProcessFailed, match=r"processes \[1\] of 3 failed") as failed:
        launch("process_tasks:fail_in", 3, tmp_path, arguments={"index": 1}, join=False)
    assert "process 1 has had enough" in str(failed.value)
    assert [o.returncode for o in failed.value.outcomes] == [None, 1, None]
