"""Reward functions that come with the package.

All have TRL's signature: ``fn(prompts, completions, **columns) -> list[float]``, each argument a
list with one entry per completion. A prompt or completion is a string or, in TRL's conversational
form, a list of messages. They return 1.0 or 0.0; what cannot be judged raises.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

Text = str | Sequence[Mapping[str, str]]

_MAGNITUDE = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![\w.])\.[0-9]+"
_NUMBER = re.compile(
    rf"(?:(?<![\w)\]}}])(?P<sign>[-+\u2212]))?(?P<magnitude>(?:{_MAGNITUDE})(?:[eE][-+]?[0-9]+)?)"
)


def last_number(
    prompts: Sequence[Text], completions: Sequence[Text], answer: Sequence[str], **columns: Any
) -> list[float]:
    """1.0 iff the last number in the completion equals the answer exactly, as a number.

    A number is digits with optional sign, thousands separators (``1,234``), decimals and exponent,
    so ``7``, ``7.0`` and ``+7`` are equal, ``1`` and ``10`` are not. A minus directly before the
    digits is a sign, unless a letter, digit or closing bracket stands directly before it: the last
    number of ``5-3`` is 3. Fractions are not evaluated: else repeating the exercise ``8/2`` would
    solve it.

    Raises:
        ValueError: if an answer is not such a number.

    >>> last_number(["2 + 2?"] * 3, ["2 + 2 is 4.", "40", "-4"], ["4"] * 3)
    [1.0, 0.0, 0.0]
    """
    rewards = []
    for completion, gold in zip(completions, answer, strict=True):
        expected = _NUMBER.fullmatch(gold.strip())
        target = _value(expected) if expected else None
        if target is None:
            raise ValueError(
                f"answer {gold!r} is not a number; last_number needs one in each row of the "
                "answer column"
            )
        numbers = list(_NUMBER.finditer(completion_text(completion)))
        rewards.append(float(bool(numbers) and _value(numbers[-1]) == target))
    return rewards


def math_verify_answer(
    prompts: Sequence[Text], completions: Sequence[Text], answer: Sequence[str], **columns: Any
) -> list[float]:
    r"""1.0 iff math-verify finds the completion's answer equal to the reference.

    An answer in ``\boxed{}`` goes before others in the completion; a completion in which no
    expression is found is wrong. Errors of math-verify propagate. Its own time-outs are off, since
    they would count as wrong answers: the deadline of the scorer pool holds instead.

    Raises:
        ValueError: if no expression is found in an answer.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)  # they warn that their time-outs are off
    forms = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    references: dict[str, Any] = {}
    rewards = []
    for completion, gold in zip(completions, answer, strict=True):
        if gold not in references:
            strict = {"parsing_timeout": None, "raise_on_error": True}
            references[gold] = parse(gold, **strict) or parse(f"${gold}$", **strict)
            if not references[gold]:
                raise ValueError(
                    f"math-verify finds no expression in answer {gold!r}; needed LaTeX or a number"
                )
        found = parse(
            completion_text(completion),
            extraction_config=forms,
            parsing_timeout=None,
            raise_on_error=True,
        )
        rewards.append(
            float(verify(references[gold], found, timeout_seconds=None, raise_on_error=True))
        )
    return rewards


def larger_digit(
    prompts: Sequence[Text], completions: Sequence[Text], **columns: Any
) -> list[float]:
    """1.0 iff the completion's first character is a digit greater than every digit in the prompt.

    Raises:
        ValueError: if a prompt has no digit.

    >>> larger_digit(["3 5"] * 3, ["6", "5", " 9"])
    [1.0, 0.0, 0.0]
    """
    rewards = []
    for prompt, completion in zip(prompts, completions, strict=True):
        text = (
            prompt
            if isinstance(prompt, str)
            else "\n".join(message["content"] for message in prompt)
        )
        digits = re.findall("[0-9]", text)
        if not digits:
            raise ValueError(
                f"prompt {text[:80]!r} has no digit; larger_digit needs prompts such as '3 5'"
            )
        first = completion_text(completion)[:1]
        rewards.append(float("0" <= first <= "9" and first > max(digits)))
    return rewards


def completion_text(completion: Text) -> str:
    """The text of a completion; of messages, that of the last."""
    if isinstance(completion, str):
        return completion
    return completion[-1]["content"]


def _value(match: re.Match[str]) -> Decimal | None:
    """The number exactly; None if its exponent is beyond anything Decimal holds."""
    sign = "-" if match["sign"] in ("-", "\u2212") else ""
    try:
        return Decimal(sign + match["magnitude"].replace(",", ""))
    except InvalidOperation:
        return None
