"""A server that speaks OpenAI's protocol. Needs the extra `serve`.

asks.py      what a request asks for, checked; what is not known is refused by name
answers.py   completions as OpenAI's JSON, whole or streamed
app.py       the routes and limits
metrics.py   what Prometheus is told
sockets.py   where it listens
run.py       the server process
"""
