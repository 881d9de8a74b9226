"""The released client of Tinker, unmodified, drives a server of the tiny policy."""

from __future__ import annotations

import asyncio
import hashlib

import numpy as np
import pytest
import tinker
from served import KEY, NAME, serve
from tinker import types

from reprise.rl.gin.loader import load
from reprise.rl.python import api
from reprise.rl.python.generate import generate
from reprise.rl.records.trajectory import Request
from reprise.rl.settings.config import TrainConfig
from reprise.spec.config import SamplingConfig
from reprise.spec.verification.sampling import step_key

SETTINGS = (
    *("Policy.lora_rank=4", "Policy.lora_targets=('attention','mlp','head')", "Mesh.data=1"),
    *("Rollout.max_prompt_tokens=16", "Sampling.max_new_tokens=16", "Engine.slots=8"),
    *("Engine.min_slots=8", "Trainer.micro_batch_tokens=128"),
)
PROMPTS = [[1, 2, 3, 4], [5, 6, 7]]


@pytest.fixture(scope="module")
def policy(tiny):
    return api.Policy(load(TrainConfig, [tiny]).policy.directory, *SETTINGS)


@pytest.fixture(scope="module")
def address(policy, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_API_KEY", KEY)
        patch.setenv("TINKER_TELEMETRY", "0")
        patch.setenv("HF_HUB_OFFLINE", "1")
        with serve(policy, tmp_path_factory.mktemp("server")) as address:
            yield address


@pytest.fixture(scope="module")
def service(address):
    return tinker.ServiceClient(base_url=address)


@pytest.fixture(scope="module")
def training(service):
    return service.create_lora_training_client(base_model=NAME, rank=4, seed=3).result()


def datum(ids, **inputs):
    arrays = {"target_tokens": np.array(ids[1:], np.int64)}
    arrays |= {name: np.asarray(x, np.float32) for name, x in inputs.items()}
    tensors = {name: types.TensorData.from_numpy(x) for name, x in arrays.items()}
    prompt = types.ModelInput.from_ints(ids[:-1])
    return types.Datum(model_input=prompt, loss_fn_inputs=tensors)


def logprobs(result):
    return [np.array(x["logprobs"].tolist()) for x in result.loss_fn_outputs]


def sampled(response):
    return [sequence.tokens for sequence in response.sequences]


def test_capabilities_name_the_policy(service, policy):
    [model] = service.get_server_capabilities().supported_models
    assert model.model_name == NAME
    assert model.max_context_length == policy.config.longest_tokens == 32


def test_a_model_is_trained_as_one_of_the_api(service, policy):
    """Losses, norms and log-probs after two steps are those of `reprise.Policy`."""
    model = service.create_lora_training_client(base_model=NAME, rank=2, seed=5).result()
    own = policy.with_new_adapter(5, 2)
    ids = [1, 5, 2, 7, 3]
    floats = {"logprobs": [-2.0, -3.0, -1.5, -2.5], "advantages": [1.0, -0.5, 0.25, 2.0]}
    cases = [
        ("cross_entropy", {"weights": [0.0, 1.0, 1.0, 2.0]}, {}),
        ("importance_sampling", floats, {}),
        ("ppo", floats, {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
        ("gspo", floats | {"weights": [0.0, 1.0, 1.0, 1.0]}, {}),
        ("cispo", floats, {}),
        ("ppo", floats | {"low": [0.5] * 4, "high": [1.1, 1.2, 1.3, 3.0]}, {}),
    ]
    for loss, inputs, config in cases:
        sent = dict(inputs)
        if loss == "gspo":
            sent["sequence_ratio_mask"] = sent.pop("weights")
        if "low" in sent:
            sent["clip_low_threshold"] = sent.pop("low")
            sent["clip_high_threshold"] = sent.pop("high")
        result = model.forward_backward([datum(ids, **sent)], loss, loss_fn_config=config)
        step = model.optim_step(types.AdamParams(learning_rate=1e-2, grad_clip_norm=1.0))
        arrays = {k: np.array(x, np.float32) for k, x in inputs.items()}
        settings = api.LossSettings(0.9, 1.1) if config else None
        wanted = own.forward_backward([api.Datum(ids[:-1], ids[1:], **arrays)], loss, settings)
        norm = own.optim_step(api.Adam(1e-2, max_grad_norm=1.0))
        assert result.result().metrics["loss:sum"] == pytest.approx(wanted.loss, rel=1e-6)
        np.testing.assert_array_equal(logprobs(result.result())[0], wanted.logprobs[0])
        assert step.result().metrics["grad_norm"] == pytest.approx(norm, rel=1e-6)
    info = model.get_info()
    assert info.lora_rank == 2 and info.model_data.model_name == NAME


def test_the_two_passes_of_a_custom_loss(service, policy):
    """As the client makes them, whose loss needs torch: C = 0.5 · Σ log p has dC/dlog p = 0.5."""
    model = service.create_lora_training_client(base_model=NAME, rank=4, seed=11).result()
    own = policy.with_new_adapter(11, 4)
    ids = [1, 2, 3, 4]
    [logps] = logprobs(model.forward([datum(ids, weights=[0.0] * 3)], "cross_entropy").result())
    result = model.forward_backward([datum(ids, weights=[-0.5] * 3)], "cross_entropy").result()
    norm = model.optim_step(types.AdamParams(learning_rate=0.0)).result().metrics["grad_norm"]
    assert result.metrics["loss:sum"] == pytest.approx(0.5 * logps.sum(), rel=1e-5)
    own.forward_backward_custom([api.Datum(ids[:-1], ids[1:])], lambda x: 0.5 * x[0].sum())
    assert norm == pytest.approx(own.optim_step(api.Adam(0.0)), rel=1e-5) and norm > 0


def test_samples_are_functions_of_weights_prompt_and_seed(service, policy):
    client = service.create_sampling_client(base_model=NAME).result()
    params = types.SamplingParams(max_tokens=9, seed=7, temperature=1.0)
    prompts = [types.ModelInput.from_ints(ids) for ids in PROMPTS]
    futures = [client.sample(p, num_samples=3, sampling_params=params) for p in prompts]
    together = [sampled(f.result()) for f in futures]
    alone = [sampled(client.sample(p, 3, params).result()) for p in prompts]
    assert together == alone and len({str(x) for x in together[0]}) == 3
    other = types.SamplingParams(max_tokens=9, seed=8)
    assert sampled(client.sample(prompts[0], 3, other).result()) != together[0]
    one = client.sample(prompts[0], 1, params).result().sequences[0]
    assert one.stop_reason in ("stop", "length") and len(one.logprobs) == len(one.tokens)
    scored = client.compute_logprobs(types.ModelInput.from_ints([1, 2, 3, *one.tokens])).result()
    assert scored[0] is None and len(scored) == 3 + len(one.tokens)


def test_samples_at_another_temperature_are_scored_as_they_were_drawn(service, training):
    """The protocol's data do not say it: all ratios are 1, of several turns too."""
    client = training.save_weights_and_get_sampling_client().result()
    first, later = (
        types.SamplingParams(max_tokens=8, seed=1, temperature=0.5),
        types.SamplingParams(max_tokens=8, seed=2, temperature=0.7, top_p=0.8, top_k=4),
    )
    [turn] = client.sample(types.ModelInput.from_ints(PROMPTS[0]), 1, first).result().sequences
    ids = [*PROMPTS[0], *turn.tokens]
    [other] = client.sample(types.ModelInput.from_ints([*ids, 9]), 1, later).result().sequences
    drawn = [*turn.logprobs, 0.0, *other.logprobs]
    before, ones = [0.0] * 3, [1.0] * len(turn.tokens)
    advantages = [*before, *ones, 0.0, *[1.0] * len(other.tokens)]
    data = [datum([*ids, 9, *other.tokens], logprobs=[*before, *drawn], advantages=advantages)]
    found = training.forward(data, "importance_sampling").result()
    assert found.metrics["loss:sum"] == pytest.approx(-sum(advantages), rel=1e-4)
    scored = logprobs(found)[0][np.array(advantages) > 0]
    np.testing.assert_allclose(scored, [*turn.logprobs, *other.logprobs], atol=1e-4)
    plain = [datum([*ids, 9, *other.tokens], logprobs=before + [-1.0] * len(drawn))]
    assert (
        np.abs(logprobs(training.forward(plain, "cross_entropy").result())[0][3:] - drawn).max()
        > 0.01
    )


def test_samples_use_the_weights_of_the_moment(training):
    prompt, params = (
        types.ModelInput.from_ints(PROMPTS[0]),
        types.SamplingParams(max_tokens=12, seed=1),
    )
    before = training.save_weights_and_get_sampling_client().result()
    first = sampled(before.sample(prompt, 4, params).result())
    for _ in range(3):
        training.forward_backward([datum([1, 2, 3, 4, 9, 9, 9, 9])], "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=0.1))
    after = training.save_weights_and_get_sampling_client().result()
    later = after.sample(prompt, 4, params)
    again = before.sample(prompt, 4, params)
    assert sampled(later.result()) != first and sampled(again.result()) == first


def test_checkpoints_continue_to_the_bit_and_are_listed(address, service, training):
    saved = training.save_state("one").result().path
    assert saved.startswith("tinker://") and saved.endswith("/weights/one")
    steps = [training.forward_backward([datum([1, 2, 3, 4])], "cross_entropy")]
    training.optim_step(types.AdamParams(learning_rate=0.05)).result()
    steps.append(training.forward_backward([datum([1, 2, 3, 4])], "cross_entropy"))
    other = service.create_training_client_from_state_with_optimizer(saved).result()
    again = [other.forward_backward([datum([1, 2, 3, 4])], "cross_entropy")]
    other.optim_step(types.AdamParams(learning_rate=0.05)).result()
    again.append(other.forward_backward([datum([1, 2, 3, 4])], "cross_entropy"))
    for a, b in zip(steps, again, strict=True):
        np.testing.assert_array_equal(logprobs(a.result())[0], logprobs(b.result())[0])
    with pytest.raises(tinker.TinkerError, match="exists: choose another name"):
        training.save_state("one").result()
    training.save_state("one", overwrite=True).result()
    rest = tinker.RestClient(base_url=address)
    run = saved.removeprefix("tinker://").partition("/")[0]
    listed = rest.list_checkpoints(run).result().checkpoints
    assert "weights/one" in [c.checkpoint_id for c in listed]
    rest.set_checkpoint_ttl_from_tinker_path(saved, 3600).result()
    rest.publish_checkpoint_from_tinker_path(saved).result()
    [one] = [c for c in rest.list_user_checkpoints().result().checkpoints if c.tinker_path == saved]
    assert one.public and one.expires_at is not None and one.size_bytes > 0
    assert rest.get_weights_info_by_tinker_path(saved).result().lora_rank == 4
    rest.delete_checkpoint_from_tinker_path(saved).result()
    assert saved not in [c.tinker_path for c in rest.list_user_checkpoints().result().checkpoints]
    assert rest.get_training_run(run).result().base_model == NAME
    assert len(rest.list_training_runs().result().training_runs) >= 2


def test_named_sampler_weights_are_loaded(service, training):
    path = training.save_weights_for_sampler("named").result().path
    prompt, params = (
        types.ModelInput.from_ints(PROMPTS[1]),
        types.SamplingParams(max_tokens=8, seed=2),
    )
    by_path = service.create_sampling_client(model_path=path).result()
    now = training.save_weights_and_get_sampling_client().result()
    assert sampled(by_path.sample(prompt, 2, params).result()) == sampled(
        now.sample(prompt, 2, params).result()
    )


def test_errors_of_the_caller_are_sentences(service, training, policy):
    with pytest.raises(Exception, match="expected a rank of 1 to 4, got 64"):
        service.create_lora_training_client(base_model=NAME, rank=64).result()
    with pytest.raises(Exception, match="expected the model 'reprise/tiny', got 'other'"):
        service.create_lora_training_client(base_model="other", rank=4).result()
    with pytest.raises(Exception, match="expected a loss of .*, got 'stable_reinforce'"):
        training.forward_backward([datum([1, 2, 3])], "stable_reinforce").result()
    with pytest.raises(Exception, match="loss_fn_inputs: expected sequence_ratio_mask"):
        training.forward_backward([datum([1, 2, 3])], "gspo").result()
    too_long = [1] * (policy.max_tokens + 2)
    with pytest.raises(Exception, match=f"expected 1 to {policy.max_tokens} tokens, got"):
        training.forward_backward([datum(too_long)], "cross_entropy").result()
    client = service.create_sampling_client(base_model=NAME).result()
    long = types.ModelInput.from_ints([1] * 40)
    with pytest.raises(Exception, match="expected a prompt of fewer than 32 tokens"):
        client.sample(long, 1, types.SamplingParams(max_tokens=4)).result()
    # the client goes on
    assert training.forward([datum([1, 2, 3])], "cross_entropy").result().loss_fn_outputs


def test_an_operation_that_fails_keeps_its_turn(training):
    """The ones after it run."""
    with pytest.raises(tinker.TinkerError, match="expected a name of letters"):
        training.save_state("a name").result()
    with pytest.raises(tinker.TinkerError, match="expected a name of letters"):
        training.save_weights_for_sampler("a/b").result()
    with pytest.raises(tinker.TinkerError, match="found no checkpoint"):
        training.load_state("tinker://none/weights/x").result()
    with pytest.raises(tinker.TinkerError, match="learning_rate: expected 0 to"):
        training.optim_step(types.AdamParams(learning_rate=-1.0)).result()
    assert training.forward([datum([1, 2, 3])], "cross_entropy").result(timeout=600)


def test_many_requests_of_several_adapters_share_rounds(service, training):
    """Each has the tokens that it has alone."""
    other = service.create_lora_training_client(base_model=NAME, rank=4, seed=9).result()
    other.forward_backward([datum([1, 2, 3, 4, 8, 8, 8])], "cross_entropy")
    other.optim_step(types.AdamParams(learning_rate=0.1)).result()
    clients = [x.save_weights_and_get_sampling_client().result() for x in (training, other)]
    clients.append(service.create_sampling_client(base_model=NAME).result())
    params = [types.SamplingParams(max_tokens=4 + i, seed=i) for i in range(8)]
    prompt = types.ModelInput.from_ints(PROMPTS[0])

    async def ask():
        return await asyncio.gather(
            *(c.sample_async(prompt, 2, p) for p in params for c in clients)
        )

    together = [sampled(x) for x in asyncio.run(ask())]
    alone = [sampled(c.sample(prompt, 2, p).result()) for p in params for c in clients]
    assert together == alone
    assert len({str(together[i::3]) for i in range(3)}) == 3


def test_samples_are_those_of_generate(service, policy):
    """With the noise that a request's seed names, of the policy without an adapter."""
    client, ids = service.create_sampling_client(base_model=NAME).result(), tuple(PROMPTS[0])
    params = types.SamplingParams(max_tokens=9, seed=7)
    got = sampled(client.sample(types.ModelInput.from_ints(list(ids)), 3, params).result())
    first = int.from_bytes(hashlib.sha256(b"seed 7").digest()[:4], "little")
    noise = [(first + i) % 2**31 for i in range(3)]
    requests = [Request(name, ids, 0, i) for i, name in enumerate(noise)]
    weights = policy._learner.policy(policy.with_new_adapter()._state.params)
    sampling = SamplingConfig(max_new_tokens=9)
    wanted = generate(policy.model, weights, requests, sampling, key=step_key(0, 0))
    assert got == [t.response_ids.tolist() for t in wanted]
