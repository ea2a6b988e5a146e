"""The browser tests leave nothing behind that other tests would stumble over."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import lab as browsing
import pytest


def test_a_loop_that_is_left_running_is_named() -> None:
    async def left() -> None:
        browsing.no_loop_is_left()

    with ThreadPoolExecutor(1) as elsewhere, pytest.raises(AssertionError, match="an event loop still runs"):
        elsewhere.submit(asyncio.run, left()).result()


def test_an_open_browser_has_a_loop_which_the_last_of_these_tests_may_not_leave(chromium: browsing.Window) -> None:
    with pytest.raises(AssertionError, match="behind the last of them"):
        browsing.no_loop_is_left()
