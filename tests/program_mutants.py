"""Programs that go wrong in many ways, made from right ones by seed."""

import random

_SWAPS = (
    ("+", "-"),
    ("<", "<="),
    ("<=", "<"),
    ("==", "!="),
    ("1", "2"),
    ("0", "1"),
    ("[", "("),
    ("return ", "return not "),
    ("return ", ""),
    ("len(", "sum("),
    ("max", "min"),
    ("range(", "range(1, "),
    (":", ""),
    ("'", '"'),
    ("True", "1"),
    ("True", "False"),
    ("    ", "   "),
    ("/", "//"),
    ("sorted(", "list("),
    ("None", "0"),
    ("not ", ""),
    ("in ", "not in "),
    (" and ", " or "),
)
_BEFORE = (
    "    raise ValueError('no')\n",
    "    return None\n",
    "    import sys; sys.exit()\n",
    "    import sys; sys.exit(1)\n",
    "    import os; os._exit(0)\n",
    "    print('noise')\n",
    "    1 / 0\n",
    "    return []\n",
    "    assert False\n",
    "    exit()\n",
    "    input()\n",
    "    raise SystemExit\n",
    "    raise KeyboardInterrupt\n",
    "    import nothing_of_this_name\n",
)
_AFTER = (
    "\nraise RuntimeError\n",
    "\nimport sys\nsys.exit(0)\n",
    "\nimport os\nos._exit(0)\n",
    "\nprint('done')\n",
    "\nif __name__ == '__main__':\n    raise ValueError\n",
    '\n"""',
    "\n)",
    "\n    pass\n",
    "\nx = \\",
    "\n# end",
    "\n```\nThat is all.\n",
    "\nassert True\n",
    "\ntry:\n    raise SystemExit\nexcept SystemExit:\n    pass\n",
    "\nwhile True: pass\n",
)


def mutant(rng: random.Random, body: str) -> str:
    """A body of a function, changed in one to three places; one of four stays as it is."""
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        kind = rng.randrange(10)
        if kind < 6:
            old, new = rng.choice(_SWAPS)
            places = [at for at in range(len(body)) if body.startswith(old, at)]
            if places:
                at = rng.choice(places)
                body = body[:at] + new + body[at + len(old) :]
        elif kind == 6:
            body = rng.choice(_BEFORE) + body
        elif kind == 7:
            # Few, because an endless loop costs its time limit.
            body += rng.choice(_AFTER if rng.random() < 0.2 else _AFTER[:-1])
        elif kind == 8:
            body = body[: rng.randrange(len(body) + 1)]
        else:
            lines = body.split("\n")
            del lines[rng.randrange(len(lines))]
            body = "\n".join(lines)
    return body
