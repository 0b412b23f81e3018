"""Log-probabilities of the texts of a file, with the likeliest tokens at each position, as columns.

texts.py     reads a file of texts, line by line
columns.py   files of columns: their content, and how far they go
run.py       scores the texts, part by part
"""

from treegen.integrations.score_texts.run import Progress as Progress
from treegen.integrations.score_texts.run import score_texts as score_texts
