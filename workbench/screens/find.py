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
            each.path or f"term:{each.title}",
            Content.assemble(
                (each.title, "bold"), ("  " + "  ".join(filter(None, (each.path, each.whose))), "$wb-dim")
            ),
            Content.styled(clean(first_sentence(each.help).replace("`", "").rstrip(".")), "$wb-dim"),
            each.text,
        )
        for each in findable(config)
    ]
