"""What is handed out: the image, the list of its contents, and the release that holds them all.

`python -m release --help` shows the commands. Whatever is written here is the same to the byte
whenever it is made from the same module: there are no times, owners or random numbers in it.
"""
