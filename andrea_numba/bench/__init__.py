"""Speed on this machine, beside PyTorch's where it is installed: `python -m andrea_numba.bench`.

    __main__.py    the command
    compare.py     what is measured, in turns
    process.py     the processes that take turns, and what is said to them
    ours.py        the measurements by this project
    peer.py        the same by PyTorch
    start.py       what a user waits for at the start of a program
    ceilings.py    what memory and arithmetic can give, and how far from that each op of a step is
    report.py      the README's table and plot
    steps.py       training steps of presets by this project alone, on a GPU too
"""
