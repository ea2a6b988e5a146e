"""Talking to a run's model in a process of its own: the same tokens as transformers', one set of weights, and nothing left."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.builtin import tiny
from engine.errors import UsageError, WorkbenchError
from engine.run import devices
from engine.run.store import RunFolder
from engine.session.chat import ChatSession, who_answers
from engine.session.conversation import Settings
from tests.chats import QUESTION, make_run, model_folder, tuned


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def lora(runs: Path) -> RunFolder:
    return make_run(runs, steps=(10, 20))


@pytest.fixture(scope="module")
def chat(lora: RunFolder) -> Iterator[ChatSession]:
    """The newest checkpoint beside its base, loaded once for the tests that only ask."""
    with opened([lora]) as session:
        yield session


ENDLESS = QUESTION * 3
"""A text to which neither side finds an end."""


@contextmanager
def opened(found: list[RunFolder], *steps: int, only: Any = "", **given: Any) -> Iterator[ChatSession]:
    with closing(ChatSession(who_answers(found, steps, only), device="cpu", **given)) as session:
        session.load().result(240)
        yield session


def said(session: ChatSession, text: str, **settings: Any) -> list[dict[str, Any]]:
    session.conversation.settings = Settings(**settings)
    session.renew()
    return [ticket.result(120) for ticket in session.send(text)]


def greedy(model: Any, tokens: int = 24, question: str = QUESTION) -> list[int]:
    """transformers' own greedy ids, to the end of the turn or so many."""
    tokenizer = AutoTokenizer.from_pretrained(tiny.folder(None))
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    made = model.generate(**ids, do_sample=False, max_new_tokens=tokens, eos_token_id=stop, pad_token_id=0)
    new: list[int] = made[0, ids["input_ids"].shape[1] :].tolist()
    return new[: new.index(stop)] if stop in new else new


def base() -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny.folder(None), dtype=torch.float32).eval()


def gone(pid: int, within: float = 15.0) -> bool:
    until = time.monotonic() + within
    while time.monotonic() < until:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def test_greedy_answers_are_the_tokens_of_generate(chat: ChatSession) -> None:
    mine, its_base = said(chat, QUESTION, max_new_tokens=24)
    assert mine["ids"] == greedy(tuned("sft", tiny.folder(None), 20))
    assert its_base["ids"] == greedy(base())
    assert mine["ids"] != its_base["ids"]


def test_base_and_adapters_share_one_set_of_weights(chat: ChatSession, lora: RunFolder) -> None:
    alone = sum(weight.nbytes for weight in base().parameters())
    assert chat.loaded["models"] == 1
    assert alone < chat.loaded["bytes"] < 1.2 * alone
    with opened([lora], 10, 20) as two:
        assert two.loaded["models"] == 1
        first, second = said(two, QUESTION, max_new_tokens=24)
        assert first["ids"] == greedy(tuned("sft", tiny.folder(None), 10))
        assert second["ids"] == greedy(tuned("sft", tiny.folder(None), 20))


def test_weights_trained_themselves_are_two_models(runs: Path) -> None:
    with opened([make_run(runs, lora=False)]) as session:
        mine, its_base = said(session, QUESTION, max_new_tokens=24)
        assert mine["ids"] == greedy(tuned("sft", tiny.folder(None), 10, lora=False))
        assert its_base["ids"] == greedy(base())
        assert session.loaded["models"] == 2
        assert any("2 models are loaded" in note for note in session.notes)


def test_an_answer_grows_piece_by_piece(lora: RunFolder) -> None:
    seen: list[str] = []
    with opened([lora], only="tuned") as session:
        session._wake = lambda: (
            seen.append(session.conversation.turns[-1].answers[0].text) if session.conversation.turns else None
        )
        (answer,) = said(session, QUESTION, max_new_tokens=24)
        # The last callback may come a moment after the result.
        while not session.conversation.turns[-1].answers[0].done:
            time.sleep(0.01)
    grown = list(dict.fromkeys(text for text in seen if text))
    assert len(grown) > 3
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(grown))
    assert grown[-1] == answer["text"]


