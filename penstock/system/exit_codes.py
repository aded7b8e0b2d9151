"""Exit codes of penstock's processes."""

EXIT_ERROR = 1
#: Its configuration is invalid: supervisors treat a second such exit in a row as final.
EXIT_CONFIG = 2
EXIT_INTERRUPT = 130
#: The reader of the output is gone (``| head``): 128 and the number of SIGPIPE, as in other programs.
EXIT_PIPE = 141
