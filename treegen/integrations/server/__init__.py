"""A server that speaks OpenAI's protocol. Needs the extra `serve`.

requests.py    request bodies, checked; unknown fields are errors that name the field
responses.py   completions as OpenAI's JSON, whole or streamed
app.py         the routes and limits
metrics.py     metrics for Prometheus
sockets.py     the socket that the server listens on
run.py         the server process
"""
