"""Rows for the other demos, made from the built-in dates: another answer form, preference pairs, plain text.

    python -P demos/make_rows.py german|pairs|text FILE [--count 4000] [--held-out]

`german` asks for DD.MM.YYYY, which the ISO model has never written; `pairs` prefers ISO to the American order; `text` is
plain sentences. Held-out rows are of days that no training row names. Seeded: the same file every time.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
from pathlib import Path

from engine.builtin import dates


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("kind", choices=list(KINDS))
    given.add_argument("file", type=Path)
    given.add_argument("--count", type=int, default=4000)
    given.add_argument("--held-out", action="store_true")
    options = given.parse_args()
    draw = random.Random(f"{options.kind} {options.held_out}")
    days = dates.held_out_days() if options.held_out else dates.training_days()
    lines = [KINDS[options.kind](draw.choice(days), draw) for _ in range(options.count)]
    options.file.write_text("".join(line + "\n" for line in lines), "utf-8")


def german(day: datetime.date, draw: random.Random) -> str:
    return json.dumps({"prompt": f"{dates.spell(day, draw)} in German form?", "completion": f"{day:%d.%m.%Y}"})


def pairs(day: datetime.date, draw: random.Random) -> str:
    question = f"Write {dates.spell(day, draw)} as numbers."
    return json.dumps({"prompt": question, "chosen": day.isoformat(), "rejected": f"{day:%m/%d/%Y}"})


def text(day: datetime.date, draw: random.Random) -> str:
    return f"{dates.spell(day, draw)} was a {day:%A}, and {day.isoformat()} is how it is written in ISO form."


KINDS = {"german": german, "pairs": pairs, "text": text}

if __name__ == "__main__":
    main()
