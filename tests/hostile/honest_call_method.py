# ruff: noqa
# mypy: ignore-errors
# expect: accepted
# stdin: ""
# answer: ""
# call: ["solve", [[3, 4]], 7]
from typing import List


class Solution:
    def solve(self, xs: List[int]) -> int:
        print("debugging")
        return sum(xs)
