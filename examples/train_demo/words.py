"""Word problems of one to four steps, with a solution in sentences.

How hard one is, is up to its level: the size of its numbers. Each operation is written down with
its result and nothing between, so a model has to do large sums in one go.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from train_demo.held_out import reserved

# By level: what is added or taken away, and the two factors of a product.
_TERMS: Final = ((2, 12), (5, 99), (20, 400), (100, 999), (500, 9999), (5_000, 99_999))
_FACTORS: Final = (
    ((2, 6), (2, 12)),
    ((2, 9), (2, 20)),
    ((2, 9), (11, 49)),
    ((2, 9), (11, 99)),
    ((3, 12), (11, 99)),
    ((3, 19), (12, 99)),
)
_LARGEST: Final = 1000  # factors and dividends above this are not multiplied or divided
LEVELS: Final = len(_TERMS)

_NAMES: Final = (
    "Ada she, Ben he, Carla she, Dev he, Elsa she, Farid he, Grete she, Hugo he, Ines she, "
    "Jon he, Kira she, Luis he, Mila she, Noah he, Olga she, Priya she, Quinn he, Rosa she, "
    "Sami he, Tara she, Umar he, Vera she, Wim he, Yuki she, Zoe she, Otto he, Leo he, Mia "
    "she, Anton he, Bea she"
)
_PEOPLE: Final = tuple((name, word) for name, word in map(str.split, _NAMES.split(", ")))
_THINGS: Final = (
    "pears",
    "apples",
    "marbles",
    "stickers",
    "stamps",
    "shells",
    "cards",
    "pens",
    "eggs",
    "rolls",
    "books",
    "beads",
    "coins",
    "plums",
    "cookies",
    "buttons",
    "balloons",
    "bricks",
    "tiles",
    "nails",
    "bulbs",
    "seeds",
    "roses",
    "candles",
    "postcards",
    "muffins",
    "lemons",
    "pencils",
    "jars",
    "ribbons",
)
_HOLDERS: Final = (
    "boxes",
    "bags",
    "crates",
    "baskets",
    "packs",
    "trays",
    "shelves",
    "drawers",
    "rows",
    "tins",
)
_DAYS: Final = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_TIMES: Final = {2: "twice", 3: "three times", 4: "four times", 5: "five times"}


@dataclass(frozen=True, slots=True)
class Step:
    """One sentence of a solution; {} in it stands for the calculation, if it has one."""

    sentence: str
    left: int = 0
    sign: str = ""
    right: int = 0
    result: int = 0

    def plain(self) -> str:
        """Return the sentence as in a chain of thought: ... 14 + 9 = 23 ..."""
        return self.sentence.replace("{}", f"{self.left} {self.sign} {self.right} = {self.result}")

    def annotated(self) -> str:
        """Return the sentence as GSM8K has it: ... 14+9=<<14+9=23>>23 ..."""
        sum_ = f"{self.left}{self.sign}{self.right}"
        return self.sentence.replace("{}", f"{sum_}=<<{sum_}={self.result}>>{self.result}")


@dataclass(frozen=True, slots=True)
class WordProblem:
    """A question, its solution and the number asked for."""

    question: str
    steps: tuple[Step, ...]
    answer: int
    level: int

    def target(self, between: str = " ") -> str:
        """Return the solution as few-shot examples show it."""
        reasoning = between.join(step.plain() for step in self.steps)
        return f"{reasoning}{between}The answer is {self.answer}."

    def reference(self) -> str:
        """Return the solution in the format of GSM8K's own files."""
        return "\n".join([*(step.annotated() for step in self.steps), f"#### {self.answer}"])

    @property
    def key(self) -> str:
        """What makes it this problem."""
        return self.question


