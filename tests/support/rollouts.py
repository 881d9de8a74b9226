"""Rollouts whose arguments are given one by one."""

from drive import drive

from reprise.rl.engine.rollout_spec import RolloutSpec, draft_with

OF_THE_RUN = ("stats", "on_finish", "on_round")


def run(
    engine,
    params,
    requests,
    sampling,
    key,
    stop=(),
    *,
    drafter=None,
    budget=None,
    source=None,
    **options,
):
    """Trajectories of `engine`; options are fields of `RolloutSpec`, or arguments of its `run`.

    With a `source` its requests are run, and their trajectories go to `on_finish` alone.
    """
    given = {name: options.pop(name) for name in OF_THE_RUN if name in options}
    spec = {"drafts": draft_with(drafter, budget)} | options
    spec = RolloutSpec(params, sampling, key, stop, **spec)
    if source is not None:
        return drive(engine, spec, source, **given)
    return engine.run(spec, requests, **given)
