"""What `/` finds: every setting of the schema by its name and the words of its help, and the terms of the trade."""

from __future__ import annotations

from textual.content import Content

from engine.config.schema import RunConfig, fields
from engine.config.terms import TERMS
from workbench.panels.paint import clean
from workbench.screens.dialog import Item


def find_items(config: RunConfig) -> list[Item]:
    """One entry a setting; those of other methods and adapters say whose they are."""
    items = []
    for spec in sorted(fields, key=lambda spec: not spec.applies(config)):
        whose = "" if spec.applies(config) else f"  only with {spec.section} {' or '.join(spec.kinds)}"
        title = Content.assemble((spec.title, "bold"), (f"  {spec.path}{whose}", "$wb-dim"))
        first = spec.help.partition(". ")[0].replace("`", "").rstrip(".")
        words = f"{spec.title} {spec.path} {spec.help}".lower()
        items.append(Item(spec.path, title, Content.styled(clean(first), "$wb-dim"), words))
    for term, text in TERMS.items():
        title = Content.assemble((term, "bold"), ("  a term", "$wb-dim"))
        first = text.partition(". ")[0].rstrip(".")
        items.append(Item(f"term:{term}", title, Content.styled(clean(first), "$wb-dim"), f"{term} {text}".lower()))
    return items
