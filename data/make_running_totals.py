"""Write the running-totals task: prompts with answers, and worked solutions for a warm start.

    python data/make_running_totals.py [DIRECTORY]

A prompt is a letter and three digits: steps to go (b is 1, c is 2, ...), increment, digit, total.
Each step counts the letter down, adds the increment to the digit and the digit to the total, modulo
10, and writes all four again. After step ``a`` come ``=`` and the total:

    prompt    d372
    solution  c302b335a361=1

so the response to a prompt of n steps has 4 n + 2 characters, and each further step is one more
chance to go wrong. n is 2 plus an exponential draw of mean 6, at most 25: most prompts are short
and the tail is long, as lengths of reasoning are.

In the worked solutions, one step in ``1 / WRONG_SHARE`` writes a wrong total and goes on from
there: a model that imitates them knows how to go on, but not reliably, and that is what RL can
improve. No prompt is in both files.
"""

from __future__ import annotations

import json
import random
import string
import sys
from pathlib import Path

NUM_PROMPTS = 3000
NUM_SOLVED = 5000
MAX_STEPS = 25
WRONG_SHARE = 0.1
SEED = 20260


def solve(prompt: str, *, wrong_share: float, draw: random.Random) -> tuple[str, str]:
    """Worked solution and its last total; right if ``wrong_share`` is 0."""
    steps = string.ascii_lowercase.index(prompt[0])
    increment, digit, total = (int(character) for character in prompt[1:])
    written = []
    for letter in reversed(string.ascii_lowercase[:steps]):
        digit = (digit + increment) % 10
        total = (total + digit) % 10
        if draw.random() < wrong_share:
            total = (total + draw.randrange(1, 10)) % 10
        written.append(f"{letter}{increment}{digit}{total}")
    return f"{''.join(written)}={total}", str(total)


def main(directory: Path) -> None:
    """Write both files."""
    draw = random.Random(SEED)
    prompts: dict[str, None] = {}
    while len(prompts) < NUM_PROMPTS + NUM_SOLVED:
        steps = min(MAX_STEPS, 2 + int(draw.expovariate(1 / 6)))
        digits = "".join(str(draw.randrange(10)) for _ in range(3))
        prompts[string.ascii_lowercase[steps] + digits] = None
    distinct = list(prompts)
    draw.shuffle(distinct)
    with (directory / "running_totals.jsonl").open("w") as file:
        for prompt in distinct[:NUM_PROMPTS]:
            answer = solve(prompt, wrong_share=0, draw=draw)[1]
            file.write(json.dumps({"prompt": prompt, "answer": answer}) + "\n")
    with (directory / "running_totals_solved.jsonl").open("w") as file:
        for prompt in distinct[NUM_PROMPTS:]:
            solution = solve(prompt, wrong_share=WRONG_SHARE, draw=draw)[0]
            file.write(json.dumps({"prompt": prompt, "solution": solution}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