def test_the_stop_key_ends_an_answer_between_two_tokens(chat: ChatSession) -> None:
    chat.conversation.settings = Settings(max_new_tokens=4000)
    chat.renew()
    tickets = chat.send(ENDLESS)
    first = chat.conversation.turns[-1].answers[0]
    until = time.monotonic() + 30
    while first.tokens < 3 and not first.done and time.monotonic() < until:
        time.sleep(0.01)
    pressed = time.monotonic()
    chat.stop()
    results = [ticket.result(30) for ticket in tickets]
    assert [result["ended"] for result in results] == ["stopped", "stopped"]
    assert 3 <= results[0]["tokens"] < 4000
    assert results[1]["tokens"] == 1
    assert time.monotonic() - pressed < 5


def test_the_seed_decides_what_is_drawn(chat: ChatSession) -> None:
    def drawn(seed: int, **more: Any) -> list[int]:
        return list(said(chat, QUESTION, temperature=1.5, seed=seed, max_new_tokens=16, **more)[1]["ids"])

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    # So small a share of likelihood leaves the likeliest token alone.
    assert drawn(1, top_p=1e-6) == said(chat, QUESTION, max_new_tokens=16)[1]["ids"]


def test_the_next_turn_reads_what_each_side_said_itself(chat: ChatSession) -> None:
    mine, its_base = said(chat, QUESTION, max_new_tokens=4, system="Be short.")
    text = chat.prompt(0, "And then?").result(60)["text"]
    tokenizer = AutoTokenizer.from_pretrained(tiny.folder(None))
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": mine["text"]},
        {"role": "user", "content": "And then?"},
    ]
    expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == expected
    other = chat.prompt(1, "And then?").result(60)
    assert its_base["text"] in other["text"]
    assert other["tokens"] == len(tokenizer(other["text"], add_special_tokens=False)["input_ids"])


