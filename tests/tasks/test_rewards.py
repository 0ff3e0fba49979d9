"""The reward functions that come with the package."""

import doctest
import subprocess
import sys
from decimal import Decimal

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from pace_lightning.tasks import rewards
from pace_lightning.tasks.rewards import larger_digit, last_number, math_verify_answer


def judge(completion, answer):
    return last_number(["p"], [completion], [answer])[0]


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("The answer is 7.", "7"),
        ("7.0", "7"),
        ("3 + 4 = 7", "7"),
        ("first 8, then 7!", "7"),
        ("5-3", "3"),
        ("x-3", "3"),
        ("(2)-3", "3"),
        ("5 - 3", "3"),
        ("x = -3", "-3"),
        ("$-3$", "-3"),
        ("2 * -3", "-3"),
        ("it is \u22123 degrees", "-3"),
        ("1,234,567", "1234567"),
        ("1234567", "1,234,567"),
        ("1, 2", "2"),
        ("(1,2)", "2"),
        ("0.50", ".5"),
        ("costs $1,234.50.", "1234.5"),
        ("2.5e3", "2500"),
        ("0.1", "0.10"),
        ("-0", "0"),
        ("007", "7"),
        ("8/2", "2"),
        ("1.2.3", "3"),
        ("the answer is.5", "5"),
        ("1" + "0" * 5000, "1" + "0" * 5000),
        ([{"role": "assistant", "content": "so 7"}], "7"),
    ],
)
def test_the_last_number_equals_the_answer(completion, answer):
    assert judge(completion, answer) == 1.0


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("10", "1"),
        ("1", "10"),
        ("7 or 8", "7"),
        ("-7", "7"),
        ("5-3", "-3"),
        ("no number", "0"),
        ("", "0"),
        ("8/2", "4"),
        ("0.3", "0.30000000000000004"),
        ("9007199254740993", "9007199254740992"),
        ("1" + "0" * 4999 + "1", "1" + "0" * 5000),
        ("1e99999999999999999999999", "1"),
        ("1e999999999999", "1"),
        ("1.2", "2"),
        ("\u0667", "7"),
    ],
)
def test_anything_else_is_wrong(completion, answer):
    assert judge(completion, answer) == 0.0


def written(number):
    """Ways to write one number."""
    return st.sampled_from(
        [f"{number}", f"{number:,}", f"{number}.0" if "." not in f"{number}" else f"{number}0"]
    )


numbers = st.decimals(allow_nan=False, allow_infinity=False, places=3) | st.integers()


@given(st.data(), numbers, st.text("ab .,;:=(\n", max_size=8), st.integers(0, 10**6))
def test_any_way_to_write_the_answer_at_the_end_is_right(data, number, prose, earlier):
    number = f"{Decimal(number):f}" if isinstance(number, Decimal) else str(number)
    value = Decimal(number)
    shown = data.draw(written(value if "." in number else int(number)))
    text = f"{earlier} {prose} = {shown} {data.draw(st.text('abc .!', max_size=5))}"
    assert judge(text, number) == 1.0


@given(st.integers(), st.integers())
@example(1, 10)
def test_another_integer_is_wrong(answer, given_answer):
    assume(answer != given_answer)
    assert judge(f"{answer} = {given_answer}", str(answer)) == 0.0


@given(st.integers(0), st.integers(0))
def test_a_minus_between_two_numbers_is_not_a_sign(left, right):
    assert judge(f"{left}-{right}", str(right)) == 1.0
    assert judge(f"{left} = -{right}", f"-{right}") == 1.0


@given(st.text())
def test_no_text_raises(text):
    assert judge(text, "1") in (0.0, 1.0)


@pytest.mark.parametrize("answer", ["", "seven", "3/4", "1 2", "#### 4", "1e99999999999999999999"])
def test_an_answer_that_is_no_number_is_an_error_not_a_wrong_answer(answer):
    with pytest.raises(ValueError, match="is not a number"):
        judge("7", answer)


def test_the_answers_must_be_as_many_as_the_completions():
    with pytest.raises(ValueError, match="shorter"):
        last_number(["p"] * 2, ["7", "7"], ["7"])


def test_larger_digit_looks_at_the_first_character_only():
    completions = ["6", "65", "5", "3", " 6", "x", "", "\u0667"]
    assert larger_digit(["3 5"] * 8, completions) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    conversation = [[{"role": "user", "content": "3 5"}]]
    assert larger_digit(conversation, [[{"role": "assistant", "content": "6"}]]) == [1.0]
    with pytest.raises(ValueError, match="has no digit"):
        larger_digit(["three"], ["6"])


@pytest.mark.slow
def test_math_verify_judges_mathematics_and_its_errors_propagate(monkeypatch):
    completions = [
        r"so \boxed{\frac{1}{2}}, not 3",
        "the answer is $0.5$",
        "2/4",
        "0.51",
        r"\boxed{\frac{1}{",
        "no idea",
    ]
    judged = math_verify_answer(["p"] * 6, completions, [r"\frac{1}{2}"] * 6)
    assert judged == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    assert math_verify_answer(["p"], ["$1+x$"], ["x+1"]) == [1.0]
    with pytest.raises(ValueError, match="finds no expression in answer ''"):
        math_verify_answer(["p"], ["1"], [""])

    def broken(*arguments, **settings):
        raise ArithmeticError("broken")

    monkeypatch.setattr("math_verify.grader.sympy_expr_eq", broken)
    with pytest.raises(ArithmeticError, match="broken"):
        math_verify_answer(["p"], ["1"], ["1"])


def test_the_examples_in_the_docstrings_hold():
    assert doctest.testmod(rewards).failed == 0


def test_the_tasks_import_no_heavy_package():
    script = (
        "import sys, pace_lightning.tasks.rewards, pace_lightning.tasks.scoring, "
        "pace_lightning.tasks.sources, pace_lightning.tasks.prompts; "
        "heavy = {'torch', 'transformers', 'lightning', 'omegaconf', 'datasets', 'math_verify', "
        "'reasoning_gym'} & set(sys.modules); sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
