"""Messages of drafting programs: what is written comes back, and nothing that does not fit."""

import dataclasses

import numpy as np
import pytest
from drafting_programs import block, commit
from tiny_team import SAMPLING

from rl.drafting.config import DraftingConfig
from rl.drafting.elsewhere import Address, Apart
from rl.remote.drafting_messages import (
    CODEC,
    Blocks,
    Brought,
    Exchange,
    blocks_of,
    commits_of,
    of_blocks,
    of_commits,
)
from rl.remote.messages import CODEC as MESSAGES
from rl.remote.messages import Begin, Job
from rl.remote.wire import WireError
from spec.decoupled.messages import DraftPlan


def as_lists(x):
    """A commit or block with lists in place of arrays."""
    return [(y.dtype, y.tolist()) if isinstance(y, np.ndarray) else y for y in x]


def test_commits_and_blocks_come_back():
    commits = [commit(2**61), commit(7, 2, (9,), (), first=3), commit(8, chain=(1, 2))]
    told = Exchange("a", np.zeros(2, np.uint32), SAMPLING, of_commits(commits), (3, 4), 0.5)
    came = CODEC.decode(CODEC.encode(told))
    assert [as_lists(c) for c in commits_of(came.commits)] == [as_lists(c) for c in commits]
    assert (came.link, came.sampling, came.closed) == ("a", SAMPLING, (3, 4))
    for blocks in ([], [block(), block(7, (3,), (-1,), (1.0,))]):
        came = CODEC.decode(CODEC.encode(Brought("p", 3, of_blocks(blocks), True)))
        assert [as_lists(b) for b in blocks_of(came.blocks)] == [as_lists(b) for b in blocks]
    rounded = blocks_of(of_blocks([block(prob=(1.0000001, 0.4, 0.40000004))]))[0]
    assert rounded.prob_N.tolist() == [1.0, np.float32(0.4), np.float32(0.4)]


BAD_BLOCKS = {
    "parents before their children": {"parents": (-1, 1, -1)},
    "parents before": {"parents": (-2, 0, 1)},
    "probabilities of 0": {"prob": (1.5, 0.4, 0.3)},
    "the likeliest first": {"prob": (0.3, 0.4, 0.2)},
    "token ids of 0 or more": {"tokens": (4, -5, 6)},
    "requests of 0": {"request_id": -1},
}


@pytest.mark.parametrize("what", BAD_BLOCKS)
def test_malformed_blocks_are_refused(what):
    bad = block(**BAD_BLOCKS[what])
    one, good = of_blocks([bad]), of_blocks([block()])
    one = dataclasses.replace(one, prob_N=bad.prob_N)  # as they are
    names = [field.name for field in dataclasses.fields(Blocks)]
    both = Blocks(*(np.concatenate([getattr(good, n), getattr(one, n)]) for n in names))
    with pytest.raises(WireError, match=what):
        CODEC.decode(CODEC.encode(Brought("p", 0, both, False)))


def test_columns_that_do_not_fit_are_refused():
    good = of_blocks([block(), block(2)])
    lacks = dataclasses.replace(good, tokens_N=good.tokens_N[:-1])
    narrow = dataclasses.replace(good, numbers_BX=good.numbers_BX[:, :3])
    doubles = dataclasses.replace(good, prob_N=good.prob_N.astype(np.float64))
    for bad in (lacks, narrow, doubles):
        with pytest.raises(WireError):
            CODEC.decode(CODEC.encode(Brought("p", 0, bad, False)))
    for bad in (
        *(commit(-1), commit(1, 0), commit(1, tokens=()), commit(1, tokens=(-1,))),
        *(commit(1, first=-1), commit(1, window=99), commit(1, chain=range(99))),
        *(commit(1, remaining=-1), commit(1)._replace(prompt_tokens=9)),
        *(commit(1)._replace(processing=(0.5, 0.0, x)) for x in (0.0, 2.0, float("nan"))),
    ):
        told = Exchange("a", np.zeros(2, np.uint32), SAMPLING, of_commits([bad]), (), 0.0)
        with pytest.raises(WireError):
            CODEC.decode(CODEC.encode(told))


def test_where_drafts_come_from_is_told_with_a_rollout():
    apart = Apart((Address("d", 3),), DraftingConfig(workers=1, window=2), 3, 16, 2, 0.5)
    job = Job("a", 1, SAMPLING, np.zeros(2, np.uint32), (), 0, 4, 32, 60, None, None, None)
    came = MESSAGES.decode(MESSAGES.encode(Begin(1, dataclasses.replace(job, apart=apart))))
    assert came.job.apart == apart
    planner = apart.planner()
    assert planner.plans().plan(0, 4) == DraftPlan(2) and planner.drafting_workers == 1
    for bad in ({"addresses": ()}, {"max_window": 99}, {"draft_s": float("nan")}):
        with pytest.raises(ValueError, match="expected"):
            dataclasses.replace(apart, **bad)
