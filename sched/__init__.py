"""Schedulers that assign requests to workers over time, as pure state machines.

The time is an argument and decisions are return values, so that a simulator and a real rollout
drive the same objects.
"""
