"""Runs of the worker in this process, as the trainers' tests have them."""

from tests.engine.trainers.conftest import source, train  # noqa: F401
