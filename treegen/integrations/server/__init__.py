"""A server that speaks OpenAI's protocol, and a protocol of tree nodes. Needs the extra `serve`.

app.py           routes, API keys and limits
requests.py      parses request bodies; errors name the field, and suggest the right spelling
responses.py     converts completions to OpenAI's JSON, whole or streamed
errors.py        converts errors to OpenAI's JSON; cancels calls whose client disconnects
metrics.py       metrics for Prometheus
sockets.py       the socket that the server listens on
run.py           runs the server process, until a signal stops it
weights.py       loads new weights from checkpoints below one folder

limits.py        limits on the nodes and the searches of clients
node_routes.py   routes of nodes, and responses that are stored by idempotency keys
node_batch.py    runs several operations of one request
node_calls.py    runs single operations, such as sample and extend
given_text.py    checks and renders prompts, and text that clients append to nodes
node_answers.py  converts nodes, scores and usage to JSON
nodes.py         trees of nodes, with their leases, and the memory of each client
openapi.py       the OpenAPI document of the routes of nodes

search.py           answers chats by searches
search_thread.py    the thread in which searches run
search_requests.py  parses requests for searches
"""
