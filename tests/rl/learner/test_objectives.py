"""The losses' defaults and where they are from; inputs and settings that a loss does not have."""

from __future__ import annotations

import math
import typing

import numpy as np
import pytest
from shapes import CHAT

from reprise.rl.batches.data import Datum, DatumInputs, pack
from reprise.rl.batches.drawn import DrawnResponses
from reprise.rl.http import wire
from reprise.rl.learner.objectives import LOSSES, Adam, LossSettings, check_inputs, complete
from reprise.rl.records.packing import Shape
from reprise.rl.server import bodies


def test_the_client_names_these_losses_and_defaults():
    """`tinker` states the losses, the inputs of a datum, and the settings of AdamW."""
    types = pytest.importorskip("tinker.types")
    named = set(typing.get_args(types.LossFnType))
    assert named - LOSSES.keys() == {"custom", "stable_reinforce"}
    assert LOSSES.keys() <= named
    theirs = types.AdamParams().model_dump()
    assert theirs.pop("grad_clip_norm") == 0  # off
    ours = vars(Adam()) | vars(bodies.parse_adam({"adam_params": {}}))
    assert ours == vars(Adam()) and ours.pop("max_grad_norm") == math.inf
    names = {"b1": "beta1", "b2": "beta2"}
    assert {names.get(name, name): x for name, x in ours.items()} == theirs


def test_every_input_of_the_clients_datum_is_known():
    datum = pytest.importorskip("tinker.types.datum")
    known = bodies.INPUTS | bodies.BOUNDS.keys() | {bodies.RATIO_MASK}
    assert datum._KEY_TO_TYPE.keys() == known


@pytest.mark.parametrize(
    ("loss", "wanted"),
    [
        ("cross_entropy", LossSettings()),
        ("importance_sampling", LossSettings()),
        ("ppo", LossSettings(low=0.8, high=1.2)),
        ("cispo", LossSettings(low=0.0, high=4.0)),  # one-sided
        ("dro", LossSettings(beta=0.05)),
        ("gspo", LossSettings(low=0.9997, high=1.0004)),
    ],
)
def test_defaults(loss, wanted):
    assert complete(loss, None) == wanted == LOSSES[loss].defaults


def test_a_setting_that_is_given_leaves_the_others_the_losss_own():
    assert complete("cispo", LossSettings(high=6.0)) == LossSettings(low=0.0, high=6.0)
    assert complete("gspo", LossSettings(low=0.5)) == LossSettings(low=0.5, high=1 + 4e-4)


@pytest.mark.parametrize(
    ("loss", "settings", "words"),
    [
        ("crossentropy", None, "expected a loss of cross_entropy, .* got 'crossentropy'"),
        ("cross_entropy", LossSettings(low=0.5), "cross_entropy reads no settings, got low"),
        ("ppo", LossSettings(beta=0.5), "ppo reads low, high, got beta"),
        ("dro", LossSettings(0.7, 1.1), "dro reads beta, got low"),
        ("ppo", LossSettings(1.3), "expected low <= high, got 1.3 and 1.2"),
        ("ppo", LossSettings(math.nan), "expected low <= high, got nan"),
    ],
)
def test_settings_that_a_loss_does_not_read_are_refused(loss, settings, words):
    with pytest.raises(ValueError, match=words):
        complete(loss, settings)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_ratio_needs_log_probs_and_bounds_need_a_ratio(loss):
    whole = Datum([1, 2], [2, 3], logprobs=[-1, -1], advantages=[1, 1])
    check_inputs(loss, [whole])
    bounded = Datum([1, 2], [2, 3], logprobs=[-1, -1], advantages=[1, 1], low=[0.5, 0.5])
    if loss not in ("ppo", "cispo", "gspo"):
        with pytest.raises(ValueError, match=f"datum 1: {loss} has no bounds, got low"):
            check_inputs(loss, [whole, bounded])
    if loss == "cross_entropy":
        return check_inputs(loss, [Datum([1, 2], [2, 3])])
    with pytest.raises(ValueError, match=f"datum 0: {loss} needs logprobs, got none"):
        check_inputs(loss, [Datum([1, 2], [2, 3], advantages=[1, 1])])
    with pytest.raises(ValueError, match=f"datum 0: {loss} needs advantages, got none"):
        check_inputs(loss, [Datum([1, 2], [2, 3], logprobs=[-1, -1])])


