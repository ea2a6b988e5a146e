"""A person's functions in their own process: whatever they do wrong is one sentence that names them and the row."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.config.reward_specs import reward_specs
from engine.errors import WorkbenchError
from engine.rewards.functions import RewardFunctions

MINE = """
import os, time
import beside

def letters(completions, **columns):
    print("this goes to the log")
    return [len(text) for text in completions]

async def waits(completions, days):
    return [float(day) for day in days]

def tensors(completions):
    import numpy
    return numpy.array([1.5] * len(completions))

def raises(completions):
    return [1 / int(text) for text in completions]

def hangs(completions):
    time.sleep(60)

def short(completions):
    return [1.0] * (len(completions) - 1)

def nan(completions):
    return [1.0, float("nan"), 1.0]

def word(completions):
    return ["good"] * len(completions)

def one(completions):
    return 1.0

def ends(completions):
    os._exit(3)

def sys_exit(completions):
    raise SystemExit(4)

def talks(completions):
    raise ValueError("x" * 100_000)

def counts(completions, answer):
    return [None if each is None else beside.VALUE for each in answer]
"""


@pytest.fixture
def functions(tmp_path: Path) -> Iterator[Callable[..., RewardFunctions]]:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "beside.py").write_text("VALUE = 2")
    made: list[RewardFunctions] = []

    def make(*texts: str, timeout: float = 20.0) -> RewardFunctions:
        texts = tuple(text.replace("mine.py", str(tmp_path / "mine.py")) for text in texts)
        made.append(RewardFunctions(reward_specs(texts), timeout))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_functions_get_what_they_ask_for_and_may_print_and_wait(functions) -> None:
    batch = {"completions": ["a", "bcd", ""], "days": [1, 2, 3], "answer": ["x", None, "x"], "prompts": ["", "", ""]}
    five = functions("mine.py:letters", "mine.py:waits", "exact_match", "mine.py:tensors", "mine.py:counts")
    values = [five.score(number, batch, [0, 1, 2]) for number in range(5)]
    assert values == [[1, 3, 0], [1, 2, 3], [0, None, 0], [1.5, 1.5, 1.5], [2, None, 2]]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("raises", r"mine.py:raises raised ValueError: invalid literal .* \(row 11 of the data\)"),
        ("short", r"mine.py:short must return 3 numbers, one an answer; got 2"),
        ("nan", r"mine.py:nan must return finite numbers; got nan \(row 11 of the data\)"),
        ("word", r"mine.py:word must return numbers; got str good \(row 10 of the data\)"),
        ("one", r"mine.py:one must return a list of 3 numbers, one an answer; got float"),
        ("ends", r"mine.py:ends ended its process \(exit code 3\) on 3 answers to rows 10 to 12"),
        ("sys_exit", r"mine.py:sys_exit raised SystemExit: 4"),
        ("talks", r"mine.py:talks raised ValueError: x{300} \.\.\. \(row 10 of the data\)"),
    ],
)
def test_what_goes_wrong_names_function_and_row(functions, name: str, words: str) -> None:
    with pytest.raises(WorkbenchError, match=words) as caught:
        functions(f"mine.py:{name}").score(0, {"completions": ["1", "x", "2"]}, [10, 11, 12])
    assert caught.value.message.startswith("method.reward_funcs: ")
    assert caught.value.hint
    assert "\n" not in caught.value.message


def test_one_that_hangs_is_ended_within_its_time(functions) -> None:
    hanging = functions("mine.py:hangs", timeout=1.0)
    hanging.start()
    pid = hanging._processes[0].process.pid
    begun = time.monotonic()
    with pytest.raises(WorkbenchError, match=r"mine.py:hangs did not return within 1 seconds on row 5 of the data"):
        hanging.score(0, {"completions": ["1"]}, [5])
    assert time.monotonic() - begun < 10
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(
    ("text", "words", "way_out"),
    [
        ("mine.py:nothing", "nothing is no function of its file, which has letters, waits, tensors", "after the colon"),
        ("absent.py:score", "absent.py:score cannot be loaded: there is no file", "from the config's folder"),
        ("json_schema:absent.json", r"json_schema absent.json cannot be read: No such file", "starts at the config's"),
    ],
)
def test_one_that_cannot_be_loaded_says_so_at_the_start(functions, text: str, words: str, way_out: str) -> None:
    with pytest.raises(WorkbenchError, match=words) as caught:
        functions(text).start()
    assert way_out in caught.value.hint


def test_a_file_that_cannot_be_imported_says_why(functions, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import absent_package")
    with pytest.raises(WorkbenchError, match="cannot be imported with its file: ModuleNotFoundError"):
        functions("mine.py:letters").start()


def test_an_argument_that_no_column_fills_is_named_with_those_that_are_given(functions, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def score(completion, **columns):\n    return 1.0\n")
    with pytest.raises(
        WorkbenchError, match=r"mine.py:score takes completion, but is given answer, completions"
    ) as caught:
        functions("mine.py:score").score(0, {"completions": ["1"], "answer": ["1"]}, [0])
    assert "**columns" in caught.value.hint


FORGING = """
import json, os, subprocess, sys

