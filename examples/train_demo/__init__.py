"""Train the small models that come with treegen, on problems that are made up by rule.

    cd examples && python -m train_demo.train OUT      # about ten minutes on one H200
    cd examples && python -m train_demo.train OUT --tiny   # a minute on a CPU; learns little
    cd examples && python -m train_demo.train_agent OUT    # the model that calls tools; a CPU
    cd examples && python -m train_demo.bundle OUT     # the held-out problems as data files

Four skills, each asked for in the very form of a task of treegen: word problems (gsm8k), facts in
a long text (needle), small programs (apps), and number puzzles (countdown). No outside text is
used.

    words, needles, programs, puzzles    problems and their right answers, drawn by a seed
    operations                           the steps that programs are made of
    documents                            many solved problems in a row, as in a few-shot prompt
    tokenizer, batches                   tokens, and rows of one length with a weight per token
    model, train                         the model and its loss; the stages and the loop
    episodes, train_agent                the second model, which calls tools (text-world and repair)
    bundle                               problems that training never sees, in the tasks' formats
    evaluate                             treegen's own scores of a checkpoint on them
"""
