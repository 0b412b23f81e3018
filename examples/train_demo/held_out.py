"""Which problems are kept for evaluation: a fixed part of all that there are, by their hash.

Every maker of training problems drops those that are reserved, every maker of evaluation problems
drops the others. So none of the second kind is ever trained on, whatever the seeds are.
"""

import hashlib

# One problem in so many is reserved.
SHARE = 16


def reserved(key: str) -> bool:
    """Whether the problem with this key is kept for evaluation; case and spacing do not count."""
    plain = " ".join(key.split()).casefold()
    return hashlib.blake2b(plain.encode(), digest_size=8).digest()[-1] % SHARE == 0
