"""The number of large programs that a run compiles before its first step."""

from pathlib import Path

import pytest
from live_by_hand import live_slots

from reprise.models.config import ModelConfig
from reprise.rl.assembly.first_programs import drafted_alone, num_whole_model, rollout_reach
from reprise.rl.commands import serve
from reprise.rl.engine.engine import Engine
from reprise.rl.gin.loader import load
from reprise.rl.settings.config import TrainConfig
from reprise.rl.settings.inputs import open_policy
from reprise.rl.slot_memory.model_runner import ModelRunner
from reprise.rl.slots.config import EngineConfig
from reprise.rl.warm_up import compile_buckets
from reprise.rl.warm_up.rollout_programs import Reach
from reprise.spec.budget.budget import FixedBudget, best_trees, equal_trees
from reprise.spec.config import SamplingConfig
from reprise.spec.drafter import no_drafts

CONFIGS = Path(__file__).parents[3] / "configs"
DEFAULT = CONFIGS / "tiny_cpu.gin"
MOST = {"tiny_cpu": 5, "epochs_tiny": 10, "ahead_tiny": 16, "countdown_cpu": 13}  # of rollouts
MOST_OF_SERVER = 20
MOST_LONG = 40  # of 256 slots and 18k positions, with the engine's defaults


def count(*overrides, name="tiny_cpu"):
    config = load(TrainConfig, [CONFIGS / f"{name}.gin"], overrides)
    model = open_policy(load(TrainConfig, [DEFAULT]).policy.directory)[1]
    return num_whole_model(config, model, is_cpu=True)


def test_the_default_run_drafts_and_compiles_few_programs_of_the_whole_policy():
    assert load(TrainConfig, [DEFAULT]).speculation.enabled
    assert count("Speculation.budget='off'") < count()


@pytest.mark.parametrize("name", MOST)
def test_shipped_runs_compile_few_programs_on_cpus(name):
    assert count(name=name) <= MOST[name]
    # a size of slots more, and the count knows
    assert count("Engine.min_slots=2", name=name) > MOST[name]


def test_a_server_on_cpus_compiles_few_programs():
    """As `rl.serve` and `rl.python.stream` set it up."""
    config = load(TrainConfig, [DEFAULT], ["Speculation.budget='goodput'"])
    settings = EngineConfig(max_round_nodes=int(serve.NODES.partition("=")[2]))
    model = open_policy(config.policy.directory)[1]
    reach = Reach(settings.max_slots, 256, speculative=True)

    def of(settings):
        engine = Engine(model, settings)
        return compile_buckets.num_whole_model(engine, config.sampling, reach)

    assert of(settings) <= MOST_OF_SERVER < of(EngineConfig())


ALONE = "Speculation.sources=('learned',)"
BOTH = "Speculation.sources=('own', 'learned', 'model')"


def shapes(runner, num_slots, decisions):
    return {runner.draft_options("cdf", num_slots, d)["shape"] for d in decisions}


@pytest.mark.parametrize("budget", ["fixed:3", "fixed:40", "goodput", "bandit"])
def test_rounds_on_the_device_are_compiled_in_the_shapes_that_budgets_ask_for(budget):
    sources = BOTH if budget == "bandit" else ALONE
    config = load(TrainConfig, [DEFAULT], [sources, f"Speculation.budget='{budget}'"])
    runner = ModelRunner(open_policy(config.policy.directory)[1], config.engine)
    most = config.engine.max_nodes - 1
    found = drafted_alone(config)
    assert set(found) == ({"learned", "model"} if budget == "bandit" else {"learned"})
    for B in (8, 64):
        sizes = config.engine.node_sizes(B)
        if budget == "goodput":
            wanted = [best_trees(m, B, most) for m in sizes]
        elif budget == "bandit":
            reached = {8: (15,), 64: ()}  # half full at least, and none beyond 32 requests
            wanted = [equal_trees(n, sizes, B) for n in reached[B]]
        else:
            wanted = [FixedBudget(int(budget[6:])).choose_on_device(live_slots(2), most, sizes, B)]
        assert shapes(runner, B, found["learned"](B)) == shapes(runner, B, wanted)


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 31])
def test_a_fixed_budget_compiles_the_rounds_that_its_trees_can_fill(num_tokens):
    """Requests with more draft tokens than the budget allows ask for no other size."""
    sizes = "Engine.slots=16", "Engine.max_nodes=32", "Engine.max_round_nodes=512"
    budget = f"Speculation.budget='fixed:{num_tokens}'"
    config = load(TrainConfig, [DEFAULT], [*sizes, budget])
    nodes = rollout_reach(config).nodes
    for B in (4, 16):
        every = config.engine.node_sizes(B)
        asked = set()
        for live in range(1, B + 1):
            for count in range(1, num_tokens + 1):
                drafts = no_drafts(live, 31)
                drafts.count_A[:] = count
                drafts.prob_AN[:] = 0.5
                asked.add(FixedBudget(num_tokens).choose(None, drafts, every, B, 64).num_nodes)
        assert asked == nodes(B)
        assert (nodes(B) < set(every)) == (num_tokens < 15)
    with_responses = load(TrainConfig, [DEFAULT], [*sizes, budget, "Reuse.mode='coupled'"])
    assert rollout_reach(with_responses).nodes is None, "a cached response has any length"


@pytest.mark.parametrize(("sources", "budget"), [(BOTH, "fixed:3"), (ALONE, "aimd"), (BOTH, "off")])
def test_where_the_host_sees_all_drafts_no_such_rounds_are_compiled(sources, budget):
    assert not drafted_alone(
        load(TrainConfig, [DEFAULT], [sources, f"Speculation.budget='{budget}'"])
    )


@pytest.mark.parametrize("num_slots", [64, 256])
@pytest.mark.parametrize("new_tokens", [1024, 16_384])
def test_many_slots_and_long_responses_compile_few_programs(num_slots, new_tokens):
    model = ModelConfig("qwen3", 512, 64, 2, 4, 2, 16, 128, qk_norm=True, max_positions=20_000)
    reach = Reach(2048, 2048, speculative=True)
    sampling = SamplingConfig(max_new_tokens=new_tokens)
    engine = Engine(model, EngineConfig(slots=num_slots))
    assert compile_buckets.num_whole_model(engine, sampling, reach) <= MOST_LONG
