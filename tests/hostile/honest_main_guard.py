# ruff: noqa
# mypy: ignore-errors
# expect: accepted
# stdin: "3 4\n"
# answer: "7"
def main():
    print(sum(map(int, input().split())))


if __name__ == "__main__":
    main()
