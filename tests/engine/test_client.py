"""The faces' end: answers belong to their tickets, cancelling is instant, a dead inspector is one sentence."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.client import Inspector, Ticket
from engine.errors import Cancelled, WorkbenchError

# A stand-in that speaks the protocol, for what an inspector does only when it is broken.
ODD = """
import json, os, sys, time
for line in sys.stdin:
    asked = json.loads(line)
    number, do = asked["id"], asked["do"]
    if do == "die":
        sys.stderr.write("Segmentation of the mind\\n"); sys.stderr.flush(); os._exit(3)
    if do == "torn":
        sys.stdout.write('{"id": 1, "resu'); sys.stdout.flush(); os._exit(0)
    if do == "noise":
        print("not json"); print('[]'); print('{"id": 99, "result": 1}')
    if do == "hang":
        continue
    if do == "progress":
        print(json.dumps({"id": number, "progress": {"what": "x", "done": 1, "total": 2, "unit": "rows"}}))
    print(json.dumps({"id": number, "result": asked.get("value")}), flush=True)
"""


@pytest.fixture
def odd() -> Iterator[Inspector]:
    with Inspector((sys.executable, "-c", ODD)) as inspector:
        yield inspector


def test_answers_find_their_tickets_and_noise_is_passed_over(odd: Inspector) -> None:
    tickets = [odd.ask("echo", value=number) for number in range(50)]
    noisy = odd.ask("noise", value="still here")
    assert [ticket.result(10) for ticket in tickets] == list(range(50))
    assert noisy.result(10) == "still here"


def test_progress_and_callbacks_arrive(odd: Inspector) -> None:
    seen: list[Any] = []
    called: list[Ticket] = []
    ticket = odd.ask("progress", on_progress=seen.append, value=7)
    ticket.add_done_callback(called.append)
    assert ticket.result(10) == 7
    deadline = time.monotonic() + 5
    while not called and time.monotonic() < deadline:
        time.sleep(0.01)
    assert called == [ticket]
    assert seen == [{"what": "x", "done": 1, "total": 2, "unit": "rows"}]
    late: list[Ticket] = []
    ticket.add_done_callback(late.append)
    assert late == [ticket]


@pytest.mark.parametrize("how", ["die", "torn"])
def test_a_dead_inspector_fails_its_tickets_and_the_next_question_starts_another(odd: Inspector, how: str) -> None:
    waiting, killer = odd.ask("hang"), odd.ask(how)
    for ticket in (waiting, killer):
        with pytest.raises(WorkbenchError, match="the inspector ended") as caught:
            ticket.result(10)
        assert "\n" not in caught.value.message
    assert odd.ask("echo", value="back").result(10) == "back"


def test_the_last_words_of_a_dead_inspector_are_told(odd: Inspector) -> None:
    with pytest.raises(WorkbenchError, match=r"exit code 3.: Segmentation of the mind"):
        odd.ask("die").result(10)


def test_cancel_is_answered_at_once_even_by_a_hanging_inspector(odd: Inspector) -> None:
    ticket = odd.ask("hang")
    before = time.monotonic()
    ticket.cancel()
    with pytest.raises(Cancelled):
        ticket.result(5)
    assert time.monotonic() - before < 2
    assert ticket.cancelled
    assert odd.ask("echo", value=1).result(10) == 1


def test_result_waits_no_longer_than_asked(odd: Inspector) -> None:
    with pytest.raises(TimeoutError):
        odd.ask("hang").result(0.05)


def test_close_cancels_what_is_open_and_ends_process_and_thread() -> None:
    inspector = Inspector((sys.executable, "-c", ODD))
    ticket = inspector.ask("hang")
    pid = inspector.pid
    assert pid is not None
    inspector.close()
    with pytest.raises(Cancelled):
        ticket.result(1)
    assert not psutil.pid_exists(pid)
    assert not [thread for thread in threading.enumerate() if thread.name == "inspector-reader"]
    with pytest.raises(WorkbenchError, match="closed"):
        inspector.ask("echo")


def test_many_threads_may_ask(odd: Inspector) -> None:
    results: list[Any] = []

    def ask(start: int) -> None:
        results.extend(odd.ask("echo", value=start + n).result(10) for n in range(20))

    threads = [threading.Thread(target=ask, args=(100 * n,)) for n in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == sorted(100 * t + n for t in range(5) for n in range(20))


def test_a_missing_interpreter_is_one_sentence() -> None:
    with Inspector(("/nonexistent/python",)) as inspector, pytest.raises(WorkbenchError, match="cannot be reached"):
        inspector.ask("hello").result(1)


def test_the_client_imports_no_heavy_library() -> None:
    code = (
        "import sys, engine.client\n"
        "heavy = {'torch', 'transformers', 'datasets', 'trl', 'pandas', 'numpy', 'pydantic'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=Path(__file__).parents[2])


def test_an_inspector_sees_the_tokens_of_hub_and_stores_and_no_other_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_" + "a" * 34)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a" * 40)
    monkeypatch.setenv("GITHUB_TOKEN", "a" * 40)
    monkeypatch.setenv("JUDGE", "https://me:geheim@host")
    told = (
        "import json, os, sys\n"
        "for line in sys.stdin:\n"
        "    print(json.dumps({'id': json.loads(line)['id'], 'result': dict(os.environ)}), flush=True)\n"
    )
    with Inspector((sys.executable, "-c", told)) as inspector:
        seen = inspector.ask("environment").result(10)
    assert seen["HF_TOKEN"] == "hf_" + "a" * 34
    assert seen["AWS_SECRET_ACCESS_KEY"] == "a" * 40
    assert not {"GITHUB_TOKEN", "JUDGE"} & seen.keys()


def test_a_signal_before_the_reader_is_started_ends_the_process_and_nothing_else(
    odd: Inspector, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(thread: threading.Thread) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            odd.ask("echo")
    assert odd.pid is not None
    odd.close()
    assert not psutil.pid_exists(odd.pid)
