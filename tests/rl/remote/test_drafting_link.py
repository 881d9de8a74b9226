"""A verifying worker's link to a drafting program: silent while that is away, and bounded."""

import threading
import time

import pytest
from drafting_programs import commit, wait_for
from tiny_team import KEY, MODEL, SAMPLING

from rl.drafting.elsewhere import Address
from rl.engine.rollout_spec import RolloutSpec
from rl.remote import drafting_link
from rl.remote.drafting_link import RemoteLink
from rl.remote.drafting_messages import CODEC, MOST_COMMITS, Brought, commits_of, of_blocks
from rl.runtime.waits import ProgramLost

SPEC = RolloutSpec((), SAMPLING, KEY)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(drafting_link, "RETRY_S", 0.02)


@pytest.mark.fault
def test_a_link_is_silent_while_its_program_is_away_and_finds_the_one_in_its_place():
    there, heard, said = {"d-2": "one"}, [], []

    def ask(name, message):
        if name not in there:
            raise ProgramLost("it is not there")
        heard.append(CODEC.decode(message))
        return CODEC.encode(Brought(there[name], 0, of_blocks([]), False))

    with RemoteLink(Address("d", 2), ask, SPEC, MODEL.vocab_size, said.append) as link:
        link.tell([commit(7)], ())
        wait_for(lambda: heard)
        assert commits_of(heard[0].commits)[0].request_id == 7
        del there["d-2"]
        link.tell([commit(8)], (7,))
        wait_for(lambda: said)
        began_s = time.monotonic()
        link.wait(5.0)
        assert time.monotonic() - began_s < 1.0 and link.generation == 0
        link.tell([commit(9)], ())
        assert not link._commits
        there["d-4"] = "another"
        wait_for(lambda: link.generation == 1)
        assert [asked.closed for asked in heard if asked.closed] == [(7,)]
        link.tell([commit(9)], ())
        wait_for(lambda: commits_of(heard[-1].commits))
        there["d-4"] = "a third one"
        link.tell([commit(9, 2)], ())
        wait_for(lambda: link.generation == 2)
    assert said == ["drafts of d-2 are missing: it is not there"]


def test_what_waits_for_a_hanging_program_is_bounded():
    go = threading.Event()

    def ask(name, message):
        assert go.wait(30)
        return CODEC.encode(Brought("one", 0, of_blocks([]), False))

    with RemoteLink(Address("d", 1), ask, SPEC, MODEL.vocab_size, print) as link:
        for n in range(2, MOST_COMMITS // 100 + 200):
            link.tell([commit(r, n) for r in range(100)], ())
        assert len(link._commits) <= MOST_COMMITS
        go.set()
        wait_for(lambda: link.generation == 1)