@dataclass(slots=True)
class _Story:
    """A problem in the making."""

    draw: random.Random
    level: int
    sentences: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    def pick(self, *texts: str) -> str:
        return self.draw.choice(texts)

    def term(self) -> int:
        return self.draw.randint(*_TERMS[self.level])

    def below(self, limit: int) -> int:
        """Return something to take away from `limit`, itself of the level's size if it can be."""
        low, high = _TERMS[self.level]
        high = min(high, limit - 1)
        return self.draw.randint(min(low, high), high)

    def factors(self) -> tuple[int, int]:
        (a, b), (c, d) = _FACTORS[self.level]
        return self.draw.randint(a, b), self.draw.randint(c, d)

    def factor(self) -> int:
        return self.draw.randint(*_FACTORS[self.level][0])

    def say(self, *texts: str) -> None:
        self.sentences.append(self.draw.choice(texts))

    def reckon(self, left: int, sign: str, right: int, *sentences: str) -> int:
        result = {"+": left + right, "-": left - right, "*": left * right, "/": left // right}[sign]
        self.steps.append(Step(self.draw.choice(sentences), left, sign, right, result))
        return result


def _people(s: _Story, num: int) -> list[tuple[str, str]]:
    return s.draw.sample(_PEOPLE, num)


def _running(s: _Story) -> int:
    """A number of things that changes one to four times."""
    (who, they), (friend, _) = _people(s, 2)
    things = s.draw.choice(_THINGS)
    kind = s.draw.randrange(3)
    if kind == 0:
        now = s.term()
        s.say(f"{who} has {now} {things}.", f"There are {now} {things} in the house of {who}.")
    elif kind == 1:
        count, size = s.factors()
        holders = s.draw.choice(_HOLDERS)
        s.say(
            f"{who} has {count} {holders} with {size} {things} in each.",
            f"{who} has {count} {holders} of {size} {things}.",
        )
        now = s.reckon(
            count,
            "*",
            size,
            f"There are {{}} {things} at first.",
            f"{count} {holders} of {size} are {{}} {things}.",
        )
    else:
        one, two = s.term(), s.term()
        first, second = s.draw.sample(_DAYS, 2)
        s.say(f"{who} collects {one} {things} on {first} and {two} on {second}.")
        now = s.reckon(
            one, "+", two, f"Together these are {{}} {things}.", f"{who} collects {{}} {things}."
        )
    num_turns = s.draw.randint(1, 4) - len(s.steps)
    for turn in range(num_turns):
        event = s.draw.choices(("gain", "lose", "trade", "share", "sell"), (4, 4, 1, 2, 2))[0]
        last = turn == num_turns - 1
        if event == "gain":
            more = s.term()
            s.say(
                f"Then {friend} gives {who} {more} more.",
                f"{they.title()} buys {more} more.",
                f"{they.title()} finds another {more}.",
            )
            now = s.reckon(
                now,
                "+",
                more,
                f"With {more} more there are {{}} {things}.",
                f"After that there are {{}} {things}.",
            )
        elif event == "trade" and now <= _LARGEST:
            size = s.factor()
            new = s.draw.choice([name for name in _THINGS if name != things])
            s.say(f"{they.title()} trades each of the {things} for {size} {new}.")
            things = new
            now = s.reckon(now, "*", size, f"That makes {{}} {things}.", f"They are {{}} {things}.")
        elif event == "share" and last and (parts := _divisor(s, now)):
            s.say(
                f"{they.title()} shares them equally among {parts} people.",
                f"They are put into {parts} equal piles.",
            )
            now = s.reckon(now, "/", parts, "Each part is {}.", f"Each gets {{}} {things}.")
            s.say(f"How many {things} are in each part?", f"How many {things} is one part?")
            return now
        elif event == "sell" and last and now <= _LARGEST:
            price = s.factor()
            s.say(
                f"{they.title()} sells all of them for {price} dollars each.",
                f"All of them are sold at {price} dollars apiece.",
            )
            now = s.reckon(now, "*", price, "That brings {} dollars.", "They bring {} dollars.")
            s.say("How many dollars is that?", f"How many dollars does {who} get?")
            return now
        elif now > 3:
            less = s.below(now)
            s.say(
                f"{they.title()} gives {less} to {friend}.",
                f"Then {less} of them get lost.",
                f"{they.title()} sells {less} of them.",
            )
            now = s.reckon(
                now,
                "-",
                less,
                f"Without these there are {{}} {things}.",
                f"Then {{}} {things} are left.",
            )
    if not s.steps:
        more = s.term()
        s.say(f"{friend} has {more} {things}.")
        now = s.reckon(now, "+", more, f"Together they have {{}} {things}.")
        s.say(f"How many {things} do they have together?")
        return now
    s.say(
        f"How many {things} does {who} have now?",
        f"How many {things} are there in the end?",
        f"How many {things} does {they} have then?",
    )
    return now


def _divisor(s: _Story, number: int) -> int:
    """Return a number of parts that `number` can be split into; 0 if there is none."""
    divisors = [k for k in range(2, 13) if number % k == 0 and 1 < number // k <= _LARGEST]
    return s.draw.choice(divisors) if divisors else 0


def _comparison(s: _Story) -> int:
    """Two or three people, each with more or less than the one before."""
    people = [name for name, _ in _people(s, s.draw.randint(2, 3))]
    things = s.draw.choice(_THINGS)
    amounts = [s.term()]
    s.say(f"{people[0]} has {amounts[0]} {things}.", f"{people[0]} picks {amounts[0]} {things}.")
    for other, who in pairwise(people):
        base = amounts[-1]
        kind = s.draw.choice(("more", "fewer", "times"))
        if kind == "more":
            more = s.term()
            s.say(f"{who} has {more} more than {other}.", f"{who} has {more} {things} more.")
            amounts.append(
                s.reckon(base, "+", more, f"{who} has {{}} {things}.", f"{who} has {{}}.")
            )
        elif kind == "fewer" and base > 3:
            less = s.below(base)
            s.say(f"{who} has {less} fewer than {other}.")
            amounts.append(
                s.reckon(base, "-", less, f"{who} has {{}} {things}.", f"{who} has {{}}.")
            )
        else:
            times = s.draw.randint(2, 5) if base <= _LARGEST else 2
            s.say(f"{who} has {_TIMES[times]} as many as {other}.")
            amounts.append(s.reckon(base, "*", times, f"{who} has {{}} {things}."))
    if s.draw.random() < 0.3:
        s.say(f"How many {things} does {people[-1]} have?")
        return amounts[-1]
    total = amounts[0]
    for amount in amounts[1:]:
        total = s.reckon(total, "+", amount, "Together that is {}.", "Adding these gives {}.")
    s.say(f"How many {things} do they have together?", f"How many {things} is that in all?")
    return total


def _shopping(s: _Story) -> int:
    """One or two kinds of goods at a price, perhaps paid with more than they cost."""
    ((who, they),) = _people(s, 1)
    goods = s.draw.sample(_THINGS, s.draw.randint(1, 2))
    bought = []
    for good in goods:
        count, price = s.factors()
        if s.draw.random() < 0.5:
            count, price = price, count
        bought.append((good, count, price))
    costs = " and ".join(f"{good} cost {price} dollars each" for good, _, price in bought)
    s.say(f"{costs[0].upper()}{costs[1:]}.", f"In a shop {costs}.")
    order = " and ".join(f"{count} {good}" for good, count, _ in bought)
    s.say(f"{who} buys {order}.")
    parts = [
        s.reckon(
            count,
            "*",
            price,
            f"The {good} cost {{}} dollars.",
            f"For the {good} {they} pays {{}} dollars.",
        )
        for good, count, price in bought
    ]
    total = parts[0]
    for part in parts[1:]:
        total = s.reckon(total, "+", part, "Together they cost {} dollars.", "That is {} dollars.")
    if s.draw.random() < 0.5:
        step = 10 ** max(1, len(str(total)) - 1)
        note = (total // step + s.draw.randint(1, 3)) * step
        s.say(f"{they.title()} pays with {note} dollars.")
        change = s.reckon(
            note, "-", total, f"{who} gets back {{}} dollars.", "The change is {} dollars."
        )
        s.say(f"How many dollars does {they} get back?", "How much is the change, in dollars?")
        return change
    s.say(f"How many dollars does {they} pay?", "How much is that in dollars?")
    return total


def _rate(s: _Story) -> int:
    """So much a day for some days, of a whole or with something on top."""
    ((who, they),) = _people(s, 1)
    verb, unit, job = s.draw.choice(
        (
            ("reads", "pages", "book has"),
            ("paints", "fences", "village has"),
            ("plants", "trees", "plan asks for"),
            ("bakes", "loaves", "order is for"),
            ("walks", "miles", "path has"),
            ("solves", "riddles", "collection has"),
        )
    )
    days, rate = s.factors()
    s.say(f"{who} {verb} {rate} {unit} a day.", f"Every day {who} {verb} {rate} {unit}.")
    done = s.reckon(
        days,
        "*",
        rate,
        f"In {days} days {they} {verb} {{}} {unit}.",
        f"After {days} days it is {{}}.",
    )
    if s.draw.random() < 0.5:
        remaining = s.term()
        s.say(f"The {job} {done + remaining} {unit}.")
        s.say(f"How many {unit} are left after {days} days?")
        return s.reckon(
            done + remaining, "-", done, f"{{}} {unit} are left.", f"So {{}} {unit} remain."
        )
    if s.draw.random() < 0.5:
        more = s.term()
        s.say(f"On the last of {days} days {they} {verb} {more} {unit} more.")
        done = s.reckon(done, "+", more, f"With the other {more} it is {{}}.")
    s.say(
        f"How many {unit} is that after {days} days?", f"How many {unit} are that in {days} days?"
    )
    return done


def _backwards(s: _Story) -> int:
    """What there was before something came or went."""
    (who, they), (friend, _) = _people(s, 2)
    things = s.draw.choice(_THINGS)
    first, change = s.term(), s.term()
    s.say(f"{who} has some {things}.")
    if s.draw.random() < 0.5:
        now = first + change
        s.say(f"After {friend} gives {who} {change} {they} has {now}.")
        s.reckon(now, "-", change, f"At first {they} had {{}}.", "Before that it was {}.")
    else:
        now = first
        first = now + change
        s.say(f"After {they} loses {change} {they} has {now}.")
        s.reckon(now, "+", change, f"At first {they} had {{}}.", "Before that it was {}.")
    if s.draw.random() < 0.4:
        times = s.draw.randint(2, 5) if first <= _LARGEST else 2
        s.say(f"{friend} had {_TIMES[times]} as many as {who} had at first.")
        s.say(f"How many {things} did {friend} have?")
        return s.reckon(first, "*", times, f"{friend} had {{}} {things}.")
    s.say(f"How many {things} did {who} have at first?")
    return first


def _carrying(s: _Story) -> int:
    """How many trips or boxes it takes, the last of them perhaps not full."""
    size = s.draw.randint(3, 9)
    full, remainder = s.draw.randint(2, (12, 99)[s.level > 1]), s.draw.randint(0, size - 1)
    number = full * size + remainder
    things = s.draw.choice(_THINGS)
    holder = s.pick("box", "bag", "crate", "cart")
    plural = f"{holder}es" if holder == "box" else f"{holder}s"
    s.say(f"There are {number} {things} to be packed.", f"A shop has {number} {things} to pack.")
    s.say(f"Each {holder} takes {size} {things}.", f"A {holder} is full with {size} {things}.")
    s.say(f"How many {plural} are needed?")
    if not remainder:
        return s.reckon(number, "/", size, f"{{}} {plural} are needed.")
    s.steps.append(Step(f"{number} / {size} is {full} with {remainder} left over."))
    return s.reckon(full, "+", 1, f"The rest needs one more, so {{}} {plural} are needed.")


_KINDS: Final[tuple[tuple[Callable[[_Story], int], int], ...]] = (
    (_running, 5),
    (_comparison, 3),
    (_shopping, 3),
    (_rate, 2),
    (_backwards, 1),
    (_carrying, 1),
)


def word_problem(draw: random.Random, level: int, *, evaluation: bool = False) -> WordProblem:
    """Draw a problem of a level from 0 to LEVELS - 1: of those to train on, or of the reserved."""
    while True:
        story = _Story(draw, level)
        (kind,) = draw.choices([kind for kind, _ in _KINDS], [weight for _, weight in _KINDS])
        answer = kind(story)
        problem = WordProblem(" ".join(story.sentences), tuple(story.steps), answer, level)
        if 1 <= len(story.steps) <= 4 and reserved(problem.key) == evaluation:
            return problem
