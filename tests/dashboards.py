"""The dashboards in deploy/grafana as data, and their variables replaced as Grafana replaces them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).parents[1] / "deploy" / "grafana" / "dashboards"
NAMES: Final = tuple(sorted(file.stem for file in FOLDER.glob("*.json")))

Values = Mapping[str, str | Sequence[str]]
"""What is chosen, by variable: one value, or those of a variable that may have several."""

_LABEL_VALUES: Final = re.compile(r"label_values\((?P<series>.+), (?P<label>\w+)\)")


def load(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def panels(dashboard: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Without the rows."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def variables(dashboard: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Those that are asked of Prometheus, in order: a later one may name an earlier one."""
    return [variable for variable in dashboard["templating"]["list"] if variable["type"] == "query"]


@dataclass(frozen=True, slots=True)
class Asked:
    """One query of a panel."""

    panel: int
    ref_id: str
    expression: str
    instant: bool
    repeat: str | None


def queries(dashboard: Mapping[str, Any]) -> Iterator[Asked]:
    for panel in panels(dashboard):
        for target in panel["targets"]:
            yield Asked(panel["id"], target["refId"], target["expr"], target["instant"], panel.get("repeat"))


def label_values(query: str) -> tuple[str, str]:
    """The series and the label of ``label_values(series, label)``."""
    match = _LABEL_VALUES.fullmatch(query)
    assert match is not None, query
    return match["series"], match["label"]


def chosen(variable: Mapping[str, Any], options: Sequence[str]) -> str | Sequence[str]:
    """What is chosen when the dashboard opens: the variable's own choice, else the first option."""
    current = variable.get("current", {}).get("value")
    if current == "$__all":
        return variable.get("allValue") or list(options)
    if current in options:
        return current
    return [options[0]] if variable["multi"] else options[0]


def interpolated(expression: str, values: Values, scrape_seconds: int, step_seconds: int) -> str:
    """The expression that Prometheus gets. Variables of several values become a regular expression."""
    rate_interval = max(step_seconds + scrape_seconds, 4 * scrape_seconds)
    expression = expression.replace("$__rate_interval", f"{rate_interval}s")
    for name, value in values.items():
        expression = re.sub(rf"\${name}\b", _literally(_text_of(value)), expression)
    assert "$" not in expression.replace("$1", ""), expression  # $1 is label_replace's
    return expression


def _text_of(value: str | Sequence[str]) -> str:
    if isinstance(value, str):
        return value
    escaped = [re.sub(r"[\\$^*{}\[\]'+?.()|]", lambda special: "\\\\" + special[0], one) for one in value]
    return escaped[0] if len(escaped) == 1 else f"({'|'.join(escaped)})"


def _literally(text: str) -> Callable[[re.Match[str]], str]:
    return lambda _: text
