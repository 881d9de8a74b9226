"""`LLM.generate` of vLLM: `python -m benchmarks.baselines.vllm_generate`.

Runs in an environment of its own, with vllm, and takes `SHARE` of the device's memory, since
another process holds the rest. Without detokenizing and without kept prefixes, which equal prompts
of another call would reuse.
"""

from __future__ import annotations

from typing import Any

from benchmarks.baselines import protocol
from benchmarks.shape import Shape

SHARE = 0.3


class VLLM:
    name = "vllm"
    variants = ("default",)
    packages = ("vllm", "torch", "transformers")

    def prepare(self, shape: Shape, policy: str, variant: str) -> None:
        from vllm import LLM

        self.shape = shape
        self.prompts = [{"prompt_token_ids": ids} for ids in shape.prompts()]
        self.engine = LLM(
            model=policy,
            dtype=shape.dtype,
            max_model_len=shape.cache,
            max_num_seqs=shape.batch,
            gpu_memory_utilization=SHARE,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
        )

    def generate(self, seed: int, greedy: bool) -> tuple[list, list]:
        """Generate the batch; `seed` is not used, since vLLM draws slower with one per request."""
        from vllm import SamplingParams

        settings: Any = SamplingParams(
            temperature=0.0 if greedy else 1.0,
            max_tokens=self.shape.new_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,  # of the token that was drawn
        )
        done = self.engine.generate(self.prompts, settings, use_tqdm=False)
        found = [request.outputs[0] for request in done]
        tokens = [list(one.token_ids) for one in found]
        logprobs = [
            [step[token].logprob for step, token in zip(one.logprobs, one.token_ids, strict=True)]
            for one in found
        ]
        return tokens, logprobs


if __name__ == "__main__":
    protocol.serve(VLLM())
