"""Drafters on the devices of workers in other programs: the same tokens, and how they learn."""

import dataclasses
import itertools
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rollouts
from remote_workers import IDENTITY, TUNER, Programs, hello, make_team
from shapes import make_params
from tiny_drafter import TRAINING, TREE, bits, make_engine, make_learned, make_trainer
from tiny_team import (
    CONFIG,
    KEY,
    MODEL,
    PARAMS,
    PROMPTS,
    REQUESTS,
    SAMPLING,
    STOP,
    assert_same_tokens,
    play,
)

from models import hf
from rl.cluster.join import DRAFT_MODEL, identity_of
from rl.drafter_training.spot_trainer import SpotTrainer
from rl.drafter_training.trainer import BufferSink
from rl.engine.engine import Engine
from rl.engine.rollout_spec import RolloutSpec
from rl.loop.drafter_run import _elsewhere
from rl.remote import messages
from rl.remote.caught_states import CaughtStates
from rl.remote.drafter_messages import Caught, Drafters, Learned, params_of, tuner_state
from rl.remote.messages import CODEC
from rl.remote.team import Mismatch
from rl.remote.weights import PublishedWeights
from rl.remote.wire import WireError
from rl.speculation.config import DraftModelConfig, SpeculationConfig
from rl.speculation.draft_model import DraftModel
from rl.speculation.sources import Speculation
from spec.budget.config import LEARNED
from spec.budget.config import MODEL as DRAFT
from spec.eagle.config import DataBufferConfig
from spec.eagle.data_buffer import DataBuffer, RequestSample
from spec.reuse.rollout_cache import RolloutCache
from spec.round_times import RoundTimes

KEYS = [f"q{g}" for g in range(len(PROMPTS))]
SIZES = itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16, 32), (8, 16, 32, 64))
TIMES = RoundTimes({size: 1.0 + size[1] / 100 for size in SIZES})


@pytest.fixture(scope="module")
def alone():
    done = rollouts.run(Engine(MODEL, CONFIG), PARAMS, REQUESTS, SAMPLING, KEY, STOP)
    return {t.request_id: t for t in done}


@pytest.fixture
def model(tmp_path):
    """The settings of a draft model: the policy itself, whose own draws it proposes."""
    hf.save_pretrained(tmp_path, MODEL, jax.tree.map(jnp.asarray, PARAMS))
    return DraftModelConfig(str(tmp_path), max_depth=3, proposal="shared_noise")


def told(learned):
    return Drafters(learned=Learned(learned.config, TREE, TRAINING, learned.draft_ids_U, 1.0))


def with_model(model):
    """What a team is told of a draft model, with the digest of its folder."""
    found = identity_of("", Path(__file__), Path(model.directory))
    identity = IDENTITY | {DRAFT_MODEL: found[DRAFT_MODEL]}
    return {"drafters": Drafters(model), "identity": identity}


@pytest.mark.parity
def test_a_draft_model_is_read_there_and_changes_no_token(alone, model):
    config = SpeculationConfig(budget="fixed:3", sources=("model",))
    drafters = {DRAFT: DraftModel.elsewhere(model)}
    with Speculation(config, RolloutCache(), drafters) as drafting:
        drafting.for_others = True
        multi, team = make_team(Programs(), 2, speculation=config, **with_model(model))
        with team:
            team.start()
            assert_same_tokens(play(multi, drafts=drafting.drafter_factory(KEYS, PROMPTS)), alone)
    assert multi.stats.accepted_tokens > 40  # it is the policy


def test_another_draft_model_or_none_is_refused(model):
    config = SpeculationConfig(budget="fixed:3", sources=("model",))
    given = with_model(model)
    given["identity"] = given["identity"] | {DRAFT_MODEL: "another"}
    _, team = make_team(Programs(), 1, speculation=config, **given)
    with team, pytest.raises(Mismatch, match=f"the same {DRAFT_MODEL}"):
        team.start()
    given["drafters"] = Drafters(dataclasses.replace(model, directory="/nowhere/to/be/found"))
    _, team = make_team(Programs(), 1, speculation=config, **given)
    with team, pytest.raises(Mismatch, match=r"expected the draft model /nowhere.* put the same"):
        team.start()


@pytest.fixture
def learning():
    """A trainer, its speculation, and a team whose idle workers train: closed at the end."""
    trainer = make_trainer(buffer=DataBuffer(DataBufferConfig()))
    config = SpeculationConfig(budget="fixed:3", sources=("learned",))
    home, programs = make_engine(), Programs()
    clock = itertools.count(0.0).__next__
    spot = SpotTrainer(trainer, 1, clock, partial(_elsewhere, home))
    with Speculation(config, RolloutCache(), {LEARNED: trainer.learned}) as drafting:
        drafting.for_others = True
        given = {"drafting": drafting, "drafters": told(trainer.learned), "spot": spot}
        multi, team = make_team(programs, 2, speculation=config, **given)
        with team:
            team.start()
            yield SimpleNamespace(**locals())


