"""The cost model: time and memory of a strategy.

`model` leads from stages to a verdict, on one page. Read its inputs first, in this order: one
kernel (`roofline`), one layer on one rank (`layers`), links (`collective`, `topology`), stages
(`stages`, `samples`), messages between stages (`messages`), parameters and memory of ranks
(`weights`, `memory`). Then read the later steps: the pipeline (`instructions`, `timer`,
`timeline`), the end of an iteration (`step_end`), and the result (`estimate`, `verdict`,
`columns`).
"""
