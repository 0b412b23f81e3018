"""Pages of keys and values: the pool, what is kept between calls, and writing into it."""
