"""What a strategy takes: time and memory.

`model` has the way from stages to a verdict, on one page. Before it, to read in this order: one
kernel (`roofline`), one layer on one rank (`layers`), links (`collective`, `topology`), stages
(`stages`, `samples`), what crosses their cuts (`messages`), what ranks hold (`weights`, `memory`).
After it: the pipeline (`instructions`, `timer`, `timeline`), the end of an iteration (`step_end`),
and what is said of a result (`estimate`, `verdict`, `columns`).
"""
