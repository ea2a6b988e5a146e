"""What `/` finds: every setting of the schema by its name and the words of its help, and the terms of the trade."""

from __future__ import annotations

from textual.content import Content

from engine.config.tree import RunConfig
from engine.session.explain import findable, first_sentence
from workbench.panels.paint import clean
from workbench.screens.dialog import Item


def find_items(config: RunConfig) -> list[Item]:
    """One entry a setting or term; those of other methods and adapters say whose they are."""
    return [
        Item(
            item.path or f"term:{item.title}",
            Content.assemble(
                (item.title, "bold"), ("  " + "  ".join(filter(None, (item.path, item.whose))), "$wb-dim")
            ),
            Content.styled(clean(first_sentence(item.help).replace("`", "").rstrip(".")), "$wb-dim"),
            item.text,
        )
        for item in findable(config)
    ]
