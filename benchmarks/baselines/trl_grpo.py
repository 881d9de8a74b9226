"""TRL's GRPOTrainer, which waits for a command before it generates.

One generation gives the responses of a step. Each of `updates_per_step` batches makes an optimizer
step, with log-probabilities of before the first one. A batch has responses of any group, shuffled.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from benchmarks.end_to_end import calculator
from benchmarks.end_to_end.protocol import Given, Parent, Step, prompt_text

CACHES: dict[str, dict[str, Any]] = {
    "dynamic cache": {},
    "static cache": {"cache_implementation": "static"},
    "continuous batching": {"use_transformers_continuous_batching": True},
}
# torch's threads wait for each other at every operation, which costs dearly on a busy machine
VARIANTS = (*(f"{cache}, 1 thread" for cache in CACHES), "dynamic cache, 2 threads")
MAX_TURNS = 24  # of benchmarks/end_to_end/calculator.gin
PACKAGES = ("trl", "transformers", "torch", "accelerate", "datasets")


class CommandedTrainer(GRPOTrainer):
    """A step lasts from one generation to the next."""

    def __init__(self, parent: Parent, **options: Any) -> None:
        super().__init__(**options)
        self._parent, self._now, self._updates = parent, Step(), 0

    def save_weights(self, folder: Path) -> None:
        self.model.save_pretrained(folder)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        updates = self.state.global_step - self._updates
        self._updates += updates
        figures = self._now.figures() | {"updates": updates} if updates else {}
        if not self._parent.next_step(figures, self.save_weights):
            sys.exit()
        self._now = Step()
        return super()._generate_and_score_completions(inputs)

    def _generate(self, prompts: Any) -> Any:
        made = self._now.timed("rollout", super()._generate, prompts)
        _, completion_ids, is_drawn, *_ = made  # no mask without an environment
        self._now.tokens = sum(map(len if is_drawn is None else sum, is_drawn or completion_ids))
        return made

    def _calculate_rewards(self, *arguments: Any) -> Any:
        found = self._now.timed("reward", super()._calculate_rewards, *arguments)
        self._now.rewards = found[:, 0].tolist()
        return found


def config(given: Given) -> GRPOConfig:
    """Return the settings of our run, in TRL's words; a batch has a step's share of responses."""
    return GRPOConfig(
        output_dir=given.scratch,
        seed=given.seed,
        max_steps=1_000_000,
        num_generations=given.group_size,
        per_device_train_batch_size=given.responses // given.updates_per_step,
        steps_per_generation=given.updates_per_step,
        gradient_accumulation_steps=1,
        num_iterations=1,
        max_completion_length=given.max_new_tokens,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        epsilon=0.2,
        scale_rewards="group",
        loss_type="bnpo",  # averages over all tokens of an optimizer step
        learning_rate=given.learning_rate,
        lr_scheduler_type="constant",
        warmup_steps=0,
        weight_decay=0.0,
        adam_beta1=0.9,
        adam_beta2=0.99,
        adam_epsilon=1e-8,
        max_grad_norm=1.0,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        shuffle_dataset=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **CACHES[given.variant.split(", ")[0]],
    )


def with_calculator(given: Given, tokenizer: Any, model: Any) -> dict[str, Any]:
    """Return the options of a trainer whose policy calls the calculator.

    The tokenizer gets a template and a parser of calls. A turn ends with a call or an end token.
    """
    [call] = tokenizer.encode(calculator.CALL, add_special_tokens=False)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, call]
    tokenizer.chat_template = calculator.TEMPLATE
    tokenizer.response_schema = {}  # TRL asks for one, and the parser below reads none

    def parse_response(ids: Any, **_: Any) -> dict[str, Any]:
        return calculator.parsed(tokenizer.decode(ids, skip_special_tokens=True))

    def score(completions: Any, answer: Any, **_: Any) -> list[float]:
        return given.score(calculator.last_turns(completions), answer)

    tokenizer.parse_response = parse_response
    return {"environment_factory": calculator.Tool, "reward_funcs": score}


def main() -> None:
    parent = Parent(VARIANTS, PACKAGES)
    given = parent.given
    torch.set_num_threads(1 if given.variant.endswith("1 thread") else 2)
    tokenizer = AutoTokenizer.from_pretrained(given.policy)
    model = AutoModelForCausalLM.from_pretrained(given.policy, dtype=torch.float32)
    options: dict[str, Any] = {"reward_funcs": given.score}
    as_prompt: Any = partial(prompt_text, tokenizer)
    settings = config(given)
    if given.environment:
        options = with_calculator(given, tokenizer, model)
        settings.max_tool_calling_iterations = MAX_TURNS - 1

        def as_prompt(text: str) -> Any:
            return [{"role": "user", "content": text}]

    rows = [row | {"prompt": as_prompt(row["prompt"])} for row in given.rows()]
    trainer = CommandedTrainer(
        parent,
        model=model,
        args=settings,
        **options,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.train()


if __name__ == "__main__":
    main()
