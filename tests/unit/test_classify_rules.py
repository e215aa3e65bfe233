"""The rules file: the order it documents, rules of one's own, and one clear line for what is wrong with it."""

from __future__ import annotations

import re

import pytest

from vllm_k25_instrument.analysis.classify import Classifier
from vllm_k25_instrument.analysis.rules import BUILT_IN, RulesError, read_rules
from vllm_k25_instrument.model import HOOKED_CATEGORIES, Category


def written(tmp_path, text):
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_sections_of_the_file_come_in_the_order_that_its_head_documents():
    text = BUILT_IN.read_text(encoding="utf-8")
    documented = [int(n) for n in re.findall(r"^#   (\d)\. ", text, re.M)]
    sections = [int(n) for n in re.findall(r"^# --- (\d)\. ", text, re.M)]
    assert documented == sections == sorted(sections) == list(range(1, 10))


def test_every_rule_says_why():
    assert all(rule.comment for rule in read_rules().rules)


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        ("k25-range", "all-reduce-op"),
        ("inductor-norm", "all-reduce"),
        ("all-reduce", "collective"),
        ("collective", "moe"),
        ("all-reduce", "norm"),
        ("expert-permutation", "moe"),
        ("moe-marlin", "marlin"),
        ("moe-grouped-gemm", "gemm"),
        ("kv-cache", "attention"),
        ("attention", "norm"),
        ("shared-experts-gemm", "gemm"),
        ("gemm", "activation"),
        ("gemm", "quant"),
        ("copy-with-cast", "elementwise"),
        ("elementwise", "in-moe"),
    ],
)
def test_the_specific_rule_comes_before_the_general_one(earlier, later):
    order = [rule.id for rule in read_rules().rules]
    assert order.index(earlier) < order.index(later)


def test_our_ranges_rule_names_every_hooked_category():
    (rule,) = [rule for rule in read_rules().rules if rule.id == "k25-range"]
    pattern = rule.compiled["context"]
    assert all(pattern.search(category)["category"] == category for category in HOOKED_CATEGORIES)


def test_rules_of_ones_own_come_first(tmp_path):
    mine = written(
        tmp_path,
        """
        [[rule]]
        id = "my-marlin"
        category = "dense_gemm"
        function = '\\bmarlin moe\\b'
        """,
    )
    name = "void marlin_moe_wna16::Marlin<1l>(int4 const*)"
    assert Classifier.load().classify(name).category is Category.MOE_EXPERTS
    assert Classifier.load(mine).classify(name) == (Category.DENSE_GEMM, "my-marlin")
    assert Classifier.load(mine).classify(name, ("moe_experts L3",)).rule == "my-marlin"
    assert Classifier.load(mine).classify("fused_moe_kernel").category is Category.MOE_EXPERTS


def test_a_rule_may_take_the_category_from_the_context(tmp_path):
    mine = written(
        tmp_path,
        """
        [[rule]]
        id = "team-ranges"
        category = "from_context"
        context = '^team/(?P<category>\\w+)'
        """,
    )
    classifier = Classifier.load(mine)
    assert classifier.classify("k", ("team/rope",)) == (Category.ROPE, "team-ranges")
    assert classifier.classify("k", ("team/nonsense",)).category is Category.OTHER


def test_a_spelling_of_ones_own_is_used_by_all_rules(tmp_path):
    mine = written(tmp_path, '[spelling]\n"all reduce" = ["summe aller"]\n')
    assert Classifier.load(mine).classify("SummeAllerKernel").category is Category.ALL_REDUCE


RULE = '[[rule]]\nid = "r"\n'


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("[[rule]\n", 1, "not valid TOML"),
        ('\n\n[[rule]]\nid = "r"\ncategory = \n', 5, "not valid TOML"),
        (RULE + "category = 'fast'\nfunction = 'x'\n", 3, "category 'fast' is not one of all_reduce, collective"),
        (RULE + "function = 'x'\n", 1, "category None is not one of"),
        (RULE + "category = 'norm'\nfunction = '('\n", 4, "function '(' is not a regular expression"),
        (RULE + "category = 'norm'\nfunction = [\n  'fine',\n  '[bad',\n]\n", 6, "'[bad' is not a regular expression"),
        (RULE + "category = 'norm'\nfunktion = 'x'\n", 4, "unknown key 'funktion': known are id, category"),
        (RULE + "category = 'norm'\n", 2, "has no condition: give function, inside, name or context"),
        (RULE + "category = 'norm'\nunless = 'x'\n", 2, "has no condition"),
        (RULE + "category = 'norm'\nfunction = 3\n", 4, "'function' must be text, or a list of texts"),
        (RULE + "category = 'norm'\nfunction = []\n", 4, "'function' must be text, or a list of texts"),
        (RULE + "category = 'norm'\nfunction = 'x'\nkind = 'gpu'\n", 5, "kind 'gpu' is not one of kernel"),
        (RULE + "category = 'norm'\nfunction = 'x'\nkind = ['a']\n", 5, "is not one of kernel"),
        (RULE + "category = ['norm']\nfunction = 'x'\n", 3, "is not one of all_reduce"),
        (RULE + "category = 'norm'\nfunction = 'x'\nmla = 'yes'\n", 5, "mla must be true or false"),
        (RULE + "category = 'norm'\nfunction = 'x'\ncomment = 4\n", 5, "comment must be text"),
        (RULE + "category = 'from_context'\ncontext = 'x'\n", 3, "needs a context with a group (?P<category>"),
        ("[[rule]]\ncategory = 'norm'\n", 1, "a rule needs an id"),
        (2 * (RULE + "category = 'norm'\nfunction = 'x'\n"), 6, "two rules have the id 'r'"),
        ("rule = 3\n", 1, "'rule' must be an array of tables"),
        ("spelling = 3\n", 1, "'spelling' must be a table"),
        ("[spelling]\na = 3\n", 2, "'a' must be text, or a list of texts"),
        ("[rules]\n", 1, "unknown table or key 'rules'"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_with_its_number(tmp_path, text, line, reason):
    path = written(tmp_path, text)
    with pytest.raises(RulesError) as caught:
        Classifier.load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:{line}: ")
    assert reason in message
    assert "\n" not in message


def test_a_file_that_is_not_there_or_not_text_is_said_in_one_line(tmp_path):
    with pytest.raises(RulesError, match="No such file"):
        Classifier.load(tmp_path / "none.toml")
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RulesError, match="not UTF-8 text"):
        Classifier.load(binary)
