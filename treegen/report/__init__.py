"""What a run looks like: pages, plots, comparisons and drawn trees.

    RunView     a run read back, its samples judged             view.py
      | estimates over k, votes, histograms                     curves.py
      | figures                                                 plots.py
      | one self-contained page                                 page.py, blobs.py, page/
    Paired      two runs of the same problems                   compare.py
    StoredTree  a search tree, for a page or a terminal         trees.py

matplotlib, scipy and jinja2 (the extra `report`) are imported where they are used.
"""
