"""What processes of penstock end with."""

EXIT_ERROR = 1
#: Its configuration cannot work: who supervises it takes a second such end in a row as final.
EXIT_CONFIG = 2
EXIT_INTERRUPT = 130
#: Whoever read the output is gone (``| head``): 128 and the number of SIGPIPE, as of other programs.
EXIT_PIPE = 141
