"""The KV cache: the page pool, writes of keys and values, and states of recurrent layers."""
