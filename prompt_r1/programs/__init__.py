"""What the programs share: a program starts here, ends here, and prints and writes safely.

In reading order:

    installation   the Python and the packages that a program needs; runs in old Pythons
    command_line   read the settings before slow imports; exit codes and one sentence for every error
    text           text that is safe to print
    keys           keep keys out of what is printed or written
    progress       progress bars that are also readable in a log file
    tables         tables for the terminal and in Markdown
    files          write lines, files and folders that are complete or absent; read what others wrote
    launcher       what torchrun or Slurm tells a process; names of devices

It imports no other room, and no torch.
"""
