"""Schedulers as pure state machines: they assign requests to workers over time.

The time is an argument and decisions are return values, so that a simulator and a real rollout
drive the same objects.
"""