def test_tools_reach_the_template(runs: Path, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    words = json.loads((folder / "tokenizer_config.json").read_text())
    words["chat_template"] = "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}" + tiny.CHAT_TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
    tool = {"type": "function", "function": {"name": "calendar", "parameters": {}}}
    with opened([make_run(runs, model=folder)], only="base", tools=[tool]) as session:
        assert session.prompt(0, "hello").result(60)["text"].startswith("[calendar]<|im_start|>user\nhello")


def test_a_conversation_longer_than_the_positions(runs: Path, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", positions=48)
    with opened([make_run(runs, model=folder)], only="tuned") as session:
        (answer,) = said(session, "a b c", max_new_tokens=4000)
        assert answer["ended"] in ("positions", "stop")
        assert answer["prompt_tokens"] + answer["tokens"] <= 48
        with pytest.raises(WorkbenchError, match=r"conversation is \d+ tokens long, and .* has 48 positions"):
            said(session, "one two three " * 40)
        assert said(session, "a b c", max_new_tokens=2)[0]["tokens"] <= 2


def test_a_model_without_template_continues_the_text(runs: Path, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", template=False)
    with opened([make_run(runs, model=folder)], only="base") as session:
        assert any("No chat template" in note for note in session.notes)
        (answer,) = said(session, "May the", max_new_tokens=8)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        ids = torch.tensor([tokenizer("May the")["input_ids"]])
        made = base().generate(input_ids=ids, do_sample=False, max_new_tokens=8, pad_token_id=0)
        assert made[0, ids.shape[1] :].tolist()[: len(answer["ids"])] == answer["ids"]
        with pytest.raises(WorkbenchError, match="has no chat template, so a system prompt would reach no one"):
            said(session, "May the", system="Be short.")


def test_a_checkpoint_of_another_tokenizer_is_refused(runs: Path, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    run = make_run(runs, model=folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    words = content["model"]["vocab"]
    one, two = list(words)[300:302]
    words[one], words[two] = words[two], words[one]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(WorkbenchError, match="checkpoint-10 was trained with another tokenizer"), opened([run]):
        pass


def test_what_cannot_be_talked_to_is_one_sentence(runs: Path, lora: RunFolder) -> None:
    empty = make_run(runs, steps=())
    with pytest.raises(WorkbenchError, match="has no whole checkpoint to talk to"):
        who_answers([empty])
    (empty.checkpoints / "checkpoint-5").mkdir(parents=True)
    with pytest.raises(WorkbenchError, match=r"to talk to \(checkpoint-5: COMMIT\.json is missing or damaged\)"):
        who_answers([empty])
    assert [who.checkpoint for who in who_answers([empty], only="base")] == [None]
    with pytest.raises(UsageError, match=r"no whole checkpoint 7; its whole ones are 10, 20"):
        who_answers([lora], [7])
    with pytest.raises(UsageError, match="two sides at most"):
        who_answers([lora], [10, 20, 20])
    with pytest.raises(WorkbenchError, match="process reward model"):
        who_answers([make_run(runs, kind="prm", steps=())], only="base")
    scores = make_run(runs, kind="reward", steps=())
    with pytest.raises(UsageError, match="no trained head"):
        who_answers([scores], only="base")
    with pytest.raises(UsageError, match=f"{lora.id} and {scores.id} answer in different ways"):
        who_answers([lora, scores])
    (lora.checkpoints / "checkpoint-30").mkdir()
    try:
        newest, base = who_answers([lora])
        assert (newest.checkpoint, base.checkpoint) == (20, None)
        session = ChatSession([newest, base], device="cpu")
        session.close()
        assert session.notes == [f"checkpoint-30 of {lora.id} is passed over: COMMIT.json is missing or damaged."]
    finally:
        (lora.checkpoints / "checkpoint-30").rmdir()


@pytest.mark.parametrize(
    ("mine", "theirs", "told"),
    [((), [], "the CPU"), (("0",), ["0"], "GPU 0"), (("1",), ["0"], ""), ((), ["0"], ""), (("0",), [], "")],
)
def test_a_run_that_trains_on_the_same_device_is_named(
    lora: RunFolder, monkeypatch: pytest.MonkeyPatch, mine: tuple[str, ...], theirs: list[str], told: str
) -> None:
    monkeypatch.setattr("engine.session.chat.devices_of_live", lambda root, leaving: {"other-0001": theirs})
    monkeypatch.setattr("engine.session.chat.devices.choose", lambda wanted, taken: devices.Choice(mine, 1))
    session = ChatSession(who_answers([lora]))
    assert session._client._environment["CUDA_VISIBLE_DEVICES"] == ",".join(mine)
    expected = f"other-0001 is training on {told} too: both share its memory and are slower."
    assert session.notes == ([expected] if told else [])
    session.close()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "-1"),
        ("temperature", "nan"),
        ("top_p", "0"),
        ("max_new_tokens", "1.5"),
        ("seed", "-3"),
        ("seed", "x"),
    ],
)
def test_a_setting_out_of_bounds_is_named(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"^{name}: must be .*; got {value}"):
        Settings().changed(name, value)


def test_saved_rows_are_training_rows(chat: ChatSession, tmp_path: Path) -> None:
    from engine.client import Inspector

    said(chat, QUESTION, max_new_tokens=3, system="Be short.")
    whole = chat.conversation.turns[-1].answers[0]
    whole.ended = "stop"
    assert chat.conversation.turns[-1].answers[1].ended == "length"
    path = tmp_path / "rows.jsonl"
    assert chat.conversation.save(path) == 2
    with pytest.raises(UsageError, match="is there already"):
        chat.conversation.save(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows.jsonl"]
    config = {"version": 1, "model": {"name": "builtin/tiny"}, "method": {"kind": "sft"}}
    with Inspector() as inspector:
        asked = {**config, "data": {"train": [{"path": str(path)}]}}
        first, second = (
            inspector.ask("preview", config=asked, rows={"kind": "index", "index": row}).result(120)["rows"][0]
            for row in (0, 1)
        )
    texts = [
        "".join(token["text"] for token in row["parts"].get("input", ()) if token["trained"]) for row in (first, second)
    ]
    assert texts[0].startswith(whole.text)
    assert texts[1] == "", "an answer that was cut teaches nothing"


def test_a_reward_model_scores_the_answer(runs: Path) -> None:
    run = make_run(runs, kind="reward")
    with opened([run]) as session:
        assert session.kind == "score"
        assert len(session.who) == 1
        assert session.conversation.wants == "prompt"
        assert session.send(QUESTION) == []
        scores = [session.send(text)[0].result(60)["score"] for text in ("2021-03-03", "no")]
        with pytest.raises(UsageError, match="no rows to train on"):
            session.conversation.rows()
    model = tuned("reward", tiny.folder(None), 10)
    tokenizer = AutoTokenizer.from_pretrained(tiny.folder(None))
    for answer, score in zip(("2021-03-03", "no"), scores, strict=True):
        messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": answer}]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        model.config.pad_token_id = tokenizer.pad_token_id
        with torch.no_grad():
            expected = model(**tokenizer(text, add_special_tokens=False, return_tensors="pt")).logits[0, 0].item()
        assert score == pytest.approx(expected, abs=1e-5)
    assert scores[0] != scores[1]


def test_an_embedding_model_ranks_texts(runs: Path) -> None:
    texts = ["3 March 2021", "May May", "2021-03-03"]
    with opened([make_run(runs, kind="embedding", method={"pooling": "mean"})]) as session:
        assert session.kind == "rank"
        session.send("2021-03-03")
        for text in texts:
            results = [ticket.result(60) for ticket in session.send(text)]
    model = tuned("embedding", tiny.folder(None), 10)
    tokenizer = AutoTokenizer.from_pretrained(tiny.folder(None))
    for which, result in enumerate(results):
        vectors = []
        for text in ("2021-03-03", *texts):
            with torch.no_grad():
                inputs = {"input_ids": torch.tensor([tokenizer(text)["input_ids"]])}
                if which == 0:
                    hidden = model(**inputs).last_hidden_state
                else:
                    with model.disable_adapter():
                        hidden = model(**inputs).last_hidden_state
            vectors.append(torch.nn.functional.normalize(hidden[0].mean(0), dim=0))
        expected = [float(vector @ vectors[0]) for vector in vectors[1:]]
        got = {one["place"]: one["similarity"] for one in result["order"]}
        assert [got[place] for place in range(3)] == pytest.approx(expected, abs=1e-5)
        assert [one["similarity"] for one in result["order"]] == sorted(got.values(), reverse=True)
        assert result["order"][0]["text"] == "2021-03-03"


def test_the_process_goes_with_its_window(lora: RunFolder) -> None:
    with opened([lora], only="base") as session:
        pid = session.pid
        assert pid is not None
        assert psutil.pid_exists(pid)
    assert gone(pid)


WINDOW = """
import sys, time
if sys.argv[2] == "answering":  # the other is killed in the midst of its imports
    import prestarted
    prestarted.install()
from engine.run import devices
from engine.run.store import RunFolder
from engine.session.chat import ChatSession, who_answers
from engine.session.conversation import Settings
session = ChatSession(who_answers([RunFolder(sys.argv[1])]), Settings(max_new_tokens=4000), device="cpu")
ticket = session.load()
if sys.argv[2] == "answering":
    ticket.result(240)
    session.send("hello " * 5)
print(session.pid, flush=True)
time.sleep(300)
"""


@pytest.mark.parametrize("doing", ["loading", "answering"])
def test_the_process_goes_when_its_window_is_killed(lora: RunFolder, doing: str) -> None:
    window = subprocess.Popen([sys.executable, "-c", WINDOW, str(lora.path), doing], stdout=subprocess.PIPE, text=True)
    assert window.stdout is not None
    with window.stdout:
        pid = int(window.stdout.readline())
    children = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    window.kill()
    window.wait(10)
    assert all(gone(one) for one in children)


def test_a_killed_process_is_said_and_loads_again(lora: RunFolder) -> None:
    with opened([lora], only="base") as session:
        assert session.pid is not None
        session.conversation.settings = Settings(max_new_tokens=4000)
        (ticket,) = session.send("hello")
        psutil.Process(session.pid).kill()
        with pytest.raises(WorkbenchError, match=r"the chat's process ended \(signal 9\)"):
            ticket.result(30)
        with pytest.raises(UsageError, match="the chat's process ended"):
            session.send("hello")
        session.load().result(240)
        assert said(session, QUESTION, max_new_tokens=24)[0]["ids"] == greedy(base())
