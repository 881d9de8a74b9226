"""What stands for the learned drafter where another process has it: shapes, in checkpoints too."""

import jax
import numpy as np
import pytest

from reprise.rl.assembly.drafter_run import open_drafter, open_stub
from reprise.rl.assembly.listeners import StepListener
from reprise.rl.checkpoint.reader import describe, flatten
from reprise.rl.engine.engine import Engine
from reprise.rl.gin.loader import load
from reprise.rl.python.generate import RolloutSpec
from reprise.rl.sessions.multi_engine import MultiEngine
from reprise.rl.settings.config import TrainConfig
from reprise.rl.settings.inputs import open_inputs
from reprise.rl.speculation.device_drafters import LearnedDrafter
from reprise.rl.speculation.sources import Speculation, make_bandits
from reprise.rl.workers.config import SchedConfig
from reprise.spec.budget.config import LEARNED
from reprise.spec.eagle import files
from reprise.spec.eagle.model import EagleWeights
from reprise.spec.eagle_training import training as drafter_training
from reprise.spec.reuse.rollout_cache import RolloutCache

LEARNS = ("Speculation.sources=('own', 'learned')", "Speculation.budget='bandit'")
LEARNS += ("Engine.max_nodes=4", "Tuner.verify_tokens=(3, 1)", "Tuner.thresholds=(1, 5)")
LEARNS += ("Tuner.depths=(1, 2)", "Drafter.max_depth=2", "Drafter.top_k=2")


@pytest.fixture(params=["random", "reduced", "of a folder"])
def opened(request, tiny, tmp_path):
    """Settings and inputs of a run whose drafter is random, small, or read from a folder."""
    more = ["Drafter.draft_vocab_size=8"] if request.param == "reduced" else []
    config = load(TrainConfig, [tiny], [*LEARNS, *more])
    inputs = open_inputs(config)
    if request.param == "of a folder":  # of another data type
        first = open_drafter(config, inputs)
        params = jax.tree.map(lambda x: np.asarray(x).astype(jax.numpy.bfloat16), first.params)
        files.save(tmp_path, EagleWeights(first.config, params), inputs.model, None)
        config = load(TrainConfig, [tiny], [*LEARNS, f"Drafter.directory={str(tmp_path)!r}"])
    return config, inputs


def test_it_has_the_shapes_of_what_process_0_saves(opened):
    config, inputs = opened
    start, there = open_drafter(config, inputs), open_stub(config, inputs)
    params = jax.tree.map(jax.numpy.asarray, start.params)
    state = drafter_training.state_of(config.drafter_training, params)
    floats = [x for x in jax.tree.leaves(state) if jax.numpy.issubdtype(x.dtype, np.floating)]
    assert {x.dtype.name for x in floats} == {"float32"}, "also if the folder has another type"
    wanted = describe(flatten(state, concrete=True))
    assert describe(flatten(there.template, concrete=False)) == wanted
    arrays, host = there.saved()
    assert describe(flatten(arrays, concrete=True)) == wanted and host == {}
    assert there.learned.config == start.config
    assert there.spot is None and not there.trained_this_step
    assert not isinstance(there, StepListener), "it takes no part in steps"


def test_what_bandits_have_learnt_is_read_with_it(opened):
    config, inputs = opened
    drafters = (
        LearnedDrafter(open_drafter(config, inputs), config.drafter.tree),
        open_stub(config, inputs).learned,
    )
    first, other = (
        Speculation(
            config.speculation,
            RolloutCache(),
            {LEARNED: d},
            bandits=make_bandits(config.speculation, {LEARNED: d}, config.tuner, 0),
        )
        for d in drafters
    )
    first.bandits.of(0)
    other.load_state(first.state())
    assert other.state() == first.state() and first.state()["bandits"]


def test_without_workers_nothing_is_answered(opened):
    config, inputs = opened
    engine = MultiEngine([Engine(inputs.model, config.engine)], SchedConfig(workers=2), places=())
    spec = RolloutSpec({}, config.sampling, jax.random.key(0), (1,))
    assert engine.run(spec, []) == []
    with engine.session(engine.make_scheduler(), 4, 8) as session:
        session.submit(0, spec, [])
        session.trained(0)
        assert session.next_result(0.01) is None
        assert session.stats(0).tokens == session.num_tokens(0) == 0
