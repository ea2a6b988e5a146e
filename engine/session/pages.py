"""What each step says beside its settings, as blocks that app and notebook draw; and the consequences of a config in numbers.

Pure functions of a session. Text from outside is made visible here; a frontend draws kinds of blocks and words nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from engine.config.files import short_path
from engine.config.tree import fields
from engine.errors import visible
from engine.figures import count
from engine.session.build import BuildSession
from engine.session.collector import key_of
from engine.session.first_rows import SourcePreview

FIRST_ROWS = 3


@dataclass(frozen=True, slots=True)
class Block:
    """`kind` is title, text, dim, warn, bad, code, gap, or table, which has `rows` of label and value."""

    kind: str
    text: str = ""
    rows: tuple[tuple[str, str], ...] = ()


GAP = Block("gap")


def _block(text: str, kind: str = "text") -> Block:
    return Block(kind, visible(text))


def _table(rows: Iterable[tuple[str, str | None]]) -> Block:
    """Labels and values; what is not known is left out."""
    return Block("table", rows=tuple((label, visible(value)) for label, value in rows if value))


def about_model(session: BuildSession) -> Iterator[Block]:
    """What is known of the model and its tokenizer."""
    facts, collector = session.draft.facts.model, session.facts
    yield _block("What is known of this model", "title")
    if facts is None:
        yield _block(f"Nothing yet; {collector.asking or 'name a folder, a hub model or builtin/tiny'}.", "dim")
    elif facts.missing:
        yield _block(facts.missing, "bad")
    elif facts.remote:
        yield _block(
            "Its files are not on this machine; they are downloaded at launch if the hub can be reached.", "warn"
        )
    else:
        yield _table(
            (
                ("Kind", facts.model_type or None),
                ("Parameters", count(facts.parameters) if facts.parameters else None),
                ("Layers", f"{facts.layers} of width {count(facts.hidden_size)}" if facts.layers else None),
                ("Context", f"{count(facts.max_length)} tokens" if facts.max_length else None),
                ("Vocabulary", count(facts.vocab_size) if facts.vocab_size else None),
                ("Chat template", {True: "yes", False: "none in its files", None: None}[facts.chat_template]),
            )
        )
    if collector.tokenizer:
        tokenizer, template = (collector.tokenizer.get(part) or {} for part in ("tokenizer", "template"))
        own = str(template.get("name") or "").startswith("the tokenizer")
        yield _table(
            (
                ("Tokenizer", f"{count(tokenizer.get('size', 0))} tokens"),
                ("Template", "the tokenizer's" if own else template.get("name") or "none"),
                ("End of answer", tokenizer.get("eos_token") or "none"),
            )
        )
    elif collector.asking and facts is not None:
        yield _block(collector.asking, "dim")
    yield from _problem_blocks(session)


def about_data(session: BuildSession) -> Iterator[Block]:
    """The first rows of each source, and what was counted over all."""
    draft, collector = session.draft, session.facts
    sources = draft.value(fields.data.train.path)
    for entry in sources if isinstance(sources, list) else []:
        if (look := collector.looks.get(key_of(entry))) is not None:
            yield from _source_blocks(look)
    facts = draft.facts.data
    if facts is not None and facts.rows is not None:
        yield _block("Counted over all rows" if facts.exact else "Counted so far", "title")
        yield _table(
            (
                ("Rows to learn from", count(facts.rows)),
                ("Held-out rows", count(facts.eval_rows) if facts.eval_rows else None),
                ("Tokens", count(facts.tokens) if facts.tokens else None),
                ("of them learned", count(facts.trained_tokens) if facts.trained_tokens else None),
                ("Longest row", f"{count(facts.longest)} tokens" if facts.longest else None),
                ("Rows too long", count(facts.truncated) if facts.truncated else None),
                ("Nothing to learn in", f"{count(facts.masked)} rows" if facts.masked else None),
            )
        )
    elif collector.asking:
        yield GAP
        yield _block(collector.asking, "dim")
    yield from _problem_blocks(session)


def _source_blocks(look: SourcePreview) -> Iterator[Block]:
    """Format, columns and the first rows of one source."""
    yield _block(short_path(visible(look.path)) + (f", {count(look.count)} rows" if look.count else ""), "title")
    if look.why:
        yield _block(f"{look.format}: {look.why}" if look.format else look.why, "dim")
    renamed = [f"{part} from {column}" for part, column in look.used if part != column]
    if renamed:
        yield _block("Read as " + ", ".join(renamed), "dim")
    if look.columns and not look.format:
        yield _block("Columns that can be mapped: " + ", ".join(look.columns), "dim")
    for problem in look.problems[:FIRST_ROWS]:
        yield _block(problem, "bad")
    for row in look.rows:
        yield _block(row, "code")


def _problem_blocks(session: BuildSession) -> Iterator[Block]:
    if session.facts.problems:
        yield GAP
    for words in session.facts.problems:
        yield _block(words, "warn")


def uncounted(session: BuildSession) -> Iterator[Block]:
    """That a run would find out first what the rows hold."""
    if words := session.uncounted:
        yield _block(f"{words} yet: what they hold is found out first", "warn")


def in_sentences(session: BuildSession) -> Iterator[Block]:
    """The config in one paragraph, first thing of the review."""
    yield _block(session.paragraph)


def waiting(session: BuildSession) -> Iterator[Block]:
    """That a worker waits for the run, and what it takes."""
    if words := session.warm.summary():
        yield _block(words, "dim")


CHOSEN = "Chosen for you, and why"


def changed_from(session: BuildSession) -> str:
    """What the differences on the review page are from."""
    recipe = session.draft.recipe
    return f"Changed from {'recipe ' + recipe if recipe else 'the defaults'}"
