"""Make the learned drafter that ships: EAGLE's layer over the states of the policy that searches.

    python -m policies.make.drafter --output policies/countdown_drafter

The policy answers training questions at temperature 1, without those that `few.jsonl` has, and the
drafter is trained on its hidden states as `rl.train_drafter` trains one. Acceptance is measured in
rollouts of the test questions. `policies.make.grow --drafter` makes it the grown policy's.
"""

from __future__ import annotations

import argparse
import dataclasses
import typing
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from policies.make.countdown import NUM_FEW, questions
from policies.make.policy import respond, write_report
from reprise.models.config import ModelConfig
from reprise.models.decoder.transformer import Params
from reprise.models.formats import hf
from reprise.models.text import tokenizer
from reprise.rl.drafter_training import export
from reprise.rl.drafter_training.config import DrafterConfig
from reprise.rl.drafter_training.offline import hidden_of
from reprise.rl.drafter_training.trainer import SUMS, DrafterTrainer, copied
from reprise.rl.engine.engine import Engine
from reprise.rl.engine.rollout_spec import RolloutSpec, draft_with
from reprise.rl.records.packing import Response
from reprise.rl.records.trajectory import Request, Trajectory
from reprise.rl.slot_memory.model_runner import ModelRunner
from reprise.rl.slots.config import EngineConfig
from reprise.rl.speculation.device_drafters import LearnedDrafter
from reprise.spec.budget.budget import FixedBudget
from reprise.spec.config import Proposal, SamplingConfig
from reprise.spec.drafter import Acceptance, Drafts, LiveSlots
from reprise.spec.eagle import model as eagle
from reprise.spec.eagle.config import DataBufferConfig, DrafterTrainingConfig, TreeConfig, Variant
from reprise.spec.eagle.model import EagleParams, EagleWeights
from reprise.spec.eagle_training.training_data import DataBuffer
from reprise.spec.verification.sampling import step_key

SAY_EVERY_STEPS = 20
NOISE = 11  # of the responses: other ones than the policy's recipe draws


@dataclasses.dataclass(frozen=True)
class Settings:
    """Responses to train on, steps, and the size of the drafter.

    A step has `batch_rows` rows of `row_tokens`. Weights are the mean over the last
    `averaged_steps`, since the learning rate is constant.
    """

    seed: int = 0
    responses: int = 768
    max_new_tokens: int = 1024
    variant: Variant = "eagle"
    steps: int = 220
    averaged_steps: int = 40
    learning_rate: float = 3e-3
    batch_rows: int = 4
    row_tokens: int = 512
    d_ff: int = 384
    max_depth: int = 4  # of the chains that are measured
    measured_responses: int = 128


Policy = tuple[ModelConfig, Params]


def sampled(policy: Policy, tok: tokenizer.Tokenizer, settings: Settings) -> list[Response]:
    """Return the policy's own responses to training questions that no shipped run trains on."""
    train, _ = questions()
    prompts = [q.prompt for q in train[NUM_FEW : NUM_FEW + settings.responses]]
    key, limit = jax.random.key(NOISE + settings.seed), settings.max_new_tokens
    answers = respond(Engine(policy[0]), policy[1], tok, prompts, key, limit)
    return [_response(i, answer) for i, answer in enumerate(answers)]


def _response(number: int, answer: Trajectory) -> Response:
    prompt_ids = np.asarray(answer.prompt_ids, np.int32)
    response_ids = np.asarray(answer.response_ids, np.int32)
    return Response(str(number), number, prompt_ids, response_ids)


def train(
    policy: Policy, start: EagleWeights, buffer: DataBuffer, settings: Settings
) -> tuple[EagleWeights, list[dict[str, float]]]:
    """Return the drafter after all steps, of averaged weights, and each step's metrics."""
    rows, last = list[dict[str, float]](), list[EagleParams]()
    sizes = {"micro_batches": 1, "batch_rows": settings.batch_rows}
    config = DrafterConfig(row_tokens=settings.row_tokens, **sizes)
    variant = DrafterTrainingConfig(settings.variant, learning_rate=settings.learning_rate)
    learned = LearnedDrafter(start, config.tree)
    trainer = DrafterTrainer(config, variant, learned, buffer, seed=settings.seed, temperature=1.0)
    context = trainer.context(ModelRunner(policy[0], dtype=jnp.float32), policy[1])
    for step in range(1, settings.steps + 1):
        trainer.run_steps(1, context)
        rows += trainer.take_history()
        last = [*last[1 - settings.averaged_steps :], copied(trainer.state.params)]
        if step % SAY_EVERY_STEPS == 0:
            print(f"step {step:5d}  {said(rows[-SAY_EVERY_STEPS:])}", flush=True)
    mean = jax.tree.map(lambda *leaves: np.mean(leaves, axis=0), *last)
    return dataclasses.replace(start, params=mean), rows


