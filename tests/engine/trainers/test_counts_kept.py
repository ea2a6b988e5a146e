"""What a run's own preparation counted is known to whoever looks at its config later, as if they had counted it."""

from __future__ import annotations

import json

from click.testing import CliRunner

from engine.config.files import parse
from engine.data.gather_facts import gather_facts
from engine.rules import read
from tests.engine.trainers.conftest import CONVERSATIONS
from workbench.cli.check import command as check


def test_a_runs_own_counts_are_found_by_a_later_check(train, source, tmp_path):
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join(json.dumps({"messages": row}) + "\n" for row in CONVERSATIONS[:3]))
    settings = {"data.train": [{"path": source(CONVERSATIONS)}], "data.eval": [{"path": str(held_out)}]}
    run = train({**settings, "optim.max_steps": 2, "data.max_length": 36, "data.excess_length": "truncate"})
    config = read(parse(run.read_config()).mapping).config
    known = gather_facts(config, tmp_path).data
    assert known is not None
    assert (known.counted, known.exact, known.read) == ("all", True, len(CONVERSATIONS))
    assert known.truncated > 0
    file = tmp_path / "later.yaml"
    file.write_text(run.read_config())
    told = json.loads(CliRunner().invoke(check, [str(file), "--json"], standalone_mode=False).stdout)
    assert told["data"]["truncated_share"] == {"value": known.truncated / known.read, "counted": "all"}


def test_the_built_in_rows_are_known_too_once_a_run_has_counted_them(train, tmp_path):
    run = train({"data.train": [{"path": "builtin/dates", "rows": 64}], "optim.max_steps": 2})
    known = gather_facts(read(parse(run.read_config()).mapping).config, tmp_path).data
    assert known is not None
    assert (known.counted, known.read) == ("all", 64)
