"""An alert's expression taken apart."""

from __future__ import annotations

import pytest

from tests.promql import operands


@pytest.mark.parametrize(
    ("expression", "parts"),
    [
        ("a > 0.5", ["a"]),
        ('a{b=~"c>d", e!="f"} == 0', ['a{b=~"c>d", e!="f"}']),
        ("a > 0.8 and on (job, instance) b > 0.2", ["a", "b"]),
        ("a > 0.4\n  unless on (job)\nb > 0.8\n", ["a", "b"]),
        ("rate(a[5m]) > 1.5 * (b + c)", ["rate(a[5m])", "1.5 * (b + c)"]),
        ("min by (x) (a > bool 1) == 0", ["min by (x) (a > bool 1)"]),
        ("standard > operand", ["standard", "operand"]),
        ("absent(a{b='c'})", ["a{b='c'}"]),
        ("absent(a) or absent(b)", ["a", "b"]),
    ],
)
def test_the_operands_of_an_expression(expression, parts):
    assert operands(expression) == parts
