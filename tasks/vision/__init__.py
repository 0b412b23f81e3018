"""Questions about images, scored as published: MMMU, MMMU-Pro, ChartQA, DocVQA."""
