"""Reports of runs: pages, plots, comparisons and drawn trees.

    RunView     a loaded run with scored samples                view.py
      | estimates over k, votes, histograms                     curves.py
      | figures                                                 plots/
      | one self-contained page                                 html_page*.py, page/
    Comparison  two runs of the same problems                   compare.py
    StoredTree  a search tree, for a page or a terminal         view.py

matplotlib, scipy and jinja2 (the extra `report`) are imported where they are used.
"""
