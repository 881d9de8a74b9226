"""The bandits of a run: one for each worker, in checkpoints and metrics."""

from reprise.rl.speculation.config import SpeculationConfig
from reprise.rl.speculation.sources import Speculation, make_bandits
from reprise.spec.budget.config import TunerConfig
from reprise.spec.reuse.rollout_cache import RolloutCache

CONFIG = SpeculationConfig(budget="bandit", sources=("own",))
TUNER = TunerConfig((1, 5), verify_tokens=(3, 1), depths=(1, 2))


def bandits(seed=0):
    return make_bandits(CONFIG, {}, TUNER, seed)


def test_other_budgets_have_no_bandits():
    other = SpeculationConfig(budget="goodput", sources=("own",))
    assert make_bandits(other, {}, TUNER, 0) is None
    with Speculation(other, RolloutCache()) as speculation:
        assert speculation.state() == {"bandits": {}} and speculation.bandit_metrics() == {}
        speculation.load_state({"bandits": {"0": bandits().of(0).state()}})  # of another budget
        assert speculation.state() == {"bandits": {}}


def test_each_worker_learns_for_itself_and_goes_on_from_a_checkpoint():
    own = bandits()
    own.of(1).record(own.of(1).select(1), 1.0, [3.0], 1)
    assert own.of(1) is own.of(1) and own.of(0).state() != own.of(1).state()
    with Speculation(CONFIG, RolloutCache(), bandits=own) as speculation:
        saved = speculation.state()
    assert saved["bandits"].keys() == {"0", "1"}
    with Speculation(CONFIG, RolloutCache(), bandits=bandits()) as resumed:
        resumed.load_state(saved)
        assert resumed.state() == saved


def test_metrics_have_the_share_and_the_tokens_of_each_arm():
    own = bandits()
    for worker in (0, 1):
        arm = own.of(worker).select(1)
        own.of(worker).record(arm, 1.0, [3.0], 1)
    found = own.metrics()
    assert sum(value for name, value in found.items() if name.endswith("/share")) == 1.0
    assert all(value > 0 for name, value in found.items() if name.endswith("/tokens_per_s"))
    assert not [name for name in own.metrics() if name.endswith("/share")], "counted once"
