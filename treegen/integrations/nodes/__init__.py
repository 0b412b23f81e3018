"""Nodes over HTTP: their protocol, and searches over the nodes of a server.

The server and its client use this package. Nothing here imports torch.

protocol.py       the JSON of requests for nodes, and of their responses
params.py         sampling parameters of nodes
conversion.py     content parts, samples, scores and errors as JSON
step_requests.py  the calls of one step as one request
backend.py        the backend of searches: nodes, calls and their results
searches.py       the event loop of searches
"""