@pytest.mark.parametrize("loss", ["ppo", "cispo"])
def test_places_have_bounds_of_their_own(loss):
    """A place with the bounds of settings has the loss that these give to all places."""
    rng = np.random.default_rng(0)
    logp, drawn, advantages = rng.normal(size=(3, 2, 8)).astype(np.float32)
    low, high = rng.uniform(0.2, 0.9, (2, 8)), rng.uniform(1.0, 2.0, (2, 8))
    ones = np.ones((2, 8), np.float32)
    inputs = DatumInputs(ones > 0, ones, drawn, advantages, low, high)
    found = LOSSES[loss].per_place(logp, inputs, complete(loss, None))
    plain = DatumInputs(ones > 0, ones, drawn, advantages)
    for place in np.ndindex(2, 8):
        settings = LossSettings(low[place], high[place])
        wanted = LOSSES[loss].per_place(logp, plain, settings)
        np.testing.assert_allclose(found[place], wanted[place], rtol=1e-6)


def test_packed_places_without_bounds_have_the_settings():
    shape = Shape(1, 16, 4)
    own = Datum([1, 2, 3], [2, 3, 4], low=[0.5, 0.6, 0.7])
    other = Datum([1, 2], [2, 3])
    [packed] = pack([own, other], CHAT, shape, DrawnResponses(), bounds=(0.8, 1.2))
    e, f = packed.places[packed.sample_indices.argsort()]
    inputs = packed.batch.inputs
    np.testing.assert_allclose(inputs.low_EM[e, :3], [0.5, 0.6, 0.7])
    np.testing.assert_allclose(inputs.low_EM[f, :2], 0.8)
    np.testing.assert_allclose(inputs.high_EM[[e, f], :2], 1.2)
    [packed] = pack([other, other], CHAT, shape, DrawnResponses(), bounds=(0.8, 1.2))
    assert packed.batch.inputs.low_EM is packed.batch.inputs.high_EM is None


def message(loss, config=(), **inputs):
    result = wire.make("ForwardBackwardRequest", loss_fn=loss)
    result.loss_fn_config.update(dict(config))
    one = result.data.add()
    one.model_input.add().encoded_text.tokens = wire.int32_bytes([1, 2])
    for name, values in {"target_tokens": np.array([2, 3]), **inputs}.items():
        array = np.asarray(values, "<i8" if name == "target_tokens" else "<f4")
        tensor = one.loss_fn_inputs[name]
        tensor.dense = array.tobytes()
        tensor.dtype = wire.INT64 if name == "target_tokens" else wire.FLOAT32
    return result


def test_the_server_reads_settings_and_bounds_by_the_clients_names():
    assert bodies.loss_settings(message("cispo")) == LossSettings(0.0, 4.0)
    given = message("cispo", {"clip_high_threshold": 5.0})
    assert bodies.loss_settings(given) == LossSettings(0.0, 5.0)
    bounded = message("ppo", clip_low_threshold=[0.5, 0.6], clip_high_threshold=[1.5, 1.6])
    datum = bodies.parse_datum(bounded.data[0], "ppo")
    np.testing.assert_allclose(datum.low, [0.5, 0.6], rtol=1e-6)
    np.testing.assert_allclose(datum.high, [1.5, 1.6], rtol=1e-6)
    with pytest.raises(ValueError, match="loss_fn_config: expected clip_low_.* for ppo, .*'beta'"):
        bodies.loss_settings(message("ppo", {"beta": 1.0}))
    with pytest.raises(ValueError, match="expected a loss of .* got 'pp'"):
        bodies.loss_settings(message("pp"))
    with pytest.raises(ValueError, match="loss_fn_inputs: .* got 'clip_high_threshold'"):
        bodies.parse_datum(bounded.data[0], "dro")
