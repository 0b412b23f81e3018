"""A server that speaks OpenAI's protocol. Needs the extra `treegen[serve]`.

asks.py      what a request asks for, checked; everything unknown is refused by name
answers.py   completions as OpenAI's JSON, whole or streamed
app.py       the routes, limits and metrics
run.py       the server process
"""
