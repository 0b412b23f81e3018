"""A server that speaks OpenAI's protocol, and a protocol of tree nodes. Needs the extra `serve`.

app.py           the routes and limits
requests.py      request bodies, checked; errors name the field, with hints at misspelled fields
responses.py     completions as OpenAI's JSON, whole or streamed
errors.py        errors as OpenAI's JSON; calls end when their client disconnects
metrics.py       metrics for Prometheus
sockets.py       the socket that the server listens on
run.py           the server process
weights.py       new weights from checkpoints below one folder

node_types.py    the protocol of nodes
node_params.py   its sampling parameters, and limits of each API key
node_routes.py   the routes of nodes; answers stored by idempotency keys
node_batch.py    several operations of one request
node_calls.py    the operations; prompts and appended text are in given_text.py
node_answers.py  nodes as JSON
nodes.py         trees, leases and what they take
openapi.py       the OpenAPI document

search.py           chats answered by searches
search_requests.py  their requests and limits
"""
