"""What the programs share: a program starts here, ends here, and prints and writes safely.

In reading order:

    installation   the Python and the packages that a program needs; runs in old Pythons
    command_line   read the settings, begin slow imports, run; exit codes and one sentence for every error
    text           text that is safe to print or to write: without what acts on a terminal, and without keys
    progress       progress bars that are also readable in a log file
    tables         tables for the terminal and in Markdown
    reading        check what was read from files and requests that others may have written
    files          write lines and files that are complete or absent; make and lock the folder of a run
    folders        write folders that are complete or absent, also for a cache
    launcher       what torchrun or Slurm tells a process; names of devices

Importing torch takes seconds. So a program checks its settings before it imports torch, and a function that
these checks call imports torch inside.

This room may import the root, and imports no torch.
"""
