"""PromQL: rates, means and quantiles over the vllm_k25_ metrics, narrowed by the variables of a dashboard.

Windows are Grafana's ``$__rate_interval``: four scrapes at least, and as wide as a pixel when one looks at a week.
"""

from __future__ import annotations

from typing import Final

from vllm_k25_instrument.export.families import Family

WINDOW: Final = "$__rate_interval"

SERVER: Final = 'instance=~"$instance"'
PHASE: Final = 'phase="$phase"'
RANK: Final = 'rank=~"$rank"'


def where(*conditions: str) -> str:
    """A selector's conditions in braces."""
    return "{" + ", ".join(conditions) + "}"


def rate(name: str, *conditions: str) -> str:
    """Increase per second of a counter."""
    return f"rate({name}{where(*conditions)}[{WINDOW}])"


def aggregate(how: str, expression: str, by: tuple[str, ...] = ()) -> str:
    """``sum by (a, b) (expression)``, or over everything."""
    return f"{how} by ({', '.join(by)}) ({expression})" if by else f"{how}({expression})"


def total(name: str, *conditions: str, by: tuple[str, ...] = ()) -> str:
    """Sum of the rates."""
    return aggregate("sum", rate(name, *conditions), by)


def over(numerator: str, denominator: str, matching: str = "") -> str:
    """A quotient on three lines, as one reads it; `matching` is ``on (...) group_left ()`` where labels differ."""
    return f"{numerator}\n  / {matching}".rstrip(" ") + f"\n{denominator}"


def mean(family: Family, *conditions: str, by: tuple[str, ...] = ()) -> str:
    """Mean of what a histogram or summary has observed."""
    return over(
        total(family.name + "_sum", *conditions, by=by),
        total(family.name + "_count", *conditions, by=by),
    )


def quantile(q: float, family: Family, *conditions: str, by: tuple[str, ...] = ()) -> str:
    """An estimate from the buckets of a histogram: right to the width of the bucket it falls into."""
    return f"histogram_quantile({q}, {total(family.name + '_bucket', *conditions, by=('le', *by))})"


def padded(expression: str, label: str, digits: int) -> str:
    """Adds ``<label>_sorted``: numbers with leading zeros, so that the bars of a chart stand in order.

    Grafana sorts text by letter: 16 would come before 4. ``+Inf`` and other words keep their letters.
    """
    new, zeros = f"{label}_sorted", "0" * digits
    with_zeros = f'label_replace({expression}, "{new}", "{zeros}$1", "{label}", "(.+)")'
    cut = f'label_replace({with_zeros}, "{new}", "$1", "{new}", "0*([0-9]{{{digits},}})")'
    return f'label_replace({cut}, "{new}", "$1", "{new}", "0+[+]?([A-Za-z]+)")'