def states_of(policy: Policy, responses: Sequence[Response], start: EagleWeights) -> DataBuffer:
    """Return a buffer with the policy's hidden states of all responses."""
    buffer, (model, params) = DataBuffer(DataBufferConfig()), policy
    for sequence in hidden_of(responses, params, model, start.config, jnp.float32):
        buffer.add(sequence, 0)
    return buffer


def mean_of(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: round(float(np.mean([row[name] for row in rows])), 4) for name in SUMS}


def said(rows: Sequence[dict[str, float]]) -> str:
    return "  ".join(f"{name} {value:.3f}" for name, value in mean_of(rows).items())


class CountedDepths(FixedBudget):
    """Verifies chains whole; counts draft tokens verified and accepted at each depth."""

    def __init__(self, max_depth: int) -> None:
        super().__init__(max_depth)
        self.verified_N, self.accepted_N = np.zeros((2, max_depth), int)

    def observe(self, live: LiveSlots, drafts: Drafts, acceptance: Acceptance) -> None:
        super().observe(live, drafts, acceptance)
        if acceptance.verified:
            N = len(self.verified_N)
            self.verified_N += acceptance.observed_AN[:, :N].sum(axis=0)
            self.accepted_N += acceptance.accepted_AN[:, :N].sum(axis=0)

    def by_depth(self) -> list[float]:
        """Return the share of draft tokens at depth n, verified together, that were accepted."""
        share_N = self.accepted_N / np.maximum(self.verified_N, 1)
        return [round(float(x), 4) for x in share_N]


def acceptance(
    policy: Policy,
    tok: tokenizer.Tokenizer,
    drafter: EagleWeights,
    settings: Settings,
    proposal: Proposal,
) -> list[float]:
    """Return the acceptance of chains at each depth, in rollouts of test questions."""
    _, test = questions()
    prompts = [q.prompt for q in test[: settings.measured_responses]]
    tree = TreeConfig(settings.max_depth, 1, proposal)
    nodes = settings.max_depth + 1
    config = EngineConfig(slots=32, min_slots=32, max_nodes=nodes, max_round_nodes=32 * nodes)
    engine = Engine(policy[0], config, feature_layers=drafter.config.feature_layers)
    sampling = SamplingConfig(max_new_tokens=settings.max_new_tokens, draw="gumbel")
    spec = RolloutSpec(policy[1], sampling, step_key(1, 0), policy[0].eos_token_ids)
    source = LearnedDrafter(drafter, tree).drafter_for(engine.drafter_context(spec))
    budget = CountedDepths(settings.max_depth)
    requests = [Request(i, tuple(tok.encode(prompt))) for i, prompt in enumerate(prompts)]
    engine.run(dataclasses.replace(spec, drafts=draft_with(source, budget)), requests)
    return budget.by_depth()


def make(policy_folder: Path, output: Path, settings: Settings) -> None:
    """Sample responses, train, write the folder, and measure acceptance."""
    policy, tok = hf.load_pretrained(policy_folder), tokenizer.load(policy_folder)
    responses = sampled(policy, tok, settings)
    start = first(policy[0], settings)
    drafter, rows = train(policy, start, states_of(policy, responses, start), settings)
    export.write(output, drafter, policy[0], None, policy_folder, settings.variant)
    proposals = typing.get_args(Proposal)
    write_report(
        output / "trained.json",
        settings,
        response_tokens=sum(len(r.tokens) for r in responses),
        last_steps=mean_of(rows[-settings.averaged_steps :]),
        accepted_by_depth={p: acceptance(policy, tok, drafter, settings, p) for p in proposals},
    )


def first(model: ModelConfig, settings: Settings) -> EagleWeights:
    """Return a drafter of random weights."""
    shape = eagle.config_for(model)
    layer = dataclasses.replace(shape.layer, d_ff=settings.d_ff)
    shape = dataclasses.replace(shape, layer=layer)
    return EagleWeights(shape, eagle.init(shape, jax.random.key(settings.seed)))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m policies.make.drafter", description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--policy", type=Path, default=Path("policies/countdown"))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make(arguments.policy, arguments.output, Settings(seed=arguments.seed))


if __name__ == "__main__":
    main()
