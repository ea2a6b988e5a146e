"""The server: the tools and resources over standard input and output, behind one gate.

Whatever leaves passes the gate: no secret, no character that hides or reorders text. Whatever fails is one sentence with its
way out, as the commands say it, never a traceback.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from importlib import metadata
from typing import Any

from mcp.server.lowlevel.helper_types import ReadResourceContents
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import (
    ResourceError,
    ResourceNotFoundError,
    ToolError,
    UnexpectedResourceError,
    UnexpectedToolError,
)
from mcp.shared.exceptions import MCPError
from mcp.types import INTERNAL_ERROR, CallToolResult, InputRequiredResult, Resource, TextContent
from pydantic import ValidationError

from engine.errors import RunNotFound, WorkbenchError, nearest, visible
from workbench.assistants import answers, resources
from workbench.assistants.desk import Desk
from workbench.assistants.gate import as_text, clean, safe
from workbench.assistants.tools import tools
from workbench.crash import crashed

INSTRUCTIONS = (
    "Fine-tuning of language models: configs (YAML files) and runs (folders). Work in this order: `explain` settings, `check` a "
    "config and mend what it finds, `preview` the tokens that are learned, `estimate` memory and time, and `launch` when the "
    "person wants a run; then `watch` it, and read its `post_mortem`. `launch` and `stop` ask the person. Paths are relative to "
    f"the first root. {answers.DATA}"
)


class Server(MCPServer[Desk]):
    """The tools and resources of one desk."""

    def __init__(self, desk: Desk) -> None:
        @asynccontextmanager
        async def lifespan(_: MCPServer[Desk]) -> AsyncIterator[Desk]:
            try:
                yield desk
            finally:
                desk.close()

        super().__init__(
            "workbench",
            title="Fine-tuning workbench",
            instructions=INSTRUCTIONS,
            version=metadata.version("finetuning-workbench"),
            tools=tools(),
            lifespan=lifespan,
            log_level="ERROR",  # what fails is said to who called
            subscriptions=False,
        )
        self._desk = desk
        resources.add_to(self)

    async def call_tool(
        self, name: str, arguments: dict[str, Any], context: Context[Desk, Any] | None = None
    ) -> CallToolResult | InputRequiredResult:
        """What a tool answers; what goes wrong is its answer too, in one sentence."""
        try:
            await self._refuse_unknown(name, arguments)
            result = await super().call_tool(name, arguments, context)
        except ToolError as problem:
            return _refused(_sentence(name, problem))
        except WorkbenchError as problem:
            return _refused(problem)
        return result if isinstance(result, InputRequiredResult) else _shown(result)

    async def list_resources(self) -> list[Resource]:
        """The parts of the newest runs."""
        try:
            return await self._desk.jobs.run(lambda job: resources.listed(self._desk), _silent)
        except WorkbenchError as problem:
            raise MCPError(INTERNAL_ERROR, _words(problem)) from None

    async def read_resource(
        self, uri: Any, context: Context[Desk, Any] | None = None
    ) -> Iterable[ReadResourceContents] | InputRequiredResult:
        """A part of a run."""
        try:
            return await super().read_resource(uri, context)
        except UnexpectedResourceError as problem:
            found = _cause(problem)
            kind = ResourceNotFoundError if isinstance(found, RunNotFound) else ResourceError
            raise kind(_words(found)) from None

    async def _refuse_unknown(self, name: str, arguments: Mapping[str, Any]) -> None:
        """Raises WorkbenchError for a tool, or an argument of it, that there is not."""
        known = {tool.name: list(tool.input_schema["properties"]) for tool in await self.list_tools()}
        if name not in known:
            raise WorkbenchError(f"{visible(name)[:80]}: must be a tool; there are {', '.join(known)}.")
        for word in arguments:
            if word not in known[name]:
                close = nearest(word, known[name])
                way = f"Did you mean {close}?" if close else f"It takes {', '.join(known[name]) or 'none'}."
                raise WorkbenchError(f"{name}: knows no argument {visible(word)[:80]}.", way)


async def _silent(progress: float, total: float | None, message: str) -> None:
    """Nobody is told."""


# -- what is said ------------------------------------------------------------------------------------------------------


def _shown(result: CallToolResult) -> CallToolResult:
    """An answer past the gate; as text it is the same JSON, for clients that read no other."""
    content = clean(result.structured_content)
    return CallToolResult(content=[TextContent(type="text", text=as_text(content))], structured_content=content)


def _refused(problem: WorkbenchError) -> CallToolResult:
    """What went wrong, as a command says it."""
    return CallToolResult(content=[TextContent(type="text", text=_words(problem))], is_error=True)


def _words(problem: WorkbenchError) -> str:
    """The sentence and its way out, below the findings that it speaks of."""
    findings = [f"{each['severity']}: {each['message']}" for each in getattr(problem, "findings", ())]
    return safe("\n".join([*findings, problem.message, *([problem.hint] if problem.hint else [])]))


def _sentence(name: str, problem: ToolError) -> WorkbenchError:
    """What a tool's failure says."""
    cause = problem.__cause__
    if isinstance(cause, ValidationError) and not isinstance(problem, UnexpectedToolError):
        first = cause.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        given = "nothing" if first["type"] == "missing" else visible(repr(first["input"]))[:80]
        return WorkbenchError(f"{name}: {place}: {first['msg'][:1].lower()}{first['msg'][1:]}; got {given}.")
    if isinstance(cause, ToolError) and not isinstance(cause, UnexpectedToolError):
        # The library alone raises these, over an answer that is none to the form that was shown.
        return WorkbenchError(
            f"{name}: the client's answer fits no question that was asked; nothing was started or stopped."
        )
    return _cause(problem)


def _cause(problem: BaseException) -> WorkbenchError:
    """The error of ours behind one of the library; an unforeseen one goes into the log."""
    cause = problem.__cause__
    while isinstance(cause, ToolError | ResourceError) and cause.__cause__ is not None:
        cause = cause.__cause__
    if isinstance(cause, WorkbenchError):
        return cause
    if isinstance(cause, Exception):
        return crashed(cause)
    return WorkbenchError(str(problem))
