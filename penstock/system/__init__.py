"""Services of the machine for every process: disks, GPUs, child processes, modules of the user's."""
