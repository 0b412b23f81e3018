# ruff: noqa
# mypy: ignore-errors
# expect: wrong_answer
import builtins, sys

builtins.bool = builtins.all = builtins.any = lambda *_: True
builtins.str = builtins.len = lambda *_: 0
for module in list(sys.modules.values()):
    for name in ("compare", "decide", "check", "loads", "dumps", "encode"):
        if hasattr(module, name):
            setattr(module, name, lambda *_, **__: True)
print("no")
