# ruff: noqa
# mypy: ignore-errors
# expect: accepted
# stdin: "3 4\n"
# answer: "7"
import asyncio


async def main():
    loop = asyncio.get_running_loop()
    line = await loop.run_in_executor(None, input)
    await asyncio.sleep(0.01)
    print(sum(map(int, line.split())))


asyncio.run(main())
