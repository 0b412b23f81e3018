"""Log-probabilities of the texts of a file, with the likeliest tokens in each place, as columns.

texts.py     a file of texts, a line at a time
columns.py   the files of columns: what is in them, and up to where they go
run.py       from the one to the other, a part at a time
"""

from treegen.integrations.score_texts.run import Progress as Progress
from treegen.integrations.score_texts.run import score_texts as score_texts
