"""Statistics of judgements: intervals, variances, pairs, agreement and human labels."""
