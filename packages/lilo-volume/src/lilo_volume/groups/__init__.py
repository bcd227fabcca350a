"""Groups: the ranks that publish together, over three kinds of channel.

- `tcp`: sockets of the standard library; a script on two nodes needs nothing else.
- `torch`: a process group of torch's, made for this alone; the extra `torch`.
- `threads`: threads of one process, for tests.

All of them give every call a deadline of its own, and name the step, the rank and the node that did not come. After
an error a group is of no more use: its ranks may stand at different steps.
"""