def pipes():
    return [n for n in map(int, os.listdir("/proc/self/fd")) if n > 2 and os.path.exists(f"/proc/self/fd/{n}")
            and os.readlink(f"/proc/self/fd/{n}").startswith("pipe:")]

def write(values):
    for pipe in pipes():
        try:
            os.write(pipe, json.dumps({"values": values}).encode() + b"\\n")
        except OSError:
            pass

def before(completions):
    write([100.0] * len(completions))
    return [0.0] * len(completions)

def garbage(completions):
    for pipe in pipes():
        try:
            os.write(pipe, b"no json\\n")
        except OSError:
            pass
    return [0.0] * len(completions)

def honest(completions):
    return [0.5] * len(completions)

def aborts(completions):
    if (child := os.fork()) == 0:
        import time
        time.sleep(120)
        os._exit(0)
    with open(__file__ + ".child", "w") as file:
        file.write(str(child))
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (1 << 28, 1 << 28))
    os.abort()

def sees(completions):
    return [float(os.environ.get(name, "no") != "no") for name in ("HF_TOKEN", "MY_API_KEY", "JUDGE_KEY")]

def tells(completions):
    raise ValueError("https://me:geheim@host and " + os.environ.get("HF_TOKEN", "none"))
"""


@pytest.mark.parametrize("name", ["before", "garbage"])
def test_a_function_cannot_write_answers_through_descriptors_that_it_inherits(functions, tmp_path, name: str) -> None:
    (tmp_path / "forging.py").write_text(FORGING)
    forging = tmp_path / "forging.py"
    made = functions(f"{forging}:{name}", f"{forging}:honest")
    assert made.score(1, {"completions": ["a"]}, [0]) == [0.5]
    with pytest.raises(WorkbenchError, match=rf"forging.py:{name} wrote into the pipe that its answers go through"):
        made.score(0, {"completions": ["a"]}, [0])


def test_a_native_abort_under_a_memory_limit_does_not_wait_for_what_it_started(functions, tmp_path) -> None:
    (tmp_path / "forging.py").write_text(FORGING)
    made = functions(f"{tmp_path / 'forging.py'}:aborts", timeout=90.0)
    made.start()
    begun = time.monotonic()
    with pytest.raises(WorkbenchError, match=r"ended its process \(exit code -6\)"):
        made.score(0, {"completions": ["a"]}, [0])
    os.kill(int((tmp_path / "forging.py.child").read_text()), signal.SIGKILL)  # it still sleeps
    assert time.monotonic() - begun < 45


def test_a_function_sees_no_secret_but_those_that_it_is_given(functions, tmp_path, monkeypatch) -> None:
    (tmp_path / "forging.py").write_text(FORGING)
    for name in ("HF_TOKEN", "MY_API_KEY", "JUDGE_KEY"):
        monkeypatch.setenv(name, "value-of-it")
    monkeypatch.setenv("WORKBENCH_REWARD_SECRETS", "JUDGE_KEY")
    made = functions(f"{tmp_path / 'forging.py'}:sees", f"{tmp_path / 'forging.py'}:tells")
    assert made.score(0, {"completions": ["a", "b", "c"]}, [0, 1, 2]) == [0.0, 0.0, 1.0]
    with pytest.raises(WorkbenchError, match=r"\[hidden\]@host and none"):
        made.score(1, {"completions": ["a"]}, [0])


def test_two_threads_that_ask_are_each_given_their_own_answer(functions) -> None:
    """Held-out answers are scored while those of the next batch are, by another thread."""
    rewards = functions("mine.py:letters")
    rewards.start()
    batches = [["a" * length] * 50 for length in range(1, 41)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda batch: rewards.score(0, {"completions": batch}, [0]), batches))
    assert found == [[len(batch[0])] * 50 for batch in batches]


def test_a_thread_that_waits_for_a_function_is_let_go(functions) -> None:
    rewards = functions("mine.py:hangs", timeout=600.0)
    rewards.start()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(rewards.score, 0, {"completions": ["a"]}, [0])
        while not rewards._turn.locked():
            time.sleep(0.01)
        rewards.interrupt()
        with pytest.raises(WorkbenchError, match="ended its process"):
            asked.result(30)
