"""The palette's entries: every action of the table that works on the screen below it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from textual.command import DiscoveryHit, Hit, Hits, Provider

from workbench.actions import Action, actions


class ActionProvider(Provider):
    """All actions of this screen by name and help."""

    def _actions(self) -> Iterator[Action]:
        own = actions(getattr(self.screen, "NAME", ""))
        return (action for action in (*own, *actions("everywhere")) if not action.quiet)

    def _run(self, action: Action) -> object:
        owner = "app" if "everywhere" in action.screens else "screen"
        return partial(self.screen.run_action, f"{owner}.{action.call or action.id}")

    async def discover(self) -> Hits:
        """All of them, before anything is typed."""
        for action in self._actions():
            yield DiscoveryHit(self._title(action), self._run(action), help=action.help)  # type: ignore[arg-type]

    async def search(self, query: str) -> Hits:
        """Those whose name or help fits what is typed."""
        matcher = self.matcher(query)
        for action in self._actions():
            score = max(matcher.match(self._title(action)), matcher.match(action.help) * 0.8)
            if score > 0:
                title = matcher.highlight(self._title(action))
                yield Hit(score, title, self._run(action), text=self._title(action), help=action.help)  # type: ignore[arg-type]

    @staticmethod
    def _title(action: Action) -> str:
        title = action.label[0].upper() + action.label[1:]
        return f"{title}   {action.name}" if action.name else title
