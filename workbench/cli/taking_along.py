"""What `merge`, `export` and `push` share: one line of progress, the parts as they are done, the document of `--json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.errors import WorkbenchError, redact, visible
from engine.export.process import Export, compared
from engine.figures import progress, size
from workbench.cli.output import clear, echo, print_json, rewrite

SENT = "Cancelled: nothing was published unless the hub had answered; push again, and files that arrived are not sent twice."


def followed(request: dict[str, Any], *, as_json: bool) -> dict[str, Any]:
    """Runs the export and shows it; Ctrl-C cancels. Raises its WorkbenchError, and one that says what a cancelled one leaves."""

    def show(message: dict[str, Any]) -> None:
        if "progress" in message:
            state = message["progress"]
            counted = f" {progress(state)}" if state["total"] > 1 else " …"
            rewrite(state["what"] + counted)
        elif "part" in message:
            clear()
            if not as_json:
                part_line(message["part"])

    try:
        return Export(request).run(show)
    except KeyboardInterrupt:
        raise WorkbenchError(SENT if request["do"] == "push" else Export.cancelled, exit_code=130) from None
    finally:
        clear()


def ended(result: dict[str, Any], *, as_json: bool) -> int:
    """Prints the document where it is asked for; the exit code: 1 where a part failed."""
    failed = [part for part in result["parts"] if not part["ok"]]
    if as_json:
        print_json({"ok": not failed, **result})
    return 1 if failed else 0


def part_line(part: dict[str, Any]) -> None:
    """What became of one part."""
    where = visible(redact(part["path"]))
    if not part["ok"]:
        problem = WorkbenchError(**part["error"])
        echo(f"Error: {part['form']}: {problem.full_message.removeprefix(part['form'] + ': ')}", err=True)
        return
    echo(f"{part['form']}: {where} ({size(part['bytes'])})")
    echo(f"  {compared(part['parity'])}")
    for note in part.get("notes", ()):
        echo(f"  {note}")


def absolute(path: Path | None, otherwise: str) -> Path:
    """The folder that was named, or one of this name where the person stands."""
    return (path.expanduser() if path else Path(otherwise)).absolute()