def learn(all_of, requests=REQUESTS, **options):
    """A rollout with the drafter, whose states are kept."""
    all_of.spot.prepare(PARAMS, 1)
    drafts = all_of.drafting.drafter_factory(KEYS, PROMPTS)
    sink = BufferSink(all_of.trainer.buffer, 1)
    given = {"policy_version": 7, "drafts": drafts, "sink": sink} | options
    return rollouts.run(all_of.multi, PARAMS, requests, SAMPLING, KEY, STOP, **given)


@pytest.mark.parity
def test_a_learned_drafter_drafts_there_and_its_states_come_back(alone, learning):
    assert_same_tokens(learn(learning), alone)
    assert sum(learning.multi.stats.drafted_by_source) > 0
    here = DataBuffer(DataBufferConfig())
    sink = BufferSink(here, 1)
    rollouts.run(
        *(make_engine(), PARAMS, REQUESTS, SAMPLING, KEY, STOP), policy_version=7, sink=sink
    )
    caught, wanted = (
        {tuple(x.tokens_T.tolist()): x for x in b.sample(10**6, 1, np.random.default_rng(0))}
        for b in (learning.trainer.buffer, here)
    )
    texts = [(*t.prompt_ids.tolist(), *t.response_ids.tolist()) for t in alone.values()]
    assert len(caught) > 10
    for tokens, found in caught.items():
        assert any(text[: len(tokens)] == tokens for text in texts)
        if tokens in wanted:
            states = wanted[tokens].hidden_TW
            np.testing.assert_allclose(found.hidden_TW, states, atol=1e-4)
            assert found.prompt_tokens == wanted[tokens].prompt_tokens


@pytest.mark.parity
def test_new_weights_reach_workers_with_the_next_rollout(alone, learning, monkeypatch):
    learn(learning)
    context = learning.trainer.context(learning.home, learning.home.place(PARAMS))
    learning.trainer.run_steps(3, context)
    learning.trainer.publish()
    # a worker that idles at this rollout's end would train newer ones
    monkeypatch.setattr(learning.trainer, "work", lambda context, *, leads: None)
    assert_same_tokens(learn(learning), alone)
    newest = bits(learning.trainer.learned.drafter.params)
    for (channel,) in learning.programs.channels.values():
        _, params = channel.program._drafters.learned.newest
        assert bits(params) == newest


def test_only_a_sample_of_the_responses_sends_its_states(learning):
    sample = RequestSample(0, 1, 0.4)
    learn(learning, sink=BufferSink(learning.trainer.buffer, 1, sample))
    assert (
        0 < learning.trainer.buffer.num_sequences == sum(r.request_id in sample for r in REQUESTS)
    )


def test_a_gradient_is_the_same_there_and_here(learning):
    learn(learning)
    trainer, engine = learning.trainer, learning.multi.engines[0]
    here = trainer.context(learning.home, learning.home.place(PARAMS))
    batch = trainer._plan().todo[0]
    params = trainer.state.params
    wanted, metrics = trainer._gradients(here, params, batch)
    found, told_metrics = engine.gradients(PARAMS, 0, params, batch)
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    assert told_metrics["num_entries"] == float(metrics["num_entries"]) > 0


@pytest.mark.parity
def test_idle_workers_train_and_tokens_stay(alone, learning):
    learn(learning)
    learning.spot.take_spans()
    for _ in range(4):  # one of two workers has nothing to do
        done = learn(learning, REQUESTS[:1])
        assert done[0].response_ids.tolist() == alone[0].response_ids.tolist()
    rows, spans = learning.trainer.take_history(), learning.spot.take_spans()
    assert len(rows) == learning.trainer.step > 0
    assert not any(row["skipped"] for row in rows)
    assert {s.kind for s in spans} == {"gradient", "update"}


@pytest.mark.fault
@pytest.mark.parity
def test_a_worker_that_is_lost_in_a_unit_costs_nothing_but_time(alone, learning):
    learn(learning)
    victims = []

    def heard(channel, message):
        if isinstance(CODEC.decode(message), messages.Gradient) and not victims:
            victims.append(channel)
            threading.Thread(target=channel.kill).start()

    for (channel,) in learning.programs.channels.values():
        channel._heard = partial(heard, channel)
    learning.trainer.take_history()
    for _ in range(20):
        done = learn(learning, REQUESTS[:2])
        same = [alone[t.request_id].response_ids.tolist() for t in done]
        assert [t.response_ids.tolist() for t in done] == same
        if victims and learning.trainer.step > 1:
            break
    assert len(victims) == 1 and learning.trainer.step > 1
    assert not any(row["skipped"] for row in learning.trainer.take_history())


