"""The child that renders ends with whoever asks it, also where another process was forked meanwhile."""

from __future__ import annotations

import os
import signal
import threading

from engine.data.rendering import Child


class Echo:
    def answer(self, name, *arguments):
        return {"answer": name, "notes": []}


def test_the_child_ends_beside_a_process_that_holds_its_pipe():
    child = Child(Echo)
    child._start()
    other = os.fork()
    if not other:
        signal.pause()  # as a process of a loader, which outlives the rendering
        os._exit(0)
    ending = threading.Thread(target=child._end, daemon=True)
    ending.start()
    ending.join(10)
    ended = not ending.is_alive()
    os.kill(other, signal.SIGKILL)
    os.waitpid(other, 0)
    assert ended
