"""The browser tests leave nothing behind that other tests would stumble over."""

from __future__ import annotations

import lab as browsing
import pytest


async def test_a_loop_that_is_left_running_is_named() -> None:
    with pytest.raises(AssertionError, match="an event loop still runs"):
        browsing.no_loop_is_left()


def test_after_the_browser_no_loop_runs(lab: browsing.Lab) -> None:
    with browsing.browser(), pytest.raises(AssertionError, match="module-scoped"):
        browsing.no_loop_is_left()
    browsing.no_loop_is_left()
