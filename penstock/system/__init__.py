"""What every process meets on its machine: disks, GPUs, child processes, modules of the user's."""
