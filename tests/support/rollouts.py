"""Rollouts whose arguments are given one by one."""

from rl.engine.rollout_spec import RolloutSpec, draft_with

OF_THE_RUN = ("source", "stats", "on_finish", "on_round")


def run(engine, params, requests, sampling, key, stop=(), *, drafter=None, budget=None, **options):
    """Trajectories of `engine`; options are fields of `RolloutSpec`, or arguments of its `run`."""
    given = {name: options.pop(name) for name in OF_THE_RUN if name in options}
    spec = {"drafts": draft_with(drafter, budget)} | options
    return engine.run(RolloutSpec(params, sampling, key, stop, **spec), requests, **given)