def test_what_a_bandit_learns_there_is_kept_and_told_again(alone):
    """Also to a program that takes another one's place, as after a resume."""
    config = SpeculationConfig(budget="bandit", sources=("group", "own"))
    begun = []

    def noted(channel):
        channel._heard = lambda m: begun.append(CODEC.decode(m))

    programs = Programs(changed=noted)
    with Speculation(config, RolloutCache(), tuner=TUNER) as drafting:
        drafting.for_others = True
        multi, team = make_team(programs, 1, speculation=config, drafting=drafting)
        with team:
            team.start()
            (channel,) = programs.channels[0]
            channel.program._speculation.times = TIMES
            drafts = drafting.drafter_factory(KEYS, PROMPTS, group_size=4)
            assert_same_tokens(play(multi, drafts=drafts), alone)
            kept = drafting.state()
            assert kept["bandits"]["0"] == channel.program._speculation.bandit(0).state()
            assert any(w["rewards"] for w in kept["bandits"]["0"]["windows"])
            drafting.load_state(kept)
            play(multi, drafts=drafts)
    first, second = [m.tuner for m in begun if isinstance(m, messages.Begin)]
    assert not any(w.rewards for w in first.windows)
    assert tuner_state(second) == kept["bandits"]["0"]


def states_of(trajectory, **changes):
    tokens = np.concatenate([trajectory.prompt_ids, trajectory.response_ids])
    n, prompt = len(tokens), len(trajectory.prompt_ids)
    states = np.zeros((n - 1, MODEL.d_model), np.float32)
    return dataclasses.replace(Caught(trajectory.request_id, tokens, prompt, states, 7), **changes)


def test_states_without_their_response_are_not_believed(alone):
    sink, trajectory = BufferSink(DataBuffer(DataBufferConfig()), 1), alone[0]
    spec = RolloutSpec(PARAMS, SAMPLING, KEY, STOP, policy_version=7, sink=sink)
    good = states_of(trajectory)

    def states():
        return CaughtStates(make_engine(), spec, RequestSample(0, 0, 1.0))

    one = states()
    assert one.caught(good) is None and one.waiting
    assert one.answered(trajectory) is None and not one.waiting
    assert sink._buffer.num_sequences == 1
    other = states()
    assert other.answered(trajectory) is None
    wrong = good.tokens_T.copy()
    wrong[-1] += 1
    assert "of other tokens" in other.caught(states_of(trajectory, tokens_T=wrong))
    narrow = good.hidden_TW[:, 1:]
    assert "expected hidden states of 16" in states().caught(
        states_of(trajectory, hidden_TW=narrow)
    )
    assert "of policy 6" in states().caught(states_of(trajectory, policy_version=6))
    twice = states()
    assert twice.caught(good) is None and "came before" in twice.caught(good)
    assert sink._buffer.num_sequences == 1


def test_drafter_messages_are_checked():
    learned = make_learned()
    arrays = tuple(np.asarray(x) for x in jax.tree.leaves(learned.drafter.params))
    assert bits(params_of(learned.config, arrays)) == bits(learned.drafter.params)
    with pytest.raises(ValueError, match="arrays of float32 of the drafter's shapes"):
        params_of(learned.config, arrays[:-1])
    bad = messages.Report(1, (), 0, 0, None, messages.Tuner(0, -1, ()))
    with pytest.raises(WireError, match="draws of 0 or more"):
        CODEC.decode(CODEC.encode(bad))
    shape = Learned(learned.config, TREE, TRAINING, np.zeros(3, np.int32), 1.0)
    with pytest.raises(WireError, match="a map of a reduced vocabulary"):
        CODEC.decode(CODEC.encode(hello(0, drafters=Drafters(learned=shape))))


def test_an_older_version_is_fetched_and_encoded_once_for_all_workers():
    old, new, sent = make_params(1), make_params(2), []
    published = PublishedWeights()
    version = published.publish(old)
    published.publish(new)
    link = SimpleNamespace(name="worker", ask=lambda message, kind, limit_s: sent.append(message))
    for _ in range(3):
        assert published.bring(link, None, version, old, 1.0) is None
    published.close()
    assert sent[0] is sent[1] is sent[2]
    told = CODEC.decode(sent[0])
    assert told.version == version and bits(told.arrays) == bits(old)
