"""Attacks on outcomes (`_scores`), and on side channels: work, time and traffic."""

from nearveil.audit.attacks._clock import make_clock_experiment, make_time_experiment
from nearveil.audit.attacks._wire import make_wire_experiment

__all__ = ["make_clock_experiment", "make_time_experiment", "make_wire_experiment"]
